"""Intervals: percentile bootstrap over windows or items, paired wherever the same windows or items were used.

Every statistic here is a function of means (perplexity is exp of a mean, a recovery is a ratio of means), so a resample
is only a mean of resampled values, and all of them are one matrix. What belongs together is resampled together: arrays
of one group (a corpus, a task) share their indices. Indices depend on the seed, the group's name and its size and on
nothing else, so that the same interval comes out byte for byte, whatever else is measured beside it.

Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
"""

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from repro.errors import UserError

BLOCK = 2**20  # resampled indices that are held at a time
GROUP = ""  # the group of arrays without one


def interval(
    values: np.ndarray,
    statistic: Callable[[Any], Any] = np.asarray,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of `statistic(mean(values))`.

    Args:
        values: one value per window or item, `[n]`, n at least 2.
        statistic: an elementwise function of the mean, such as `np.exp` for a perplexity; the mean itself by default.
        level: coverage of the interval.
        resamples: how many.
        seed: of the resampling.

    Raises:
        UserError: fewer than two values, or a value that is not finite.
    """
    return paired({"values": values}, lambda mean: statistic(mean["values"]), None, level, resamples, seed)


def paired(
    arrays: Mapping[str, np.ndarray],
    expression: Callable[[dict[str, np.ndarray]], Any],
    groups: Mapping[str, str] | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of an expression of several means, such as `lambda m: np.exp(m["w4"] - m["w16"])`.

    Args:
        arrays: by name, one value per window or item, `[n of the group]`.
        expression: from the means by name, each `[resamples]`, to `[resamples]` values; numpy arithmetic does that.
        groups: array name to group name; arrays of one group are aligned. Those not named are one group.
        level: coverage of the interval.
        resamples: how many.
        seed: of the resampling.

    Raises:
        UserError: arrays of one group of different lengths, fewer than two values, or anything that is not finite.
    """
    if not 0 < level < 1 or resamples < 1:
        raise UserError(f"bootstrap: level {level} is not between 0 and 1, or {resamples} resamples are too few")
    together: dict[str, dict[str, np.ndarray]] = {}
    for name, values in arrays.items():
        values = np.asarray(values, dtype=np.float64)
        if values.ndim != 1 or len(values) < 2 or not np.isfinite(values).all():
            raise UserError(
                f"bootstrap: {name!r} must be two or more finite values in a row, not {values.shape} {values}"
            )
        together.setdefault((groups or {}).get(name, GROUP), {})[name] = values
    means: dict[str, np.ndarray] = {}
    for group, members in together.items():
        sizes = {name: len(values) for name, values in members.items()}
        if len(set(sizes.values())) > 1:
            raise UserError(f"bootstrap: arrays that are paired differ in length: {sizes}")
        means |= _resampled_means(members, resamples, [seed, zlib.crc32(group.encode())])
    results = np.asarray(expression(means), dtype=np.float64)
    if results.shape != (resamples,) or not np.isfinite(results).all():
        raise UserError(
            "bootstrap: the expression is not one finite number per resample; a mean it divides by may be 0"
        )
    low, high = np.quantile(results, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def chance_floor(mean: float, n: int, chance: float) -> bool:
    """Whether an accuracy over `n` items is at chance: less than 3 binomial standard errors above it (status `floor`).

    Raises:
        UserError: no items, or a chance that is not a probability below 1.
    """
    if n < 1 or not 0 <= chance < 1:
        raise UserError(f"chance floor: {n} items with chance {chance} make no accuracy")
    return mean <= chance or mean < chance + 3 * math.sqrt(chance * (1 - chance) / n)


def _resampled_means(members: dict[str, np.ndarray], resamples: int, seed: list[int]) -> dict[str, np.ndarray]:
    """Means `[resamples]` of each array `[n]` over shared random indices, in blocks of rows that bound the memory."""
    n = len(next(iter(members.values())))
    random, rows = np.random.default_rng(seed), max(1, BLOCK // n)
    means = {name: np.empty(resamples) for name in members}
    for start in range(0, resamples, rows):
        index = random.integers(n, size=(min(rows, resamples - start), n))
        for name, values in members.items():
            means[name][start : start + rows] = values[index].mean(axis=1)
    return means
