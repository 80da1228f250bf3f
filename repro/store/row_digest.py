"""Digests of stored rows, by which an edit of any field is detected and named.

A digest is 16 hex digits over all fields of a row, the digests of its series (`observations`) included, then a dot and
two characters for each field, which locate an edit. It detects slips of the hand and edits without a new digest
(`accepted.rewrite` makes one); it is no cryptographic signature. Measurements and kernel times both have it.
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
    fields = "\0".join(f"{name}={value}" for name, value in values.items())
    of_all = hashlib.sha256(fields.encode()).hexdigest()[:WHOLE]
    of_each = "".join(_of_field(name, value) for name, value in values.items())
    return f"{of_all}.{of_each}"


def signed(row: R) -> R:
    """The row with its digest."""
    return replace(row, digest=of(row))


def check(row: StoredRow, where: str) -> None:
    """Raise unless a stored row agrees with its digest.

    Args:
        row: as it was read.
        where: the file and the row, for the message.

    Raises:
        UserError: it does not; the message names the edited fields.
    """
    today = of(row)
    if row.digest == today:
        return
    if len(row.digest) != len(today):
        raise UserError(f"{where}: its digest is missing or cut short; check the file out again")
    edited = []
    for i, (name, value) in enumerate(row.signed().items()):
        start = WHOLE + 1 + EACH * i  # after the digits over all fields, and the dot
        if today[start : start + EACH] != row.digest[start : start + EACH]:
            edited.append(f"{name} is {value!r:.60}")
    difference = ", ".join(edited) or "its digest is another"
    raise UserError(
        f"{where}: edited after it was accepted: {difference}; check the file out again, or measure it again"
    )


@cache
def _of_field(name: str, value: str) -> str:
    digest = hashlib.sha256(f"{name}={value}".encode()).digest()
    return base64.urlsafe_b64encode(digest)[:EACH].decode()
