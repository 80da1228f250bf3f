"""Launch configurations as data: `python -m repro tune <kernel>` sweeps a kernel's `SPACE` on this device.

Every configuration is checked against the reference before it is timed, all of a shape take turns, and the fastest goes
to `kernels/configs/<device>.json`, which `kernels/launch_config.py` reads, as soon as its shape is done. Keys that were
not swept stay as they are. A configuration of W8A8 serves activations in float16 and in bfloat16: it is timed in both,
and the geometric mean decides. A sweep that was cut goes on where it stopped: `build/tune/` says which shapes of which
space are done. What a shape needs of CUDA C++ is compiled by several processes beforehand, and where a space is large
all of it is timed for a few rounds and its fastest again: so one key takes less than a minute.
"""

import functools
import inspect
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from repro.bench import peers, timing, two_bit
from repro.bench.kernel_list import QUANTIZED, load
from repro.bench.stored_peers import COUNTS, shapes
from repro.bench.task import Layer, Task
from repro.core.errors import UserError, unknown
from repro.core.files import one_at_a_time, reading, short_hash, write_text
from repro.kernels import (
    linear,
    nvrtc,
    q4_k_planes,
    w4a16_beside,
    w4a16_choice,
    w4a16_estimates,
    w4a16_plans,
    w4a16_tiles,
)
from repro.kernels.launch_config import FOLDER, capability_of, device_slug, processors
from repro.store.kernel_rows import USES

DONE = Path("build") / "tune"  # a file a device and kernel: keys that were swept, with the hash of their space
TIE = 0.01  # within so much of the fastest, the configuration that comes first in SPACE wins: no churn from noise
AT_ONCE = 12  # configurations that are measured together; each has its copies of the weights
ROUNDS, FIRST_ROUNDS = 9, 3  # of the fastest AT_ONCE of a larger space; of all of it before
MOST_WORKERS = 16  # processes that compile
MOST_ESTIMATED = 100  # configurations of W4A16 that are tried at a key; what is recorded is among them
HEAD = w4a16_beside.LEAST_HEAD  # tokens of the first of two launches, behind which the second is timed
SECOND = [m for m in w4a16_choice.TOKENS if w4a16_beside.MOST_DECODED < m <= w4a16_beside.MOST_TAIL]
MODULES = dict.fromkeys(
    (w4a16_choice.TAIL, w4a16_choice.HEAD), "w4a16_gemm"
)  # of what is tuned, where it is not a kernel's own name
BOTH_TYPES = ("float16", "bfloat16")  # of activations whose configurations are the same
Q4_K_STEP = (  # products of layers that share an input, of Llama 3 8B, Llama 2 7B, 13B and 70B: q, k, v; gate, up
    *((6144, 4096), (28672, 4096), (12288, 4096), (22016, 4096)),
    *((15360, 5120), (27648, 5120), (10240, 8192), (57344, 8192)),
)

Config = Mapping[str, Any]
Case = Mapping[str, Any]


# ---- what is swept


@dataclass(frozen=True)
class TuningPoint:
    """A key under which a kernel's launch configuration is looked up, such as a shape or a size.

    Attributes:
        key: as the kernel's launcher looks it up.
        space: the configurations that are worth trying here.
        prepare: makes the inputs, once, and gives the function that makes a configuration's tasks, one for each type.
        types: of the activations in which every configuration is timed; ("",) for that of the inputs alone.
    """

    key: str
    space: Sequence[Config]
    prepare: Callable[[], Callable[[Config], Sequence[Task]]]
    types: tuple[str, ...] = ("",)


def _read_floor() -> list[TuningPoint]:
    """Sizes from a small 2-bit layer to a large bf16 one."""
    space = load("read_floor").SPACE

    def prepare(size: int) -> Callable[[Config], list[Task]]:
        return lambda config: [timing.read_floor(size, config)]

    sizes = [1 << n for n in range(18, 30)]
    return [TuningPoint(str(size), space, functools.partial(prepare, size)) for size in sizes]


def _points(
    name: str,
    cases: Iterable[Case],
    hot: tuple[str, ...] = ("x",),
    key: Callable[[Case], str] | None = None,
    space_of: Callable[[Case], Sequence[Config]] | None = None,
    types: tuple[str, ...] = ("",),
) -> list[TuningPoint]:
    """A kernel whose `launch(*inputs, config)` takes what its `make_inputs` gives and returns the output, at cases.

    Of a case all of `SPACE` is tried, or what `space_of` says of it. With `types` a case is of each of them, and so is
    the output of a launch that is told its type.
    """
    module = load(name)
    parameters = inspect.signature(module.launch).parameters

    def of_one_type(case: Case) -> Callable[[Config], Task]:
        inputs = dict(zip(parameters, module.make_inputs(case, "cuda")))
        more = {"dtype": getattr(torch, case["dtype"])} if "dtype" in parameters else {}
        launch = lambda config, **given: module.launch(**given, config=dict(config), **more)  # noqa: E731
        want = lambda **given: module.reference(*given.values())  # noqa: E731
        return lambda config: Task(name, functools.partial(launch, config), inputs, want, 4e-3, hot)

    def prepare(case: Case) -> Callable[[Config], list[Task]]:
        makers = [of_one_type(case | {"dtype": dtype} if dtype else case) for dtype in types]
        return lambda config: [make(config) for make in makers]

    key = key or module.tuning_key
    points = []
    for case in cases:
        space = space_of(case) if space_of else module.SPACE
        points.append(TuningPoint(key(case), space, functools.partial(prepare, case), types))
    return points


def _cases(*counts: int, **more: Any) -> list[Case]:  # noqa: ANN401
    """Every layer shape with every number of activation rows."""
    cases = []
    for n, k in shapes():
        cases += [{"M": m, "N": n, "K": k, "seed": 0, "dtype": "bfloat16", **more} for m in counts]
    return cases


def _wna16_gemv() -> list[TuningPoint]:
    cases = []
    for bits, group, symmetric in ((4, 128, False), (2, 64, False), (8, 0, True)):
        form = {"bits": bits, "group": group, "symmetric": symmetric}
        for n, k in shapes():
            cases += [{"rows": n, "columns": k, **form, "m": m, "seed": 0} for m in (1, 8, 16)]
    return _points("wna16_gemv", cases, key=lambda c: f"w{c['bits']} m{c['m']} {c['rows']}x{c['columns']}")


def _w4a16_gemm() -> list[TuningPoint]:
    """Every number of tokens with a configuration of its own."""
    cases = _cases(*w4a16_choice.TOKENS, bits=4, group=128, symmetric=False)
    return _points("w4a16_gemm", cases, key=w4a16_choice.tuning_key, space_of=w4a16_space)


def w4a16_space(case: Case, device: torch.device | None = None) -> list[Config]:
    """The `MOST_ESTIMATED` of W4A16 with the least estimates, of tiles for at most twice the tokens, or 32 more.

    From nine tokens on tiles for 48 are among them. A tile is trimmed to the tokens that there are. Estimates are for
    the SMs of `device`, this machine's unless one is given.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = case["M"], case["N"], case["K"], case["bits"], processors(device)
    most = case["M"] + 32 if case["M"] > 128 else 2 * case["M"]
    if case["M"] > 8:
        most = max(most, 48)
    able = []
    for config in load("w4a16_gemm").SPACE:
        if w4a16_tiles.tokens_of(config) <= most and w4a16_plans.runs(config, capability_of(device)):
            able.append(config)
    return sorted(able, key=lambda config: w4a16_estimates.estimate(config, *sizes))[:MOST_ESTIMATED]


def _w4a16_gemm_tail() -> list[TuningPoint]:
    """The second of two launches beside each other, behind `HEAD` tokens."""
    module = load("w4a16_gemm")

    def prepare(case: Case) -> Callable[[Config], list[Task]]:
        x, packed = module.make_inputs({**case, "M": HEAD + case["M"]}, "cuda")
        linear.launch_two(x, packed, HEAD)  # compiles the first launch, which all have in common

        def tasks(config: Config) -> list[Task]:
            launch = functools.partial(linear.launch_two, head=HEAD, tail=dict(config))
            return [Task(w4a16_choice.TAIL, launch, {"x": x, "packed": packed}, module.reference, 4e-3)]

        return tasks

    points = []
    for case in _cases(*SECOND, bits=4, group=128, symmetric=False):
        key = w4a16_choice.tuning_key(case)
        points.append(TuningPoint(key, w4a16_space(case), functools.partial(prepare, case)))
    return points


def _w4a16_gemm_head() -> list[TuningPoint]:
    """One launch, or how many tokens the first of two has that run beside each other."""
    module = load("w4a16_gemm")

    def prepare(case: Case) -> Callable[[Config], list[Task]]:
        x, packed = module.make_inputs(case, "cuda")
        alone = w4a16_choice.configuration(case["M"], case["N"], case["K"], case["bits"], x.device)

        def tasks(config: Config) -> list[Task]:
            launch = functools.partial(module.launch, config=alone)
            if config["tokens"]:
                launch = functools.partial(linear.launch_two, head=config["tokens"])
            return [Task(w4a16_choice.HEAD, launch, {"x": x, "packed": packed}, module.reference, 4e-3)]

        return tasks

    points = []
    counts = [m for m in w4a16_choice.TOKENS if m > w4a16_beside.LEAST_HEAD]
    for case in _cases(*counts, bits=4, group=128, symmetric=False):
        space = [{"tokens": tokens} for tokens in (0, *w4a16_beside.heads_of(case["M"]))]
        points.append(TuningPoint(w4a16_choice.tuning_key(case), space, functools.partial(prepare, case)))
    return points


def _q4_k(name: str) -> list[TuningPoint]:
    """Products with Q4_K on the layers of the papers' models and those of a step, half of the inputs listed or all."""
    module = load(name)

    def prepare(case: Case) -> Callable[[Config], list[Task]]:
        given = module.make_inputs(case, "cuda")
        inputs = {key: given.pop(key) for key in ("x", "codes", "headers")}
        want = functools.partial(module.reference, **given)

        def tasks(config: Config) -> list[Task]:
            launch = functools.partial(module.launch, config=dict(config), **given)
            return [Task(name, launch, inputs, want, 4e-3)]

        return tasks

    points = []
    for n, k in sorted({*shapes(), *Q4_K_STEP}, key=lambda shape: (shape[0] * shape[1], shape)):
        case = {"N": n, "K": k, "seed": 0, "dtype": "bfloat16", "ordered": True, "share": 0.5}
        bands = -(-n // q4_k_planes.SUPER)
        space = module.SPACE
        if name.startswith("zigzag"):
            space = [config for config in space if load("zigzag_gemv").worth_trying(config, bands)]
        points.append(TuningPoint(f"{n}x{k}", space, functools.partial(prepare, case)))
    return points


def _two_bit(name: str, hot: tuple[str, ...]) -> list[TuningPoint]:
    """W2A2 on the layers of Bit-by-Bit's Table 7, one token and four; one token on those of a step and split ones."""
    module = load(name)

    def prepare(case: Case) -> Callable[[Config], list[Task]]:
        inputs = module.make_inputs(case, "cuda")

        def tasks(config: Config) -> list[Task]:
            launch = functools.partial(module.launch, config=dict(config))
            return [Task(name, launch, inputs, module.reference, 4e-3, hot)]

        return tasks

    points = []
    for n, k in (*two_bit.TABLE7, *two_bit.STEP, *two_bit.SPLIT_LAYERS):
        for m in (1, 4) if (n, k) in two_bit.TABLE7 else (1,):
            space = [config for config in module.SPACE if worth_trying(config, m, k)]
            case = {"M": m, "N": n, "K": k, "dtype": "bfloat16", "seed": 0}
            points.append(TuningPoint(f"{m}x{n}x{k}", space, functools.partial(prepare, case)))
    return points


def worth_trying(config: Config, tokens: int, columns: int) -> bool:
    """Whether the warps of a configuration of w2a2_gemv.cu share units of 512 columns, and fewer would have more each.

    Where the blocks of a cluster share the columns, a warp more is tried, too: without units of its own it requests
    copies alone. One token never needs the registers of several blocks.
    """
    split = config.get("split", 1)
    warps = config["warps"]
    if split > 1 and tokens == 1:
        return False
    units = -(-columns // (512 * split))
    needed = -(-units // -(-units // warps))
    return warps == needed or (split > 1 and warps == units + 1)


TUNABLE: dict[str, Callable[[], list[TuningPoint]]] = {
    "read_floor": _read_floor,
    "wna16_gemv": _wna16_gemv,
    "w4a16_gemm": _w4a16_gemm,
    w4a16_choice.TAIL: _w4a16_gemm_tail,
    w4a16_choice.HEAD: _w4a16_gemm_head,
    "w8a8_gemv": lambda: _points("w8a8_gemv", _cases(1, 2, 4, 8), types=BOTH_TYPES),
    "q4_k_gemv": lambda: _q4_k("q4_k_gemv"),
    "q4_k_naive_sparse": lambda: _q4_k("q4_k_naive_sparse"),
    "zigzag_gemv": lambda: _q4_k("zigzag_gemv"),
    "zigzag_sparse": lambda: _q4_k("zigzag_sparse"),
    "zigzag_masked": lambda: _q4_k("zigzag_masked"),
    "w2a2_gemv": lambda: _two_bit("w2a2_gemv", ("x",)),
    "w2a2_ready": lambda: _two_bit("w2a2_ready", QUANTIZED),
    "w8a8_gemm": lambda: _points(
        "w8a8_gemm", _cases(16, 32, 64, 128, 256, 512, 1024, 2048), hot=("x_q", "s_x"), types=BOTH_TYPES
    ),
}


# ---- the sweep


def sweep(
    kernel: str, points: Iterable[TuningPoint], backend: timing.Cuda, say: Callable[[str], None] = print
) -> Iterator[tuple[TuningPoint, dict[str, Any]]]:
    """Each point with its fastest configuration, as soon as it is known.

    Raises:
        UserError: nothing in the space runs at a point.
    """
    workers = min(MOST_WORKERS, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:  # begins none until one is asked
        for point in points:
            begin = time.perf_counter()
            tasks_of = point.prepare()
            failures: dict[str, Exception] = {}
            configs = {json.dumps(config, sort_keys=True): dict(config) for config in point.space}
            tasks = {name: named(tasks_of(config), name, point.types) for name, config in configs.items()}
            compile_ahead(list(itertools.chain.from_iterable(tasks.values())), pool)
            times = contest(tasks, backend, failures)
            if not times:
                reason = next(iter(failures.values()), "its SPACE is empty")
                raise UserError(f"tune: no configuration of {kernel} runs at {point.key}: {reason}")
            winner = pick(times)
            ran = [name for name in tasks if not has_failed(tasks[name], failures)]
            took = time.perf_counter() - begin
            mean = f" (geometric mean of {' and '.join(point.types)})" if len(point.types) > 1 else ""
            say(
                f"{kernel} {point.key}: {times[winner]:.2f} us{mean}, {winner}; "
                f"{len(ran)} of {len(configs)} run; {took:.0f} s"
            )
            yield point, configs[winner]


def has_failed(tasks: Sequence[Task], failures: Mapping[str, Exception]) -> bool:
    """Whether any of a configuration's tasks failed."""
    return any(task.name in failures for task in tasks)


def named(tasks: Sequence[Task], name: str, types: Sequence[str]) -> list[Task]:
    """The tasks of a configuration, named after it and their types."""
    return [replace(task, name=f"{name} {dtype}".strip()) for task, dtype in zip(tasks, types, strict=True)]


def contest(
    tasks: Mapping[str, Sequence[Task]], backend: timing.Cuda, failures: dict[str, Exception]
) -> dict[str, float]:
    """Microseconds of the fastest configurations, in the order of `tasks`: the geometric mean of each one's tasks.

    `failures` takes exceptions by the name of a task; a configuration that fails in one type is left out.
    """

    def measured(names: Sequence[str], rounds: int) -> dict[str, float]:
        means = {}
        for i in range(0, len(names), AT_ONCE):
            some = names[i : i + AT_ONCE]
            together = list(itertools.chain.from_iterable(tasks[name] for name in some))
            timings = timing.measure(together, backend, rounds=rounds, failures=failures)
            us = {t.name: t.us for t in timings}
            for name in some:
                if all(task.name in us for task in tasks[name]):
                    means[name] = statistics.geometric_mean(us[task.name] for task in tasks[name])
        return means

    finalists = list(tasks)
    if len(finalists) > AT_ONCE:
        first = measured(finalists, FIRST_ROUNDS)
        fastest = sorted(first, key=first.__getitem__)[:AT_ONCE]
        finalists = [name for name in finalists if name in fastest]
    return measured(finalists, ROUNDS)


def compile_ahead(tasks: Sequence[Task], pool: ProcessPoolExecutor) -> None:
    """Compile the CUDA C++ that tasks launch, by several processes; Triton's kernels are compiled as they are asked."""
    jobs = nvrtc.jobs_of(functools.partial(task.launch, **task.inputs) for task in tasks)
    if len(jobs) <= 1:
        return
    compiling = [pool.submit(nvrtc.compile_job, job) for job in jobs]
    for one in compiling:
        one.exception()  # met again by the measurement


def swept(
    kernel: str, points: Sequence[TuningPoint], backend: timing.Cuda, path: Path, say: Callable[[str], None] = print
) -> None:
    """Sweep the points that are not done and write each winner to `path` at once.

    These points are forgotten at the end; of a longer sweep that was cut what else is done is kept. Several processes
    may sweep at once, each with points of its own.

    Raises:
        UserError: `path` is not a file of configurations, or nothing in the space runs at a point.
    """
    record = DONE / path.stem / f"{kernel}.json"
    done = _done(record)
    spaces = {point.key: what_is_timed(point) for point in points}
    todo = [point for point in points if done.get(point.key) != spaces[point.key]]
    if len(todo) < len(points):
        say(f"{kernel}: {len(points) - len(todo)} of {len(points)} shapes are done; remove {record} to start again")
    for point, best in sweep(kernel, todo, backend, say):
        merge(path, kernel, {point.key: best})
        with one_at_a_time(record):
            _write_done(record, _done(record) | {point.key: spaces[point.key]})
    with one_at_a_time(record):
        _write_done(record, {key: space for key, space in _done(record).items() if key not in spaces})


def what_is_timed(point: TuningPoint) -> str:
    """The hash of a point's space, and of the types in which it is timed where those are several."""
    space = json.dumps(list(map(dict, point.space)), sort_keys=True)
    return short_hash(" ".join([space, *point.types]).strip())


def _done(record: Path) -> dict[str, str]:
    """The keys that a sweep which was cut has done, with the hashes of their spaces."""
    return json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}


def _write_done(record: Path, done: Mapping[str, str]) -> None:
    """Keep what is done, or remove the record where that is nothing."""
    if done:
        write_text(record, json.dumps(done, indent=0) + "\n")
    else:
        record.unlink(missing_ok=True)


def pick(times: Mapping[str, float]) -> str:
    """The fastest by its microseconds; of those that tie with it, the first."""
    least = min(times.values())
    return next(name for name, us in times.items() if us <= least * (1 + TIE))


def read(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The configurations of a device; empty where it has no file.

    Raises:
        UserError: the file cannot be read, or is not what `merge` writes.
    """
    wrong = UserError(f"{path}: not a file of launch configurations; fix or remove it")
    try:
        with reading(path):
            content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        raise wrong from None
    if not isinstance(content, dict):
        raise wrong
    for by_key in content.values():
        if not isinstance(by_key, dict) or not all(isinstance(config, dict) for config in by_key.values()):
            raise wrong
    return content


def merge(path: Path, kernel: str, best: Mapping[str, Config]) -> None:
    """Write one kernel's configurations into a device's file, one a line, atomically; everything else in it stays.

    That includes what other processes write meanwhile.

    Raises:
        UserError: what is there is not what this writes, or cannot be read or written.
    """
    with one_at_a_time(path):
        content = read(path)
        content.setdefault(kernel, {}).update(best)
        write_text(path, _text(content))


def _text(content: Mapping[str, Mapping[str, Config]]) -> str:
    """Configurations by kernel and key as JSON, one a line."""
    blocks = []
    for name, by_key in sorted(content.items()):
        entries = [f"    {json.dumps(key)}: {json.dumps(by_key[key], sort_keys=True)}" for key in sorted(by_key)]
        blocks.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(entries) + "\n  }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def gemlite(
    points: Iterable[tuple[int, int, int]],
    forms: Sequence[tuple[int, int]] = ((4, 128), (2, 64)),
    path: Path | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Let the peer GemLite's own tuner run on this GPU where nothing is tuned, and keep what it finds.

    Args:
        points: (N, K, M) of layers and activation rows.
        forms: (bits, group).
        path: the file to add to; that of the device, which `bench` loads, when not given.
        say: takes a line a point.

    Raises:
        UserError: no CUDA device, or GemLite is not there in the release that is compared.
    """
    if reason := peers.no_gemlite("cuda"):
        raise UserError(f"tune: gemlite {reason}")
    from gemlite import core

    path = path or peers.gemlite_file("cuda")
    layer = None
    for n, k, m in points:
        if layer is None or (layer.rows, layer.columns) != (n, k):
            layer = Layer(n, k)
        for bits, group in forms:
            provider = peers.PEERS[f"w{bits}-g{group}/fp16/gemlite"]
            if provider.takes(m) and not peers.gemlite_configuration(bits, group, layer, m):
                inputs, launch, _ = peers.gemlite_task(bits, group, layer, m)
                launch(**inputs)
                say(f"gemlite W{bits} g{group}, {n} x {k}, M = {m}")
        with tempfile.TemporaryDirectory() as folder:
            core.GemLiteLinear.cache_config(f"{folder}/all.json")
            for name, by_place in read(Path(folder) / "all.json").items():
                if by_place:
                    merge(path, name, by_place)
    return path


def tune(kernel: str, layers: Sequence[tuple[int, int]] = ()) -> Path:
    """Sweep a kernel on this machine's GPU and record what is fastest; `gemlite`: let the peer tune itself.

    Args:
        kernel: its name.
        layers: (N, K) of the layers to sweep; all when empty.

    Returns:
        The file that was written.

    Raises:
        UserError: no such kernel, one with a single launch configuration, no CUDA device, one that it cannot run on, or
            a layer that is not among those that are swept.
    """
    if kernel == "gemlite":
        return gemlite((*shape, m) for shape, m in itertools.product(layers or shapes(), COUNTS))
    if kernel in USES and kernel not in TUNABLE:
        tuned = [name for name in USES[kernel] if name in TUNABLE]
        raise UserError(f"tune: {kernel} launches other kernels; tune what it launches: {', '.join(tuned)}")
    if kernel not in TUNABLE:
        load(kernel)  # is there such a kernel?
        raise UserError(f"tune: {kernel} has a single launch configuration; choose from: {', '.join(sorted(TUNABLE))}")
    module = load(MODULES.get(kernel, kernel))
    if not torch.cuda.is_available():
        raise UserError("tune: this machine has no CUDA device; without a file of configurations heuristics are used")
    if reason := module.unsupported("cuda"):
        raise UserError(f"tune: {reason}")
    path = FOLDER / f"{device_slug('cuda')}.json"
    read(path)  # complain before the sweep, not after it
    swept(kernel, of_layers(TUNABLE[kernel](), layers), timing.Cuda(), path)
    return path


def of_layers(points: Sequence[TuningPoint], layers: Sequence[tuple[int, int]]) -> list[TuningPoint]:
    """The points of some layers (N, K), with whose sizes keys end; all where none is named.

    Raises:
        UserError: a layer without a point.
    """
    if not layers:
        return list(points)
    by_layer: dict[str, list[TuningPoint]] = {}
    for point in points:
        by_layer.setdefault("x".join(point.key.split()[-1].split("x")[-2:]), []).append(point)
    chosen = []
    for n, k in layers:
        if f"{n}x{k}" not in by_layer:
            raise unknown("layer", f"{n}x{k}", by_layer)
        chosen += by_layer[f"{n}x{k}"]
    return chosen
