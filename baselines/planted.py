"""`planted`: add outlier channels to a model without changing its function, as in `planted + bitbybit-w2-g32`.

The pocket models have no outliers in their weights, which channel splitting is for. Here some channels between two
neighbouring layers are made larger on one side and smaller on the other, by a power of two, so that every product stays
the same number: norm to the linears that read it, value rows to the columns of the output projection (all heads of a
group), up rows to the columns of the down-projection. A row that has a quantizer after this step is a named variant,
and no stand-in for a model of a paper.

`factor` and `share` are those of published activation outliers: up to 20 times other features (Dettmers et al. 2022,
arXiv 2208.07339, section 4), about 100 times most values (Xiao et al. 2023, arXiv 2211.10438, section 3), in few fixed
channels. What the model has before and after lies in `lm.facts`, next to these.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from repro.baselines.awq import FOLDS, Fold
from repro.core.errors import UserError, unknown
from repro.models.activations import statistics
from repro.models.lowbit import LowBitModel, block_linears, blocks

VERSION = 1
CALIBRATED = False  # with calibration text inputs are described too
RESCALES = True
PREPARES = True  # what it changes is stored by the quantizer that comes after
WATCHED = 32  # sequences that inputs are described on


@dataclass(frozen=True)
class Config:
    """The outliers to plant.

    Attributes:
        side: where the channels are large: in the weights that read them, or in these layers' inputs.
        share: of the channels between two layers, rounded up to whole ones.
        factor: by which they are larger than before, a power of two.
        draw: another number, other channels. No seed: seeds of training share the variant.
    """

    side: Literal["weights", "inputs"] = "weights"
    share: float = 0.01
    factor: int = 16
    draw: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise UserError(f"planted: share is {self.share}; a share of the channels above 0 and below 1 is planted")
        if self.factor < 2 or self.factor & (self.factor - 1):
            raise UserError(f"planted: factor is {self.factor}; a power of two from 2 on leaves the function exact")
        if self.draw < 0:
            raise UserError(f"planted: draw is {self.draw}; it must be 0 or more")


@torch.no_grad()
def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Plant outliers in every block of `lm`; changed norms and biases are stored, weights by the step that comes next.

    Args:
        lm: a decoder of a layout in `FOLDS`, in full precision; edited.
        calibration: int64 token ids `[sequences, length]`, only to describe inputs; or None.
        config: where and how much.

    Raises:
        UserError: another architecture, or something that is quantized or attached already.
    """
    kind = getattr(getattr(lm.model, "config", None), "model_type", type(lm.model).__name__)
    if kind not in FOLDS:
        raise unknown("architecture for planted, which must know neighbouring layers,", kind, FOLDS)
    if lm.weights or lm.attachments:
        raise UserError("planted rescales full-precision weights; put it first: planted + rtn-w4-g128")
    ids = None if calibration is None else calibration[:WATCHED]
    lm.facts |= {f"{name}/before": values for name, values in outliers(lm.model, ids).items()}
    for prefix, block in blocks(lm.model).items():
        for fold in FOLDS[kind]:
            plant(block, fold, config)
            source = f"{prefix}.{fold.source}"
            for name, value in lm.model.get_submodule(source).named_parameters(source):
                if value.dim() == 1:  # a norm or a bias: nothing quantizes it
                    lm.set_dense(name, value.data)
    lm.facts |= {f"{name}/after": values for name, values in outliers(lm.model, ids).items()}


def plant(block: nn.Module, fold: Fold, config: Config) -> None:
    """Rescale some channels between the source of `fold` and the linears that read it, in place.

    The channels depend on their number and on `draw`, so that those of the residual stream are the same in all blocks.
    """
    source = block.get_submodule(fold.source)
    readers = [block.get_submodule(name) for name in fold.linears]
    size = source.weight.shape[0]
    picked = torch.randperm(size, generator=torch.Generator().manual_seed(config.draw))[
        : math.ceil(config.share * size)
    ]
    s = source.weight.new_ones(size)
    s[picked.to(s.device)] = config.factor if config.side == "weights" else 1 / config.factor
    for parameter in source.parameters():
        parameter.div_(s.view(-1, *[1] * (parameter.dim() - 1)))
    for linear in readers:
        linear.weight.mul_(spread(s, linear.in_features, block))


def spread(s: Tensor, columns: int, block: nn.Module) -> Tensor:
    """`[columns]`: `s` of each source channel for every column that reads it; query heads of a group read one value."""
    if len(s) == columns:
        return s
    return s.view(-1, block.self_attn.head_dim).repeat_interleave(block.self_attn.num_key_value_groups, 0).flatten()


def outliers(model: nn.Module, ids: Tensor | None) -> dict[str, list[float]]:
    """Outlier statistics of each block linear: of its weight, and with token ids `[S, L]` of its inputs.

    Returns:
        `layers/KIND_kurtosis`: E(v - μ)⁴ / σ⁴ over all entries, 3 for a normal distribution; `layers/KIND_ratio`: the
        largest |v| of an input channel, the largest of them over their median; KIND is `weight` or `input`.
    """
    statistics_of: dict[str, list[float]] = {}
    linears = block_linears(model)
    input_statistics = {} if ids is None else statistics(model, list(linears), ids, ("kurtosis",))
    for name, linear in linears.items():
        weight = linear.weight.double()
        centred = weight - weight.mean()
        kurtosis = centred.pow(4).mean() / centred.square().mean().square()
        candidates = {"weight": (kurtosis.item(), weight.abs().amax(0))}
        if input_statistics:
            pooled = replace(input_statistics[name], powers=input_statistics[name].powers.mean(1, keepdim=True))
            candidates["input"] = (pooled.kurtosis().item() + 3, input_statistics[name].max_abs.amax(0))
        for kind, (kurtosis, largest) in candidates.items():
            statistics_of.setdefault(f"layers/{kind}_kurtosis", []).append(kurtosis)
            statistics_of.setdefault(f"layers/{kind}_ratio", []).append((largest.max() / largest.median()).item())
    return statistics_of
