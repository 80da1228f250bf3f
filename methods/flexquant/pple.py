"""Perplexity entropy (equation 5), the effective number of tokens that a model hesitates between.

    PPLE = exp(-sum_v P(v) log P(v)),    P = softmax(logits)

1 where the model is certain, the size of the vocabulary where all tokens are equally likely. The symbol P is lost in
the printed formula; the sum over the vocabulary at one position is our reading.
"""

from torch import Tensor

from repro.kernels import pple as kernel


def pple(logits: Tensor) -> Tensor:
    """PPLE float32 `[T]` of logits `[T, V]` in fp16, bf16 or float32; NaN where they have no softmax."""
    return pple_and_token(logits)[0]


def pple_and_token(logits: Tensor) -> tuple[Tensor, Tensor]:
    """PPLE, and the greedy choice int64 `[T]`, -1 where there is none: on a GPU in one pass over the logits."""
    return kernel.pple(logits) if logits.device.type == "cuda" else kernel.reference(logits)


def fault_tolerance(logits: Tensor) -> Tensor:
    """The probability of the first token less that of the second, float32 `[T]` (section 4.2, Figure 4)."""
    first, second = logits.float().softmax(-1).topk(2, dim=-1).values.unbind(-1)
    return first - second
