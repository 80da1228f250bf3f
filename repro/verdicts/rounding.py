"""Predicates on printed numbers, each known to half a unit of its last digit."""

from collections.abc import Mapping
from itertools import product

import numpy as np

from repro import papers
from repro.papers.cell import CellKey
from repro.specs import tables
from repro.stats.quantity import evaluate, satisfied


def cells(claim: tables.ClaimSpec) -> dict[CellKey, papers.Printed]:
    """The printed cells of the claim's tables, also by their keys without a metric, which means the first."""
    by_key: dict[CellKey, papers.Printed] = {}
    for name in (claim.table, *claim.more):
        for cell in papers.printed(*tables.split(name)):
            for metric in (cell.metric, ""):
                by_key.setdefault((cell.row, cell.col, cell.model, metric), cell)
    return by_key


def corners(quantity: str, holds: str, named: Mapping[str, papers.Printed]) -> np.ndarray:
    """Whether the predicate holds, bool `[2^n + 1]`: where each of n cells is as low or high as it can be, as printed.

    Raises:
        UserError: as `evaluate`.
    """
    ranges = [(cell.number - cell.tolerance, cell.number + cell.tolerance) for cell in named.values()]
    points = np.array([*product(*ranges), [cell.number for cell in named.values()]]).T
    return np.asarray(satisfied(holds, evaluate(quantity, dict(zip(named, points)))))
