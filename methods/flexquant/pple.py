"""Perplexity entropy (equation 5), the effective number of tokens that a model hesitates between.

    PPLE = exp(-sum_v P(v) log P(v)),    P = softmax(logits)

1 where the model is certain, the size of the vocabulary where all tokens are equally likely. The symbol P is lost in
the printed formula; the sum over the vocabulary at one position is our reading.
"""

import torch
from torch import Tensor


def pple(logits: Tensor) -> Tensor:
    """PPLE float32 `[T]` of logits `[T, V]`, in any dtype; NaN where they are not finite enough to have a softmax."""
    return torch.special.entr(logits.float().softmax(-1)).sum(-1).exp()


def fault_tolerance(logits: Tensor) -> Tensor:
    """The probability of the first token less that of the second, float32 `[T]` (section 4.2, Figure 4)."""
    first, second = logits.float().softmax(-1).topk(2, dim=-1).values.unbind(-1)
    return first - second
