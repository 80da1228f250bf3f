"""The list of the inputs above a threshold, which the sparse products read (SpQt, section 4.2.3).

    active[1 ... n] = the k with |x[k]| > threshold,    active[0] = n

x: fp16, bf16 or float32 [1, K], K up to 2^16; active: int32 [K + 1]. NaN is listed, so that it reaches the output.
Bytes moved: (2 or 4) K + 4 (K + 1).

As the paper has it, a program makes the exclusive prefix sum of a segment of at most 1024 inputs and reserves its part
of the list by one atomic addition, whose order is that in which segments arrive: products that add up in the list's
order then differ in their last bits from run to run, and nobody writes the entries after the n-th.

`ordered` lists by k instead, and the entries after the n-th are 0: the thread blocks of a cluster have a segment each
and send each other how many inputs it lists (compute capability 9.0 and later; one thread block before). The same
source makes the vector as well: `rms_norm_active.py`, `silu_product_active.py`.
"""

import struct
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from repro.kernels import nvrtc
from repro.kernels.launch_config import lacks
from repro.kernels.operators import VECTOR, operator
from repro.kernels.prepared import blank
from repro.kernels.q4_k_planes import X, kept, scratch
from repro.kernels.triton_language import tl, triton

CASES = [  # inputs, share above the threshold, ordered, dtype, seed
    {"K": 2311, "share": 0.5, "ordered": True, "dtype": "float32", "seed": 0},
    {"K": 2311, "share": 0.35, "ordered": False, "dtype": "float16", "seed": 1},
    {"K": 8192, "share": 0.5, "ordered": True, "dtype": "bfloat16", "seed": 2},
    {"K": 8192, "share": 0.5, "ordered": False, "dtype": "bfloat16", "seed": 2},
    {"K": 28672, "share": 0.5, "ordered": True, "dtype": "bfloat16", "seed": 3},
    {"K": 28672, "share": 0.5, "ordered": False, "dtype": "bfloat16", "seed": 3},
]
SOURCE = Path(__file__).with_suffix(".cu")
NOTHING, NORM, GATED = 0, 1, 2  # what the source makes: no vector, RMSNorm, SiLU of gate times up
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
BLOCKS, LARGE = 8, 8192  # of a cluster; inputs beyond which it has twice as many: 5 to 15 % faster (H200)
EIGHT = 8  # neighbours that a thread loads at once
SEGMENT = 1024  # inputs of a program
MOST = 1 << 16  # inputs, whose places are 16 bits, and a list in any order as many


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator: normal inputs, and their quantile as threshold."""
    generator = torch.Generator().manual_seed(case["seed"])
    x = torch.randn(1, case["K"], generator=generator).to(getattr(torch, case["dtype"]))
    threshold = x.abs().float().quantile(1 - case["share"]).item()
    return {"x": x.to(device), "threshold": threshold, "ordered": case["ordered"]}


def reference(x: Tensor, threshold: float, ordered: bool = True) -> Tensor:
    """active int32 [K + 1], in order, with zeros after the last index."""
    indices = kept(x, threshold)[0].nonzero()[:, 0]
    active = torch.zeros(x.shape[1] + 1, dtype=torch.int32, device=x.device)
    active[0] = len(indices)
    active[1 : 1 + len(indices)] = indices
    return active


def in_order(active: Tensor) -> Tensor:
    """A list int32 [K + 1] with its indices sorted and zeros after them, as an ordered one has them."""
    count = int(active[0])
    ordered = torch.zeros_like(active)
    ordered[0] = count
    ordered[1 : 1 + count] = active[1 : 1 + count].sort().values
    return ordered


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("active_inputs", device) or nvrtc.unavailable()


@triton.jit
def active_inputs_kernel(  # noqa: ANN201
    x, active, state, K, threshold, SEGMENTS, SEGMENT: tl.constexpr,  # noqa: ANN001
):  # fmt: skip
    """`state`: one zeroed word; its low 20 bits count indices and the others segments that have arrived."""
    segment, lane = tl.program_id(0), tl.arange(0, SEGMENT)
    index = segment * SEGMENT + lane
    value = tl.load(x + index, mask=index < K, other=0.0).to(tl.float32)
    keep = ((index < K) & ((tl.abs(value) <= threshold) == 0)).to(tl.int32)
    before, own = tl.cumsum(keep, axis=0) - keep, tl.sum(keep, axis=0)
    noted = tl.atomic_add(state, own + (1 << 20))  # by the segments before
    start, arrived = noted & 0xFFFFF, noted >> 20
    tl.store(active + 1 + start + before, index, mask=keep != 0)
    if arrived == SEGMENTS - 1:
        tl.store(active, start + own)
        tl.store(state, 0)


def launch(x: Tensor, threshold: float, ordered: bool = True) -> Tensor:
    """active of the operator, computed by the kernel; `x` is not checked."""
    return prepare(x, threshold, ordered)(x)


def prepare(x: Tensor, threshold: float, ordered: bool = True) -> Callable[..., Tensor]:
    """The launch of the operator for calls like this one."""
    columns = x.shape[1]
    allocate = blank(torch.int32, columns + 1)
    fill = prepared(NOTHING, columns, threshold, x) if ordered else unordered(x, threshold)

    def launch(x: Tensor, *_: object) -> Tensor:
        active = allocate(x)
        fill(active, x)
        return active

    return launch


def unordered(x: Tensor, threshold: float) -> Callable[[Tensor, Tensor], None]:
    """What fills a list as segments arrive, for x like this one; it takes the list and x."""
    columns = x.shape[1]
    segments = triton.cdiv(columns, SEGMENT)
    state = scratch("active_inputs", 1, torch.int32, x.device)
    kernel = active_inputs_kernel[(segments,)]
    return lambda active, x: kernel(x, active, state, columns, threshold, segments, SEGMENT=SEGMENT, num_warps=8)


def run(
    makes: int, columns: int, threshold: float, active: Tensor, x: Tensor, y: Tensor | None = None,
    total: Tensor | None = None, residual: Tensor | None = None, weight: Tensor | None = None, eps: float = 0.0,
) -> None:  # fmt: skip
    """Launch the source, which fills `active` and, by what it makes, `y` and `total`; nothing is checked."""
    launch = prepared(makes, columns, threshold, x, residual, weight, eps)
    launch(active, x, y, total, residual, weight)


def prepared(
    makes: int, columns: int, threshold: float, x: Tensor, residual: Tensor | None = None,
    weight: Tensor | None = None, eps: float = 0.0,
) -> Callable[..., None]:  # fmt: skip
    """The launch of `run` for calls like this one; outputs begin at multiples of 16 bytes, as new memory does."""
    blocks = 1
    if lacks("active_inputs", x.device, (9, 0)) is None:
        blocks = BLOCKS if columns <= LARGE else 2 * BLOCKS
    given = [tensor for tensor in (x, residual, weight) if tensor is not None]
    aligned = columns % EIGHT == 0 and all(tensor.data_ptr() % VECTOR == 0 for tensor in given)
    macros = {"MAKES": makes, "RESIDUAL": int(residual is not None), "TYPE": TYPES[x.dtype], "ALIGNED": int(aligned)}
    macros |= {"CLUSTER": blocks} | sizes(columns, blocks)
    function = nvrtc.load(SOURCE, "active_inputs", macros, x.device, shared_bytes(macros))
    names = "x", "residual", "weight", "y", "total", "active"
    step = function.step(blocks, 32 * macros["WARPS"], (*names, columns, bits_of(eps), bits_of(threshold)))
    write = function.in_a_row(names, (step,))

    def launch(
        active: Tensor, x: Tensor, y: Tensor | None = None, total: Tensor | None = None,
        residual: Tensor | None = None, weight: Tensor | None = None,
    ) -> None:  # fmt: skip
        write(*[x if tensor is None else tensor for tensor in (x, residual, weight, y, total)], active)

    return launch


def sizes(columns: int, blocks: int) -> dict[str, int]:
    """The macros WARPS and VECTORS: as few vectors of a thread as blocks of at most 32 warps need."""
    vectors = -(-columns // (blocks * 32 * 32 * EIGHT))
    return {"WARPS": -(-columns // (blocks * 32 * EIGHT * vectors)), "VECTORS": vectors}


def shared_bytes(macros: dict[str, int]) -> int:
    """Shared memory of a block: 16 bits for each of its values."""
    return 2 * 32 * macros["WARPS"] * EIGHT * macros["VECTORS"]


def bits_of(number: float) -> int:
    """The bits of a float32, as a C int."""
    return struct.unpack("<i", struct.pack("<f", number))[0]


def limit(x: Tensor, threshold: float, ordered: bool = True) -> str | None:
    """What is wrong with checked arguments, or None."""
    if x.shape[1] > MOST:
        return f"x has {x.shape[1]} columns; a list holds {MOST} at most"
    return None if threshold >= 0 else f"threshold is {threshold}; magnitudes are compared with 0 or more"


active_inputs = operator(
    "active_inputs",
    reference,
    launch,
    {"x": X},
    empty=lambda x, *rest, **more: torch.empty(x.shape[1] + 1, dtype=torch.int32, device=x.device),
    limit=limit,
    prepare=prepare,
)
