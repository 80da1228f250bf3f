"""Read floor: read n bytes once and reduce them. This bounds the speed of every kernel that reads n bytes of weights.

    out[p] = xor of the 32-bit words of block p of x

x: any contiguous tensor of n bytes, n a multiple of 4. out: int32, one entry per block of BLOCK words; entries past the
last block are not written. Bytes moved: n, plus 4 per block. Operations: one per word.
One Triton program reads one block with 16-byte loads that are all in flight before the first is used; `evict_first`,
because each word is read once.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from repro.kernels.launch_config import configurations, device_slug, lacks
from repro.kernels.operators import FLOATS, Argument, operator

CASES = [  # bytes, seed: weights of real layers at 4 and 8 bits, and ragged ends
    {"bytes": 512 * 2048, "seed": 0},
    {"bytes": 4096 * 4096 // 2, "seed": 1},
    {"bytes": 4096 * 14336, "seed": 2},
    {"bytes": 4 * 4097, "seed": 3},
    {"bytes": 4, "seed": 4},
]
SPACE = [
    {"block": block, "warps": warps}
    for block in (512, 1024, 2048, 4096, 8192, 16384)
    for warps in (1, 4, 8, 16)  # one warp needs no barrier
    if 128 * warps <= block <= 1024 * warps
]
MIN_BLOCK = 512


def make_inputs(case: dict, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes x (uint8) and a zeroed `out` that is large enough for every configuration."""
    generator = torch.Generator().manual_seed(case["seed"])
    x = torch.randint(0, 256, (case["bytes"],), dtype=torch.uint8, generator=generator).to(device)
    return x, torch.zeros(triton.cdiv(case["bytes"] // 4, MIN_BLOCK), dtype=torch.int32, device=device)


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
    """{"block": words per program, "warps"}: recorded for the largest size up to `nbytes`, or a heuristic."""
    recorded = configurations(device_slug(device)).get("read_floor", {})
    sizes = sorted(int(key) for key in recorded)
    if sizes:
        return recorded[str(max((size for size in sizes if size <= nbytes), default=sizes[0]))]
    return {"block": 1024, "warps": 1} if nbytes < 2**25 else {"block": 4096, "warps": 16}


def launch(x: torch.Tensor, out: torch.Tensor, config: dict) -> None:
    """Launches the kernel with one configuration of SPACE. `x` and `out` as in the operator."""
    words = x.numel() * x.element_size() // 4
    blocks = triton.cdiv(words, config["block"])
    if out.numel() < blocks:
        raise ValueError(f"read_floor: out has {out.numel()} entries, {blocks} blocks are read")
    read_floor_kernel[(blocks,)](
        x.view(-1).view(torch.int32), out, words, BLOCK=config["block"], num_warps=config["warps"]
    )


def on_cpu(x: torch.Tensor, out: torch.Tensor) -> None:
    """The operator by the reference: the xor of all in the first entry of `out`."""
    out.zero_()
    out[0] = reference(x)


def on_cuda(x: torch.Tensor, out: torch.Tensor) -> None:
    """The operator by the kernel, with its recorded configuration."""
    launch(x, out, configuration(x.numel() * x.element_size(), x.device))


def limit(x: torch.Tensor, out: torch.Tensor) -> str | None:
    """What is wrong with checked arguments, or None."""
    nbytes = x.numel() * x.element_size()
    if nbytes % 4:
        return f"x of {nbytes} bytes must have a multiple of 4"
    if out.numel() < -(-nbytes // 4 // MIN_BLOCK):
        return f"out has {out.numel()} entries; one for each {4 * MIN_BLOCK} of {nbytes} bytes always suffices"
    return None


# Reads every byte of `x` and writes one word per block into `out`.
read_floor = operator(
    "read_floor",
    on_cpu,
    on_cuda,
    {
        "x": Argument((torch.uint8, torch.int8, torch.int32, *FLOATS), "...", 4),
        "out": Argument((torch.int32,), "blocks"),
    },
    empty=lambda x, out: None,
    limit=limit,
    mutates=("out",),
)
