"""Measurements as CSV: one tidy row per cell, with its provenance."""

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from repro.core.errors import UserError, shortened, unknown
from repro.core.files import HOME, read_text, short_hash
from repro.papers.cell import CellKey, table_name

STATUSES = (
    *("ok", "at_chance", "too_long", "oom", "unsupported", "diverged", "stale"),
    *("no_stand_in", "other_device", "not_run"),
)
MEASURED = ("ok", "at_chance")
SHOWN = (*MEASURED, "stale")  # statuses that come with a value
GRADES = ("A", "B", "C", "D")
RESULTS = HOME / "results"


@dataclass(frozen=True)
class Measurement:
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
        digest: of a stored row (`row_digest`); empty elsewhere.
    """

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
        """What makes a cell: its cell key in a table and the scale that measured it."""
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

    def texts(self) -> dict[str, str]:
        """Its fields as CSV text, by column."""
        return {name: text(getattr(self, name)) for name in COLUMNS}

    def signed(self) -> dict[str, str]:
        """The fields that its digest is of: all but the digest."""
        return {name: value for name, value in self.texts().items() if name != "digest"}


COLUMNS = tuple(f.name for f in fields(Measurement))
SEEDS = "([0-9]{1,10}( [0-9]{1,10})*)?"
NUMBERS: dict[str, type] = {"value": float, "lo": float, "hi": float, "n": int, "lower_bound": float}


def inputs_hash(inputs: Mapping[str, Any]) -> str:
    """Hash of declared inputs."""
    return short_hash(json.dumps(inputs, sort_keys=True))


def to_csv(rows: Iterable[Measurement]) -> str:
    """Measurements as CSV text; numbers with 7 significant digits, missing ones empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow(row.texts().values())
    return out.getvalue()


def text(value: object) -> str:
    """A value as CSV text: 7 significant digits, empty for none.

    Raises:
        UserError: a number that is not finite.
    """
    if value is None:
        return ""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UserError(f"a measurement is {value}; a number that is not finite is a status, never a value")
        return f"{value:.7g}"
    return str(value)


def from_csv(path: Path) -> list[Measurement]:
    """Read measurements, checked.

    Raises:
        UserError: the file is missing, has other columns, a value that is no finite number, or an unknown word.
    """
    try:
        lines = list(csv.reader(io.StringIO(read_text(path), newline="")))
    except OSError as error:
        raise UserError(f"{shortened(path, 200)}: cannot be read ({error.strerror}); name a table's .csv") from None
    except csv.Error:
        raise UserError(f"{path}: not a CSV file") from None
    if not lines or tuple(lines[0]) != COLUMNS:
        odd = sorted(set(lines[0] if lines else ()) ^ set(COLUMNS))
        raise UserError(f"{path}: not a file of measurements; its columns differ in {', '.join(odd)[:200] or 'order'}")
    return [_row(dict(zip(COLUMNS, line)), len(line), f"{path}, line {i}") for i, line in enumerate(lines[1:], start=2)]


def _row(line: Mapping[str, str], width: int, where: str) -> Measurement:
    if width != len(COLUMNS):
        raise UserError(f"{where}: {width} values for {len(COLUMNS)} columns; the file was cut short")
    values: dict[str, object] = dict(line)
    for column, kind in NUMBERS.items():
        try:
            number = kind(line[column]) if line[column] else None
        except ValueError:
            raise UserError(f"{where}: {column} is {line[column]!r:.60}, not a number") from None
        if number is not None and not math.isfinite(number):
            given = line[column]
            raise UserError(f"{where}: {column} is {given}; a number that is not finite is a status, never a value")
        values[column] = number
    if line["status"] not in STATUSES:
        raise UserError(f"{where}: {unknown('status', line['status'], STATUSES)}")
    if not re.fullmatch(SEEDS, line["seeds"], re.ASCII):
        raise UserError(f"{where}: seeds is {shortened(line['seeds'])!r}, not whole numbers with blanks between them")
    return Measurement(**values)  # type: ignore[arg-type]


def slug(device: str) -> str:
    """A device's name as that of its folder."""
    return "".join(c if c.isalnum() else "-" for c in device.lower()).strip("-")
