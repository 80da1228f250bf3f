"""Read floor: read n bytes once and reduce them. This bounds the speed of every kernel that reads n bytes of weights.

    out[p] = xor of the 32-bit words of block p of x

x: any contiguous tensor of n bytes, n a multiple of 4. out: int32, one entry per block of BLOCK words; entries past the
last block are not written. Bytes moved: n, plus 4 per block. Operations: one per word.
One block is read with 16-byte loads that are all in flight before the first is used; `evict_first`, because each word
is read once. There are two readers: a Triton program, and a thread block of `read_floor.cu`, which was 0.5 to 4.8 %
faster at most sizes on an H100 and an H200. So a floor is the best of a few of their configurations (`readers`).
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from repro.kernels import nvrtc
from repro.kernels.launch_config import configurations, device_slug, lacks
from repro.kernels.operators import FLOATS, VECTOR, Argument, operator
from repro.kernels.triton_language import tl, triton

CASES = [  # bytes, seed: weights of real layers at 4 and 8 bits, and ragged ends
    {"bytes": 512 * 2048, "seed": 0},
    {"bytes": 4096 * 4096 // 2, "seed": 1},
    {"bytes": 4096 * 14336, "seed": 2},
    {"bytes": 4 * 4097, "seed": 3},
    {"bytes": 4, "seed": 4},
]
SOURCE = Path(__file__).with_suffix(".cu")
CUDA_SPACE = []
for threads in (256, 512, 1024):
    CUDA_SPACE += [{"threads": threads, "loads": loads} for loads in (1, 2, 4, 8) if threads * loads <= 4096]
SPACE = []
for block in (512, 1024, 2048, 4096, 8192, 16384):
    counts = (1, 4, 8, 16)  # one warp needs no barrier
    SPACE += [{"block": block, "warps": warps} for warps in counts if 128 * warps <= block <= 1024 * warps]
SPACE += CUDA_SPACE
PLAIN = [{"threads": 512, "loads": 2}, {"threads": 1024, "loads": 2}, {"threads": 256, "loads": 4}]  # fastest on Hopper
MIN_BLOCK = 512
RATED = (1 << 20, 1 << 30)  # bytes: the least and the most that `rate` reads at once
ROTATED = 1 << 28  # bytes that `rate` goes through, more than an L2 cache holds


def make_inputs(case: dict, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes x (uint8) and a zeroed `out` that is large enough for every configuration."""
    generator = torch.Generator().manual_seed(case["seed"])
    x = torch.randint(0, 256, (case["bytes"],), dtype=torch.uint8, generator=generator).to(device)
    return x, torch.zeros(math.ceil(case["bytes"] // 4 / MIN_BLOCK), dtype=torch.int32, device=device)


def reference(x: torch.Tensor) -> int:
    """The xor of all words of x, which is also the xor of `out` after the kernel."""
    return int(np.bitwise_xor.reduce(x.cpu().flatten().view(torch.uint8).view(torch.int32).numpy()))


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("read_floor", device, (7, 0))


@triton.jit
def read_floor_kernel(x, out, words, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    program = tl.program_id(0)
    first = program.to(tl.int64) * BLOCK
    block = tl.arange(0, BLOCK)
    if first + BLOCK <= words:  # no mask: with one, no program would get wide loads
        values = tl.load(x + first + block, eviction_policy="evict_first")
    else:
        values = tl.load(x + first + block, mask=first + block < words, other=0)
    tl.store(out + program, tl.xor_sum(values, axis=0))


def configuration(nbytes: int, device: torch.device | str) -> dict:
    """A configuration of SPACE: the one tuned for the size that is nearest to `nbytes` by ratio, or a heuristic."""
    tuned = configurations(device_slug(device)).get("read_floor", {})
    if tuned:
        return tuned[min(tuned, key=lambda size: abs(math.log(int(size) / max(nbytes, 1))))]
    return {"block": 1024, "warps": 1} if nbytes < 2**25 else {"block": 4096, "warps": 16}


def readers(nbytes: int, device: torch.device | str) -> list[dict]:
    """The configurations whose best is the floor of `nbytes` bytes: the tuned one, and plain CUDA's."""
    plain = [] if nvrtc.unavailable() else PLAIN
    first = configuration(nbytes, device)
    return [first, *(config for config in plain if config != first)]


def words_of_block(config: dict) -> int:
    """Words of 32 bits that a program or thread block of a configuration reads."""
    return config["block"] if "block" in config else 4 * config["threads"] * config["loads"]


def launch(x: torch.Tensor, out: torch.Tensor, config: dict) -> None:
    """Launches the kernel with one configuration of SPACE. `x` and `out` as in the operator."""
    words = x.numel() * x.element_size() // 4
    blocks = triton.cdiv(words, words_of_block(config))
    if out.numel() < blocks:
        raise ValueError(f"read_floor: out has {out.numel()} entries, {blocks} blocks are read")
    if "threads" in config:
        macros = {name.upper(): value for name, value in config.items()}
        function = nvrtc.load(SOURCE, "read_floor", macros, x.device)
        function(blocks, config["threads"], x, out, words)
    else:
        read_floor_kernel[(blocks,)](
            x.view(-1).view(torch.int32), out, words, BLOCK=config["block"], num_warps=config["warps"]
        )


def rated_size(nbytes: float) -> int:
    """The power of two in `RATED` that is nearest to `nbytes` by ratio."""
    least, most = RATED
    return 1 << round(math.log2(min(max(nbytes, least), most)))


def rate(nbytes: int, device: torch.device) -> float:
    """Bytes a second of the fastest reader on `nbytes` bytes that no cache holds, in CUDA graphs timed by events."""
    slices = max(1, ROTATED // nbytes)
    buffer = torch.randint(-(2**31), 2**31, (slices, nbytes // 4), dtype=torch.int32, device=device)
    out = torch.empty(triton.cdiv(nbytes // 4, MIN_BLOCK), dtype=torch.int32, device=device)
    launches = max(slices, 4)  # a replay is long beside its start
    best = math.inf
    for config in readers(nbytes, device):
        calls = [(buffer[i % slices], out, config) for i in range(launches)]
        best = min(best, min(_replays(calls)) / launches)
    return nbytes / best


def _replays(calls: list[tuple[Any, ...]], count: int = 7) -> list[float]:
    """Seconds of each replay of a graph of launches."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launch(*calls[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            launch(*call)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seconds = []
    for _ in range(count):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return seconds


def on_cpu(x: torch.Tensor, out: torch.Tensor) -> None:
    """The operator by the reference: the xor of all in the first entry of `out`."""
    out.zero_()
    out[0] = reference(x)


def on_cuda(x: torch.Tensor, out: torch.Tensor) -> None:
    """The operator by one reader, with its tuned configuration."""
    launch(x, out, configuration(x.numel() * x.element_size(), x.device))


def limit(x: torch.Tensor, out: torch.Tensor) -> str | None:
    """What is wrong with checked arguments, or None."""
    nbytes = x.numel() * x.element_size()
    if nbytes % 4:
        return f"x of {nbytes} bytes must have a multiple of 4"
    if nbytes >= 1 << 33:
        return f"x of {nbytes} bytes; at most 2^33 - 4 are read"
    if out.numel() < -(-nbytes // 4 // MIN_BLOCK):
        return f"out has {out.numel()} entries; one for each {4 * MIN_BLOCK} of {nbytes} bytes always suffices"
    return None


# Reads every byte of `x` and writes one word per block into `out`.
read_floor = operator(
    "read_floor",
    on_cpu,
    on_cuda,
    {
        "x": Argument((torch.uint8, torch.int8, torch.int32, *FLOATS), "...", VECTOR),
        "out": Argument((torch.int32,), "blocks"),
    },
    empty=lambda x, out: None,
    limit=limit,
    mutates=("out",),
)
