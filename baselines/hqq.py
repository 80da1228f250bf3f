"""HQQ: half-quadratic quantization, data-free (Badri and Shaji 2023, "Half-Quadratic Quantization of Large Models").

The scale of a group is that of its minimum and maximum. Its zero point, a real number, is fitted by alternating between
an outlier matrix that takes the largest errors (a proximal step of the l_p norm, p = 0.7) and the mean zero point that
is best for what is left. SubSpec's draft is made of it (arXiv 2509.18344, section 4.1): 4 bits, groups of 64.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from repro.baselines import grid
from repro.core.errors import UserError
from repro.models.lowbit import LowBitModel, block_linears, in_layer
from repro.models.quantized import QuantizedWeight

VERSION = 1
CALIBRATED = False
NARROWEST = 1e-4  # a group whose range is at most this keeps a scale of 1
LARGEST = 2e4  # codes per unit of weight, so that a scale is a half


@dataclass(frozen=True)
class Config:
    """The defaults of the authors' package.

    Attributes:
        bits: width of a code, 2 to 8.
        group: input columns that share a scale and a zero point.
        norm: p of the l_p norm that outliers are measured by.
        beta: weight of the quadratic term at the start; the shrinkage threshold is its inverse.
        kappa: factor by which beta grows in an iteration.
        iterations: at most; they end when the mean absolute error of the whole layer grows.
        scale_dtype: how scales and zero points are stored.
    """

    bits: int = 4
    group: int = 64
    norm: float = 0.7
    beta: float = 10.0
    kappa: float = 1.01
    iterations: int = 20
    scale_dtype: Literal["float16", "float32"] = "float16"

    def __post_init__(self) -> None:
        if not 1 < self.bits <= 8:
            raise UserError(f"bits is {self.bits}; HQQ has 2 to 8")
        if self.group < 1:
            raise UserError(f"group is {self.group}; give the columns that share a scale, such as 64")
        if not (0 < self.norm <= 1 and self.beta > 0 and self.kappa > 0 and self.iterations >= 0):
            values = f"norm {self.norm}, beta {self.beta}, kappa {self.kappa}, iterations {self.iterations}"
            raise UserError(f"{values}: a norm above 0 and up to 1, beta and kappa above 0, iterations of 0 or more")


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Quantize every block linear of `lm`; `calibration` is not used.

    Raises:
        UserError: a layer does not divide into groups, or holds NaN or Inf; the message names it.
    """
    for name, linear in block_linears(lm.model).items():
        with in_layer(name):
            weight = hqq(linear.weight.data, config)
        lm.set_weight(name, weight)


@torch.no_grad()
def hqq(weight: Tensor, config: Config) -> QuantizedWeight:
    """Quantize `weight` `[N, K]`, computed in float32 on its device.

    Raises:
        UserError: the group does not divide K, the weight holds NaN or Inf, or a scale does not fit its dtype.
    """
    stored_grid = grid.Grid(bits=config.bits, group=config.group, scale_dtype=config.scale_dtype)
    groups = grid.split(grid.check(weight, stored_grid), stored_grid)  # [N, G, group]
    levels = 2**config.bits - 1
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    width = high - low
    inverse = torch.where(width <= NARROWEST, 1.0, levels / width).clamp(max=LARGEST)
    zero = -low * inverse
    if config.bits == 4:  # as the package does, at this width alone
        zero = zero.round()
    zero = fitted_zero(groups, inverse, zero, config)
    codes = _codes(groups, inverse, zero, levels).to(torch.uint8).flatten(1)
    scale = 1 / inverse
    dtype = getattr(torch, config.scale_dtype)
    grid.check_scale(scale.to(dtype), weight.shape, config.scale_dtype)
    stored_bits = torch.finfo(dtype).bits
    return QuantizedWeight(
        codes,
        scale.squeeze(-1).to(dtype),
        zero.squeeze(-1).to(dtype),
        bits=config.bits,
        group=config.group,
        zero_bits=stored_bits,
        scale_bits=stored_bits,
    )


def fitted_zero(groups: Tensor, inverse: Tensor, zero: Tensor, config: Config) -> Tensor:
    """Zero points `[N, G, 1]` of weights `[N, G, group]` after the half-quadratic iterations.

    The zero point of the iteration whose error grew is kept, as the package does.
    """
    levels = 2**config.bits - 1
    beta = config.beta
    least = torch.inf
    for _ in range(config.iterations):
        codes = _codes(groups, inverse, zero, levels)
        error = groups - (codes - zero) / inverse
        outliers = error.sign() * (error.abs() - error.abs().pow(config.norm - 1) / beta).relu()
        zero = (codes - (groups - outliers) * inverse).mean(-1, keepdim=True)
        beta *= config.kappa
        mean_error = error.abs().mean().item()
        if mean_error >= least:
            break
        least = mean_error
    return zero


def _codes(groups: Tensor, inverse: Tensor, zero: Tensor, levels: int) -> Tensor:
    return (groups * inverse + zero).round().clamp(0, levels)
