"""Benchmarks: `pytest kernels --benchmark-only`. Every kernel and peer on a GPU; packing and references on a CPU."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from repro.baselines import grid
from repro.bench import timing
from repro.bench.kernel_list import KERNELS, OURS, load
from repro.bench.peers import PEERS
from repro.bench.recorded import shapes
from repro.bench.task import Layer

FEW = [(2048, 2048), (4096, 4096), (14336, 4096), (8192, 8192)]
COUNTS = (1, 8, 64)


@functools.lru_cache(maxsize=1)
def layer(rows: int, columns: int) -> Layer:
    """The layer that the benchmarks of a shape share."""
    return Layer(rows, columns)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize with shapes in the outer loop and providers in the inner one, so that each layer is made once."""
    if "provider" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-shape")
        cells = [
            pytest.param(n, k, m, provider, id=f"{n}x{k}-M{m}-{provider.label}")
            for n, k in (shapes() if every else FEW)
            for m in COUNTS
            for provider in {**PEERS, **OURS}.values()
            if provider.takes(m)
        ]
        metafunc.parametrize("rows, columns, count, provider", cells)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["cold"])
def test_linear(gpu_benchmark, benchmark, rows, columns, count, provider, mode) -> None:  # noqa: ANN001
    """One layer times `count` rows of activations, by one provider."""
    if reason := provider.unavailable("cuda"):
        pytest.skip(reason)
    benchmark.extra_info["ours"] = provider.label in OURS
    try:
        task = provider.task(layer(rows, columns), count)
    except ValueError as error:
        if provider.label in OURS:
            raise
        pytest.skip(str(error))
    found = gpu_benchmark(task, mode)
    assert found.relerr <= provider.tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16/bf16/torch.matmul", "w4-g128/bf16/tinygemm"])
def test_this_suite_and_the_timer_agree(gpu_benchmark, backend, name) -> None:  # noqa: ANN001
    """Within 3 %: both are medians of the same launches."""
    task = dataclasses.replace(PEERS[name].task(layer(4096, 4096), 1), facts={})  # not a recorded cell
    alone = timing.measure([task], backend, floor=timing.read_floors)[0]
    found = gpu_benchmark(task)
    assert found.us == pytest.approx(alone.us, rel=0.03)


# ---- on a CPU, at small sizes


def small(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """The case with the least work."""

    def work(case: dict[str, Any]) -> int:
        product = 1
        for name in ("M", "N", "K", "rows", "columns", "bytes"):
            product *= int(case.get(name, 1))
        return product

    return min((c if isinstance(c, dict) else vars(c) for c in cases), key=work)


def call(function: Callable[..., Any], inputs: Any) -> Any:  # noqa: ANN401
    """Call a kernel's reference with the result of `make_inputs`: keywords, a tuple (cut to fit) or a tensor."""
    count = len(inspect.signature(function).parameters)
    if isinstance(inputs, dict):
        return function(**inputs)
    return function(*inputs[:count]) if isinstance(inputs, tuple) else function(inputs)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("what", ["pack", "unpack", "dequantize"])
def test_packing(benchmark, what, bits) -> None:  # noqa: ANN001
    """The packed format at 512 x 1024 with groups of 128."""
    from repro.kernels import packing

    codes, scales, zeros = Layer(512, 1024, device="cpu").codes(bits, 128)
    packed = packing.pack(codes, scales, zeros, bits, 128)
    if what == "pack":
        got = benchmark(packing.pack, codes, scales, zeros, bits, 128)
        assert torch.equal(got.codes, packed.codes)
    else:
        got = benchmark(getattr(packing, what), packed)
        assert torch.equal(got[0], codes) if what == "unpack" else got.shape == codes.shape


@pytest.mark.parametrize("bits, group", [(4, 0), (4, 128), (2, 64)])
def test_round_to_nearest(benchmark, bits, group) -> None:  # noqa: ANN001
    """Round-to-nearest, the last step of every quantizer, at 512 x 1024."""
    weight = Layer(512, 1024, device="cpu").weight
    got = benchmark(grid.rtn, weight, grid.Grid(bits=bits, group=group))
    assert got.codes.shape == weight.shape


@pytest.mark.parametrize("name", KERNELS)
def test_reference(benchmark, name) -> None:  # noqa: ANN001
    """The float32 reference of a kernel on its smallest case."""
    try:
        module = load(name)
    except ImportError as error:
        pytest.skip(f"{name}: {error}")
    if not hasattr(module, "reference"):
        pytest.skip(f"{name} has no reference of its own")
    benchmark(call, module.reference, module.make_inputs(small(module.CASES), "cpu"))
