"""L²QER (Zhang et al. 2024, arXiv 2402.02446, section 3.2): the error's SVD, its input channels scaled by mean |x|.

S is diagonal, so that no channel's relation to another counts. As in the authors' code, s is the largest over batches
of the mean |x| of a batch, at least 1e-4, divided by √(min s · max s); it is measured on the full-precision model. The
division changes nothing in the product.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from repro.baselines import low_rank
from repro.core.errors import UserError
from repro.models.lowbit import LowBitModel

VERSION = 1
CALIBRATED = True
COST = 2.0  # relative to RTN, for scheduling alone
KIND = low_rank.KIND
attached = low_rank.attached
SMALLEST = 1e-4  # of s


@dataclass(frozen=True)
class Config(low_rank.Config):
    """Ranks and storage, and what the scale depends on.

    Attributes:
        batch: sequences whose mean |x| is one candidate for the maximum. The paper has a mean over all samples; the
            code takes the maximum over batches, so that its result depends on the batch, which is 2 there.
    """

    batch: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch < 1:
            raise UserError(f"batch is {self.batch}; it must be a number of sequences, 1 or more")


def scale(mean_abs: Tensor, batch: int) -> Tensor:
    """s `[K]`, the diagonal of S, of mean |x| by sequence `[S, K]`."""
    s = torch.stack([batch_mean.mean(0) for batch_mean in mean_abs.split(batch)]).amax(0).clamp(min=SMALLEST)
    return s / (s.min() * s.max()).sqrt()


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Compensate every quantized layer of `lm`, on token ids int64 `[sequences, length]`.

    Raises:
        UserError, NotMeasurable: as `low_rank.measured`.
    """
    for name, rank, inputs in low_rank.measured(lm, calibration, config, "lqer"):
        low_rank.compensate(lm, "lqer", name, rank, scale(inputs.mean_abs, config.batch), config)
