"""The digest of a stored row: an edit of any field is noticed and named.

A row's digest is 16 hex digits over all of its fields, the digests of its series among them (`observations`), and after
a dot two characters for each field, which say where an edit is. It finds slips of the hand and edits that nobody signed
anew (`accepted.rewrite`); it is no signature.
"""

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import fields, replace

from repro.errors import UserError
from repro.record.measurement import Measurement, text

SIGNED = tuple(field.name for field in fields(Measurement) if field.name != "digest")
WHOLE = 16  # hex digits over all fields
EACH = 2  # characters of base64 for a field


def of(row: Measurement) -> str:
    """The digest of a row as it would be stored."""
    values = {name: text(getattr(row, name)) for name in SIGNED}
    whole = hashlib.sha256("\0".join(f"{name}={value}" for name, value in values.items()).encode())
    return f"{whole.hexdigest()[:WHOLE]}." + "".join(_of_field(name, value) for name, value in values.items())


def signed(row: Measurement) -> Measurement:
    """The row with its digest."""
    return replace(row, digest=of(row))


def check(row: Measurement, where: str) -> None:
    """Raise unless a stored row is what was signed.

    Args:
        row: as it was read.
        where: the file and the row, for the message.

    Raises:
        UserError: naming the fields that were edited.
    """
    today = of(row)
    if row.digest == today:
        return
    if len(row.digest) != len(today):
        raise UserError(f"{where}: its digest is missing or cut short; check the file out again")
    each, known = today[WHOLE + 1 :], row.digest[WHOLE + 1 :]
    edited = [
        f"{name} is {text(getattr(row, name))!r:.60}"
        for i, name in enumerate(SIGNED)
        if each[EACH * i : EACH * (i + 1)] != known[EACH * i : EACH * (i + 1)]
    ]
    said = ", ".join(edited) or "its digest is another"
    raise UserError(f"{where}: edited after it was accepted: {said}; check the file out again, or measure it anew")


def of_keys(rows: Iterable[Measurement]) -> str:
    """16 hex digits of which rows a file has, so that one that is gone is noticed."""
    keys = sorted("\0".join(row.key) for row in rows)
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16]


def _of_field(name: str, value: str) -> str:
    found = hashlib.sha256(f"{name}={value}".encode()).digest()
    return base64.urlsafe_b64encode(found)[:EACH].decode()
