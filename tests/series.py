"""Intervals of arrays in tests: `[n]` for all seeds, or `[S, n]` for S seeds, by name."""

import numpy as np

from repro.stats import statistics
from repro.store.observations import Series


def interval(arrays, expression, groups=None, axis="windows", paired=None, known=None):
    """The interval of an expression of means; arrays of one group are paired, those not named are one group."""
    rows = {name: np.atleast_2d(values) for name, values in arrays.items()}
    count = max(map(len, rows.values()), default=0)
    seeds = [
        {name: Series(v[min(i, len(v) - 1)], axis, (groups or {}).get(name, "")) for name, v in rows.items()}
        for i in range(count)
    ]
    return statistics.interval(seeds, expression, paired, known)
