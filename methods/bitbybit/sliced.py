"""`sliced`: read Bit-by-Bit's master at fewer bits (section 3.3), as in `bitbybit-any_precision + sliced-w4`.

No training and no second file: the codes lose their low bits, scales and zero points are the master's. A MatQuant
master is read by its own rule, which rounds: `matquant + sliced-w2`.
"""

from dataclasses import dataclass

from torch import Tensor

from repro.core.errors import UserError
from repro.models.groups.weight import GroupWeight
from repro.models.lowbit import LowBitModel, in_layer

VERSION = 1
CALIBRATED = False


@dataclass(frozen=True)
class Config:
    """How wide the codes are read.

    Attributes:
        bits: of a code.
    """

    bits: int = 4


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Replace every layer's codes by the shifted ones; `calibration` is not used.

    Raises:
        UserError: a layer is not stored in groups, or the width is not nested in its master.
    """
    if not lm.weights or not all(isinstance(weight, GroupWeight) for weight in lm.weights.values()):
        raise UserError("sliced reads a master at fewer bits; put one before it: bitbybit-any_precision + sliced-w4")
    for name, weight in list(lm.weights.items()):
        with in_layer(name):
            lm.set_weight(name, weight.at(config.bits))
