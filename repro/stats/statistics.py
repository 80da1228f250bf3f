"""95 % intervals of expressions of means: a perplexity, a difference, a recovered share, an accuracy over tasks.

Neighbouring windows of one text are correlated (WikiText-2: 0.55 at lag 1, still 0.3 at lag 3; C4: 0.48, then near 0),
so the unit of resampling is a block of neighbours. `interval` leaves out one block at a time, for all arrays of a group
(one corpus or task) together, and takes a t quantile. Items of a zero-shot task are independent: their blocks have one
item, and for a plain mean the result is the classic t interval. Equal inputs give equal bytes.

From 100 windows on, the lag-1 correlation rho of what the windows contribute to the value decides twice: how long a
block is, at least 12 (the length of least error for AR(1), Politis and White), and what share of the variance of a mean
blocks of that length miss, which is divided out.

Ranks and sets of layers are steps of their means: leaving out one of 64 sequences seldom moves them, so a jackknife
would find them certain. A quantity of `sequences` is evaluated on resamples of them instead, with a fixed seed. Noise
lowers an agreement, and a resample has twice the noise, so the interval is the hull of the resamples' quantiles and of
their reflection at the value: of rank correlations of 77 layers it covers 0.97 where the quantiles alone cover 0.05.

The least of several estimates is too low on average, and a greatest too high. Where a value is one (a claim that a
method beats the best of five), its ends come from those of all that may be the least (`_ends_of_extreme`).

Where one seed ran, `Draw` gives what another draw would change, from the pooled variance of its family.

Coverage on simulated AR(1) windows (see test_statistics.py), 100 to 213 of them: 0.94 to 0.95 for rho up to 0.8. With
blocks of 12 alone it was 0.93 at 0.6 and 0.90 at 0.8, for independent windows 0.67 at 0.6. Of `min(a, b, c, d, e) - s`
and `max(a, b, c) / min(a, b, c) - 1` of equal perplexities 0.95 to 0.98, where a plain interval covers 0.83 to 0.91;
up to 1 where they are close, and as a plain one where they are far apart.

Sources: the block jackknife, Künsch (1989), Annals of Statistics 17, 1217-1241; blocks of unequal size, Busing, Meijer
and van der Leeden (1999), Statistics and Computing 9, 3-8; their length, Politis and White (2004), Econometric Reviews
23, 53-70; the bias of a lag-1 correlation, Kendall (1954), Biometrika 41, 403-404; degrees of freedom, Satterthwaite
(1946), Biometrics Bulletin 2, 110-114; the bootstrap, Efron (1979), Annals of Statistics 7, 1-26; the least of several,
Chernozhukov, Lee and Rosen (2013), Econometrica 81, 667-737.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

from repro.core.errors import UserError
from repro.store.observations import Series

Expression = Callable[[dict[str, np.ndarray]], Any]  # from means by name, each `[k]`, to `[k]` values
Moved = Callable[[Mapping[str, np.ndarray], int], np.ndarray]  # smooth expressions at changed means
Error = tuple[np.ndarray, float]  # `[branches, k]`, whose squares add up to a variance; degrees of freedom
LEVEL = 0.95
AXES = ("windows", "items", "draws", "sequences")  # correlated neighbours; independent, twice; resampled
POOLED = "pooled seeds"  # what an interval covers where one seed ran, by the variance of its family
RESAMPLES = 1000
DRAWS = 4000  # of errors that move together; their 0.975 quantile is then known to 0.03
BLOCK = 12  # windows at least: with 8, coverage at rho = 0.6 is 0.916
FEWEST_BLOCKS = 6  # shorter blocks before fewer blocks: 6 blocks of 4 cover 0.93 at rho = 0.35, with t = 2.57
FEWEST_WINDOWS = 100  # below, the blocks are too short for the correlation of a single perplexity


class NotFinite(UserError):
    """An expression that has no finite value at some means, such as a quotient of two scores that are 0."""


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval.

    Attributes:
        value: the expression of the means; with seeds, the mean of the seeds' values, of a least or greatest that of
            the branches' means over seeds.
        lo: lower end; None if the windows are too few for an interval.
        hi: upper end, or None.
        n: windows, items, draws or sequences, summed over the groups.
        df: degrees of freedom of the t quantile, or none.
        covers: what was resampled, such as `windows only` or `windows and seeds`; empty without an interval.
        by_seed: the value of each seed.
    """

    value: float
    lo: float | None
    hi: float | None
    n: int
    df: float | None
    covers: str
    by_seed: tuple[float, ...]


@dataclass(frozen=True)
class Draw:
    """A random draw of calibration text or initialization that ran with one seed only.

    Attributes:
        effects: name of a series to the change of its mean at one standard deviation; all means move together.
        df: degrees of freedom of the pooled variance.
    """

    effects: Mapping[str, float]
    df: int


def block_length(n: int, rho: float = 0.0) -> int:
    """Windows in a block: at least 12, more if the length of least error at this lag-1 correlation is more.

    At most a sixth of all windows, and at least 2.
    """
    least_error = math.ceil(1.5 ** (1 / 3) * (2 * rho / (1 - rho**2)) ** (2 / 3) * n ** (1 / 3))
    return min(max(BLOCK, least_error), max(2, n // FEWEST_BLOCKS))


def lag_one(contributions: np.ndarray) -> float:
    """The lag-1 correlation of values `[n]`, corrected for its bias in a short series and limited to 0 to 0.95."""
    centred = contributions - contributions.mean()
    total = float(centred @ centred)
    if total == 0:
        return 0.0
    rho = float(centred[1:] @ centred[:-1]) / total
    return min(0.95, max(0.0, rho + (1 + 4 * rho) / len(centred)))


def share_of_blocks(length: float, rho: np.ndarray | float) -> np.ndarray | float:
    """The share of the variance of a long AR(1) mean that blocks of `length`, taken as independent, show."""
    return 1 - 2 * rho * (1 - rho**length) / (length * (1 - rho**2))


def block_starts(n: int, length: int) -> np.ndarray:
    """The first units of the blocks of `n` units: as many blocks as fit, some longer by what is left over."""
    count = max(1, n // length)
    return np.arange(count) * n // count


def interval(
    seeds: Sequence[Mapping[str, Series]],
    expression: Expression,
    paired: bool | None = None,
    known: Mapping[str, Interval] | None = None,
    draws: Sequence[Draw] = (),
    branches: Sequence[Expression] = (),
) -> Interval:
    """Interval of an expression of several means, such as `lambda m: np.exp(m["w4"] - m["w16"])`.

    The variance is the sum of four parts, and the t quantile has Satterthwaite's degrees of freedom:

    - the block jackknife of each group's mean over seeds; for groups of sequences one bootstrap, which gives the ends
      if nothing else varies
    - s^2 / S over the values of S seeds
    - the variance of each known result
    - what each draw of which one seed ran would change

    A seed decides calibration text, and initialization and order where something is trained. Use three or more: two
    cover 0.90 to 0.95 if they differ more than windows do. A group of fewer than 100 windows gives an interval only to
    a paired quantity, whose correlation is weaker.

    Args:
        seeds: name to series, one mapping per seed; values in the order of the text. Series of a group (corpus or task)
            are aligned, across seeds too. Series whose axis is not in `AXES`, such as bits, have no spread.
        expression: from the means by name, each `[k]`, to `[k]` values; numpy arithmetic does that.
        paired: whether the quantity compares two models on the same windows. None means yes for groups of two or more
            series. Pass True for KL and top-1 agreement, which are one series but compare with full precision.
        known: results of which only the interval is known, by their name in the expression; independent of all else.
        draws: random draws of which one seed ran, each independent of all else.
        branches: smooth expressions of which `expression` is the least or the greatest at any means, as `min(a, b) - s`
            is the least of `a - s` and `b - s`; none where it is smooth itself.

    Raises:
        UserError: seeds with different series or numbers of units; series of one group of different lengths; fewer
            than two values; anything that is not finite.
    """
    groups = _grouped(seeds)
    known = known or {}
    means = groups.means() | {name: np.array([[result.value]]) for name, result in known.items()}
    count = groups.seeds
    value_by_seed = _evaluate(expression, means, count, 1)[:, 0]
    value = float(value_by_seed.mean())
    smooth = tuple(branches) or (expression,)

    def moved(changed: Mapping[str, np.ndarray], points: int) -> np.ndarray:
        """The smooth expressions at other means, `[branches, points]`: each the mean over seeds."""
        return np.stack([_evaluate(branch, means | changed, count, points).mean(axis=0) for branch in smooth])

    parts = _jackknife_errors(groups, moved, paired)
    parts += [_error_of_known(name, result, moved) for name, result in known.items()]
    parts += [_error_of_draw(draw, means, moved) for draw in draws]
    errors = [part for part in parts if part is not None]
    is_possible = len(errors) == len(parts)
    resampled = None
    resampled_means, fewest = groups.resampled()
    if resampled_means:
        resampled = moved(resampled_means, RESAMPLES)
        centred = resampled - resampled.mean(axis=1, keepdims=True)
        errors.append((centred / math.sqrt(RESAMPLES - 1), fewest - 1))
    by_seed = value_by_seed[None]
    if branches:
        by_seed = np.stack([_evaluate(branch, means, count, 1)[:, 0] for branch in branches])
        value = _extreme_of_means(value_by_seed, by_seed)
    if count > 1:
        centred = by_seed - by_seed.mean(axis=1, keepdims=True)
        errors.append((centred / math.sqrt(count * (count - 1)), count - 1))

    n = groups.units + sum(result.n for result in known.values())
    values = tuple(map(float, value_by_seed))
    if not is_possible or not errors:
        return Interval(value, None, None, n, None, "", values)
    if branches:
        lo, hi, df = _ends_of_extreme(value, by_seed.mean(axis=1), errors, n)
    else:
        variance, df = (float(part[0]) for part in _spread(errors))
        half = _quantile(df) * math.sqrt(variance)
        lo, hi = value - half, value + half
        if resampled is not None and len(errors) == 1:
            low, high = map(float, np.quantile(resampled[0], [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
            lo, hi = min(low, 2 * value - high), max(high, 2 * value - low)
    return Interval(value, lo, hi, n, df, _covered(groups, known, draws), values)


def _extreme_of_means(value_by_seed: np.ndarray, by_seed: np.ndarray) -> float:
    """The least or greatest of the branches' means over seeds `[branches, seeds]`, as the expression is of each seed's.

    The mean of each seed's least would take another branch in every seed, whichever is low there by chance. An
    expression that is now a least and now a greatest keeps the mean of its seeds' values `[seeds]`.
    """
    means = by_seed.mean(axis=1)
    for extreme in (np.min, np.max):
        if np.allclose(value_by_seed, extreme(by_seed, axis=0), rtol=1e-9, atol=1e-12):
            return float(extreme(means))
    return float(value_by_seed.mean())


def _covered(groups: "_Groups", known: Mapping[str, Interval], draws: Sequence[Draw]) -> str:
    """What an interval covers, such as `windows only` or `windows and seeds`."""
    axes = [axis for axis in AXES if axis in groups.axis_of.values()]
    if groups.seeds > 1 or any(result.covers.endswith("seeds") for result in known.values()):
        return " and ".join([*axes, "seeds"])
    if draws:
        return " and ".join([*axes, POOLED])
    return f"{' and '.join(axes) or 'results'} only"


@dataclass(frozen=True)
class _Groups:
    """The series of all seeds.

    Attributes:
        members: by group and name, the values `[S, n]`; `[1, n]` if all seeds share them.
        axis_of: group to what its units are, one of `AXES`.
        fixed: name to the means `[S, 1]` of series without spread.
    """

    members: Mapping[str, Mapping[str, np.ndarray]]
    axis_of: Mapping[str, str]
    fixed: Mapping[str, np.ndarray]

    @property
    def seeds(self) -> int:
        """How many seeds there are, 1 if all share every series."""
        count = 1
        for series in [*self.members.values(), self.fixed]:
            count = max([count, *map(len, series.values())])
        return count

    @property
    def units(self) -> int:
        """Windows, items, draws or sequences, summed over the groups."""
        return sum(next(iter(series.values())).shape[1] for series in self.members.values())

    def means(self) -> dict[str, np.ndarray]:
        """The mean of every series by name, `[S, 1]` or `[1, 1]`."""
        means: dict[str, np.ndarray] = {}
        for series in self.members.values():
            means |= {name: values.mean(axis=1)[:, None] for name, values in series.items()}
        return means | dict(self.fixed)

    def resampled(self) -> tuple[dict[str, np.ndarray], float]:
        """Means of resampled sequences by name, `[S or 1, RESAMPLES]`, and the fewest sequences of a group."""
        means: dict[str, np.ndarray] = {}
        fewest = math.inf
        random = None  # seeding it takes as long as all else of a short interval
        for group, series in self.members.items():
            if self.axis_of[group] != "sequences":
                continue
            n = next(iter(series.values())).shape[1]
            random = random or np.random.RandomState(0)
            weights = random.multinomial(n, np.full(n, 1 / n), RESAMPLES) / n
            means |= {name: values @ weights.T for name, values in series.items()}
            fewest = min(n, fewest)
        return means, fewest


def _grouped(seeds: Sequence[Mapping[str, Series]]) -> _Groups:
    """The series of all seeds by group.

    Raises:
        UserError: as `interval`.
    """
    members: dict[str, dict[str, np.ndarray]] = {}
    fixed: dict[str, np.ndarray] = {}
    axis_of: dict[str, str] = {}
    for name, values in _stacked(seeds).items():
        series = seeds[0][name]
        if series.axis not in AXES:
            fixed[name] = values.mean(axis=1)[:, None]
            continue
        if values.shape[1] < 2 or not np.isfinite(values).all():
            raise UserError(f"interval: {name!r} needs two or more finite values, not {values}")
        members.setdefault(series.group, {})[name] = values[:1] if (values == values[0]).all() else values
        axis_of[series.group] = series.axis
    for by_name in members.values():
        sizes = {name: values.shape[1] for name, values in by_name.items()}
        if len(set(sizes.values())) > 1:
            raise UserError(f"interval: arrays that are paired differ in length: {sizes}")
    return _Groups(members, axis_of, fixed)


def _jackknife_errors(groups: _Groups, moved: Moved, paired: bool | None) -> list[Error | None]:
    """The block jackknife of each group but those of sequences; None for a group that is too short for an interval."""
    unmoved = moved({}, 1)
    errors: list[Error | None] = []
    for group, series in groups.members.items():
        axis = groups.axis_of[group]
        if axis == "sequences":
            continue
        n = next(iter(series.values())).shape[1]
        length = 1
        rho = np.zeros(len(unmoved))
        if axis == "windows":
            if n >= FEWEST_WINDOWS:
                by_window = _contributions(moved, unmoved, series, np.arange(n))
                rho = np.array([lag_one(of_branch) for of_branch in by_window])
            length = block_length(n, float(rho.max()))
        starts = block_starts(n, length)
        is_paired = len(series) > 1 if paired is None else paired
        too_few_windows = axis == "windows" and not is_paired and n < FEWEST_WINDOWS
        if len(starts) < 2 or too_few_windows:
            errors.append(None)
            continue
        scale = len(starts) / (len(starts) - 1) / share_of_blocks(n / len(starts), rho)
        error = _contributions(moved, unmoved, series, starts) / n * np.sqrt(scale)[:, None]
        errors.append((error, len(starts) - 1))
    return errors


def _error_of_known(name: str, result: Interval, moved: Moved) -> Error | None:
    """What one standard error of a known result changes; None if the result has no interval."""
    if result.lo is None or result.hi is None:
        return None
    df = math.inf if result.df is None else result.df
    error = (result.hi - result.lo) / 2 / _quantile(df)
    below, above = moved({name: np.array([[result.value - error, result.value + error]])}, 2).T
    return (above - below)[:, None] / 2, df


def _error_of_draw(draw: Draw, means: Mapping[str, np.ndarray], moved: Moved) -> Error:
    """What one standard deviation of a draw that ran once changes."""
    ends = {name: means[name] + effect * np.array([[-1.0, 1.0]]) for name, effect in draw.effects.items()}
    below, above = moved(ends, 2).T
    return (above - below)[:, None] / 2, draw.df


def _spread(errors: Sequence[tuple[np.ndarray, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Variance and Satterthwaite's degrees of freedom, each `[branches]`, of errors `[branches, k]` in parts."""
    parts = np.stack([np.sum(error**2, axis=1) for error, _ in errors])
    freedom = np.array([[df] for _, df in errors], dtype=float)
    variance = parts.sum(axis=0)
    shares = np.sum((parts / np.where(variance > 0, variance, 1)) ** 2 / freedom, axis=0)
    return variance, np.where(shares > 0, 1 / np.where(shares > 0, shares, 1), freedom.max())


def _ends_of_extreme(
    value: float, values: np.ndarray, errors: Sequence[tuple[np.ndarray, float]], n: int
) -> tuple[float, float, float]:
    """The ends of an interval of the least or the greatest of smooth expressions, and degrees of freedom.

    The least of several estimates lies below the least of what they estimate, the more so the closer they are. Its
    upper end therefore is the least of upper ends that hold for all that may be the least together, by the quantile of
    their greatest error under their own correlations (Chernozhukov, Lee and Rosen 2013, section 3); its lower end is
    the least of their lower ends. Of the greatest likewise, mirrored. An expression that is neither, as
    `min(a, b) + max(c, d)`, is taken for the branch that it has here.

    Args:
        value: of the expression itself.
        values: of its branches, `[branches]`.
        errors: theirs, as `interval` puts them together.
        n: units behind them; fewer than three, as where all are times of one run, count as three.
    """
    variance, freedom = _spread(errors)
    error = np.sqrt(variance)
    quantile = np.array([_quantile(df) for df in freedom])
    nearest = int(np.argmin(np.abs(values - value)))
    df = float(freedom[nearest])
    slack = 1e-9 * (1 + abs(value))
    if value > values.min() + slack and value < values.max() - slack:
        half = float(quantile[nearest] * error[nearest])
        return value - half, value + half, df
    sign = 1.0 if value <= values.min() + slack else -1.0
    values = sign * values
    greatest = _greatest_errors(errors, error, float(freedom.min()))
    wide = float(np.quantile(greatest(np.full(len(values), True)), 1 - 0.1 / math.log(max(n, 3))))
    possible = values <= np.min(values + wide * error) + 2 * wide * error
    together = float(np.quantile(greatest(possible), (1 + LEVEL) / 2))
    low = float(np.min((values - quantile * error)[possible]))
    high = float(np.min((values + np.maximum(together, quantile) * error)[possible]))
    lo, hi = (low, high) if sign > 0 else (0.0 - high, 0.0 - low)  # without a zero of the wrong sign
    return min(lo, value), max(hi, value), df


def _greatest_errors(
    errors: Sequence[tuple[np.ndarray, float]], error: np.ndarray, df: float
) -> Callable[[np.ndarray], np.ndarray]:
    """A function from a choice of branches to simulated greatest errors of these, in standard errors, `[DRAWS]`."""
    random = np.random.RandomState(0)
    covariance = sum(part @ part.T for part, _ in errors)
    uncertain = error > 0
    scale = np.where(uncertain, error, 1)
    values, vectors = np.linalg.eigh(covariance / scale[:, None] / scale)
    # Symmetric, so that the same draws come whichever signs and order a processor's library gives the vectors.
    root = vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T
    simulated = root @ random.normal(size=(len(error), DRAWS))
    if math.isfinite(df):
        simulated /= np.sqrt(random.chisquare(df, DRAWS) / df)

    def greatest(chosen: np.ndarray) -> np.ndarray:
        relevant = chosen & uncertain
        return simulated[relevant].max(axis=0) if relevant.any() else np.zeros(DRAWS)

    return greatest


def _contributions(
    moved: Callable[[Mapping[str, np.ndarray], int], np.ndarray],
    unmoved: np.ndarray,
    series: Mapping[str, np.ndarray],
    starts: np.ndarray,
) -> np.ndarray:
    """What each block of a group's series contributes to each smooth expression, `[branches, blocks]`.

    A contribution is the change of the expression when the block is left out, times the number of units that are left.
    The squares of contributions add up to the variance of the value, times n^2 and the usual (k - 1) / k of k blocks.

    Args:
        moved: the smooth expressions at other means.
        unmoved: the same at all means, `[branches, 1]`.
        series: of the group, `[S or 1, n]` by name.
        starts: the first units of the blocks.
    """
    without = {}
    for name, values in series.items():
        n = values.shape[1]
        left = n - np.diff(starts, append=n)
        without[name] = (values.sum(axis=1)[:, None] - np.add.reduceat(values, starts, axis=1)) / left
    return left * (unmoved - moved(without, len(starts)))


def _stacked(seeds: Sequence[Mapping[str, Series]]) -> dict[str, np.ndarray]:
    """The values of all seeds by name, `[S, n]`.

    Raises:
        UserError: seeds with different series or numbers of units.
    """
    names = list(seeds[0]) if seeds else []
    if any(list(seed) != names for seed in seeds):
        raise UserError(f"the seeds have different series: {[list(seed) for seed in seeds]}")
    for name in names:
        sizes = [len(seed[name].values) for seed in seeds]
        if len(set(sizes)) > 1:
            raise UserError(f"the seeds of {name} have different numbers of units: {sizes}")
    stacked = {}
    for name in names:
        stacked[name] = np.stack([np.asarray(seed[name].values, dtype=float) for seed in seeds])
    return stacked


def _evaluate(expression: Expression, means: Mapping[str, np.ndarray], seeds: int, points: int) -> np.ndarray:
    """The expression at means that are broadcast to `[seeds, points]`; it is called with flat arrays.

    Raises:
        NotFinite: the expression is not one finite number for each of them.
    """
    shape = (seeds, points)
    flat = {}
    for name, mean in means.items():
        if mean.shape != shape:
            mean = np.broadcast_to(mean, shape)
        flat[name] = mean.ravel()
    with np.errstate(all="ignore"):
        results = np.asarray(expression(flat), dtype=np.float64)
    if results.shape != (seeds * points,) or not np.isfinite(results).all():
        raise NotFinite(
            "interval: the expression is not one finite number per mean; a mean that it divides by may be 0"
        )
    return results.reshape(seeds, points)


def _quantile(df: float) -> float:
    """The t quantile of a two-sided interval."""
    return float(stdtrit(df, (1 + LEVEL) / 2))
