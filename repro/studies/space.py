"""Quality of the heuristic of `w4a16_gemm`: all configurations it chooses from, on layers that it was not fitted to.

    python -m repro.studies.space --out DIR     # on a GPU; goes on where it was cut; about 200 s on an H200

Those of `w4a16_multicast.cu`, which `w4a16_gemm.multicast` chooses from, are not among them.

Writes `DIR/space.json`: for every case (tokens and shape, W4 g128, bf16) the fastest time and, configuration by
configuration, by how many percent it is slower. Committed as `results/<device>/space.json` it is what
`test_heuristic.py` judges the heuristic by. A time is the best of a few replays of a CUDA graph over weights that
no cache holds; the output of every configuration is compared with the library's product first.
"""

import argparse
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

NAMED = [(28672, 4096), (6144, 4096), (3584, 3584), (3584, 18944), (5120, 13824)]  # of real models
SEED, DRAWN = 20261126, 5
COUNTS = w4a16_gemm.TOKENS
FORM = 4, 128, False  # bits, group, symmetric
REPLAYS = 3
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
    """Every layer with every number of tokens that has configurations of its own."""
    return [(m, n, k) for (n, k), m in itertools.product(shapes(), COUNTS)]


def key(case: Case) -> str:
    """A case's name in the file, as that of a launch configuration."""
    m, n, k = case
    return w4a16_gemm.tuning_key({"bits": FORM[0], "M": m, "N": n, "K": k})


def able(case: Case) -> list[int]:
    """Positions in PLAIN_SPACE of the configurations that are tried."""
    most = max(COUNTS[0], case[0])
    return [i for i, config in enumerate(w4a16_gemm.PLAIN_SPACE) if w4a16_gemm.tokens_of(config) <= most]


def as_text(times: Mapping[int, float]) -> str:
    """Times by position in PLAIN_SPACE, as one character a configuration: by how many percent it is slower."""
    best, marks = min(times.values()), [NOT_RUN] * len(w4a16_gemm.PLAIN_SPACE)
    for i, us in times.items():
        marks[i] = STEPS[min(round(100 * (us / best - 1)), len(STEPS) - 1)]
    return "".join(marks)


def ratios(content: Mapping[str, Any]) -> dict[str, float]:
    """By how much the heuristic's configuration is slower than the fastest one, at each recorded case.

    Raises:
        ValueError: the file is of another space.
    """
    if content["space"] != space_hash():
        raise ValueError("recorded with another PLAIN_SPACE of w4a16_gemm; measure again")
    by_case = {}
    for case in cases():
        if key(case) in content["places"]:
            chosen = w4a16_gemm.PLAIN_SPACE.index(w4a16_gemm.heuristic(*case, FORM[0], content["sms"]))
            by_case[key(case)] = 1 + STEPS.index(content["places"][key(case)]["over"][chosen]) / 100
    return by_case


def space_hash() -> str:
    """What changes with the space, or with the layers."""
    return short_hash(json.dumps([w4a16_gemm.PLAIN_SPACE, shapes()], sort_keys=True))


# ---- on a GPU


def sources(case: Case) -> Iterator[tuple[Path, dict[str, int]]]:
    """(source, macros) of everything that is compiled for a case."""
    m, n, k = case
    defines = w4a16_gemm.format_defines(*FORM, torch.bfloat16)
    for i in able(case):
        config = w4a16_gemm.PLAIN_SPACE[i]
        plan = w4a16_gemm.plan_wgmma if "WGS" in config else w4a16_gemm.plan_mma
        source, constants, *_ = plan(m, n, k, FORM, config, (9, 0))
        yield source, defines | constants


def _compiled(job: tuple[Path, tuple[tuple[str, int], ...], str]) -> None:
    nvrtc.compile_cubin(job[0], dict(job[1]), job[2])


def compile_all(todo: Sequence[Case]) -> None:
    """Compile what the cases need, side by side; the cubins stay on disk."""
    jobs = set()
    for case in todo:
        jobs |= {(source, tuple(macros.items()), "sm_90a") for source, macros in sources(case)}
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compiled, sorted(jobs, key=str), chunksize=4))


def weights(layer: Layer) -> list[packing.PackedWeight]:
    """Copies of a layer's weight that no cache holds."""
    codes, scales, zeros = layer.codes(4, 128)
    first = packing.pack(codes, scales, zeros, 4, 128)
    count = max(2, math.ceil(timing.COLD_BYTES / first.nbytes))
    return [first.to("cpu").to("cuda") for _ in range(count - 1)] + [first]


def measure(case: Case, layer: Layer, copies: Sequence[packing.PackedWeight], backend: timing.Cuda) -> dict[int, float]:
    """Microseconds of a launch by position in PLAIN_SPACE; those that fail or are wrong are left out."""
    x = layer.activations(case[0], torch.bfloat16)
    want = x.float() @ layer.dequantized(4, 128).T
    times = {}
    for i in able(case):
        launch = functools.partial(w4a16_gemm.launch, x, config=w4a16_gemm.PLAIN_SPACE[i])
        try:
            error = (launch(packed=copies[0]).float() - want).norm() / want.norm()
            graph = backend.capture([functools.partial(launch, packed=packed) for packed in copies])
            seconds = min(graph.replay() for _ in range(REPLAYS))
        except (RuntimeError, ValueError) as reason:
            print(f"{key(case)}: {w4a16_gemm.PLAIN_SPACE[i]}: {str(reason).splitlines()[0]}")
            continue
        if error < WORST:
            times[i] = seconds * 1e6 / len(copies)
        else:
            print(f"{key(case)}: {w4a16_gemm.PLAIN_SPACE[i]} is off by {error:.2g}")
    return times


def record(out: Path) -> dict[str, Any]:
    """Measure every case that the file lacks, writing it after each."""
    content: dict[str, Any] = {"places": {}}
    if out.is_file():
        content = json.loads(out.read_text(encoding="utf-8"))
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    about = bench.origin() | {"space": space_hash(), "sms": sms}
    if any(content.get(name) != about[name] for name in ("device", "space")):
        content = {"places": {}}
    content |= about
    todo = [case for case in cases() if key(case) not in content["places"]]
    print(f"{len(todo)} of {len(cases())} cases to measure")
    if todo:
        compile_all(todo)
    backend, layer, copies = timing.Cuda(), None, []
    for case in todo:
        if layer is None or (layer.rows, layer.columns) != case[1:]:
            layer, copies = None, []
            backend.release()
            layer = Layer(*case[1:])
            copies = weights(layer)
        times = measure(case, layer, copies, backend)
        content["places"][key(case)] = {"best_us": round(min(times.values()), 3), "over": as_text(times)}
        write_text(out, json.dumps(content, indent=0) + "\n")
        print(f"{key(case)}: best {min(times.values()):.2f} us of {len(times)}", flush=True)
    return content


def main() -> None:
    """Record, then say how good the heuristic is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of space.json")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    slower = ratios(record(folder / "space.json"))
    for name, ratio in slower.items():
        print(f"{name}: {ratio:.2f} of the fastest")
    print(f"geometric mean {geometric_mean(slower.values()):.3f}, worst {max(slower.values()):.2f}")


if __name__ == "__main__":
    main()
