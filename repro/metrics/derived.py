"""Arithmetic over other cells, such as the share of a gap that a method recovers; its interval comes from theirs."""

from dataclasses import dataclass
from typing import Any

from repro.core.errors import UserError, shortened
from repro.metrics.metric import Metric


@dataclass(frozen=True)
class Derived(Metric):
    """An expression (`quantity`) over named cells (`cells`).

    A name maps to a recipe, or to a mapping with `recipe`, and `measure` or single keys that override those of `of`.
    `against` compares the value (q) with full precision (f), such as `q - f`.

    Example: `quantity: (b - s) / (b - f)`, `cells: {s: "{recipe}", b: rtn-w4-pc, f: fp16}`.
    """

    VERSION = 1
    LATER = {"against": ""}

    quantity: str
    cells: dict[str, str | dict[str, Any]]
    of: dict[str, Any]
    unit: str = ""
    against: str = ""

    def __post_init__(self) -> None:
        if odd := [name for name in self.cells if not name.isidentifier()]:
            raise UserError(f"cells: {shortened(odd[0])!r} is not a name; use letters, digits and underscores")

    def operands(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Name to the recipe and the measure of its cell."""
        mappings = {name: {"recipe": cell} if isinstance(cell, str) else cell for name, cell in self.cells.items()}
        by_name = {}
        for name, cell in mappings.items():
            other_keys = {key: value for key, value in cell.items() if key != "recipe"}
            by_name[name] = (cell.get("recipe", ""), cell.get("measure", self.of | other_keys))
        return by_name
