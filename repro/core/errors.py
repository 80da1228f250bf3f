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
    """What cannot be done with valid input: a result with a status (`unsupported`, `diverged`, `oom`, `too_long`)."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Crowded(UserError):
    """Too little memory that other programs use, too: no result, and to be run again with more room."""


def unknown(kind: str, name: object, known: Iterable[str]) -> UserError:
    """The error for a name that is not in a dict: says what was close, and what there is."""
    known = sorted(set(map(str, known)))
    given = shortened(name)
    close = difflib.get_close_matches(given, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    listed = ", ".join(known)
    if len(listed) > LISTED:
        listed = f"{listed[:LISTED].rpartition(', ')[0] or listed[:LISTED]}, …"
    return UserError(f"unknown {kind} {given!r}; {hint}choose from: {listed or 'none yet'}")


def at_least(config: object, **least: float) -> None:
    """Check that fields of a configuration are as large as they have to be; one that is None is left open.

    Args:
        config: whose fields are checked.
        least: the least value of each field by its name.

    Raises:
        UserError: a smaller value.
    """
    for name, lowest in least.items():
        value = getattr(config, name)
        if value is not None and value < lowest:
            raise UserError(f"{name} is {value}; it must be {lowest} or more")


def shortened(text: object, most: int = 60) -> str:
    """A value as it stands in a message: the start of a long one."""
    text = str(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def sentence(error: UserError) -> str:
    """The one line on stderr with which bad input ends."""
    return f"error: {shortened(' '.join(str(error).split()), LONGEST)}"


@contextlib.contextmanager
def logged(path: Path | str, what: str) -> Iterator[None]:
    """What the block prints goes to the file `path`; what goes wrong in it ends the process with a sentence on stderr.

    Args:
        what: what failed, where the error is none of the input; its traceback is in the file.
    """
    with open(path, "w", encoding="utf-8") as log:
        try:
            with contextlib.redirect_stderr(log), contextlib.redirect_stdout(log):
                yield
        except UserError as error:
            said = sentence(error)
        except Exception as error:
            traceback.print_exc(file=log)
            why = shortened(" ".join(f"{type(error).__name__}: {error}".split()), 300)
            said = f"error: {what}: {why}; the traceback is in {path}"
        else:
            return
        print(said, file=log)
    sys.exit(said)
