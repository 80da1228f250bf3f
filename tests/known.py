"""Inputs of the known answers, from a linear congruential generator that any language and version reproduces."""

import numpy as np
import torch


def uniform(rows: int, columns: int, seed: int) -> np.ndarray:
    """float64 `[rows, columns]`, row by row: s <- (1664525 s + 1013904223) mod 2^32, u = s / 2^32 - 0.5."""
    values, s = np.empty(rows * columns), seed
    for i in range(len(values)):
        s = (1664525 * s + 1013904223) % 2**32
        values[i] = s / 2**32 - 0.5
    return values.reshape(rows, columns)


def _weight() -> torch.Tensor:
    u = uniform(64, 256, seed=1)
    return torch.from_numpy(0.1 * (u + 4 * u**3)).float()


def _inputs() -> torch.Tensor:
    c = np.arange(256)
    return torch.from_numpy(uniform(512, 256, seed=2) * (1 + 0.5 * (c % 7)) * np.where(c % 37 == 0, 8, 1)).float()


W = _weight()
X = _inputs()


def errors(dequantized: torch.Tensor) -> tuple[float, float]:
    """Mean squared error of the weight, and of its 512 x 64 outputs on X, both in float64."""
    difference = W.double() - dequantized.double()
    return difference.square().mean().item(), (difference @ X.double().T).square().mean().item()
