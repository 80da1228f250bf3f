"""Rows of CSV files in results/ and build/, written and read: measurements of cells, and kernel times.

A subclass of `StoredRow` defines what a file may hold; writing and reading are the same for all.
"""

import csv
import io
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from repro.core.errors import UserError, unknown
from repro.core.files import csv_text, read_text, unreadable

ENDING = ".csv.xz"  # of a file of accepted rows; `xzcat` shows its lines


class StoredRow(ABC):
    """A line of a file of rows; subclasses are frozen dataclasses whose compared fields are the columns.

    Attributes:
        WHAT: what such a file is called in messages.
        MADE_BY: the file that a message suggests instead of one that cannot be read.
        STATUSES: the possible values of `status`.
        MEASURED: the statuses of measured rows; a file to accept needs such a row.
        DIGITS: significant digits of floats.
        device: where it was measured; several devices are joined by ` + `.
        digest: of an accepted row (`row_digest`); otherwise empty.
    """

    WHAT: ClassVar[str]
    MADE_BY: ClassVar[str]
    STATUSES: ClassVar[tuple[str, ...]]
    MEASURED: ClassVar[tuple[str, ...]]
    DIGITS: ClassVar[int]
    device: str
    status: str
    digest: str

    @property
    @abstractmethod
    def key(self) -> tuple[Any, ...]:
        """A key that is unique in a file."""

    @property
    @abstractmethod
    def table(self) -> str:
        """The name of its file in the folder of its device."""

    @property
    @abstractmethod
    def where(self) -> str:
        """The row in a message."""

    @property
    def stored_as(self) -> Path:
        """Its file below results/; of a row that several devices measured, the first device's."""
        return Path(slug(self.device.partition(" + ")[0])) / f"{self.table.replace('/', '-')}{ENDING}"

    @property
    def where_stored(self) -> str:
        """The row in a message about accepted rows, where a cell can exist at several scales."""
        return self.where

    @property
    def is_new(self) -> bool:
        """Whether it is a new result, which can be accepted."""
        return True

    def check(self) -> None:  # noqa: B027 - most rows have nothing more to check
        """Raise if a row that was read is wrong in anything but its numbers and its status."""

    def texts(self) -> dict[str, str]:
        """Its fields as CSV text, by column."""
        return {name: text(getattr(self, name), self.DIGITS) for name in columns(type(self))}

    def signed(self) -> dict[str, str]:
        """The fields that its digest covers, as CSV text: all but the digest itself."""
        return {name: value for name, value in self.texts().items() if name != "digest"}


R = TypeVar("R", bound=StoredRow)


@cache
def columns(of: type[StoredRow]) -> tuple[str, ...]:
    """The columns of a file of such rows."""
    return tuple(f.name for f in fields(of) if f.compare)  # type: ignore[arg-type]


@cache
def numbers(of: type[StoredRow]) -> dict[str, type]:
    """The columns that hold numbers or nothing, with their type."""
    kinds = {int | None: int, float | None: float}
    return {f.name: kinds[f.type] for f in fields(of) if f.type in kinds}  # type: ignore[arg-type, index]


def text(value: object, digits: int = 7) -> str:
    """A value as CSV text: a float with `digits` significant digits, None as an empty text.

    Raises:
        UserError: a number that is not finite.
    """
    if value is None:
        return ""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UserError(f"a measurement is {value}; a number that is not finite is a status, never a value")
        return f"{value:.{digits}g}"
    return str(value)


def to_csv(rows: Iterable[StoredRow], of: type[StoredRow]) -> str:
    """Rows of a class as CSV text; missing numbers are empty."""
    return csv_text([columns(of), *(row.texts().values() for row in rows)])


def from_csv(path: Path, of: type[R]) -> list[R]:
    """Read rows of a class, checked.

    Raises:
        UserError: the file is missing, has other columns, a value that is no finite number, or an unknown word.
    """
    try:
        header, *lines = list(csv.reader(io.StringIO(read_text(path), newline=""))) or [[]]
    except OSError as error:
        raise unreadable(path, error, f"name {of.MADE_BY}") from None
    except csv.Error:
        raise UserError(f"{path}: not a CSV file") from None
    if tuple(header) != columns(of):
        odd = ", ".join(sorted(set(header) ^ set(columns(of))))[:200] or "order"
        raise UserError(f"{path}: not {of.WHAT}; its columns differ in {odd}")
    return [_row(line, of, f"{path}, line {i}") for i, line in enumerate(lines, start=2)]


def _row(line: Sequence[str], of: type[R], where: str) -> R:
    if len(line) != len(columns(of)):
        raise UserError(f"{where}: {len(line)} values for {len(columns(of))} columns; the file was cut short")
    values: dict[str, Any] = dict(zip(columns(of), line))
    for name, kind in numbers(of).items():
        field_text = values[name]
        try:
            number = kind(field_text) if field_text else None
        except ValueError:
            raise UserError(f"{where}: {name} is {field_text!r:.60}, not a number") from None
        if number is not None and not math.isfinite(number):
            raise UserError(f"{where}: {name} is {field_text}; a number that is not finite is a status, never a value")
        values[name] = number
    if values["status"] not in of.STATUSES:
        raise UserError(f"{where}: {unknown('status', values['status'], of.STATUSES)}")
    row = of(**values)
    try:
        row.check()
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return row


def slug(device: str) -> str:
    """A device's name as that of its folder."""
    return "".join(c if c.isalnum() else "-" for c in device.lower()).strip("-")
