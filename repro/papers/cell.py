"""Cells: one row, column, model and metric of a table or figure, its printed value, and what measures it."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from repro.core.errors import UserError, shortened

CellKey = tuple[str, str, str, str]  # row, column, model, metric
FULL_PRECISION = "fp16"  # the recipe without any step


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        paper: its paper; empty for the project's own tables.
        kind: `table` or `figure`.
        number: the printed number, or the name of a spec of our own.
        printed: the paper's digits; empty where it printed nothing.
        measure: the metric that measures it, a key of `repro.metrics.KINDS`; empty if the spec names none.
        params: that metric with what the spec asks of it (`repro.metrics.metric.Metric`).
        recipe: canonical recipe text with the spec's variables filled in.
        seeds: seeds of calibration text, initialization and order, over which the value is averaged.
        calibration: the paper's calibration text where the cell names one; empty is the scale's own.
        stand_in: what stands in for `model` at this scale; empty where nothing does.
        variables: those of row and column.
    """

    paper: str
    kind: str
    number: str
    row: str
    col: str
    model: str
    metric: str
    printed: str = ""
    unit: str = ""
    measure: str = ""
    params: Any = None
    recipe: str = ""
    seeds: tuple[int, ...] = (0,)
    calibration: str = ""
    stand_in: str = ""
    variables: tuple[tuple[str, Any], ...] = ()

    @property
    def cell_key(self) -> CellKey:
        """Row, column, model and metric."""
        return (self.row, self.col, self.model, self.metric)

    @property
    def is_full_precision(self) -> bool:
        """Whether it is of the model without any step."""
        return self.recipe == FULL_PRECISION

    @cached_property
    def identity(self) -> tuple[str, ...]:
        """A key that is unique among all cells of a scale, operands of derived cells included."""
        measured = (self.measure, repr(self.params), self.recipe, str(self.seeds), self.calibration, self.stand_in)
        return (self.table, *self.cell_key, *measured, repr(self.variables))

    @property
    def table(self) -> str:
        """`spear/table1`, `spear/memory`, or `spear/figure13`."""
        return table_name(self.paper, self.kind, self.number)


def table_name(paper: str, kind: str, number: str) -> str:
    """The name that a user types for a table, figure or spec of our own."""
    return f"{paper}/{kind if is_printed(kind, number) else ''}{number}".removeprefix("/")


def is_printed(kind: str, number: str) -> bool:
    """Whether a number is a printed table's or figure's; a figure's part has a letter after it (`2c`)."""
    return number.isdecimal() or (kind == "figure" and re.fullmatch("[0-9]+[a-h]", number) is not None)


def check_seeds(seeds: tuple[int, ...]) -> None:
    """Raise unless seeds are distinct numbers that a generator takes.

    Raises:
        UserError: they are not.
    """
    if not seeds or len(set(seeds)) < len(seeds) or not all(0 <= seed < 2**31 for seed in seeds):
        raise UserError(f"seeds: {shortened(list(seeds))}; name at least one, each once, 0 or more")
