"""Quality of the choice of `w4a16_gemm` without a tuned configuration: all it chooses from, on layers not fitted to.

    python -m repro.studies.space --out DIR     # on a GPU; goes on where it was cut; about 270 s on an H200

Writes `DIR/space.json`: for every case (tokens and shape, W4 g128, bf16) and every space that has configurations for
it, the fastest time and, configuration by configuration, by how many percent it is slower. A space that changed is
measured again, the others stay; of one that has grown at its end the record still counts. Committed as
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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from repro.bench import bench, timing
from repro.bench.task import Layer
from repro.core.files import short_hash, write_text
from repro.kernels import nvrtc, packing, w4a16_gemm
from repro.kernels.launch_config import processors
from repro.studies.measurement_folder import file_of_command_line

NAMED = [(28672, 4096), (6144, 4096), (3584, 3584), (3584, 18944), (5120, 13824)]  # of real models
SEED, DRAWN = 20261126, 5
COUNTS = (16, 32, 64, 128, 256)
SPACES = w4a16_gemm.SPACES
LEAST_MULTICAST = 65  # tokens, from which on its configurations are chosen from
FORM = 4, 128, False  # bits, group, symmetric
REPLAYS = 3
UNTUNED = torch.device("cpu")  # for which nothing is tuned: choices are those of an H200 without its file
WORST = 1e-2  # relative error of bf16 outputs whose weights were rounded to bf16 once
STEPS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-"  # percent above the fastest, one a character
NOT_RUN = STEPS[-1]  # or as much slower

Case = tuple[int, int, int]  # tokens, rows, columns


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
    return w4a16_gemm.tuning_key({"bits": FORM[0], "M": m, "N": n, "K": k})


def positions_tried(case: Case, space: str) -> list[int]:
    """Positions in a space of the configurations that are tried."""
    tokens, tried = case[0], []
    most_few, most_narrow = w4a16_gemm.MOST_FEW, w4a16_gemm.MOST_NARROW
    chosen_from = {  # at which of COUNTS; the others at all
        "few": tokens <= most_few,
        "middle": most_few < tokens <= most_narrow,
        "wide": tokens > most_narrow,
        "known": tokens <= most_few,
        "four": most_narrow < tokens <= 128,
        "turns": False,
        "eight": False,  # of fewer tokens than are counted
        "loop": tokens <= w4a16_gemm.MOST_LOOP,
    }
    if not chosen_from.get(space, True):
        return []
    for i, config in enumerate(SPACES[space]):
        if space == "loop":
            fits = any(w4a16_gemm.suits(config, m) for m in range(tokens // 2 + 1, tokens + 1))
        elif "PAIR" in config:
            fits = tokens >= LEAST_MULTICAST
        else:
            fits = w4a16_gemm.tokens_of(config) <= max(COUNTS[0], tokens)
        if fits:
            tried.append(i)
    return tried


def as_text(times: Mapping[int, float], size: int) -> str:
    """Times by position in a space of a size, as one character a configuration: by how many percent it is slower."""
    best, marks = min(times.values()), [NOT_RUN] * size
    for i, us in times.items():
        marks[i] = STEPS[min(round(100 * (us / best - 1)), len(STEPS) - 1)]
    return "".join(marks)


def ratios(content: Mapping[str, Any]) -> dict[str, float]:
    """By how much the configuration that is chosen is slower than the fastest recorded one, at each recorded case.

    A case whose choice was not in its space yet when that was recorded is left out.

    Raises:
        ValueError: the file is of another space, or of a device with another number of SMs than an H200.
    """
    for space, facts in content["spaces"].items():
        if facts["hash"] != space_hash(space, facts["size"]):
            raise ValueError(f"recorded with another {space} space of w4a16_gemm: python -m repro.studies.space")
    if content["sms"] != processors(UNTUNED):
        raise ValueError(f"recorded on {content['sms']} SMs; what is chosen on {processors(UNTUNED)} is judged")
    by_case = {}
    for case in cases():
        recorded = content["places"].get(key(case), {})
        chosen = w4a16_gemm.configuration(*case, FORM[0], UNTUNED)
        for space, one in recorded.items():
            if chosen in SPACES[space][: len(one["over"])]:
                mark = one["over"][SPACES[space].index(chosen)]
                us = one["best_us"] * (1 + STEPS.index(mark) / 100)
                by_case[key(case)] = us / min(each["best_us"] for each in recorded.values())
    return by_case


def space_hash(space: str, size: int) -> str:
    """What changes with the first `size` configurations of a space, or with the layers."""
    return short_hash(json.dumps([SPACES[space][:size], shapes()], sort_keys=True))


# ---- on a GPU


def sources(case: Case, space: str) -> Iterator[tuple[Path, dict[str, int]]]:
    """(source, macros) of everything that is compiled for a case."""
    m, n, k = case
    defines = w4a16_gemm.format_defines(*FORM, torch.bfloat16)
    for i in positions_tried(case, space):
        config = SPACES[space][i]
        source, constants, *_ = w4a16_gemm.plan_of(config)(m, n, k, FORM, config, (9, 0))
        yield source, defines | constants


def _compiled(job: tuple[Path, tuple[tuple[str, int], ...], str]) -> None:
    nvrtc.compile_cubin(job[0], dict(job[1]), job[2])


def compile_all(todo: Sequence[tuple[Case, str]]) -> None:
    """Compile what cases need of spaces, side by side; the cubins stay on disk."""
    jobs = set()
    for case, space in todo:
        jobs |= {(source, tuple(macros.items()), "sm_90a") for source, macros in sources(case, space)}
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compiled, sorted(jobs, key=str), chunksize=4))


def weights(layer: Layer) -> list[packing.PackedWeight]:
    """Copies of a layer's weight that no cache holds."""
    codes, scales, zeros = layer.codes(4, 128)
    first = packing.pack(codes, scales, zeros, 4, 128)
    count = max(2, math.ceil(timing.COLD_BYTES / first.nbytes))
    return [first.to("cpu").to("cuda") for _ in range(count - 1)] + [first]


def measure(
    case: Case, space: str, layer: Layer, copies: Sequence[packing.PackedWeight], backend: timing.Cuda
) -> dict[int, float]:
    """Microseconds of a launch by position in a space; those that fail or are wrong are left out."""
    x = layer.activations(case[0], torch.bfloat16)
    want = x.float() @ layer.dequantized(4, 128).T
    times = {}
    for i in positions_tried(case, space):
        config = SPACES[space][i]
        launch = functools.partial(w4a16_gemm.launch, x, config=config)
        try:
            error = (launch(packed=copies[0]).float() - want).norm() / want.norm()
            graph = backend.capture([functools.partial(launch, packed=packed) for packed in copies])
            seconds = min(graph.replay() for _ in range(REPLAYS))
        except (RuntimeError, ValueError) as reason:
            print(f"{key(case)}: {config}: {str(reason).splitlines()[0]}")
            continue
        if error < WORST:
            times[i] = seconds * 1e6 / len(copies)
        else:
            print(f"{key(case)}: {config} is off by {error:.2g}")
    return times


def resumed(out: Path, origin: Mapping[str, Any], sms: int) -> dict[str, Any]:
    """What the file has of this device and of spaces that are as they were; what is missing is of `origin`."""
    content: dict[str, Any] = {}
    if out.is_file():
        content = json.loads(out.read_text(encoding="utf-8"))
    if content.get("device") != origin["device"]:
        content = {"device": origin["device"], "sms": sms, "spaces": {}, "places": {}}
    for space in SPACES:
        facts = {"size": len(SPACES[space]), "hash": space_hash(space, len(SPACES[space]))}
        if content["spaces"].get(space, {}).get("hash") != facts["hash"]:
            content["spaces"][space] = {**origin, **facts}
            for recorded in content["places"].values():
                recorded.pop(space, None)
    return content


def unmeasured(content: Mapping[str, Any]) -> list[tuple[Case, str]]:
    """Cases and spaces that are not measured yet, a layer's cases together."""
    todo = []
    for case, space in itertools.product(cases(), SPACES):
        if positions_tried(case, space) and space not in content["places"].get(key(case), {}):
            todo.append((case, space))
    return todo


def record(out: Path) -> dict[str, Any]:
    """Measure what the file lacks, writing it after each case."""
    content = resumed(out, bench.origin(), processors(torch.device("cuda")))
    todo = unmeasured(content)
    print(f"{len(todo)} to measure, of {len(cases())} cases")
    if todo:
        compile_all(todo)
    backend, layer, copies = timing.Cuda(), None, []
    for case, space in todo:
        if layer is None or (layer.rows, layer.columns) != case[1:]:
            layer, copies = None, []
            backend.release()
            layer = Layer(*case[1:])
            copies = weights(layer)
        times = measure(case, space, layer, copies, backend)
        best, text = min(times.values()), as_text(times, len(SPACES[space]))
        content["places"].setdefault(key(case), {})[space] = {"best_us": round(best, 3), "over": text}
        write_text(out, json.dumps(content, indent=0) + "\n")
        print(f"{key(case)}, {space}: best {best:.2f} us of {len(times)}", flush=True)
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
