"""Predicates on printed numbers, each known to half a unit of its last digit."""

from collections.abc import Mapping
from itertools import product

import numpy as np

from repro import papers
from repro.papers.cell import Place
from repro.specs import tables
from repro.stats.quantity import evaluate, satisfied


def cells(claim: tables.ClaimSpec) -> dict[Place, papers.Printed]:
    """The printed cells of the claim's tables, also by their places without a metric, which means the first."""
    found: dict[Place, papers.Printed] = {}
    for cell in (cell for name in (claim.table, *claim.more) for cell in papers.printed(*tables.split(name))):
        for metric in (cell.metric, ""):
            found.setdefault((cell.row, cell.col, cell.model, metric), cell)
    return found


def corners(quantity: str, holds: str, named: Mapping[str, papers.Printed]) -> np.ndarray:
    """Whether the predicate holds, bool `[2^n + 1]`: where each of n cells is as low or high as it can be, as printed.

    Raises:
        UserError: as `evaluate`.
    """
    ranges = [(cell.number - cell.tolerance, cell.number + cell.tolerance) for cell in named.values()]
    points = np.array([*product(*ranges), [cell.number for cell in named.values()]]).T
    return np.asarray(satisfied(holds, evaluate(quantity, dict(zip(named, points)))))
