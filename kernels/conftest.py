"""pytest-benchmark for kernels: `pytest kernels --benchmark-only`, and `--every-shape` for all layer shapes.

`gpu_benchmark` times a `repro.bench.task.Task` in rounds of one graph replay. The time that pytest-benchmark
stores is device time per launch, so its tables and its `compare` are correct for kernels.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from repro.bench import bench, timing


class DeviceClock:
    """A clock that each timed round advances by the device time of one launch."""

    seconds = 0.0

    def __call__(self) -> float:
        """Seconds so far."""
        return self.seconds


CLOCK = DeviceClock()
TURNS = 25  # rounds of what is timed in turns with a call beside it
torch.set_num_threads(1)  # CPU times do not depend on the number of cores


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--every-shape`."""
    parser.addoption("--every-shape", action="store_true", help="all layer shapes of the stored peers, not a few")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU benchmarks use the device's clock, also those that are timed in turns with a call beside them."""
    for item in items:
        if {"gpu_benchmark", "graph_benchmark", "host_benchmark"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.benchmark(timer=CLOCK))


def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    """Add the origin, and keep the file small: no host name, and rounds of GPU kernels only."""
    output_json["machine_info"]["node"] = ""
    output_json["machine_info"].get("cpu", {}).pop("flags", None)
    if torch.cuda.is_available():
        output_json["origin"] = bench.origin()
        output_json["commit_info"] = {"id": output_json["origin"]["commit"]}
    for entry in output_json["benchmarks"]:
        if "floor_us" not in entry["extra_info"]:
            entry["stats"].pop("data", None)
        entry["params"] = {k: v for k, v in (entry["params"] or {}).items() if isinstance(v, int | float | str)}


@pytest.fixture(scope="session")
def backend() -> timing.Cuda:
    """The GPU; skips without one."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return timing.Cuda()


@pytest.fixture
def gpu_benchmark(benchmark, backend) -> Callable[..., timing.Timing]:  # noqa: ANN001
    """A function that times a task, cold or warm, interleaved with its read floor, and returns the `Timing`."""

    def run(task: timing.Task, mode: str = timing.COLD, rounds: int = timing.ROUNDS) -> timing.Timing:
        kernel = timing.GraphRun(task, backend, mode)
        floors = [timing.GraphRun(reader, backend, mode) for reader in timing.read_floors(kernel.nbytes)]
        benchmark.group = "{N} x {K}, M = {M}".format(**task.facts) if "N" in task.facts else task.name
        last = timing.WARMUP + rounds if benchmark.enabled else 1
        done = 0

        def one_round() -> None:
            nonlocal done
            check = done < timing.CHECKED or done >= last - timing.CHECKED
            us = kernel.round(done, check)
            below = [floor.round(done, check) for floor in floors]
            if done >= timing.WARMUP or not benchmark.enabled:
                kernel.samples.append(us)
                for floor, reader in zip(floors, below):
                    floor.samples.append(reader)
            CLOCK.seconds += us * 1e-6
            done += 1

        def start() -> None:
            CLOCK.seconds = 0.0

        benchmark.pedantic(one_round, setup=start, rounds=rounds, warmup_rounds=timing.WARMUP)
        kernel.check_unchanged()
        kernel.state = backend.state(kernel.graph)
        timing_of_task = kernel.timing(min(statistics.median(floor.samples) for floor in floors))
        benchmark.extra_info |= {
            **timing_of_task.facts,
            "mode": mode,
            "bytes": timing_of_task.nbytes,
            "floor_us": timing_of_task.floor_us,
            "fraction": timing_of_task.fraction,
            "gb_per_s": timing_of_task.gb_per_s,
            "relerr": timing_of_task.relerr,
            "copies": timing_of_task.copies,
            "launches": timing_of_task.launches,
            "clock_mhz": timing_of_task.clock_mhz,
            "throttle": timing_of_task.throttle,
            "device": torch.cuda.get_device_name(),
        }
        return timing_of_task

    return run


def in_turns(benchmark: Any, once: Callable[[], Sequence[float]], rounds: int) -> float:  # noqa: ANN401
    """Record rounds of the first of two times, in microseconds, that `once` gives.

    Each is multiplied by what makes the second, beside it, that of the first round, which is returned: so a round is
    compared with what was beside it, however the pace changes between rounds.
    """
    pace = []

    def start() -> None:
        CLOCK.seconds = 0.0

    def one_round() -> None:
        mine, beside = once()
        pace.append(beside)
        CLOCK.seconds += mine / beside * pace[0] * 1e-6

    benchmark.pedantic(one_round, setup=start, rounds=rounds, warmup_rounds=1)
    return pace[0]


@pytest.fixture
def graph_benchmark(benchmark, backend) -> Callable[..., float]:  # noqa: ANN001
    """A function that times calls as one CUDA graph in turns with others as a second one, whose time it returns."""

    def run(calls: Sequence[Callable[[], Any]], others: Sequence[Callable[[], Any]], rounds: int = TURNS) -> float:
        mine, beside = backend.capture(calls), backend.capture(others)
        return in_turns(benchmark, lambda: (mine.replay() * 1e6, beside.replay() * 1e6), rounds)

    return run


@pytest.fixture
def host_benchmark(benchmark, backend) -> Callable[..., float]:  # noqa: ANN001
    """A function that times a call on the host in turns with another one, whose time it returns.

    One after the other, calls of a shared host differ by up to 44 % between processes, in turns by 7 %.
    """

    def run(call: Callable[[], Any], other: Callable[[], Any], rounds: int = TURNS) -> float:
        return in_turns(benchmark, lambda: backend.host_us(call, other), rounds)

    return run
