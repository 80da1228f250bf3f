"""Bit-by-Bit's settings: section 4.1, and one field with its reason for each thing that the paper leaves open."""

from dataclasses import dataclass, field
from typing import Literal

from repro.core.errors import UserError
from repro.methods.bitbybit import precision_order as plan
from repro.methods.bitbybit.branches import QUARTER, Branches, Rounding
from repro.methods.bitbybit.precision_order import FULL, Order, Precision, Sampling
from repro.methods.bitbybit.splitting import Metric
from repro.models.groups.quantizer import GroupGrid, Levels, Offset, Scale
from repro.models.groups.weight import check_nested
from repro.train.blocks import BlockSettings
from repro.train.streams import Dtype, Place

MASTER = 8  # bits of the codes that any precision is read from (section 3.3)


@dataclass(frozen=True)
class Config:
    """Section 4.1, then what the paper leaves open, then where the work is done.

    Attributes:
        bits: of weights at the end (w2).
        act_bits: of activations at the end; 16 leaves them alone.
        group: weights, or activations, that share a scale (section 3.1).
        order: A to D of appendix B.1.1; A is the paper's choice.
        schedule: the stages themselves, such as [w8a16, w2a16], in place of those of `order`.
        epochs: of each stage (section 4.1: two); 0 only rounds, best in one stage (schedule=[w2a16]).
        tokens: of an epoch (section 4.1: 4096 sequences; 2048 tokens each).
        any_precision: one master of 8-bit codes, trained at 8, then 8 and 4, then 8, 4 and 2 bits (section 3.3).
        scale: how group scales are stored (section 3.5).
        levels: the asymmetric grid, or SEQ's levels (appendix B.4).
        split: what the branches of a split input channel are (section 3.4 and appendix C, which compares with naive
            ones); "none" splits no channel. Channels are chosen once, before training; that the metric is used "at
            each step" (appendix A.5) may also mean that each stage chooses anew.
        split_metric: by which channels are ranked (section 4.4); the paper's choice is the product.
        split_text: the text that they are ranked on, by a scale's name such as c4 (appendix E, Table 6); by default
            that which is trained on, as in section 4.1. The metric "weight" reads none.

        include_zero: every group's range includes 0, of weights and of activations. Not given; by default at low-bit
            activations, whose kernel takes zero points that are codes.
        delta: where a shifted code's value lies. Not given; "centred" has no bias, and on shifted 2-bit codes of W of
            the known answers a quarter of the squared error of "zero".
        lr: learning rate of the weights. Not given; that of EfficientQAT's 2-bit scripts, whose block training it is.
        lr_final: the share of it at which its cosine ends. Not given; EfficientQAT's.
        batch: sequences in a step. Not given; EfficientQAT's.
        weight_decay: of AdamW. Not given; EfficientQAT's.
        second: weight of the loss to the higher-precision teacher; the full-precision one has 1. Not given; the loss
            is printed as a sum of both.
        teacher: what computes on the higher-precision inputs: the block's full-precision weights, as printed in the
            rebuilt loss, or those that it had before the stage. Not given; as printed, until swept.
        lambdas: λ_b by width, 1 where not said. Not given; equal until swept.
        rho: ρ_0, the share of the blocks that the first stage lowers. By default 1: a stage lowers "the model"
            (section 4.1). Below 1 are the growing subsets of appendix B.1.2, a named variant whose ρ_0 is not given.
        alpha: α of the bias to early blocks. Not given; 1 is linear in depth, as its growth is said to be.
        sampling: of the blocks of a stage: drawn, or the first ones (both in appendix B.1.2).
        kurtosis: τ; inputs of down-projections above it get `outlier_bits`. Not given; on text that one of
            them wrote the pocket models have 100 to 2e5 there; 1000 marks the heaviest, 0 of 2, 1 of 5 and 3 of 11, 100
            marks all.
        outlier_bits: of activations of those. Not given, 4 or 8; 4 is the next step above 2.
        split_first, split_last: r_l of the first and of the last block. Given is a ramp and 10 % (section 4.1), which
            is its mean according to the memory of Table 3. Ends not given; these are as far from the mean as from none.
        split_widths: at which widths a master's branches are rounding-aware; offsets are the sum of a quarter of their
            steps. Not given; by default those of all stages, at each of which rounding is then nearly aware.
        compute: dtype of blocks, and of their inputs and outputs, while they are trained; trained weights and
            moments are float32. Not given; the authors' GPUs and models suggest bfloat16.
        streams: dtype of hidden states between blocks.
        place: where they lie.
        seed: of the order of sequences and of the blocks that are drawn.
    """

    bits: int = 2
    act_bits: int = FULL
    group: int = 32
    order: Order = "A"
    schedule: list[str] = field(default_factory=list)
    epochs: int = 2
    tokens: int = 4096 * 2048
    any_precision: bool = False
    scale: Scale = "e4m3"
    levels: Levels = "asymmetric"
    split: Branches | Literal["none"] = "rounding_aware"
    split_metric: Metric = "product"
    split_text: str = ""

    include_zero: bool | None = None
    delta: Offset = "centred"
    lr: float = 2e-5
    lr_final: float = 0.05
    batch: int = 2
    weight_decay: float = 0.0
    second: float = 1.0
    teacher: Literal["full", "earlier"] = "full"
    lambdas: dict[int, float] = field(default_factory=dict)
    rho: float = 1.0
    alpha: float = 1.0
    sampling: Sampling = "biased"
    kurtosis: float = 1000.0
    outlier_bits: int = 4
    split_first: float = 0.05
    split_last: float = 0.15
    split_widths: list[int] = field(default_factory=list)

    compute: Dtype = "bfloat16"
    streams: Dtype = "bfloat16"
    place: Place = "device"
    seed: int = 0

    def __post_init__(self) -> None:
        self.grid(self.bits)
        if self.act_bits != FULL:
            self.grid(self.act_bits)
        self.grid(self.outlier_bits)
        self._check_numbers()
        self._check_splitting()
        plan.check(self.stages, self.order, Precision(self.bits, self.act_bits))
        self._check_stages()

    def _check_numbers(self) -> None:
        """Raise if a number is out of its range."""
        for name in ("batch", "tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"bitbybit: {name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("epochs", "lr", "weight_decay", "second", "alpha", "kurtosis", "seed"):
            if getattr(self, name) < 0:
                raise UserError(f"bitbybit: {name} is {getattr(self, name)}; it must be 0 or more")
        if not 0 < self.rho <= 1 or not 0 <= self.lr_final <= 1:
            raise UserError("bitbybit: rho is a share above 0 and at most 1, lr_final one from 0 to 1")

    def _check_splitting(self) -> None:
        """Raise if the options of channel splitting do not fit together."""
        for name in ("split_first", "split_last"):
            if not 0 < getattr(self, name) < 1:
                wrong = f"{name} is {getattr(self, name)}; a share of the channels above 0 and below 1 is split"
                raise UserError(f"bitbybit: {wrong} (split=none splits none)")
        if self.split_text and (self.split == "none" or self.split_metric == "weight"):
            wrong = "split=none" if self.split == "none" else "split_metric=weight"
            raise UserError(f"bitbybit: split_text is {self.split_text!r}, and {wrong} reads no text; leave one out")
        if self.split != "none" and self.group % 2:
            raise UserError(f"bitbybit: group is {self.group}; both copies of a split channel take an even one")
        if self.split_widths and not self.any_precision:
            raise UserError("bitbybit: split_widths is for any_precision; other weights are read at one width")
        for width in self.split_widths:
            check_nested(width, MASTER)

    def _check_stages(self) -> None:
        """Raise if the stages do not fit any precision, or `lambdas` names a width that none of them trains."""
        if self.any_precision:
            if any(stage.activations != FULL for stage in self.stages):
                raise UserError("bitbybit: any_precision trains weights alone; leave act_bits at 16")
            for stage in self.stages:
                check_nested(stage.weights, MASTER)
        if strange := sorted(set(self.lambdas) - {stage.weights for stage in self.stages}):
            raise UserError(f"bitbybit: lambdas has {strange[0]}, a width that no stage of the schedule trains")

    @property
    def second_text(self) -> str:
        """The text that is read besides the one that is trained on; empty for none."""
        return self.split_text

    @property
    def stages(self) -> list[Precision]:
        """The precisions in the order in which they are trained."""
        if self.schedule:
            return [plan.read(text) for text in self.schedule]
        return plan.precisions(self.order, Precision(self.bits, self.act_bits))

    @property
    def zero_included(self) -> bool:
        """`include_zero`, or its default."""
        return self.act_bits != FULL if self.include_zero is None else self.include_zero

    def grid(self, bits: int) -> GroupGrid:
        """The grid of weights of a width."""
        return GroupGrid(bits, self.group, self.levels, self.zero_included, self.scale)

    @property
    def stored_grid(self) -> GroupGrid:
        """The grid of the codes that are stored: those of a master where any precision is read from them."""
        return self.grid(MASTER if self.any_precision else self.bits)

    def splitting(self, bits: int) -> Rounding:
        """How split weights of a width are rounded."""
        widths = self.split_widths or [stage.weights for stage in self.stages]
        steps = sum(2 ** (MASTER - width) for width in set(widths)) if self.any_precision else 1
        return Rounding(self.grid(bits), self.split, QUARTER * steps)

    def input_grid(self, bits: int) -> GroupGrid:
        """The grid of activations of a width; their scales are computed as they are needed and not stored."""
        return GroupGrid(bits, self.group, include_zero=self.zero_included)

    def settings(self) -> BlockSettings:
        """The trainer's settings."""
        return BlockSettings(
            self.epochs, self.batch, self.lr_final, self.weight_decay, self.seed, self.streams, self.place
        )
