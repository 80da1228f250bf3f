"""Cayley SGD: gradient descent on orthogonal matrices (Li et al. 2020, arXiv 2002.01113, algorithm 1).

With X a rotation, G the gradient and V = -Gᵀ,

    A = V X - ½ Xᵀ X V X,    W = A - Aᵀ,    α = min(rate, 1 / ‖W‖₁),    Y ← Xᵀ + α W (Xᵀ + Y) / 2, five times

from Y = Xᵀ + α V; the new X is Yᵀ. The fixed point of the iteration is the Cayley transform (I - αW/2)⁻¹ (I + αW/2) Xᵀ,
which is orthogonal. As in SpinQuant's code there is no momentum, rows are scaled to length 1 before a step, and with
probability 1/101 X is made orthogonal by QR before it. Five iterations stop short of the fixed point, so, unlike there,
a last QR comes after the training.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from repro.core.errors import NotMeasurable
from repro.models import graphs
from repro.train.blocks import QUIET, Batches, batch_rows, rate_at, steps_per_epoch

ITERATIONS = 5
QR_ODDS = 101  # X is made orthogonal in one of so many steps


class CayleySettings(Batches, Protocol):
    """How rotations are trained: `batch` and `seed`, the first rate, whose cosine ends at 0, and passes."""

    lr: float
    epochs: int


def step(X: Tensor, G: Tensor, rate: float) -> Tensor:
    """Rotations after a step from `X` `[…, n, n]` with gradients `G` `[…, n, n]`."""
    X = X / (X.norm(dim=-1, keepdim=True) + 1e-8)
    V, columns = -G.mT, X.mT
    VX = V @ X
    A = VX - columns @ (X @ VX) / 2
    W = A - A.mT
    alpha = (1 / (W.abs().sum(-2).amax(-1) + 1e-8)).clamp(max=rate)[..., None, None]
    Y = columns + alpha * V
    for _ in range(ITERATIONS):
        Y = columns + alpha / 2 * (W @ (columns + Y))
    return Y.mT


def orthogonal(X: Tensor) -> Tensor:
    """The rows of `X` `[…, n, n]` made orthogonal one after the other, each on the side where it was."""
    Q, R = torch.linalg.qr(X.mT)
    return (Q * R.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]).mT


@torch.no_grad()
def train(
    gradients: Callable[[Tensor], Tensor],
    rotations: Sequence[Tensor],
    ids: Tensor | None,
    settings: CayleySettings,
    who: str,
) -> list[float]:
    """Train `rotations`, each `[L, n, n]`, in place; returns the loss of every step.

    Args:
        gradients: of token ids `[batch, L]`: the loss; it leaves the gradients in `grad` of each rotation, in place.
        rotations: each with a `grad`.
        ids: int64 `[S, L]` on their device; not used by 0 epochs.
        settings: rate and batches.
        who: for messages.

    Raises:
        UserError: fewer sequences than a batch.
        NotMeasurable: a loss is not finite; the message names the step.
    """
    steps = 0
    random = np.random.default_rng(settings.seed)
    if settings.epochs:
        steps = settings.epochs * steps_per_epoch(len(ids), settings)
    replayed = graphs.Replayed(gradients, lambda: [rotation.grad for rotation in rotations])
    losses = []
    for number in tqdm(range(steps), who, **QUIET):
        rows = batch_rows(number, len(ids), settings)
        losses.append(replayed(ids[rows.to(ids.device)]).float().clone())
        for rotation in rotations:
            for index in np.flatnonzero(random.integers(QR_ODDS, size=len(rotation)) == 0):
                rotation[index] = orthogonal(rotation[index])
            rotation.copy_(step(rotation, rotation.grad, rate_at(number / steps, settings.lr, 0.0)))
    losses = [loss.item() for loss in losses]  # not before all are asked for: each waits for the GPU
    if bad := next((i for i, value in enumerate(losses, 1) if not math.isfinite(value)), None):
        raise NotMeasurable("diverged", f"{who}: the loss is not finite at step {bad}; lower its lr")
    for rotation in rotations:
        rotation.copy_(orthogonal(rotation))
    return losses
