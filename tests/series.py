"""Intervals of arrays in tests: `[n]` for all seeds, or `[S, n]` for S seeds, by name."""

import numpy as np

from repro.stats import statistics
from repro.store.observations import Series


def interval(arrays, expression, groups=None, axis="windows", paired=None, known=None):
    """The interval of an expression of means; arrays of one group are paired, those not named are one group."""
    rows = {name: np.atleast_2d(values) for name, values in arrays.items()}
    count = max(map(len, rows.values()), default=0)
    seeds = []
    for seed in range(count):
        of_seed = {}
        for name, values in rows.items():
            last = len(values) - 1
            of_seed[name] = Series(values[min(seed, last)], axis, (groups or {}).get(name, ""))
        seeds.append(of_seed)
    return statistics.interval(seeds, expression, paired, known)
