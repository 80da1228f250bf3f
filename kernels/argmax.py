"""Greedy decoding: the first of the largest logits of every row, in one launch that reads them once.

    token[t] = the lowest i with logits[t, i] = max_i logits[t, i]

A row with a NaN, or whose largest logit is infinite, gives -1, which is no token; `sample.py` says the same of it at a
temperature of 0. logits: fp16, bf16 or float32 [T, V], V below 2^31; tokens: int64 [T]. Nothing is read on the host.
Bytes moved, of element size s: s T V. One Triton program reads a row: with 128,256 logits in bf16 that is 256 KiB,
which the product before has left in L2, and no second launch has to join the parts of a row.
"""

from collections.abc import Callable

import torch

from repro.kernels.launch_config import lacks
from repro.kernels.operators import FLOATS, Argument, operator
from repro.kernels.prepared import Prepared, blank
from repro.kernels.triton_language import tl, triton

CASES = [  # rows, vocabulary, dtype, seed
    {"T": 3, "V": 1001, "dtype": "float32", "seed": 0},
    {"T": 1, "V": 32000, "dtype": "float16", "seed": 1},
    {"T": 1, "V": 128256, "dtype": "bfloat16", "seed": 2},
    {"T": 16, "V": 128256, "dtype": "bfloat16", "seed": 3},
]
BLOCK = 8192  # logits that a program compares at a time
UNROLLED = 4  # blocks whose loads are in flight together


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator: logits of standard deviation 3; the largest of the first row comes twice."""
    generator = torch.Generator().manual_seed(case["seed"])
    logits = (torch.randn(case["T"], case["V"], generator=generator) * 3).to(getattr(torch, case["dtype"]))
    logits[0, case["V"] // 2] = logits[0, -1] = logits[0].max()
    return {"logits": logits.to(device)}


def reference(logits: torch.Tensor) -> torch.Tensor:
    """tokens int64 [T]; torch's largest is NaN wherever a row has one, and its index the first of equals."""
    largest, first = logits.max(1)
    return first.where(largest.isfinite(), -1)


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("argmax", device)


@triton.jit
def argmax_kernel(logits, tokens, V, BLOCK: tl.constexpr, UNROLLED: tl.constexpr):  # noqa: ANN001, ANN201
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    at = tl.zeros((BLOCK,), tl.int32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK * UNROLLED):
        for part in tl.static_range(UNROLLED):
            token = start + part * BLOCK + lane
            value = tl.load(logits + row * V + token, mask=token < V, other=float("-inf")).to(tl.float32)
            broken = broken | (value != value).to(tl.int32)
            larger = value > best  # not equal: the first stays
            at = tl.where(larger, token, at)
            best = tl.where(larger, value, best)
    top = tl.max(best, axis=0)
    first = tl.min(tl.where(best == top, at, V), axis=0)
    sound = (tl.max(broken, axis=0) == 0) & (tl.abs(top) < float("inf"))
    tl.store(tokens + row, tl.where(sound, first, -1).to(tl.int64))


def launch(logits: torch.Tensor) -> torch.Tensor:
    """tokens of the operator, computed by the kernel; its tensor is not checked."""
    return prepare(logits)(logits)


def prepare(logits: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The launch of the operator for calls like this one."""
    count, length = logits.shape
    kernel = Prepared(argmax_kernel, (count,), BLOCK=BLOCK, UNROLLED=UNROLLED, num_warps=32)

    allocate = blank(torch.int64, count)

    def launch(logits: torch.Tensor) -> torch.Tensor:
        tokens = allocate(logits)
        kernel(logits, tokens, length)
        return tokens

    return launch


def limit(logits: torch.Tensor) -> str | None:
    """What is wrong with checked logits, or None."""
    return f"logits have {logits.shape[1]} columns; 2^31 - 1 at most" if logits.shape[1] >= 1 << 31 else None


argmax = operator(
    "argmax",
    reference,
    launch,
    {"logits": Argument(FLOATS, "T V")},
    empty=lambda logits: torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device),
    limit=limit,
    prepare=prepare,
)
