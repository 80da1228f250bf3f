"""Read floor: read n bytes once and reduce them. No kernel that needs n bytes of weights is faster than this one.

    out[p] = exclusive or of the 32-bit words of block p of x

x: any contiguous tensor of n bytes, n a multiple of 4. out: int32, one entry per block of BLOCK words; entries past the
last block are left alone. Bytes moved: n, plus 4 per block. Operations: one per word.
One program reads one block (read_floor.cu) with 16-byte loads that are all in flight before the first is used;
`evict_first`, since a word is never read twice. Its warps meet once, after the loads; one warp needs no barrier.
"""

from pathlib import Path

import numpy as np
import torch

from repro.kernels import nvrtc
from repro.kernels.launch_config import configurations, device_slug, lacks

SOURCE = Path(__file__).with_suffix(".cu")

CASES = [  # bytes, seed: weights of real layers at 4 and 8 bits, and ragged ends
    {"bytes": 512 * 2048, "seed": 0},
    {"bytes": 4096 * 4096 // 2, "seed": 1},
    {"bytes": 4096 * 14336, "seed": 2},
    {"bytes": 4 * 4097, "seed": 3},
    {"bytes": 4, "seed": 4},
]
MIN_BLOCK = 512  # words: entries of `out` that suffice follow from it
SPACE = [  # words of a program, its warps; 1 to 16 loads a thread, all in registers
    {"block": 128 * warps * loads, "warps": warps}
    for loads in (1, 2, 4, 8, 16)
    for warps in (1, 2, 4, 8, 16, 32)
    if 128 * warps * loads >= MIN_BLOCK and warps * loads <= 256
]


def make_inputs(case: dict, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes x (uint8) and a zeroed `out` that is large enough for every configuration."""
    generator = torch.Generator().manual_seed(case["seed"])
    x = torch.randint(0, 256, (case["bytes"],), dtype=torch.uint8, generator=generator).to(device)
    return x, torch.zeros(-(-case["bytes"] // (4 * MIN_BLOCK)), dtype=torch.int32, device=device)


def reference(x: torch.Tensor) -> int:
    """The exclusive or of all words of x, which is that of all of `out` too after the kernel."""
    return int(np.bitwise_xor.reduce(x.cpu().flatten().view(torch.uint8).view(torch.int32).numpy()))


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None where it can."""
    return lacks("read_floor", device) or nvrtc.unavailable()


def configuration(nbytes: int, device: torch.device | str) -> dict:
    """{"block": words per program, "warps"}: recorded for the largest size up to `nbytes`, or a heuristic."""
    recorded = configurations(device_slug(device)).get("read_floor", {})
    sizes = sorted(int(key) for key in recorded)
    if sizes:
        return recorded[str(max((size for size in sizes if size <= nbytes), default=sizes[0]))]
    return {"block": 1024, "warps": 1} if nbytes < 2**25 else {"block": 4096, "warps": 16}


def launch(x: torch.Tensor, out: torch.Tensor, config: dict) -> None:
    """Launches the kernel with one configuration of SPACE. `x` and `out` as in the operator."""
    words, block = x.numel() * x.element_size() // 4, config["block"]
    blocks = -(-words // block)
    if x.numel() * x.element_size() % 4 or not x.is_contiguous() or words == 0:
        raise ValueError(
            f"read_floor: x of shape {tuple(x.shape)} must be contiguous, its bytes a multiple of 4 and not 0"
        )
    if out.dtype != torch.int32 or out.numel() < blocks:
        raise ValueError(f"read_floor: out {out.dtype} of {out.numel()} entries must be int32 with {blocks} or more")
    if x.data_ptr() % 16:
        x = x.clone()  # right, but no floor
    kernel = nvrtc.load(SOURCE, "read_floor", {"BLOCK": block, "WARPS": config["warps"]}, x.device)
    kernel(blocks, 32 * config["warps"], x, out, words - (blocks - 1) * block)


@torch.library.custom_op("lowbit::read_floor", mutates_args=("out",))
def read_floor(x: torch.Tensor, out: torch.Tensor) -> None:
    """Reads every byte of `x` (contiguous, 4n bytes) and writes one word per block into `out` (int32).

    ceil(n / 512) entries of `out` always suffice. Raises ValueError when the shapes do not fit. An x that does not
    begin at a multiple of 16 bytes is copied first: then the result is right, the time is not.
    """
    launch(x, out, configuration(x.numel() * x.element_size(), x.device))


@read_floor.register_kernel("cpu")
def _(x: torch.Tensor, out: torch.Tensor) -> None:
    out.zero_()
    out[0] = reference(x)
