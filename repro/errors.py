"""What goes wrong because of the input: one clear sentence and exit code 2, never a traceback."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input. The message names the file, key or value and says what would be right."""


def unknown(kind: str, name: object, known: Iterable[str]) -> UserError:
    """The error for a name that is not in a dict: says what was close, and what there is."""
    known = sorted(map(str, known))
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    shown = known if len(known) <= 40 else known[:12]
    listed = ", ".join(shown) + (", …" if len(known) > len(shown) else "")
    return UserError(f"unknown {kind} {str(name)!r}: {hint}there is {listed or 'none yet'}")
