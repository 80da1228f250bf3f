"""A measured cell: its measurement, the quantity behind it, and full precision, which it is compared with.

Code that judges or shows a cell reads it from here, and never from results/ or built files.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from repro.metrics import metric_of
from repro.papers.cell import Cell
from repro.stats.quantity import Quantity, compose, constant
from repro.stats.statistics import Interval
from repro.store.measurement import Measurement


@dataclass(frozen=True, eq=False)
class Measured:
    """A cell that was looked up, measured or not.

    Attributes:
        measurement: value, interval, status and where it comes from.
        load_quantity: returns the series behind the value and their expression, cached; None if none are stored.
        external: whether it is read from files of its metric's own, such as kernel times.
        lacking: what this machine lacks, if that is why the cell is not measured; else empty.
        wants: what this scale lacks to measure it, `spec` or `protocol`; else empty.
        full: full precision on the same windows or items; None if the metric compares with none, the cell is full
            precision itself, or one of the two has no value.
    """

    cell: Cell
    measurement: Measurement
    load_quantity: Callable[[], Quantity | None] = lambda: None
    external: bool = False
    lacking: str = ""
    wants: str = ""
    full: "Measured | None" = None

    def marked(self, **changes: Any) -> "Measured":
        """A copy with some fields of its measurement changed, such as `source`."""
        return replace(self, measurement=replace(self.measurement, **changes))

    @cached_property
    def quantity(self) -> Quantity | None:
        """The series for further arithmetic, or the value alone if there are none; None without a value.

        Raises:
            UserError: results/ without the stored series.
        """
        return self.load_quantity() or _by_value(self.measurement)

    @cached_property
    def against(self) -> Interval | None:
        """The cell against full precision: the ratio or difference that its metric names; None without `full`."""
        if self.full is None or self.quantity is None or self.full.quantity is None:
            return None
        expression = metric_of(self.cell).against
        return compose(expression, {"q": self.quantity, "f": self.full.quantity}).interval()


def _by_value(m: Measurement) -> Quantity | None:
    """The quantity of a measurement of which only value and interval are left; None without a value."""
    if m.value is None:
        return None
    if m.lo is None and not m.n:  # a count is exact
        return constant(m.value)
    interval = Interval(m.value, m.lo, m.hi, m.n or 0, None, m.covers, ())
    return Quantity([], lambda mean: mean["x"], known={"x": interval})
