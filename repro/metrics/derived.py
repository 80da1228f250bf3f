"""Arithmetic over other cells, such as the share of a gap that a method recovers; its interval comes from theirs."""

from dataclasses import dataclass
from typing import Any

from repro.core.errors import UserError, shortened
from repro.metrics.metric import Metric


@dataclass(frozen=True)
class Derived(Metric):
    """`quantity` over names; each name is a recipe, or a mapping: `recipe`, `measure`, other keys that go over `of`.

    `against`: how it is read against full precision, such as `q - f`.

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
        """Name to the recipe and the measure of the cell that it stands for."""
        whole = {name: {"recipe": cell} if isinstance(cell, str) else cell for name, cell in self.cells.items()}
        return {
            name: (
                cell.get("recipe", ""),
                cell.get("measure", self.of | {k: v for k, v in cell.items() if k != "recipe"}),
            )
            for name, cell in whole.items()
        }
