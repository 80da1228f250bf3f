"""Files are whole or absent: write beside the target under a temporary name, sync, rename."""

import contextlib
import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from repro.errors import UserError

ROOT = Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def atomic(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it there when the block ends well, remove it when it does not.

    Raises:
        UserError: the folder cannot be written or the disk is full.
    """
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp" + path.suffix, dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(f"{path}: cannot be written ({error.strerror}); make {path.parent} writable") from None
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"{path}: the disk is full; free some space in {path.parent} and run again") from None
        raise
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_text(path: Path | str, text: str) -> None:
    """Write a text file atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sha256(path: Path | str) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def short_hash(text: str) -> str:
    """Eight hex digits of a text's SHA-256: enough to name a run."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]
