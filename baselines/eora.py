"""EoRA (Liu et al. 2024, arXiv 2410.21271, section 3): the error projected into the eigenspace of the layer's inputs.

With G = Q Λ Qᵀ of the inputs, S = Q Λ^½: directions in which inputs are large count more. Nothing is trained. With
equal weights of all sequences, on the same inputs, it is the product of QERA's exact solution. The authors' code has
two differences, both on by default here: G is a decaying sum, and a block's inputs come from compensated blocks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from repro.baselines import low_rank
from repro.models.activations import watching
from repro.models.lowbit import LowBitModel, block_inputs, blocks

VERSION = 1
CALIBRATED = True
COST = 3.0  # relative to RTN, for scheduling alone
KIND = low_rank.KIND
attached = low_rank.attached


@dataclass(frozen=True)
class Config(low_rank.Config):
    """Ranks and storage, and what the authors' code does beyond the paper.

    Attributes:
        decay: each of n sequences multiplies the sum before it by n / (n + 1), so that the first counts 0.37 as much as
            the last; the paper has a plain mean.
        sequential: a block sees inputs that compensated blocks made, its own weights being the original ones; else all
            inputs are the full-precision model's, as for LQER and QERA.
    """

    decay: bool = True
    sequential: bool = True


def weights(sequences: int, decay: bool) -> Tensor:
    """How much each sequence counts in G, `[sequences]`, the last 1."""
    age = torch.arange(sequences - 1, -1, -1, dtype=torch.float64)
    return (sequences / (sequences + 1)) ** (age if decay else 0 * age)


@torch.no_grad()
def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Compensate every quantized layer of `lm`, on token ids int64 `[sequences, length]`.

    Raises:
        UserError, NotMeasurable: as `low_rank.measured`.
    """
    ids = low_rank.tokens(calibration, "eora")
    counts = weights(len(ids), config.decay)
    if not config.sequential:
        for name, rank, inputs in low_rank.measured(lm, ids, config, "eora", ["second_moment"], counts):
            low_rank.compensate(lm, "eora", name, rank, low_rank.eigenspace(inputs.second_moment), config)
        return
    ranks = low_rank.ranks(lm, config, "eora")
    hidden, kwargs = block_inputs(lm.model, ids)
    for (prefix, block), kw in zip(blocks(lm.model).items(), kwargs, strict=True):
        names = [name for name in ranks if name.startswith(f"{prefix}.")]
        layers = {name: lm.model.get_submodule(name) for name in names}
        with original(lm, names), watching(layers, len(ids), ["second_moment"], counts) as inputs:
            for h in hidden:
                block(h, **kw)
        for name in names:
            S = low_rank.eigenspace(inputs[name].second_moment)
            low_rank.compensate(lm, "eora", name, ranks[name], S, config)
        for i, h in enumerate(hidden):
            hidden[i] = block(h, **kw)


@contextmanager
def original(lm: LowBitModel, names: list[str]) -> Iterator[None]:
    """The named layers compute with their full-precision weights in the block."""
    quantized = {name: lm.model.get_submodule(name).weight.data for name in names}
    try:
        for name in names:
            lm.model.get_submodule(name).weight.data = lm.full[name]
        yield
    finally:
        for name, weight in quantized.items():
            lm.model.get_submodule(name).weight.data = weight
