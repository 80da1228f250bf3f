"""The order in which precisions are lowered (sections 3.2 and 3.3, appendix B.1.1), and in which blocks (B.1.2)."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Literal

import numpy as np

from repro.core.errors import UserError

Order = Literal["A", "B", "C", "D"]
Sampling = Literal["biased", "first"]
FULL = 16


@dataclass(frozen=True, order=True)
class Precision:
    """Bits of weights and of activations; 16 is full precision."""

    weights: int = FULL
    activations: int = FULL

    def __str__(self) -> str:
        return f"w{self.weights}a{self.activations}"


def read(text: str) -> Precision:
    """`w4a16`.

    Raises:
        UserError: another text, or a width that no group quantizer has.
    """
    match = re.fullmatch("w([0-9]{1,2})a([0-9]{1,2})", text)
    if match is None or not all(bits == FULL or 2 <= bits <= 8 for bits in map(int, match.groups())):
        raise UserError(f"schedule has {text!r}; a precision is w8a16, w2a2 and so on, each 2 to 8 or 16 bits")
    return Precision(*map(int, match.groups()))


def lowered(bits: int) -> list[int]:
    """8, 4, 2 down to `bits`; nothing for full precision."""
    return [] if bits == FULL else [width for width in (8, 4, 2) if width > bits] + [bits]


def precisions(order: Order, end: Precision) -> list[Precision]:
    """The schedule of appendix B.1.1 that ends at `end`.

    A lowers weights, then activations; B activations, then weights; C both in turn, from w8a8; D as A, each of them
    back by one step and down again before it stays.
    """
    w, a = lowered(end.weights), lowered(end.activations)
    if order == "D":
        w, a = (bits + bits[-2:] if len(bits) > 1 else bits for bits in (w, a))
    if order == "C" and a:
        pairs = [(w[0], a[0])]
        for next_w, next_a in zip_longest(w[1:], a[1:]):
            pairs += [] if next_w is None else [(next_w, pairs[-1][1])]
            pairs += [] if next_a is None else [(pairs[-1][0], next_a)]
        return [Precision(*pair) for pair in pairs]
    if order == "B":
        return [Precision(FULL, bits) for bits in a] + [Precision(bits, end.activations) for bits in w]
    return [Precision(bits) for bits in w] + [Precision(end.weights, bits) for bits in a]


def check(stages: Sequence[Precision], order: Order, end: Precision) -> None:
    """Raise unless a given schedule ends at `end` and does not rise on its way; D may rise.

    Raises:
        UserError: it ends elsewhere, or rises.
    """
    if stages[-1] != end:
        raise UserError(f"schedule ends at {stages[-1]}, bits and act_bits say {end}; give the same in both")
    for first, then in pairwise(stages):
        if order != "D" and (then.weights > first.weights or then.activations > first.activations):
            raise UserError(f"schedule rises from {first} to {then}; only the cyclic one may, so give order=D as well")


def coverage(stages: Sequence[Precision], start: float) -> list[float]:
    """ρ_t, the share of the blocks that each stage lowers: from `start` to 1 in equal steps (appendix B.1.2, linear).

    It starts again where a schedule turns from weights to activations or back, so that what was lowered before is
    lowered everywhere; a stage alone covers all.
    """
    kinds = []
    before = Precision()
    for stage in stages:
        kinds.append((stage.weights != before.weights, stage.activations != before.activations))
        before = stage
    shares: list[float] = []
    while len(shares) < len(stages):
        first = len(shares)
        count = next((i for i, kind in enumerate(kinds[first:]) if kind != kinds[first]), len(stages) - first)
        shares += [start + (1 - start) * i / (count - 1) for i in range(count)] if count > 1 else [1.0]
    return shares


def lowered_blocks(share: float, count: int) -> int:
    """⌈ρ_t L⌉ of `count` blocks, where a product such as 0.55 · 20 is not taken for more than 11."""
    return math.ceil(round(share * count, 9))


def chosen(share: float, count: int, alpha: float, sampling: Sampling, seed: int, stage: int) -> set[int]:
    """S_t, the numbers of the ⌈ρ_t L⌉ of `count` blocks that a stage lowers (appendix B.1.2).

    "biased" draws them without replacement, block l of 1 … L with probability proportional to (L - l + 1)^α; "first"
    takes the first ones.
    """
    size = lowered_blocks(share, count)
    if sampling == "first" or size == count:
        return set(range(size))
    p = np.arange(count, 0, -1, dtype=float) ** alpha
    sampled = np.random.default_rng([seed, stage]).choice(count, size, replace=False, p=p / p.sum())
    return set(sampled.tolist())
