"""User-facing errors: one clear sentence and exit code 2, never a traceback."""

import contextlib
import difflib
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

LISTED, LONGEST = 220, 390  # characters of a list of names, and of a whole sentence


class UserError(Exception):
    """Bad input. The message names the file, key or value and says what would be right."""


class NotMeasurable(UserError):
    """Valid input that cannot be measured: a result with a status (`unsupported`, `diverged`, `oom`, `too_long`)."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Crowded(UserError):
    """Too little GPU memory because other programs use it: no result; the job is to be run again with fewer of them."""


def unknown(kind: str, name: object, known: Iterable[str]) -> UserError:
    """The error for an unknown name: suggests the closest known one and lists the others."""
    known = sorted(set(map(str, known)))
    wrong = shortened(name)
    close = difflib.get_close_matches(wrong, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    listed = ", ".join(known)
    if len(listed) > LISTED:
        listed = f"{listed[:LISTED].rpartition(', ')[0] or listed[:LISTED]}, …"
    return UserError(f"unknown {kind} {wrong!r}; {hint}choose from: {listed or 'none yet'}")


def at_least(config: object, **least: float) -> None:
    """Check the least values of fields of a configuration; a field that is None is not checked.

    Args:
        config: the configuration.
        least: field to its least value.

    Raises:
        UserError: a smaller value.
    """
    for name, lowest in least.items():
        value = getattr(config, name)
        if value is not None and value < lowest:
            raise UserError(f"{name} is {value}; it must be {lowest} or more")


def shortened(text: object, most: int = 60) -> str:
    """A value as a message shows it: at most `most` characters, cut with an ellipsis."""
    text = str(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def sentence(error: UserError) -> str:
    """The one line that is printed to stderr for bad input."""
    return f"error: {shortened(' '.join(str(error).split()), LONGEST)}"


@contextlib.contextmanager
def logged(path: Path | str, what: str) -> Iterator[None]:
    """Write what the block prints to the file `path`; an error in it ends the process with one sentence on stderr.

    Args:
        path: the log; for an error that is not a `UserError` it has the traceback.
        what: name of what failed, for the message of such an error.
    """
    with open(path, "w", encoding="utf-8") as log:
        try:
            with contextlib.redirect_stderr(log), contextlib.redirect_stdout(log):
                yield
        except UserError as error:
            message = sentence(error)
        except Exception as error:
            traceback.print_exc(file=log)
            why = shortened(" ".join(f"{type(error).__name__}: {error}".split()), 300)
            message = f"error: {what}: {why}; the traceback is in {path}"
        else:
            return
        print(message, file=log)
    sys.exit(message)
