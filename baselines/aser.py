"""ASER (Zhao et al. 2025, arXiv 2411.07762): whitening SVD of the error, and outlier channels left to the correction.

Error reconstruction: S is the Cholesky factor of E[x xᵀ], so that S⁻¹x is white; B A is the error's truncation in that
norm, the same product as QERA's exact one up to damping. Activation smoothing: of the f channels with the largest mean
|x| times mean |w|, the weights W_o leave W; only W_s = W - W_o is quantized, on a grid that they no longer widen, and
the correction approximates W - q(W_s). The paper also divides the activations of these channels by a diagonal M and
multiplies W_o by it, which matters where activations are quantized: with 16-bit activations M cancels in B A.

There is no official code, and SPEAR prints no setting. That its own ASER is worse than no compensation in six cells
whose error reconstruction alone would be QERA's is what W_o of a rank near r would do; what is open is named below.
"""

import math
from dataclasses import dataclass, replace

from torch import Tensor

from repro.baselines import grid, low_rank
from repro.core.errors import NotMeasurable, UserError
from repro.models.lowbit import LowBitModel, in_layer

VERSION = 1
CALIBRATED = True
COST = 3.0  # relative to RTN, for scheduling alone
KIND = low_rank.KIND
attached = low_rank.attached


@dataclass(frozen=True)
class Config(low_rank.Config):
    """Ranks and storage, and what is open. The rank is fixed, as SPEAR's, instead of by a share of singular values.

    Attributes:
        outlier_share: f, the outlier channels, as a share of the layer's rank, rounded down. W_o has rank f, so that
            more channels than ranks lose weights whole; half leaves as much for the error itself. A number of channels
            would be all of a small model's rank. Above 0 it rounds W_s anew, which only RTN's weights can be; 0 is
            error reconstruction alone, behind any quantizer and on the very weights that it made.
        damping: share of the mean of diag E[x xᵀ] that is added to it, so that its Cholesky factor exists where
            channels are dead or tokens few. Not given; 1e-6 is enough for a rounding error in float32 inputs.
    """

    outlier_share: float = 0.5
    damping: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.outlier_share <= 1:
            raise UserError(f"outlier_share is {self.outlier_share}; it must be a share of the rank, 0 to 1")
        if self.damping < 0:
            raise UserError(f"damping is {self.damping}; it must be a share of the mean of the diagonal, 0 or more")


def outliers(mean_abs: Tensor, W: Tensor, f: int) -> Tensor:
    """int64 `[f]`: the channels with the largest mean |x| `[K]` times mean |w| over the rows of `W` `[N, K]`."""
    return (mean_abs * W.double().abs().mean(0)).topk(f).indices


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Compensate every quantized layer of `lm`; with outliers their columns are removed from the quantized weight.

    Raises:
        UserError, NotMeasurable: as `low_rank.measured`; damping is too little; or outliers behind a quantizer but RTN.
    """
    for name, rank, inputs in low_rank.measured(lm, calibration, config, "aser", ["second_moment"]):
        was = low_rank.error(lm, name)
        if f := math.floor(config.outlier_share * rank):
            remove(lm, name, outliers(inputs.mean_abs.mean(0), lm.full[name], f))
        with in_layer(name):
            S = low_rank.cholesky(inputs.second_moment, config.damping)
        low_rank.compensate(lm, "aser", name, rank, S, config, was)


def remove(lm: LowBitModel, name: str, channels: Tensor) -> None:
    """Quantize a layer again without the weights of some input channels, which become 0.

    Raises:
        NotMeasurable: a quantizer other than RTN made it.
    """
    full, weight = lm.full[name], lm.weights[name]
    moved = {key: t.to(full.device) for key in weight.TENSORS if (t := getattr(weight, key)) is not None}
    own_grid = low_rank.rtn_grid(replace(weight, **moved), full)  # what a file held is on the CPU
    if own_grid is None:
        raise NotMeasurable(
            "unsupported",
            f"{name}: aser quantizes anew without the outlier channels, which would undo any quantizer but rtn; "
            "put rtn before it, or give outlier_share=0",
        )
    remaining = full.clone()
    remaining[:, channels] = 0
    lm.set_weight(name, grid.rtn(remaining, own_grid))
