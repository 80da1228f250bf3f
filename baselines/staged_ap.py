"""Block-AP in stages: EfficientQAT's learned weights, steps and zero points under Bit-by-Bit's falling precision.

A question of this project, in neither paper: does the curriculum of Bit-by-Bit (arXiv 2604.07888, section 3.2) help a
method, too, that learns its steps, which Bit-by-Bit keeps in closed form? Each stage is a pass of Block-AP
(`efficientqat`, Chen et al. 2024, arXiv 2407.11062) over all blocks at the next width. It starts from the weights that
the stage before trained; s and z are those of the min-max grid of these weights, and are learned from there. The
teacher is full precision alone, and no channel is split.
"""

from dataclasses import dataclass, field, replace

from torch import Tensor

from repro.baselines import efficientqat
from repro.core.errors import UserError
from repro.models.lowbit import LowBitModel
from repro.train import training_cost

VERSION = 1
CALIBRATED = True
READS_FIRST_TOKENS = True  # of the calibration text its first `tokens` tokens and no others
COST = 100.0  # relative to RTN, for scheduling alone
attached = efficientqat.attached


@dataclass(frozen=True)
class Config(efficientqat.Config):
    """Block-AP's settings, those of each stage.

    Attributes:
        before: widths of the weights in the stages before the last, which trains `bits`; falling. By default those of
            Bit-by-Bit, 8 and 4.
    """

    before: list[int] = field(default_factory=lambda: [8, 4])

    def __post_init__(self) -> None:
        super().__post_init__()
        widths = [*self.before, self.bits]
        if sorted(set(widths), reverse=True) != widths or max(widths) > 8:
            raise UserError(
                f"staged_ap: before is {self.before}; the widths fall from at most 8 and end above {self.bits}"
            )

    @property
    def stages(self) -> list["Config"]:
        """The settings of each stage, whose widths alone differ."""
        return [replace(self, bits=bits, before=[]) for bits in self.before] + [replace(self, before=[])]


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Train and quantize every block of `lm`; `calibration` int64 `[sequences, length]` is the training text.

    Raises:
        UserError: fewer tokens than asked for, a group that does not divide a layer's inputs, or NaN in the model.
        NotMeasurable: the training diverged.
    """
    efficientqat.train(lm, calibration, config.stages, "staged_ap")


def work(config: Config, sequences: int, quantized: bool, count: int) -> training_cost.Work:
    """What its training takes: one pass of EfficientQAT a stage."""
    stages = len(config.stages)
    of_stage = training_cost.by_blocks(config, sequences, quantized, count)
    return replace(of_stage, passes=stages * of_stage.passes, trained=stages)
