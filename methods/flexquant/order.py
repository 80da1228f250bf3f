"""The order in which layers are switched, computed offline from the weights alone (sections 3.1 and 4.3).

The divergence of a layer is that between the distributions of its quantized and its original weights, as histograms of
equal bins over the range of both. Layers with a smaller one are switched first. Bins, smoothing and direction are not
given: they are fields of `Config`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from repro.methods.flexquant.config import Config


@dataclass(frozen=True)
class Move:
    """A layer goes to a width."""

    layer: str
    bits: int


def weight_divergence(full: Tensor, quantized: Tensor, config: Config) -> float:
    """KL divergence in nats between the weights of a layer and their quantized values, both `[N, K]`.

    Bins have equal width from the smallest to the largest of all these values.
    """
    p, q = (_shares(weights, full, quantized, config) for weights in (full, quantized))
    first, second = (q, p) if config.direction == "quantized" else (p, q)
    return float((first * (first / second).log()).sum())


def _shares(weights: Tensor, full: Tensor, quantized: Tensor, config: Config) -> Tensor:
    """The share of the weights in each bin, float64 `[bins]`, with the pseudocount."""
    low = min(full.min().item(), quantized.min().item())
    high = max(full.max().item(), quantized.max().item())
    width = (high - low) / config.bins or 1.0
    bin_of = ((weights.flatten().double() - low) / width).long().clamp(0, config.bins - 1)
    counts = torch.bincount(bin_of, minlength=config.bins).double() + config.pseudocount
    return counts / counts.sum()


def moves(divergence: Mapping[int, Mapping[str, float]], layers: Sequence[str], config: Config) -> list[Move]:
    """Every switch of a generation in the order in which they are made: each layer, at each width after the first.

    Args:
        divergence: width to layer to its divergence at that width: of its weights for the orders "kl" and "reversed",
            of the model's predictions for "oracle"; not read for the others.
        layers: the layers in the model's order.
        config: path, order and how it advances; a random order is the same at every width.

    Raises:
        KeyError: a layer or width without a divergence.
    """
    shuffled = list(np.random.default_rng(config.seed).permutation(np.asarray(layers, dtype=object)))

    def ranked(bits: int) -> list[str]:
        if config.order == "random":
            return shuffled
        if config.order == "model":
            return list(layers)
        by_divergence = sorted(layers, key=lambda layer: divergence[bits][layer])  # of equal ones the earlier first
        return by_divergence[::-1] if config.order == "reversed" else by_divergence

    widths = config.path[1:]
    every = []
    if config.advance == "stage":
        for bits in widths:
            every += [Move(layer, bits) for layer in ranked(bits)]
    else:
        for layer in ranked(widths[0]):
            every += [Move(layer, bits) for bits in widths]
    return every
