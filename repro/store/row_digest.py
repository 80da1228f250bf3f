"""Digests of stored rows, by which an edit of any field is detected and named.

A row's digest is 16 hex digits over all of its fields, the digests of its series among them (`observations`), and after
a dot two characters for each field, which say where an edit is. It finds slips of the hand and edits that nobody signed
anew (`accepted.rewrite`); it is no signature. Measurements of cells and kernel times have it alike.
"""

import base64
import hashlib
from dataclasses import replace
from functools import cache

from repro.core.errors import UserError
from repro.store.stored_row import R, StoredRow

WHOLE = 16  # hex digits over all fields
EACH = 2  # characters of base64 for a field


def of(row: StoredRow) -> str:
    """The digest of a row as it would be stored."""
    values = row.signed()
    whole = hashlib.sha256("\0".join(f"{name}={value}" for name, value in values.items()).encode())
    return f"{whole.hexdigest()[:WHOLE]}." + "".join(_of_field(name, value) for name, value in values.items())


def signed(row: R) -> R:
    """The row with its digest."""
    return replace(row, digest=of(row))


def check(row: StoredRow, where: str) -> None:
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
        f"{name} is {value!r:.60}"
        for i, (name, value) in enumerate(row.signed().items())
        if each[EACH * i : EACH * (i + 1)] != known[EACH * i : EACH * (i + 1)]
    ]
    said = ", ".join(edited) or "its digest is another"
    raise UserError(f"{where}: edited after it was accepted: {said}; check the file out again, or measure it again")


@cache
def _of_field(name: str, value: str) -> str:
    digest = hashlib.sha256(f"{name}={value}".encode()).digest()
    return base64.urlsafe_b64encode(digest)[:EACH].decode()
