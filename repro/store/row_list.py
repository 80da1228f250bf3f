"""Files of accepted rows in results/, read and written; a missing, an additional and an edited row are detected.

`rows.json` has a digest of the keys of each file. While a file is written, it has two, from before and after, so that
the file is a listed one whenever writing is interrupted.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from repro.core.errors import UserError
from repro.core.files import write_text
from repro.store import row_digest
from repro.store.stored_row import R, StoredRow, from_csv, to_csv

NAME = "rows.json"


def digest(rows: Iterable[StoredRow]) -> str:
    """16 hex digits of the keys of rows."""
    keys = sorted("\0".join(map(str, row.key)) for row in rows)
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16]


def listed(folder: Path) -> dict[str, list[str]]:
    """The digests of a device's files by name; empty if there is no list.

    Raises:
        UserError: the list is damaged.
    """
    path = folder / NAME
    if not path.is_file():
        return {}
    try:
        digests_by_file = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise UserError(f"{path}: not a JSON mapping; check it out again") from None
    if not all(isinstance(digests, list) for digests in digests_by_file.values()):
        raise UserError(f"{path}: not lists of digests by file; check it out again")
    return digests_by_file


def check(path: Path, rows: Iterable[StoredRow]) -> None:
    """Raise unless a file has the rows that were accepted.

    Raises:
        UserError: a row is missing or was added, or the file is not listed.
    """
    if digest(rows) not in listed(path.parent).get(path.name, ()):
        raise UserError(f"{path}: it has other rows than were accepted ({path.parent / NAME}); check both out again")


def is_stored(path: Path) -> bool:
    """Whether a file of accepted rows is there, or is listed and missing."""
    return path.is_file() or path.name in listed(path.parent)


def read(path: Path, of: type[R]) -> list[R]:
    """The rows of an accepted file, checked and without their digests.

    Raises:
        UserError: a row that was edited, belongs in another file, or is given twice; or a row is missing or was added.
    """
    rows = []
    keys = set()
    for row in from_csv(path, of):
        where = f"{path}: {row.where_stored}"
        row_digest.check(row, where)
        if row.stored_as != Path(*path.parts[-2:]):
            raise UserError(f"{where} on {row.device or 'no device'} does not belong in this file")
        if row.key in keys:
            raise UserError(f"{where} is given twice; check the file out again")
        keys.add(row.key)
        rows.append(replace(row, digest=""))
    check(path, rows)
    return rows


def write(path: Path, rows: Sequence[StoredRow]) -> None:
    """Write the rows of a file with their digests, and its entry in the list; without rows, remove both."""
    before = listed(path.parent)
    after = digest(rows)
    _write_list(path.parent, before | {path.name: [*before.get(path.name, []), after]})
    if rows:
        write_text(path, to_csv(map(row_digest.signed, rows), type(rows[0])))
        _write_list(path.parent, before | {path.name: [after]})
    else:
        path.unlink(missing_ok=True)
        _write_list(path.parent, {name: digests for name, digests in before.items() if name != path.name})


def _write_list(folder: Path, digests: Mapping[str, list[str]]) -> None:
    lines = [f"{json.dumps(name)}: {json.dumps(of_file)}" for name, of_file in sorted(digests.items())]
    write_text(folder / NAME, "{\n" + ",\n".join(lines) + "\n}\n")
