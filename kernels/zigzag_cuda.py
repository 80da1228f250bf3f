"""Products with Q4_K in zigzag by CUDA C++ (`zigzag_cuda.cu`): all columns, listed ones, or those above a threshold.

    y[256 R + r] = sum_k w[R, k, r] x[k],    r = 0 ... 255, of the bands R of 256 rows

x: fp16 or bf16 [1, K], codes and headers as in `zigzag_gemv.py`, whose launch configurations choose this source by
`"kernel": "cuda"`. Bytes moved: those of `zigzag_gemv.py`, `zigzag_sparse.py`, `zigzag_masked.py`.

A warp reads 16 columns of a band at a time by asynchronous copies, eight neighbouring lanes a line of 128 bytes, into a
ring of its own. Codes are operand A of `mma.m16n8k16` as they are, float16 subnormals; operand B is x d scale by
sub-block, in float16 with a power of two that follows its largest value, so that one product has 16 columns of 16 rows
and no sum needs another scale. d minimum x is a float32 sum a sub-block. That rounds x d scale once to 11 bits: about
2.5e-4 of the result, too much for an x in float32.

`n1` programs divide the columns of a band, or its listed ones evenly, which is SpQt's load balance (section 4.2.3);
above a threshold every program has as many columns of which it skips some. Sums of programs are joined as in
`zigzag_gemv.py`, in a fixed order or by atomics.
"""

import struct
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from repro.kernels import nvrtc, q4_k_planes
from repro.kernels.launch_config import processors
from repro.kernels.q4_k_planes import SUPER

SOURCE = Path(__file__).with_suffix(".cu")
OPERAND = 2 * 16 * 8  # bytes of operand B
SLOT = 16 * (q4_k_planes.LINE + q4_k_planes.HEADER + 4)  # bytes of a batch of 16 columns: codes, headers, inputs
FORMS = [  # warps of a program, batches that each has in flight, programs of an SM: 12 to 16 warps there
    {"kernel": "cuda", "n2": n2, "stages": stages, "blocks": blocks}
    for n2, stages, blocks in (
        (4, 3, 4), (4, 2, 4), (4, 3, 3), (4, 4, 3), (8, 3, 2), (8, 2, 2), (2, 3, 8), (2, 2, 8), (2, 3, 6), (1, 3, 12),
    )
]  # fmt: skip
PROGRAMS = (*range(1, 17), 19, 20, 22, 24, 26, 28, 33, 40, 49, 66, 82, 99)  # of a band
SPACE = []
for form in FORMS:
    for n1 in PROGRAMS:
        SPACE.append(form | {"n1": n1})


def heuristic(bands: int, columns: int, processors: int = 132) -> dict:
    """The first form whose programs, as many as run at once, fill 95 % of their places; else that which fills most.

    A warp has a batch of columns at least.
    """
    found = []
    for form in FORMS:
        most = columns // (16 * form["n2"])
        n1 = max(1, min(most, processors * form["blocks"] // bands))
        found.append(form | {"n1": n1})
    return max(found, key=lambda config: min(0.95, fill(config, bands, processors)))


def fill(config: dict, bands: int, processors: int = 132) -> float:
    """Which share of the places for programs is taken, over all waves of programs."""
    programs, places = bands * config["n1"], processors * config["blocks"]
    waves = -(-programs // places)
    return programs / (waves * places)


def worth_trying(config: dict, bands: int, processors: int = 132) -> bool:
    """Whether a configuration of SPACE fills the SMs once or twice, nearly, or as far as SPACE goes."""
    fits = bands * config["n1"] <= 2 * processors * config["blocks"]
    return fits and (fill(config, bands, processors) >= 0.85 or config["n1"] >= 66)


def run(
    mode: int, x: Tensor, codes: Tensor, headers: Tensor, rows: int, ordered: bool, active: Tensor | None,
    threshold: float, config: dict, parts: Tensor, tickets: Tensor,
) -> Tensor:  # fmt: skip
    """y [1, N] of one of the three products.

    Args:
        mode: which columns, as in `zigzag_gemv.py`.
        config: options of SPACE; what it lacks comes from `heuristic`.
        parts: float32, zeros unless `ordered`, of every band, and of every program if `ordered`.
        tickets: int32 zeros, one a band. Both are left as zeros.
    """
    bands, columns = codes.shape[:2]
    if columns % 2:  # inputs are copied in pairs
        x = pad(x, (0, 1))
    elif x.data_ptr() % 4:
        x = x.clone()
    y = x.new_empty(1, rows)
    function = nvrtc.load(SOURCE, "zigzag", defines(mode, ordered, x.dtype, config), x.device, shared_bytes(config))
    function(
        bands * config["n1"], 32 * config["n2"], codes, headers, x, tickets if active is None else active, y, parts,
        tickets, rows, columns, config["n1"], struct.unpack("<i", struct.pack("<f", threshold))[0],
    )  # fmt: skip
    return y


def complete(config: dict, recorded: dict, bands: int, columns: int, device: torch.device) -> dict:
    """A configuration with all options: what it lacks comes from the recorded one, if it is of this source."""
    like = recorded if recorded.get("kernel") == "cuda" else heuristic(bands, columns, processors(device))
    return like | config


def defines(mode: int, ordered: bool, dtype: torch.dtype, config: dict) -> dict[str, int]:
    """The macros of zigzag_cuda.cu."""
    launch = {name.upper(): config[name] for name in ("n2", "stages", "blocks")}
    return {"MODE": mode, "ORDERED": int(ordered), "BF16": int(dtype == torch.bfloat16), **launch}


def shared_bytes(config: dict) -> int:
    """Shared memory of a program: float32 sums, operand B and a ring of every warp."""
    return config["n2"] * (4 * SUPER + OPERAND + config["stages"] * SLOT)
