"""Whether a thread runs at its processor's full pace, by the time that a fixed piece of Python takes.

A core of a rented machine is often one of two threads of a physical core, and what uses the other one is not seen from
here. While it does, everything takes 1.4 to 2 times as long, for a tenth of a second to ten, on whichever core, pinned
or not, and no counter of the system says so (docs/log.md, 2026-11-27).
"""

import math
import time
from collections.abc import Callable

SLOWER = 1.25  # times the least that the fixed piece may take: 1.0 to 1.2 at full pace (H200's host), else 1.45 to 2.1
TURNS = 1000


def fixed_piece() -> int:
    """What is timed: about 35 us at full pace."""
    total = 0
    for number in range(TURNS):
        total += number & 3
    return total


class Pace:
    """The pace of a process by its own looks at it; the fastest that it has seen is the full one.

    Attributes:
        least: seconds of the fixed piece in the fastest look.
    """

    def __init__(self, piece: Callable[[], object] = fixed_piece) -> None:
        self._piece = piece
        self.least = math.inf

    def is_full(self) -> bool:
        """Look at it now, twice, since one interrupt is no slow pace."""
        seconds = min(self._look(), self._look())
        self.least = min(self.least, seconds)
        return seconds <= SLOWER * self.least

    def _look(self) -> float:
        began = time.perf_counter()
        self._piece()
        return time.perf_counter() - began
