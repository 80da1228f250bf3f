"""The list of the inputs above a threshold, which the sparse products read (SpQt, section 4.2.3).

    active[1 ... n] = the k with |x[k]| > threshold,    active[0] = n

x: fp16, bf16 or float32 [1, K], K below 2^20; active: int32 [K + 1]. NaN is listed, so that it reaches the output.
Bytes moved: (2 or 4) K + 4 (K + 1). A program makes the exclusive prefix sum of a segment of at most 1024 inputs and
reserves its part of the list by one atomic addition, whose order is that in which segments arrive: products that add up
in the list's order then differ in their last bits from run to run, and nobody writes the entries after the n-th.
`ordered` lists by k instead: every program counts the segments before its own, there is no atomic, and the entries
after the n-th are 0.
"""

import torch
from torch import Tensor

from repro.kernels.launch_config import lacks
from repro.kernels.operators import operator
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
SEGMENT = 1024  # inputs of a program
MOST = 1 << 20  # inputs; a segment's count and its arrival share the 32 bits of one atomic


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
    return lacks("active_inputs", device)


@triton.jit
def active_inputs_kernel(  # noqa: ANN201
    x, active, state, K, threshold, SEGMENTS, ORDERED: tl.constexpr, SEGMENT: tl.constexpr,  # noqa: ANN001
):  # fmt: skip
    """`state`: one zeroed word; its low 20 bits count indices and the others segments that have arrived."""
    segment, lane = tl.program_id(0), tl.arange(0, SEGMENT)
    index = segment * SEGMENT + lane
    value = tl.load(x + index, mask=index < K, other=0.0).to(tl.float32)
    keep = ((index < K) & ((tl.abs(value) <= threshold) == 0)).to(tl.int32)
    before, own = tl.cumsum(keep, axis=0) - keep, tl.sum(keep, axis=0)
    if ORDERED:
        others = tl.zeros((SEGMENT,), tl.int32)
        for earlier in range(segment):
            value = tl.load(x + earlier * SEGMENT + lane).to(tl.float32)
            others += ((tl.abs(value) <= threshold) == 0).to(tl.int32)
        start, arrived = tl.sum(others, axis=0), segment
    else:
        found = tl.atomic_add(state, own + (1 << 20))
        start, arrived = found & 0xFFFFF, found >> 20
    tl.store(active + 1 + start + before, index, mask=keep != 0)
    if ORDERED:
        skipped = index - start - before  # how many came before it that are not listed
        tl.store(active + K - skipped, 0, mask=(index < K) & (keep == 0))
    if arrived == SEGMENTS - 1:
        tl.store(active, start + own)
        if not ORDERED:
            tl.store(state, 0)


def launch(x: Tensor, threshold: float, ordered: bool = True) -> Tensor:
    """active of the operator, computed by the kernel; `x` is not checked."""
    columns = x.shape[1]
    active = torch.empty(columns + 1, dtype=torch.int32, device=x.device)
    segments = triton.cdiv(columns, SEGMENT)
    state = scratch("active_inputs", 1, torch.int32, x.device)
    active_inputs_kernel[(segments,)](
        x, active, state, columns, threshold, segments, ORDERED=ordered, SEGMENT=SEGMENT, num_warps=8
    )
    return active


def limit(x: Tensor, threshold: float, ordered: bool = True) -> str | None:
    """What is wrong with checked arguments, or None."""
    if x.shape[1] >= MOST:
        return f"x has {x.shape[1]} columns; a list holds fewer than {MOST}"
    return None if threshold >= 0 else f"threshold is {threshold}; magnitudes are compared with 0 or more"


active_inputs = operator(
    "active_inputs",
    reference,
    launch,
    {"x": X},
    empty=lambda x, *rest, **more: torch.empty(x.shape[1] + 1, dtype=torch.int32, device=x.device),
    limit=limit,
)
