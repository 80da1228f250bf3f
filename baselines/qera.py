"""QERA (Zhang et al. 2025, arXiv 2410.06040): the closed-form correction with the least error of a layer's output.

Exact (Theorem 1): S = R^½ with R = E[x xᵀ], the symmetric root. Approximate (Theorem 2): inputs are taken as
uncorrelated, so that S is diagonal with √E[x²]. Both are measured on the full-precision model.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from repro.baselines import low_rank
from repro.models.lowbit import LowBitModel

VERSION = 1
CALIBRATED = True
COST = 3.0  # relative to RTN, for scheduling alone
KIND = low_rank.KIND
attached = low_rank.attached


@dataclass(frozen=True)
class Config(low_rank.Config):
    """Ranks and storage, and which of the two solutions.

    Attributes:
        variant: SPEAR does not say which it compares with; the exact one is the paper's better one.
    """

    variant: Literal["exact", "approximate"] = "exact"


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Compensate every quantized layer of `lm`, on token ids int64 `[sequences, length]`.

    Raises:
        UserError, NotMeasurable: as `low_rank.measured`.
    """
    exact = config.variant == "exact"
    for name, rank, inputs in low_rank.measured(lm, calibration, config, "qera", ["second_moment"] if exact else []):
        S = low_rank.symmetric_root(inputs.second_moment) if exact else inputs.mean_square.mean(0).sqrt()
        low_rank.compensate(lm, "qera", name, rank, S, config)
