"""Hadamard matrices, their rotations x H/√n, and a layer that rotates its inputs at run time.

Sylvester's construction doubles an order, H_2n = H_2 ⊗ H_n. What it doubles are orders of other constructions (Hall
1986, Combinatorial Theory, chapter 14): 12 = 11 + 1 and 20 = 19 + 1 by Paley's first, 28 = 2 (13 + 1) by his second,
and 172 = 4 · 43, which no prime gives, by Williamson's. 12 is for an MLP of 768 (pocket models), 28 for one of 14336
(Llama-3-8B, Mistral-7B), 172 for one of 11008 (Llama-2-7B).
"""

from functools import cache, reduce

import torch
from torch import Tensor, nn

from repro.core.errors import UserError
from repro.models.groups.inputs import check_layer

WIDEST = 128  # of a Sylvester factor: 8192 is rotated by 128 and by 64, not by a matrix as large as the layer's weight


def paley_first(q: int) -> Tensor:
    """The Hadamard matrix of order q + 1 for a prime q = 3 mod 4, float64."""
    skew = torch.ones(q + 1, q + 1, dtype=torch.float64)
    skew[1:, 0], skew[0, 0], skew[1:, 1:] = -1, 0, _residues(q)
    return torch.eye(q + 1, dtype=torch.float64) + skew


def paley_second(q: int) -> Tensor:
    """The Hadamard matrix of order 2 (q + 1) for a prime q = 1 mod 4, float64."""
    conference = torch.ones(q + 1, q + 1, dtype=torch.float64)
    conference[0, 0], conference[1:, 1:] = 0, _residues(q)
    off, on = torch.tensor([[[1.0, 1], [1, -1]], [[1, -1], [-1, -1]]], dtype=torch.float64)
    return torch.kron(conference, off) + torch.kron(torch.eye(q + 1, dtype=torch.float64), on)


def williamson() -> Tensor:
    """The Hadamard matrix of order 172, float64: four symmetric circulants with A² + B² + C² + D² = 172 I.

    Each is +1 on 0 and constant on the seven cosets of {±1, ±6, ±7}, the powers of 3^7, modulo 43; the signs are the
    first of seven solutions that a search of all of them finds.
    """
    position = torch.arange(43)
    coset = torch.zeros(43, dtype=torch.int64)
    coset[[pow(3, i, 43) for i in range(42)]] = torch.arange(42) % 7
    A, B, C, D = [
        torch.where((position == 0) | ((signs >> coset) & 1 == 0), 1.0, -1.0).double()[
            (position[:, None] - position) % 43
        ]
        for signs in (7, 25, 44, 77)
    ]
    rows = [(A, B, C, D), (-B, A, -D, C), (-C, D, A, -B), (-D, -C, B, A)]
    return torch.cat([torch.cat(row, 1) for row in rows])


def _residues(q: int) -> Tensor:
    """χ(i - j) `[q, q]`: 1 for squares modulo the prime q, -1 for the others, 0 for 0."""
    position = torch.arange(q)
    sign = -torch.ones(q, dtype=torch.float64)
    sign[position**2 % q], sign[0] = 1, 0
    return sign[(position[:, None] - position) % q]


ORDERS = {
    1: lambda: torch.ones(1, 1, dtype=torch.float64),
    12: lambda: paley_first(11),
    20: lambda: paley_first(19),
    28: lambda: paley_second(13),
    172: williamson,
}  # doubled as often as a size asks for


@cache
def factors(n: int) -> tuple[Tensor, ...]:
    """Orthogonal float64 matrices whose Kronecker product is H/√n `[n, n]`; at most 172 wide.

    Raises:
        UserError: n is no order of `ORDERS` times a power of two.
    """
    fits = [order for order in ORDERS if n > 0 and n % order == 0 and (n // order).bit_count() == 1]
    if not fits:
        listed = ", ".join(f"{order}·2^k" for order in ORDERS if order > 1)
        raise UserError(f"no Hadamard matrix of order {n} is known here; sizes are 2^k, {listed}")
    matrices = [ORDERS[fits[0]]() / fits[0] ** 0.5]
    remaining = n // fits[0]
    while remaining > 1:
        width = min(remaining, WIDEST)
        matrices.append(_sylvester(width) / width**0.5)
        remaining //= width
    return tuple(matrices[1:] if fits[0] == 1 < n else matrices)


def _sylvester(n: int) -> Tensor:
    two = torch.tensor([[1.0, 1], [1, -1]], dtype=torch.float64)
    return reduce(torch.kron, [two] * (n.bit_length() - 1), torch.ones(1, 1, dtype=torch.float64))


def rotated(x: Tensor, by: tuple[Tensor, ...]) -> Tensor:
    """x H/√n `[…, n]` in the dtype of x, computed in that of the `factors` `by`."""
    y = x.to(by[0].dtype).unflatten(-1, [len(matrix) for matrix in by])
    for axis, matrix in zip(range(-len(by), 0), by, strict=True):
        y = (y.movedim(axis, -1) @ matrix).movedim(-1, axis)
    return y.flatten(-len(by)).to(x.dtype)


def matrix(n: int) -> Tensor:
    """H/√n `[n, n]`, float64; UserError as `factors`."""
    return reduce(torch.kron, factors(n))


def random(n: int, generator: torch.Generator) -> Tensor:
    """diag(±1) H/√n `[n, n]`, float64, with random signs; UserError as `factors`."""
    signs = torch.randint(0, 2, (n, 1), generator=generator).double() * 2 - 1
    return signs * matrix(n)


class RotatedInputs(nn.Linear):
    """A linear layer on rotated inputs; `weight` and `bias` are the layer's."""

    def __init__(self, linear: nn.Linear, columns: int | None = None) -> None:
        """Rotate in float32, or in float64 where the layer has that.

        Raises:
            UserError: the layer has not as many inputs as `columns`, or their number is no order of a Hadamard matrix;
                or it has no weight, as where the decode engine asks for what an attachment adds to a layer's output.
        """
        check_layer(linear, "rotated", linear.in_features if columns is None else columns, "say online=false")
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias, self.linear = linear.weight, linear.bias, linear
        wide = torch.promote_types(linear.weight.dtype, torch.float32)
        for i, factor in enumerate(factors(linear.in_features)):
            self.register_buffer(f"factor{i}", factor.to(linear.weight.device, wide), persistent=False)

    def turn(self, x: Tensor) -> Tensor:
        """The rotated inputs that `linear` reads for x `[…, K]`."""
        return rotated(x, tuple(self.buffers(recurse=False)))

    def forward(self, x: Tensor) -> Tensor:
        """y `[…, N]` of inputs `[…, K]`."""
        return self.linear(self.turn(x))
