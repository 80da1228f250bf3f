"""Q4_K, llama.cpp's 4.5 bits a weight, in rows or in SpQt's zigzag (arXiv 2511.04477, Tables 2 and 3).

Every block linear is stored in super-blocks of 256 weights, byte for byte as ggml quantizes (`methods/spqt/q4_k.py`).
In zigzag the weights of a super-block run down one column, and layers that share their input are stacked where 256 does
not divide their rows (`methods/spqt/layout.py`). Embedding and head stay as they are, as the paper has it (section 5);
llama.cpp's mix Q4_K_M, which stores some layers in 6 bits, is something else.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from repro.baselines import grid
from repro.core.errors import UserError
from repro.methods.spqt import layout
from repro.methods.spqt.q4_k_weight import Layout, pack
from repro.models.activations import statistics
from repro.models.lowbit import LowBitModel, block_linears, in_layer

VERSION = 1
CALIBRATED = False  # unless its config says so
COST = 2.0  # relative to RTN, for scheduling alone


@dataclass(frozen=True)
class Config:
    """How the super-blocks lie, and what the error of a weight counts.

    Attributes:
        layout: along rows, as llama.cpp has it; down columns, super-blocks in row-major order; the same in two planes,
            codes and scales.
        importance: "none" weighs a weight's error by its size, as llama.cpp does without an importance matrix;
            "mean_square" by mean x² of its input channel on calibration text, as with one.
    """

    layout: Layout = "row"
    importance: Literal["none", "mean_square"] = "none"

    @property
    def calibrated(self) -> bool:
        """Whether calibration tokens are needed; in zigzag importances cancel (`weight.pack`)."""
        return self.importance != "none" and self.layout == "row"


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Quantize every block linear of `lm`; `calibration` int64 `[sequences, length]` only for importances of rows.

    Raises:
        UserError: 256 does not divide the columns of a layer stored in rows, a layer holds NaN or Inf (the message
            names it), or there are no calibration tokens.
    """
    linears = block_linears(lm.model)
    groups = [(name,) for name in linears]
    if config.layout != "row":
        groups = layout.stacks({name: linear.out_features for name, linear in linears.items()})
    importances = {}
    if config.calibrated:
        if calibration is None or not calibration.numel():
            raise UserError(
                "q4_k with importance=mean_square needs calibration tokens, there are none; "
                "name a calibration corpus in the recipe, or give importance=none"
            )
        stats = statistics(lm.model, list(linears), calibration)
        importances = {name: inputs.mean_square.mean(0).float() for name, inputs in stats.items()}
    elif config.importance != "none":
        importances = {name: torch.ones(linear.in_features) for name, linear in linears.items()}
    for names in groups:
        weights = {name: linears[name].weight.data for name in names}
        for name, weight in weights.items():
            with in_layer(name):
                grid.check(weight, grid.Grid())
        with in_layer(names[0]):
            packed = pack(weights, config.layout, importances.get(names[0]))
        for name, weight in packed.items():
            lm.set_weight(name, weight)
