"""Lists of the rows of each file in results/, by which a missing or an additional row is detected.

`rows.json` holds a digest of the keys of each file. While a file is written it holds two, of before and after, so that
whenever writing is interrupted the file is one of those that are listed.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from repro.core.errors import UserError
from repro.core.files import write_text
from repro.store import row_digest
from repro.store.row_digest import StoredRow

NAME = "rows.json"
ENDING = ".csv.xz"  # of a file of accepted rows; `xzcat` shows its lines


def digest(rows: Iterable[StoredRow]) -> str:
    """16 hex digits of the keys of rows."""
    keys = sorted("\0".join(map(str, row.key)) for row in rows)
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16]


def listed(folder: Path) -> dict[str, list[str]]:
    """The digests of a device's files by their names; empty where there is no list.

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
        UserError: a row is gone or new, or the file is not listed.
    """
    if digest(rows) not in listed(path.parent).get(path.name, ()):
        raise UserError(f"{path}: it has other rows than were accepted ({path.parent / NAME}); check both out again")


def write(path: Path, rows: Sequence[StoredRow], to_csv: Callable[[Iterable[StoredRow]], str]) -> None:
    """Sign the rows of a file and write it with its entry in the list; without rows both go."""
    before, after = listed(path.parent), digest(rows)
    _write_list(path.parent, before | {path.name: [*before.get(path.name, []), after]})
    if rows:
        write_text(path, to_csv(map(row_digest.signed, rows)))
        _write_list(path.parent, before | {path.name: [after]})
    else:
        path.unlink(missing_ok=True)
        _write_list(path.parent, {name: digests for name, digests in before.items() if name != path.name})


def _write_list(folder: Path, digests: Mapping[str, list[str]]) -> None:
    lines = [f"{json.dumps(name)}: {json.dumps(of_file)}" for name, of_file in sorted(digests.items())]
    write_text(folder / NAME, "{\n" + ",\n".join(lines) + "\n}\n")
