"""Perplexity entropy of every row of logits, in one launch: the exponential of the entropy of their softmax.

    pple[t] = exp(log S - (sum_i e[i] (x[i] - m)) / S),    e[i] = exp(x[i] - m),  S = sum_i e[i],  m = max_i x[i]

1 where one token has all the probability, V where all are alike (FlexQuant, equation 5). A row with a NaN, or whose
largest logit is infinite, gives NaN. logits: fp16, bf16 or float32 [T, V], V below 2^31; pple: float32 [T].
Bytes moved, of element size s: s T V from memory, once more from L2. One program reads a row: first for m, then for
both sums, so that no logit is rescaled.
"""

import torch

from repro.kernels.launch_config import lacks
from repro.kernels.operators import FLOATS, Argument, operator
from repro.kernels.triton_language import tl, triton

CASES = [  # rows, vocabulary, dtype, seed
    {"T": 3, "V": 1001, "dtype": "float32", "seed": 0},
    {"T": 1, "V": 32000, "dtype": "float16", "seed": 1},
    {"T": 1, "V": 128256, "dtype": "bfloat16", "seed": 2},
    {"T": 16, "V": 128256, "dtype": "bfloat16", "seed": 3},
]
BLOCK = 8192  # logits that a program adds up at a time


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator: logits of standard deviation 3."""
    generator = torch.Generator().manual_seed(case["seed"])
    logits = (torch.randn(case["T"], case["V"], generator=generator) * 3).to(getattr(torch, case["dtype"]))
    return {"logits": logits.to(device)}


def reference(logits: torch.Tensor) -> torch.Tensor:
    """pple float32 [T], computed in float64: in float32 a sum over 128,256 tokens is off by up to 9e-5 on a CPU."""
    entropy = torch.special.entr(logits.double().softmax(-1)).sum(-1)
    return entropy.exp().float().where(logits.amax(-1).isfinite(), torch.nan)


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("pple", device)


@triton.jit
def pple_kernel(logits, pple, V, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        value = tl.load(logits + row * V + start + lane, mask=start + lane < V, other=float("-inf")).to(tl.float32)
        broken = broken | (value != value).to(tl.int32)
        best = tl.maximum(best, value)
    top = tl.max(best, axis=0)
    total, weighted = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        value = tl.load(logits + row * V + start + lane, mask=start + lane < V, other=float("-inf")).to(tl.float32)
        below = value - top
        weight = tl.exp(below)
        total += weight
        weighted += tl.where(weight > 0, weight * below, 0.0)  # 0 times -inf
    size = tl.sum(total, axis=0)
    found = tl.exp(tl.log(size) - tl.sum(weighted, axis=0) / size)
    sound = (tl.max(broken, axis=0) == 0) & (tl.abs(top) < float("inf"))
    tl.store(pple + row, tl.where(sound, found, float("nan")))


def launch(logits: torch.Tensor) -> torch.Tensor:
    """pple of the operator, computed by the kernel; its tensor is not checked."""
    count, length = logits.shape
    found = torch.empty(count, dtype=torch.float32, device=logits.device)
    pple_kernel[(count,)](logits, found, length, BLOCK=BLOCK, num_warps=32)
    return found


pple = operator(
    "pple",
    reference,
    launch,
    {"logits": Argument(FLOATS, "T V")},
    empty=lambda logits: torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device),
)
