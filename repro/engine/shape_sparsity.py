"""Activation thresholds for shapes with random weights: quantiles of the inputs of their own products (SpQt).

Which inputs are above is uniformly random in a model of random weights, the worst case for memory: lists of trained
models have runs. Speed and bytes are real, and nothing else is.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from repro.engine.step import Block, Cache, Decoder, run_of, step
from repro.engine.weights import LAYERS, SparseInputs

TOKENS = 64  # random ones, whose inputs give the quantiles


class Observed(nn.Module):
    """A product that keeps the magnitudes of its inputs."""

    def __init__(self, product: nn.Module) -> None:
        super().__init__()
        self.product = product
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.abs().float().flatten())
        return self.product(x)

    def threshold(self, sparsity: float) -> float:
        """The magnitude that a share of the inputs does not exceed."""
        ordered = torch.cat(self.seen).sort().values
        return ordered[round(sparsity * (len(ordered) - 1))].item()


def with_thresholds(model: Decoder, sparsity: float) -> Decoder:
    """The shape with every product's inputs skipped up to that share; the decoder itself at a sparsity of 0."""
    if sparsity == 0:
        return model
    observed = replace(model, blocks=tuple(wrapped(block) for block in model.blocks))
    generator = torch.Generator().manual_seed(0)
    count = min(TOKENS, model.cos.shape[0])
    ids = torch.randint(model.config.vocab_size, (count,), generator=generator).to(model.device)
    step(observed, Cache(model, 1), run_of(ids, 0, 0))
    blocks = [thresholded(block, sparsity) for block in observed.blocks]
    return replace(model, blocks=tuple(blocks))


def wrapped(block: Block) -> Block:
    """The block with its products observed."""
    return replace(block, **{name: Observed(getattr(block, name)) for name in LAYERS})


def thresholded(block: Block, sparsity: float) -> Block:
    """An observed block with a threshold for each product."""
    products = {name: getattr(block, name) for name in LAYERS}
    sparse = {name: SparseInputs(product.product, product.threshold(sparsity)) for name, product in products.items()}
    return replace(block, **sparse)
