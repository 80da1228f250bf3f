"""Select the input channels to split: the most sensitive ones, more in later blocks (section 3.4, appendix E)."""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from repro.models.activations import InputStatistics
from repro.models.groups.columns import Columns, paired

Metric = Literal["product", "weight", "activation", "kurtosis"]


def sensitivity(metric: Metric, weight: Tensor, inputs: InputStatistics) -> Tensor:
    """The outlier metric of each input channel, float64 `[K]`.

    "product" is O_i = ‖X_:,i‖₂ · max_j |W_ij|, "weight" the largest |W_ij| alone, "activation" the largest |X_:,i|, as
    section 4.4 calls it, and "kurtosis" that of X_:,i over tokens; a constant channel has none and comes last.

    Args:
        metric: one of the four.
        weight: `[N, K]`, a row for each output.
        inputs: the layer's inputs on calibration text, with kurtosis for that metric.
    """
    if metric == "kurtosis":
        return inputs.kurtosis().nan_to_num(nan=-math.inf)
    if metric == "activation":
        return inputs.max_abs.amax(0)
    largest = weight.detach().abs().amax(0).double()
    if metric == "weight":
        return largest
    return inputs.mean_square.mean(0).sqrt() * largest.to(inputs.mean_square.device)  # ‖X‖₂ but for √tokens


def ratio(block: int, blocks: int, first: float, last: float) -> float:
    """r_l of block l = `block` + 1 of L: from `first` to `last` in equal steps; the mean of both where L is 1."""
    return first + (last - first) * (block / (blocks - 1) if blocks > 1 else 0.5)


def count(share: float, channels: int) -> int:
    """k_l = ⌈r_l C_in⌉, where a product such as 0.07 · 100 is not taken for more than 7."""
    return math.ceil(round(share * channels, 9))


def chosen(values: Tensor, size: int, group: int) -> Columns:
    """The columns of a layer whose `size` channels with the largest `values` `[K]` are split, first ones among equals.

    Raises:
        UserError: an odd group.
    """
    twice = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    twice[values.argsort(descending=True, stable=True)[:size]] = True
    return paired(twice, group)


def block_columns(
    weights: Mapping[str, Tensor], inputs: Mapping[str, InputStatistics], share: float, metric: Metric, group: int
) -> dict[str, Columns]:
    """The columns of each linear of a block, by name, on the device of its weight.

    Args:
        weights: `[N, K]` of each.
        inputs: statistics of its inputs.
        share: r_l.
        metric: by which channels are ranked.
        group: columns that share a step.

    Raises:
        UserError: an odd group.
    """
    columns_of = {}
    for name, weight in weights.items():
        values = sensitivity(metric, weight, inputs[name])
        columns_of[name] = chosen(values, count(share, len(values)), group).to(weight.device)
    return columns_of
