"""RTN: every block linear rounded to nearest on its own grid, without data (Frantar et al. 2023, sections 2 and 5)."""

from dataclasses import dataclass

from torch import Tensor

from repro.baselines import grid
from repro.models.lowbit import LowBitModel, block_linears, in_layer

VERSION = 1
CALIBRATED = False


@dataclass(frozen=True)
class Config(grid.Grid):
    """The grid; RTN has no other options."""


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Quantize every block linear of `lm`; `calibration` is not used.

    Raises:
        UserError: a layer does not divide into groups, or holds NaN or Inf; the message names it.
    """
    for name, linear in block_linears(lm.model).items():
        with in_layer(name):
            weight = grid.rtn(linear.weight.data, config)
        lm.set_weight(name, weight)
