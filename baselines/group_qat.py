"""Next-token training of Bit-by-Bit's grouped weights (arXiv 2604.07888, 3.1) without blocks, stages or teachers.

The rows "none" of its Tables 3 and 6. All block linears are trained at once and at the last precision from the first
step, on the group quantizer in closed form with straight-through gradients,

    L = -Σ_t log p(x_t | x_<t; Ŵ),    Ŵ = s (q - z) of `repro/models/groups/quantizer.py`, fitted anew at every step

so that these rows differ from "block-wise" ones in how far the loss reaches. The paper says
"end-to-end NLL" and no more.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from repro.baselines import qat
from repro.core.errors import UserError
from repro.methods.bitbybit import WATCHED, input_kurtosis
from repro.models.groups import inputs
from repro.models.groups.quantizer import GroupGrid, Levels, Scale, fake_quantize
from repro.models.groups.weight import pack
from repro.models.lowbit import LowBitModel, block_linears, in_layer
from repro.train import training_cost
from repro.train.blocks import checkpoint_folder, training_ids
from repro.train.end_to_end import next_token_loss, train
from repro.train.streams import Dtype, computing

VERSION = 1
CALIBRATED = True
work = training_cost.end_to_end  # what its training takes
READS_FIRST_TOKENS = True  # of the calibration text its first `tokens` tokens and no others
COST = 50.0  # relative to RTN, for scheduling alone
attached = inputs.attached


@dataclass(frozen=True)
class Config:
    """Bit-by-Bit's settings and their defaults, as far as they are not of blocks and stages.

    Attributes:
        bits, act_bits: of weights; of activations, 16 leaves them alone.
        group: weights, or activations, that share a scale.
        scale, levels, include_zero: of the grid; by default ranges include 0 where activations are quantized.
        kurtosis, outlier_bits: inputs of down-projections above this kurtosis get these bits (appendix B.2).
        lr, lr_final: learning rate of the weights, and the share of it at which its cosine ends. Not given; those of
            the block-wise rows.
        epochs, tokens: passes over the text, three stages of two; tokens of a pass: those of the block-wise rows.
        batch: sequences in a step. Not given; that of the block-wise rows.
        max_norm: largest norm of the gradient, 0 does not clip. Not given; that of the other end-to-end baselines.
        compute: dtype of the decoder; what is trained is float32. Not given; that of the block-wise rows.
        seed: of the order of sequences.
    """

    bits: int = 2
    act_bits: int = qat.FULL
    group: int = 32
    scale: Scale = "e4m3"
    levels: Levels = "asymmetric"
    include_zero: bool | None = None
    kurtosis: float = 1000.0
    outlier_bits: int = 4
    lr: float = 2e-5
    lr_final: float = 0.05
    epochs: int = 6
    tokens: int = 4096 * 2048
    batch: int = 2
    max_norm: float = 1.0
    compute: Dtype = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        qat.check("group_qat", self)
        if self.group < 1 or not 2 <= self.bits <= 8:
            raise UserError(
                f"group_qat: bits is {self.bits} and group {self.group}; bits are 2 to 8, a group is above 0"
            )
        qat.input_grid("group_qat", self.act_bits, self.group)
        qat.input_grid("group_qat", self.outlier_bits, self.group)
        if not 0 <= self.lr_final <= 1 or not self.kurtosis >= 0:
            raise UserError("group_qat: lr_final is a share from 0 to 1, kurtosis is 0 or more")

    def grid(self, bits: int) -> GroupGrid:
        """The grid of weights of a width."""
        return GroupGrid(bits, self.group, self.levels, self.zero_included, self.scale)

    @property
    def stored_grid(self) -> GroupGrid:
        """The grid of the codes that are stored."""
        return self.grid(self.bits)

    def input_grid(self, bits: int) -> GroupGrid:
        """The grid of activations of a width."""
        return GroupGrid(bits, self.group, include_zero=self.zero_included)

    @property
    def zero_included(self) -> bool:
        """`include_zero`, or its default."""
        return self.act_bits != qat.FULL if self.include_zero is None else self.include_zero


def input_bits(lm: LowBitModel, ids: Tensor, config: Config) -> dict[str, int]:
    """The width of every block linear's inputs; notes the kurtosis that decides it."""
    widths = dict.fromkeys(block_linears(lm.model), config.act_bits)
    if config.act_bits == qat.FULL:
        return widths
    kurtosis = input_kurtosis(lm.model, ids[:WATCHED])
    lm.facts["layers/kurtosis"] = list(kurtosis.values())
    heavy = [name for name, value in kurtosis.items() if value > config.kurtosis]
    return widths | dict.fromkeys(heavy, max(config.act_bits, config.outlier_bits))


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Train and quantize every block linear of `lm`; `calibration` int64 `[sequences, length]` is the text.

    Raises:
        UserError: fewer tokens than asked for, a group that does not divide a layer's inputs, or NaN in the model.
        NotMeasurable: the training diverged.
    """
    model = lm.model
    weights = qat.start(model, config.group)
    ids = training_ids(calibration, config.tokens, "group_qat").to(model.device)
    widths = input_bits(lm, ids, config)
    grid = config.grid(config.bits)
    student = computing(model, config.compute)
    student = inputs.on_quantized_inputs(student, widths, config.input_grid(8))

    def loss(rows: Tensor) -> Tensor:
        rounded = {f"{name}.weight": fake_quantize(weight, grid) for name, weight in weights.items()}
        return next_token_loss(qat.logits(student, rounded, rows), rows)

    settings = qat.settings(config, config.lr_final, model, ids.shape[1])
    losses = train(loss, weights, ids, settings, checkpoint_folder(model, ids, __file__, config), "group_qat")
    for name, weight in weights.items():
        with in_layer(name), torch.no_grad():
            lm.set_weight(name, pack(weight, grid))
            if widths[name] < qat.FULL:
                columns = weight.shape[1]
                input_grid = config.input_grid(widths[name])
                lm.attach(name, inputs.attachment("group_qat", columns, input_grid))
    qat.finish(lm, "group_qat", None, losses, ids, settings)
