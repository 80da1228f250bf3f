"""Measurements as CSV: one tidy row per cell, with its provenance."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from repro.core.errors import UserError, shortened
from repro.core.files import HOME, short_hash
from repro.papers.cell import CellKey, table_name
from repro.store import stored_row
from repro.store.stored_row import StoredRow

STATUSES = (
    "ok",
    "at_chance",
    "too_long",
    "oom",
    "unsupported",
    "diverged",
    "stale",
    "no_stand_in",
    "other_device",
    "not_run",
)
MEASURED = ("ok", "at_chance")
SHOWN = (*MEASURED, "stale")  # statuses that come with a value
ACCEPTED = (*SHOWN, "unsupported", "diverged", "oom", "too_long")  # stale: measured under earlier versions
GRADES = ("A", "B", "C", "D")
RESULTS = HOME / "results"


@dataclass(frozen=True)
class Measurement(StoredRow):
    """One measured (or not measured: see `status`) cell of a table or figure.

    Attributes:
        value, lo, hi: the value and its 95 % interval; `covers` says what the interval covers (windows, items, seeds).
        n: windows or items.
        source: where it comes from: `fresh` (measured here), `partial` (measured here on the first windows or items),
            `stored` (in results/), `replicated` or `differs` (stored, and measured again here), `arithmetic` (nothing
            ran: it follows from the recipe and the paper's own shapes), `unattested` (timed before versions were kept).
        recipe: canonical text.
        protocol: the groups of its series: corpora and tasks under their protocols.
        inputs: hash of the declared inputs, which `results/<device>/inputs.json.xz` spells out.
        versions: of the metric, the steps and the jobs that decided it, such as `gptq=1 perplexity=1`.
        artifacts: hash of the digests of the files that were read, compressed weights among them.
        observations: digest of the series that the value is computed from.
        lower_bound: for a time, the least that the device allows in the same unit.
    """

    WHAT: ClassVar[str] = "a file of measurements"
    MADE_BY: ClassVar[str] = "a table's .csv"
    STATUSES: ClassVar[tuple[str, ...]] = STATUSES
    MEASURED: ClassVar[tuple[str, ...]] = MEASURED
    DIGITS: ClassVar[int] = 7

    paper: str
    kind: str
    number: str
    row: str
    col: str
    model: str
    metric: str
    printed: str = ""
    value: float | None = None
    lo: float | None = None
    hi: float | None = None
    covers: str = ""
    n: int | None = None
    unit: str = ""
    status: str = "not_run"
    grade: str = ""
    source: str = ""
    scale: str = ""
    stand_in: str = ""
    recipe: str = ""
    seeds: str = ""
    protocol: str = ""
    device: str = ""
    device_class: str = ""
    commit: str = ""
    inputs: str = ""
    versions: str = ""
    artifacts: str = ""
    observations: str = ""
    environment: str = ""
    lower_bound: float | None = None
    note: str = ""
    digest: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """The key of the row: the cell's key in its table, and the scale."""
        return (self.paper, self.kind, self.number, self.row, self.col, self.model, self.metric, self.scale)

    @property
    def table(self) -> str:
        """The name that a user types for its table or figure."""
        return table_name(self.paper, self.kind, self.number)

    @property
    def cell_key(self) -> CellKey:
        """Row, column, model and metric."""
        return (self.row, self.col, self.model, self.metric)

    @property
    def where(self) -> str:
        """The cell in a message."""
        return f"{self.paper} {self.kind} {self.number} / " + " / ".join(map(shortened, self.cell_key))

    @property
    def where_stored(self) -> str:
        """The cell and the scale in a message."""
        return f"{self.where} at scale {self.scale}"

    @property
    def is_new(self) -> bool:
        """Whether it was measured here, or could not be; not taken from results/ or calculated."""
        return self.source == "fresh" and self.status in ACCEPTED

    def check(self) -> None:
        """Raise unless the seeds are whole numbers."""
        if not re.fullmatch(SEEDS, self.seeds, re.ASCII):
            raise UserError(f"seeds is {shortened(self.seeds)!r}, not whole numbers with blanks between them")


COLUMNS = stored_row.columns(Measurement)
SEEDS = "([0-9]{1,10}( [0-9]{1,10})*)?"


def inputs_hash(inputs: Mapping[str, Any]) -> str:
    """Hash of declared inputs."""
    return short_hash(json.dumps(inputs, sort_keys=True))


def to_csv(rows: Iterable[Measurement]) -> str:
    """Measurements as CSV text."""
    return stored_row.to_csv(rows, Measurement)


def from_csv(path: Path) -> list[Measurement]:
    """Read measurements, checked; raises what `stored_row.from_csv` does."""
    return stored_row.from_csv(path, Measurement)
