"""Time of a 4-bit layer by its number of tokens: finds cliffs where a path, a tile or a configuration changes.

    python -m repro.studies.steps --out DIR     # on a GPU, about 190 s; measures what the file lacks

Writes `DIR/steps.json`: microseconds of `linear` (W4 g128, bf16) at numbers of tokens from 8 to 600, pairs of
neighbours where anything changes, next to those of every path that it could take and of cuBLAS in bf16; then says which
of the three targets hold. Times are the best of replays of a CUDA graph over weights that no cache holds, in turns. The
project's own are in `results/<device>/steps.json`, which says of each layer at which commit it was measured. To measure
one again, take it out of the file.

    step        one token more takes at most 1.15 times as long, or as much more as with cuBLAS
    dequantize  from 96 to 512 tokens of layers from 4096 x 4096 on at most 1.02 times as long as to dequantize and use
                cuBLAS
    bf16        at 128 tokens 0.90 of the speed of cuBLAS, at 256 0.85, in the geometric mean; 0.70 at the worst layer
"""

import functools
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from repro.bench import bench, stored_peers, timing
from repro.bench.task import Layer
from repro.core.files import write_text
from repro.kernels import dequantize, linear, nvrtc, w4a16_choice, w4a16_gemm, wna16_gemv
from repro.kernels.packing import PackedWeight
from repro.studies import space
from repro.studies.measurement_folder import file_of_command_line

LLAMA_3 = [(4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 4096), (28672, 8192)]
EDGES = (
    *(8, 12, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 128, 144, 160, 192, 208, 224, 256),
    *(264, 288, 312, 320, 328, 336, 344, 352, 360, 368, 376, 384, 400, 416, 448, 480, 512, 576),
)  # and one token more
COUNTS = sorted({*EDGES, *(m + 1 for m in EDGES), 600})
STEP, AGAINST = 1.15, {128: 0.90, 256: 0.85}
WORST = 0.70
TURNS, REPLAYS = 4, 5  # of the graph of each that is timed; by one replay a turn, times of few tokens scatter more
SAME = 1.02  # times as long is the same within noise
LEAST_WEIGHTS = 4096 * 4096  # of a layer of which the second target is asked

Times = Mapping[str, Mapping[str, Mapping[str, float]]]  # by shape, tokens and who


def shapes() -> list[tuple[int, int]]:
    """(N, K) of the layers: those of Llama 3 8B and 70B, then all others for which peers are stored."""
    return LLAMA_3 + [shape for shape in stored_peers.shapes() if shape not in LLAMA_3]


def candidates(x: Tensor, copies: Sequence[PackedWeight], dense: Sequence[Tensor]) -> dict[str, list[Callable]]:
    """Who is timed for tokens x: calls over the copies of the weights."""
    first, count = copies[0], x.shape[0]
    sizes = count, first.rows, first.columns

    def on_each_copy(function: Callable) -> list[Callable]:
        return [functools.partial(function, packed) for packed in copies]

    calls = {
        "linear": on_each_copy(lambda packed: linear.wna16(x, packed)),
        "library": [functools.partial(F.linear, x, w) for w in dense],
        "dequantize": on_each_copy(lambda packed: x @ dequantize.launch(packed, x.dtype).T),
    }
    if count <= wna16_gemv.MAX_ROWS:
        calls["decode"] = on_each_copy(lambda packed: wna16_gemv.wna16_gemv(x, packed))
    config = w4a16_choice.configuration(*sizes, first.bits, x.device)
    calls["gemm"] = on_each_copy(lambda packed: w4a16_gemm.launch(x, packed, config))  # in one launch
    return calls


def compile_all(calls: Sequence[Callable], pool: Executor) -> None:
    """Compile what calls will load, side by side; a call of two launches says what the second needs after the first."""
    for _ in range(2):
        list(pool.map(nvrtc.compile_job, nvrtc.jobs_of(calls)))


def measure(shape: tuple[int, int], backend: timing.Cuda, pool: Executor) -> dict[str, dict[str, float]]:
    """Microseconds by tokens and who."""
    layer, times = Layer(*shape), {}
    copies = space.weights(layer)
    count = max(2, math.ceil(timing.COLD_BYTES / (2 * layer.weight.numel())))
    dense = [layer.weight.to(torch.bfloat16) for _ in range(count)]
    inputs = {tokens: layer.activations(tokens, torch.bfloat16) for tokens in COUNTS}
    first_calls = []
    for x in inputs.values():
        for calls in candidates(x, copies, dense).values():
            first_calls.append(calls[0])
    compile_all(first_calls, pool)
    for tokens, x in inputs.items():
        row = in_turns(candidates(x, copies, dense), backend)
        times[str(tokens)] = row
        print(f"{shape[0]}x{shape[1]} {tokens}: " + ", ".join(f"{who} {us:.1f}" for who, us in row.items()), flush=True)
    return times


def in_turns(calls_of: Mapping[str, Sequence[Callable]], backend: timing.Cuda) -> dict[str, float]:
    """Microseconds of a call by who is timed: the least of `REPLAYS` of all its calls in each of `TURNS`."""
    graphs = {who: backend.capture(calls) for who, calls in calls_of.items()}
    least = dict.fromkeys(graphs, math.inf)
    for _ in range(TURNS):
        for who, graph in graphs.items():
            seconds = min(graph.replay() for _ in range(REPLAYS))
            least[who] = min(least[who], seconds)
    return {who: round(seconds * 1e6 / len(calls_of[who]), 3) for who, seconds in least.items()}


def verdicts(times: Times) -> dict[str, list[str]]:
    """What misses each target, in a sentence each; nothing where it holds."""
    missed: dict[str, list[str]] = {"step": [], "dequantize": [], "bf16": []}
    for shape, row in times.items():
        large = math.prod(map(int, shape.split("x"))) >= LEAST_WEIGHTS
        for count, here in row.items():
            after = row.get(str(int(count) + 1))
            if after is not None:
                step, theirs = after["linear"] / here["linear"], after["library"] / here["library"]
                if step > max(STEP, theirs):
                    missed["step"].append(
                        f"{shape}, {count} to {int(count) + 1} tokens: {step:.2f}, cuBLAS {theirs:.2f}"
                    )
            if large and 96 <= int(count) <= 512 and here["linear"] > SAME * here["dequantize"]:
                ratio = here["linear"] / here["dequantize"]
                missed["dequantize"].append(f"{shape}, {count} tokens: {ratio:.2f} of its time")
    for count, least in AGAINST.items():
        speeds = {shape: row[str(count)]["library"] / row[str(count)]["linear"] for shape, row in times.items()}
        mean, worst = geometric_mean(speeds.values()), min(speeds, key=speeds.get)
        if mean < least:
            missed["bf16"].append(f"{count} tokens: {mean:.2f} in the geometric mean, {least:.2f} asked")
        if speeds[worst] < WORST:
            missed["bf16"].append(f"{count} tokens, {worst}: {speeds[worst]:.2f}, {WORST:.2f} asked")
    return missed


def record(out: Path) -> dict[str, Any]:
    """Measure the layers that the file lacks, writing it after each."""
    about = bench.origin()
    commit = about.pop("commit")
    content: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    if content.get("device") != about["device"]:
        content = {"times": {}, "commits": {}}
    content |= about
    backend = timing.Cuda()
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for shape in shapes():
            name = f"{shape[0]}x{shape[1]}"
            if name not in content["times"]:
                content["times"][name] = measure(shape, backend, pool)
                content["commits"][name] = commit
                write_text(out, json.dumps(content) + "\n")
                backend.release()
    return content


def main() -> None:
    """Record, then say which targets hold."""
    out = file_of_command_line(__doc__, "steps.json")
    for target, missed in verdicts(record(out)["times"]).items():
        print(f"{target}: " + ("holds" if not missed else f"missed {len(missed)} times"))
        for sentence in missed:
            print(f"  {sentence}")


if __name__ == "__main__":
    main()
