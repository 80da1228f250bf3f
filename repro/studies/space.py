"""Quality of the choice of `w4a16_gemm` without a tuned configuration: all it chooses from, on layers not fitted to.

    python -m repro.studies.space --out DIR     # on a GPU; goes on where it was cut; about 270 s on an H200 for all

Writes `DIR/space.json`: runs, each with its configurations and, for every case (tokens and shape, W4 g128, bf16), the
fastest time and, configuration by configuration, by how many percent it is slower. What no run has of `compared` is
measured as one more; to measure others again, take their run out of the file. Committed as
`results/<device>/space.json` it is what `test_heuristic.py` judges the choice by. A time is the best of a few replays
of a CUDA graph over weights that no cache holds; the output of every configuration is compared with the library's
product first.
"""

import functools
import itertools
import json
import math
import multiprocessing
import os
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from repro.bench import bench, timing
from repro.bench.task import Layer
from repro.bench.tune import w4a16_space
from repro.core.files import write_text
from repro.kernels import nvrtc, packing, w4a16_choice, w4a16_gemm, w4a16_plans, w4a16_tiles
from repro.kernels.launch_config import processors
from repro.studies.measurement_folder import file_of_command_line

NAMED = [(28672, 4096), (6144, 4096), (3584, 3584), (3584, 18944), (5120, 13824)]  # of real models
SEED, DRAWN = 20261126, 5
COUNTS = (16, 32, 64, 128, 256)
FORM = 4, 128, False  # bits, group, symmetric
REPLAYS = 3
UNTUNED = torch.device("cpu")  # for which nothing is tuned: choices are those of an H200 without its file
WORST = 1e-2  # relative error of bf16 outputs whose weights were rounded to bf16 once
STEPS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-"  # percent above the fastest, one a character
NOT_RUN = STEPS[-1]  # or as much slower
NOT_ASKED = " "  # measured by another run, or at other cases alone

Case = tuple[int, int, int]  # tokens, rows, columns
Config = dict[str, int]


def shapes() -> list[tuple[int, int]]:
    """(N, K) of the layers: five of real models, five drawn, their sizes multiples of 128."""
    draw = random.Random(SEED)  # noqa: S311
    drawn = [(128 * draw.randint(8, 224), 128 * draw.randint(8, 128)) for _ in range(DRAWN)]
    return NAMED + drawn


def cases() -> list[Case]:
    """Every layer with every number of tokens."""
    return [(m, n, k) for (n, k), m in itertools.product(shapes(), COUNTS)]


def key(case: Case) -> str:
    """A case's name in the file, as that of a launch configuration."""
    m, n, k = case
    return w4a16_choice.tuning_key({"bits": FORM[0], "M": m, "N": n, "K": k})


def tried(case: Case) -> list[Config]:
    """The configurations that are chosen from for any tokens that a case's stand for, more than half as many."""
    tokens, configs = range(case[0] // 2 + 1, case[0] + 1), []
    for candidate in itertools.chain.from_iterable(w4a16_tiles.CANDIDATES.values()):
        if any(candidate.suits(m, FORM[0]) for m in tokens):
            configs.append(candidate.config)
    return configs


def compared(case: Case) -> list[Config]:
    """The configurations that a choice is compared with: those of `tried`, then what a sweep of the case would time.

    That is the hundred with the least estimates of all of `SPACE`, those that are recorded alone among them.
    """
    m, n, k = case
    configs = tried(case)
    for config in w4a16_space({"M": m, "N": n, "K": k, "bits": FORM[0]}, UNTUNED):
        if config not in configs:
            configs.append(config)
    return configs


def name_of(config: Config) -> str:
    """A configuration in the file: "KS=128 MT=32 ..."."""
    return " ".join(f"{name}={config[name]}" for name in sorted(config))


def as_text(times: Mapping[str, float], names: Sequence[str], asked: Collection[str] | None = None) -> str:
    """Times by configuration as one character for each of `names`: by how many percent it is slower.

    Only those that are `asked` of a case, all if it is not given, were to be measured.
    """
    best, marks = min(times.values()), []
    for name in names:
        if asked is not None and name not in asked:
            marks.append(NOT_ASKED)
            continue
        percent = round(100 * (times[name] / best - 1)) if name in times else len(STEPS)
        marks.append(STEPS[min(percent, len(STEPS) - 1)])
    return "".join(marks)


def ratios(content: Mapping[str, Any]) -> dict[str, float]:
    """By how much the configuration that is chosen is slower than the fastest recorded one, at each recorded case.

    A case whose choice no run has is left out.

    Raises:
        ValueError: the file is of a device with another number of SMs than an H200.
    """
    if content["sms"] != processors(UNTUNED):
        raise ValueError(f"recorded on {content['sms']} SMs; what is chosen on {processors(UNTUNED)} is judged")
    by_case = {}
    for case in cases():
        chosen = name_of(w4a16_choice.configuration(*case, FORM[0], UNTUNED))
        fastest, of_choice = math.inf, None
        for run in content["runs"]:
            place = run["places"].get(key(case))
            if place is None:
                continue
            fastest = min(fastest, place["best_us"])
            mark = dict(zip(run["configs"], place["over"], strict=True)).get(chosen, NOT_ASKED)
            if mark != NOT_ASKED:  # the last run that has it counts
                of_choice = place["best_us"] * (1 + STEPS.index(mark) / 100)
        if of_choice is not None:
            by_case[key(case)] = of_choice / fastest
    return by_case


# ---- on a GPU


def sources(case: Case, configs: Sequence[Config]) -> Iterator[tuple[Path, dict[str, int]]]:
    """(source, macros) of everything that is compiled for a case."""
    m, n, k = case
    defines = w4a16_plans.format_defines(*FORM, torch.bfloat16)
    for config in configs:
        source, plan = w4a16_plans.plan_of(config, m, n, k, FORM, (9, 0))
        yield source, defines | plan.macros


def _compiled(job: tuple[Path, tuple[tuple[str, int], ...], str]) -> None:
    nvrtc.compile_cubin(job[0], dict(job[1]), job[2])


def compile_all(todo: Mapping[Case, Sequence[Config]]) -> None:
    """Compile what cases need, side by side; the cubins stay on disk."""
    jobs = set()
    for case, configs in todo.items():
        jobs |= {(source, tuple(macros.items()), "sm_90a") for source, macros in sources(case, configs)}
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compiled, sorted(jobs, key=str), chunksize=4))


def weights(layer: Layer) -> list[packing.PackedWeight]:
    """Copies of a layer's weight that no cache holds."""
    codes, scales, zeros = layer.codes(4, 128)
    first = packing.pack(codes, scales, zeros, 4, 128)
    count = max(2, math.ceil(timing.COLD_BYTES / first.nbytes))
    return [first.to("cpu").to("cuda") for _ in range(count - 1)] + [first]


def measure(
    case: Case,
    configs: Sequence[Config],
    layer: Layer,
    copies: Sequence[packing.PackedWeight],
    backend: timing.Cuda,
) -> dict[str, float]:
    """Microseconds of a launch by configuration; those that fail or are wrong are left out."""
    x = layer.activations(case[0], torch.bfloat16)
    want = x.float() @ layer.dequantized(4, 128).T
    times = {}
    for config in configs:
        launch = functools.partial(w4a16_gemm.launch, x, config=config)
        try:
            error = (launch(packed=copies[0]).float() - want).norm() / want.norm()
            graph = backend.capture([functools.partial(launch, packed=packed) for packed in copies])
            seconds = min(graph.replay() for _ in range(REPLAYS))
        except (RuntimeError, ValueError) as reason:
            print(f"{key(case)}: {config}: {str(reason).splitlines()[0]}")
            continue
        if error < WORST:
            times[name_of(config)] = seconds * 1e6 / len(copies)
        else:
            print(f"{key(case)}: {config} is off by {error:.2g}")
    return times


def resumed(out: Path, origin: Mapping[str, Any], sms: int) -> dict[str, Any]:
    """What the file has of this device."""
    if out.is_file():
        content = json.loads(out.read_text(encoding="utf-8"))
        if content["device"] == origin["device"]:
            return content
    return {"device": origin["device"], "sms": sms, "runs": []}


def unmeasured(content: Mapping[str, Any]) -> dict[Case, list[Config]]:
    """By case the configurations that no run has for it, a layer's cases together."""
    todo = {}
    for case in cases():
        measured: set[str] = set()
        for run in content["runs"]:
            place = run["places"].get(key(case))
            if place is not None:
                marks = zip(run["configs"], place["over"], strict=True)
                measured.update(name for name, mark in marks if mark != NOT_ASKED)
        missing = [config for config in compared(case) if name_of(config) not in measured]
        if missing:
            todo[case] = missing
    return todo


def record(out: Path) -> dict[str, Any]:
    """Measure what the file lacks, writing it after each case."""
    origin = bench.origin()
    content = resumed(out, origin, processors(torch.device("cuda")))
    todo = unmeasured(content)
    print(f"{sum(map(len, todo.values()))} to measure, of {len(todo)} of {len(cases())} cases")
    if not todo:
        return content
    compile_all(todo)
    names = sorted({name_of(config) for config in itertools.chain.from_iterable(todo.values())})
    places: dict[str, dict[str, Any]] = {}
    content["runs"].append({**origin, "configs": names, "places": places})
    backend, layer, copies = timing.Cuda(), None, []
    for case, configs in todo.items():
        if layer is None or (layer.rows, layer.columns) != case[1:]:
            layer, copies = None, []
            backend.release()
            layer = Layer(*case[1:])
            copies = weights(layer)
        times = measure(case, configs, layer, copies, backend)
        best = min(times.values())
        asked = set(map(name_of, configs))
        places[key(case)] = {"best_us": round(best, 3), "over": as_text(times, names, asked)}
        write_text(out, json.dumps(content, indent=0) + "\n")
        print(f"{key(case)}: best {best:.2f} us of {len(times)}", flush=True)
    return content


def main() -> None:
    """Record, then say how good the choice is."""
    out = file_of_command_line(__doc__, "space.json")
    slower = ratios(record(out))
    for name, ratio in slower.items():
        print(f"{name}: {ratio:.2f} of the fastest")
    print(f"geometric mean {geometric_mean(slower.values()):.3f}, worst {max(slower.values()):.2f}")


if __name__ == "__main__":
    main()
