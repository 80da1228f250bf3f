"""MatQuant (Nair et al. 2025, arXiv 2502.06786), weight-only: one 8-bit master whose leading bits are models, too.

The loss is a sum over widths r of the next-token loss under weights whose 8-bit codes q are cut to r bits:

    L = Σ_r λ_r L(Ŵ_r),    Ŵ_r = s (2^(8-r) min(⌊q / 2^(8-r) + 1/2⌋, 2^r - 1) - z)

so a slice takes the next lower bit to round half up, and saturates at the top, where Bit-by-Bit drops the bits. q, s
and z are those of the min-max grid, fitted anew to every step's weights and constants of it. Rounding passes gradients
straight through, and so does saturation (at 2 bits of the highest eighth of codes). Block linears alone are trained.

What is stored is the master: `matquant + sliced-w2` reads it at 2 to 8 bits, also at those between the trained ones
(the paper's interpolation). The loss is plain next-token loss; co-distillation and the OmniQuant variant are not here.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from repro.baselines import qat
from repro.core.errors import UserError
from repro.models.groups import quantizer, weight
from repro.models.groups.quantizer import GroupGrid, Scale
from repro.models.groups.weight import GroupWeight
from repro.models.lowbit import LowBitModel, in_layer
from repro.models.quantized import FORMATS
from repro.train import training_cost
from repro.train.blocks import checkpoint_folder, training_ids
from repro.train.end_to_end import next_token_loss, train
from repro.train.streams import Dtype

VERSION = 1
CALIBRATED = True
READS_FIRST_TOKENS = True  # of the calibration text its first `tokens` tokens and no others
COST = 150.0  # relative to RTN, for scheduling alone
MASTER = 8


@dataclass(frozen=True)
class Config:
    """The training. "Ours" differs from the paper, whose models have 2B parameters and more, or is not known of it.

    Attributes:
        group: columns that share a scale, 0 for one scale a row. Ours: that of Bit-by-Bit, so that the rows of its
            Table 4 differ in training and slicing alone.
        scale: how scales are stored. Ours: half precision, as the other baselines.
        lambdas: λ_r by width: the widths that are trained, 8, 4 and 2 in the paper. Ours: equal, as Bit-by-Bit's.
        lr, epochs, batch, tokens: learning rate of the weights, passes over the text, sequences in a step, tokens of
            an epoch, each counted once for all widths. Ours: ParetoQ's rate, which is swept, and batch, since it trains
            on the same loss; tokens and epochs to which Bit-by-Bit aligns its baselines (section 4.1).
        max_norm: largest norm of the gradient. Ours: as in the other baselines.
        compute: dtype of the decoder; what is trained is float32. Ours: that of the baselines.
        seed: of the order of sequences.
    """

    group: int = 32
    scale: Scale = "float16"
    lambdas: dict[int, float] = field(default_factory=lambda: {8: 1.0, 4: 1.0, 2: 1.0})
    lr: float = 2e-5
    epochs: int = 2
    batch: int = 2
    tokens: int = 4096 * 2048
    max_norm: float = 1.0
    compute: Dtype = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        qat.check("matquant", self)
        if self.group < 0:
            raise UserError(f"matquant: group is {self.group}; give the columns per group, or 0 for one scale a row")
        if strange := [width for width in self.lambdas if not 2 <= width <= MASTER]:
            raise UserError(f"matquant: lambdas has {strange[0]}, a width that a master of {MASTER} bits cannot have")
        if not (self.lambdas and min(self.lambdas.values()) >= 0 < max(self.lambdas.values())):
            raise UserError("matquant: lambdas are 0 or more, and one is above 0")

    def grid(self, columns: int) -> GroupGrid:
        """The master's grid for a layer; every range includes 0, so that zero points are codes."""
        return GroupGrid(MASTER, self.group or columns, include_zero=True, scale=self.scale)


def sliced(codes: Tensor, away: int, master: int = MASTER) -> Tensor:
    """Codes without their `away` low bits, rounded half up and saturated, for integer and float codes."""
    if not away:
        return codes
    shifted_codes = quantizer.shifted(codes, away)
    return (shifted_codes + (quantizer.shifted(codes, away - 1) - 2 * shifted_codes)).clamp(
        max=2 ** (master - away) - 1
    )


@dataclass(frozen=True)
class RoundedWeight(GroupWeight):
    """A `GroupWeight` whose narrower codes are rounded; a slice of a slice would round twice and is refused."""

    FORMAT: ClassVar[str] = "matquant"  # a reader that would drop bits does not know it

    def at(self, bits: int) -> "RoundedWeight":
        """The same weight read at `bits` bits, 2 or more.

        Raises:
            UserError: the width is above the stored one, or the stored codes are a slice already.
        """
        if bits == self.bits:
            return self
        if self.shift or not 2 <= bits <= self.bits:
            raise UserError(f"{self.bits} of {self.master} bits are stored, which cannot be read at {bits}")
        away = self.bits - bits
        return replace(self, codes=sliced(self.codes, away, self.bits), bits=bits, shift=away)


FORMATS[RoundedWeight.FORMAT] = RoundedWeight


def fake_quantize(latent: Tensor, grid: GroupGrid, widths: list[int]) -> dict[int, Tensor]:
    """Ŵ_r `[N, K]` of a float32 weight by width, each with the gradient of the weight."""
    with torch.no_grad():
        groups = quantizer.split(latent, grid.group)
        scales, factor, z = quantizer.fit(groups, grid)
        s = quantizer.restored(scales, factor)
        q = quantizer.encode(groups, s, z, grid)
        by_width = {r: quantizer.decode(sliced(q, MASTER - r), s, z, MASTER - r, "zero").flatten(1) for r in widths}
    return {r: quantizer.StraightThrough.apply(latent, value) for r, value in by_width.items()}


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Train every block linear of `lm` and store its master; `calibration` int64 `[sequences, length]` is the text.

    Raises:
        UserError: fewer tokens than asked for, a group that does not divide a layer's inputs, or NaN in the model.
        NotMeasurable: the training diverged.
    """
    model = lm.model
    latents = qat.start(model, config.group)
    ids = training_ids(calibration, config.tokens, "matquant").to(model.device)
    grids = {name: config.grid(latent.shape[1]) for name, latent in latents.items()}
    widths = [width for width, share in config.lambdas.items() if share > 0]

    student = qat.student(model, config.compute)

    def loss(rows: Tensor) -> Tensor:
        rounded = {name: fake_quantize(latent, grids[name], widths) for name, latent in latents.items()}
        total = torch.zeros((), device=rows.device)
        for width in widths:
            weights = {f"{name}.weight": by_width[width] for name, by_width in rounded.items()}
            total = total + config.lambdas[width] * next_token_loss(qat.logits(student, weights, rows), rows)
        return total

    settings = qat.settings(config, 0.0, model, ids.shape[1])
    folder = checkpoint_folder(model, ids, __file__, config)
    losses = train(loss, latents, ids, settings, folder, "matquant")
    for name, latent in latents.items():
        with in_layer(name):
            packed = weight.pack(latent, grids[name], "zero")
            lm.set_weight(name, RoundedWeight(**vars(packed)))
    qat.finish(lm, "matquant", None, losses, ids, settings)


def work(config: Config, sequences: int, quantized: bool, count: int) -> training_cost.Work:
    """What its training takes: a forward pass and a loss of every width that counts, in each step."""
    students = sum(share > 0 for share in config.lambdas.values())
    of_one = training_cost.end_to_end(config, sequences, quantized, count)
    return replace(of_one, passes=of_one.passes * students, students=students)
