"""Benchmarks of the operators of a decode step: `pytest kernels --benchmark-only`, next to their peers, on a GPU."""

import pytest

pytest.importorskip("triton")

from repro.bench import operator_tasks  # noqa: E402
from repro.bench.kernel_list import load  # noqa: E402


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize with the cases of every operator, and with its providers in the inner loop."""
    cases = []
    for name, peers in operator_tasks.OPERATORS.items():
        for number, case in enumerate(load(name).CASES):
            for provider in (name, *peers):
                cases.append(pytest.param(name, case, provider, id=f"{name}-{number}-{provider}"))
    metafunc.parametrize("name, case, provider", cases)


@pytest.mark.gpu
def test_operator(gpu_benchmark, benchmark, name, case, provider) -> None:  # noqa: ANN001
    """One operator on one case, by one provider, checked against the reference before and after it is timed."""
    if reason := load(name).unsupported("cuda"):
        pytest.skip(reason)
    benchmark.extra_info["ours"] = provider == name
    try:
        task = operator_tasks.task(name, case, provider)
    except ValueError as error:
        pytest.skip(str(error))
    timed = gpu_benchmark(task)
    assert timed.relerr <= task.tolerance
