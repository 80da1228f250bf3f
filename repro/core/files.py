"""Atomic file writes: write next to the target under a temporary name, sync, rename; locks and hashes of files."""

import bz2
import contextlib
import csv
import errno
import fcntl
import hashlib
import io
import lzma
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from repro.core.errors import UserError, shortened

ROOT = Path(__file__).resolve().parents[2]  # where the package is
# Where specs, scales, results and the Snakefile are: there too in a checkout; an installed package has copies.
HOME = ROOT if (ROOT / "Snakefile").is_file() else ROOT / "repro" / "checkout"
UNPACK = {".xz": lzma.decompress, ".bz2": bz2.decompress}
XZ = 6 | lzma.PRESET_EXTREME  # one preset, so that one text always is one file; larger ones gain nothing below 8 MiB


@contextlib.contextmanager
def atomic(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it there when the block ends well, remove it when it does not.

    Raises:
        UserError: the folder cannot be written or the disk is full.
    """
    path = Path(path)
    temporary = None
    try:
        with writing(path):
            with making(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp" + path.suffix, dir=path.parent)
            os.close(handle)
            temporary = Path(name)
            yield temporary
            with open(temporary, "rb") as written:
                os.fsync(written.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def one_at_a_time(path: Path | str) -> Iterator[None]:
    """Let one writer at a time run the block, which reads a file, changes its content and writes it; others wait.

    The lock is on the file's folder, since every atomic write replaces the file; it ends with the process. A block may
    not take the lock of another file in the same folder: it would wait for itself.

    Raises:
        UserError: there is no such folder and none can be made.
    """
    folder = Path(path).parent
    with making(path):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turn an error of the block that means that `path` cannot be written into one sentence.

    Raises:
        UserError: the folder cannot be written, something else is in its place, or the disk is full.
    """
    path = Path(path)
    try:
        yield
    except Exception as error:
        match = re.search(r"\(os error (\d+)\)", str(error))  # safetensors gives the system's number in words alone
        number = int(match[1]) if match else None
        if isinstance(error, OSError):
            number = error.errno
        if number in (errno.EACCES, errno.EPERM, errno.EROFS):
            problem = f"{path}: cannot be written ({os.strerror(number)}); make {path.parent} writable"
        elif number in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EBUSY):
            problem = f"{path}: cannot be written, a file or folder is in its place; move it away"
        elif number in (errno.ENOSPC, errno.EDQUOT):
            problem = f"{path}: the disk is full; free some space in {path.parent} and run again"
        elif number == errno.ENAMETOOLONG:
            problem = f"{shortened(path)}: cannot be written, the name is too long; choose a shorter one"
        else:
            raise
        raise UserError(problem) from None


@contextlib.contextmanager
def making(path: Path | str) -> Iterator[None]:
    """Turn every system error of the block, which creates `path` or its folder, into one sentence.

    Use it only for a block that does nothing else: unlike `writing`, it takes every system error for one of `path`.

    Raises:
        UserError: it cannot be created, such as below /proc.
    """
    try:
        with writing(path):
            yield
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise UserError(f"{shortened(path, 200)}: cannot be created ({why}); choose another path") from None


def unreadable(path: Path | str, error: OSError, remedy: str = "") -> UserError:
    """The sentence for a file that the system does not let this process read.

    Args:
        path: the file.
        error: why.
        remedy: what would be right, such as "name a text file".
    """
    why = os.strerror(error.errno) if error.errno else str(error)  # libraries put more than that into `strerror`
    problem = f"{shortened(path, 200)}: cannot be read ({why})"
    return UserError(f"{problem}; {remedy}" if remedy else problem)


@contextlib.contextmanager
def reading(path: Path | str, remedy: str = "") -> Iterator[None]:
    """Turn a system error of the block, which reads `path`, into one sentence, so that none is taken for bad content.

    A missing file stays a FileNotFoundError; an error without a number, by which libraries mean the content, passes.

    Raises:
        UserError: the file may not be read, is a folder, or its disk fails.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if not error.errno:
            raise
        raise unreadable(path, error, remedy) from None


def regular(path: Path | str, named: str = "") -> Path:
    """The path of a file to be read; refuses named pipes, sockets and devices, which could block forever.

    A missing path or a folder passes: opening it raises.

    Args:
        path: the file.
        named: how a message names it, such as `--text my.txt`; by default by its path.

    Raises:
        UserError: something else than a regular file is there.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return Path(path)
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kind = "a device"
        if stat.S_ISFIFO(mode):
            kind = "a named pipe"
        elif stat.S_ISSOCK(mode):
            kind = "a socket"
        raise UserError(f"{shortened(named or path, 200)}: {kind}, not a regular file; name a file on a disk")
    return Path(path)


def check_replaceable(path: Path, named: str, is_ours: Callable[[Path], bool]) -> None:
    """Raise if a command would replace a file that it did not write itself.

    Args:
        path: the file that the command is to write.
        named: the option that names it, such as `--out`.
        is_ours: tells by its contents whether a regular file was written by this command.

    Raises:
        UserError: something else is there.
    """
    if not os.path.lexists(path):
        return
    if path.is_dir() and not path.is_symlink():  # what writes the file says that a folder is in its place
        return
    if path.is_symlink() or not path.is_file() or not is_ours(path):
        problem = f"{named} {shortened(path, 200)}: exists, and this command did not write it"
        raise UserError(f"{problem}; choose another name")


def csv_text(lines: Iterable[Iterable[object]]) -> str:
    """Lines as CSV text, ended by newlines."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()


def write_text(path: Path | str, text: str) -> None:
    """Write a text file atomically, compressed if its name ends in `.xz`."""
    data = text.encode("utf-8")
    if Path(path).suffix == ".xz":
        data = lzma.compress(data, preset=XZ)
    with atomic(path) as temporary:
        temporary.write_bytes(data)


def read_text(path: Path | str) -> str:
    """The text of a file with its line ends as they are, unpacked as by `unpacked`.

    Raises:
        OSError: it cannot be read.
        UserError: no regular file, not UTF-8, or not whole.
    """
    data = unpacked(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file in UTF-8") from None


def unpacked(path: Path | str) -> bytes:
    """The bytes of a file, unpacked where its name ends in `.xz` or `.bz2`.

    Raises:
        OSError: it cannot be read.
        UserError: no regular file, or not whole.
    """
    data = regular(path).read_bytes()
    ending = Path(path).suffix
    if ending not in UNPACK:
        return data
    try:
        return UNPACK[ending](data)
    except (lzma.LZMAError, OSError, ValueError):  # bz2 raises the last two
        raise UserError(f"{path}: an incomplete or damaged file in {ending[1:]}; check it out again") from None


def sha256(path: Path | str) -> str:
    """Hex SHA-256 of a file's bytes.

    Raises:
        UserError: no regular file.
    """
    with open(regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def short_hash(text: str) -> str:
    """Eight hex digits of a text's SHA-256: enough to name a run."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]
