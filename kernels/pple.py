"""Perplexity entropy and greedy token of every row of logits, in one launch that reads them once.

    pple[t] = exp(log S - (sum_i e[i] (x[i] - m)) / S),    e[i] = exp(x[i] - m),  S = sum_i e[i],  m = max_i x[i]
    token[t] = the lowest i with x[i] = m

pple is 1 where one token has all the probability, V where all are alike (FlexQuant, equation 5). A row with a NaN, or
whose largest logit is infinite, gives NaN and the token -1, as `argmax.py` says of it. logits: fp16, bf16 or float32
[T, V], V below 2^31; pple: float32 [T]; tokens: int64 [T]. Bytes moved, of element size s: s T V.
One program reads a row. Each lane keeps the largest of its own logits and both sums relative to it; four logits of a
lane are read together, so that its sums are rescaled once for all of them. The lanes are joined at the end.
"""

from collections.abc import Callable

import torch

from repro.kernels import argmax
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
BLOCK, WARPS = 4096, 16  # lanes of a program: eight of each thread, which has 128 registers


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator: logits of standard deviation 3."""
    generator = torch.Generator().manual_seed(case["seed"])
    logits = (torch.randn(case["T"], case["V"], generator=generator) * 3).to(getattr(torch, case["dtype"]))
    return {"logits": logits.to(device)}


def reference(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(pple float32 [T], tokens int64 [T]); in float32 a CPU's sum over 128,256 tokens would be off by up to 9e-5."""
    largest, first = logits.max(1)
    sound = largest.isfinite()
    entropy = torch.special.entr(logits.double().softmax(-1)).sum(-1)
    return entropy.exp().float().where(sound, torch.nan), first.where(sound, -1)


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("pple", device)


@triton.jit
def read(logits, token, V):  # noqa: ANN001, ANN201
    """Logits of tokens as float32; minus infinity beyond the last."""
    return tl.load(logits + token, mask=token < V, other=float("-inf")).to(tl.float32)


@triton.jit
def weighed(value, top):  # noqa: ANN001, ANN201
    """exp(value - top), and its product with the exponent; both 0 where a token cannot be."""
    weight = tl.where(value == float("-inf"), 0.0, tl.exp(value - top))
    return weight, tl.where(weight > 0, weight * (value - top), 0.0)


@triton.jit
def rescaled(total, weighted, best, top):  # noqa: ANN001, ANN201
    """Both sums relative to `best` as sums relative to `top`, which is as large or larger."""
    shift = tl.where(best == top, 0.0, best - top)
    moved = weighted + tl.where(total > 0, total * shift, 0.0)
    shrink = tl.exp(shift)
    return total * shrink, tl.where(shrink > 0, moved * shrink, 0.0)


@triton.jit
def pple_kernel(logits, pple, tokens, V, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logits += row * V
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    at = tl.zeros((BLOCK,), tl.int32)
    total, weighted = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, 4 * BLOCK):
        first = start + lane
        a, b = read(logits, first, V), read(logits, first + BLOCK, V)
        c, d = read(logits, first + 2 * BLOCK, V), read(logits, first + 3 * BLOCK, V)
        top, where = best, at
        where, top = tl.where(a > top, first, where), tl.where(a > top, a, top)  # not equal: the first stays
        where, top = tl.where(b > top, first + BLOCK, where), tl.where(b > top, b, top)
        where, top = tl.where(c > top, first + 2 * BLOCK, where), tl.where(c > top, c, top)
        where, top = tl.where(d > top, first + 3 * BLOCK, where), tl.where(d > top, d, top)
        total, weighted = rescaled(total, weighted, best, top)
        best, at = top, where
        one, other = weighed(a, top)
        total, weighted = total + one, weighted + other
        one, other = weighed(b, top)
        total, weighted = total + one, weighted + other
        one, other = weighed(c, top)
        total, weighted = total + one, weighted + other
        one, other = weighed(d, top)
        total, weighted = total + one, weighted + other
    largest = tl.max(best, axis=0)
    chosen = tl.min(tl.where(best == largest, at, V), axis=0)
    total, weighted = rescaled(total, weighted, best, largest)
    size = tl.sum(total, axis=0)
    perplexity = tl.exp(tl.log(size) - tl.sum(weighted, axis=0) / size)
    sound = (size == size) & (tl.abs(largest) < float("inf"))  # a NaN among the logits is one in the sum
    tl.store(pple + row, tl.where(sound, perplexity, float("nan")))
    tl.store(tokens + row, tl.where(sound, chosen, -1).to(tl.int64))


def launch(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(pple, tokens) of the operator, computed by the kernel; its tensor is not checked."""
    return prepare(logits)(logits)


def prepare(logits: torch.Tensor) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """The launch of the operator for calls like this one."""
    count, length = logits.shape
    kernel = Prepared(pple_kernel, (count,), BLOCK=BLOCK, num_warps=WARPS)

    make_pple, make_tokens = blank(torch.float32, count), blank(torch.int64, count)

    def launch(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, tokens = make_pple(logits), make_tokens(logits)
        kernel(logits, values, tokens, length)
        return values, tokens

    return launch


def empty(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of the right shape and dtype."""
    count = logits.shape[0]
    device = logits.device
    return torch.empty(count, dtype=torch.float32, device=device), torch.empty(count, dtype=torch.int64, device=device)


pple = operator(
    "pple", reference, launch, {"logits": Argument(FLOATS, "T V")}, empty=empty, limit=argmax.limit, prepare=prepare
)
