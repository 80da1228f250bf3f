"""Columns that fit a page: wrapped heads, narrow text columns, panels; in points or in characters."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from math import ceil

Measure = Callable[[str], float]  # the width of a text


class MeasuredText(str):
    """Text of a measured value; `latex` sets its leading number in bold."""


@dataclass(frozen=True)
class TextGrid:
    """A table as lines of text; `body` has the lines of each row, and a section is one line with one text."""

    head: list[str]
    body: list[list[list[str]]]
    left: int


@dataclass(frozen=True)
class ColumnPlan:
    """Columns that fit a page; text columns may be narrower than their texts, which then are wrapped.

    Attributes:
        heads: the lines of each column's heading.
        widths: of each column.
        panels: the value columns of each panel; every panel repeats the text columns.
        totals: the width of each panel.
    """

    grid: TextGrid
    heads: list[list[str]]
    widths: list[float]
    panels: list[list[int]]
    totals: list[float]


def fit(grid: TextGrid, measure: Measure, page: float, gap: float) -> ColumnPlan:
    """Wrap heads, narrow the text columns, and split the value columns into panels if the page is too narrow."""
    left = grid.left
    count = len(grid.head)
    most = 0.45 * page  # of one value; a longer one is broken
    body = []
    for block in grid.body:
        if len(block[0]) == 1:
            body.append(block)
            continue
        folded: list[list[str]] = []
        for line in block:
            folded += _fold_values(line, left, most, measure)
        body.append(folded)
    lines = [line for line in chain(*body) if len(line) > 1]
    natural = [max((measure(line[i]) for line in lines), default=0.0) for i in range(count)]
    heads = []
    for i, text in enumerate(grid.head):
        word = min(most, max((measure(type(text)(word)) for word in text.split()), default=0.0))
        heads.append([text] if i < left else fold(text, max(natural[i], word), measure))
        natural[i] = max(natural[i], *map(measure, heads[i]))

    texts, values = natural[:left], natural[left:]
    room = page - sum(values) - gap * (count - 1)
    least = 0.3 * page if values else 0.0  # what text columns get before there are more panels
    texts = shrink(texts, room if room >= min(sum(texts), least) else least)
    widths = texts + values

    def total(columns: Sequence[int]) -> float:
        wide = [*texts, *(widths[i] for i in columns)]
        return sum(wide) + gap * (len(wide) - 1)

    def split(limit: int) -> list[list[int]]:
        panels = []
        columns = list(range(left, count))
        while columns:
            n = min(limit, len(columns))
            while n > 1 and total(columns[:n]) > page + 1e-6:
                n -= 1
            panels.append(columns[:n])
            columns = columns[n:]
        return panels

    panels = split(count)
    even = ceil(len(values) / len(panels)) if panels else 0
    panels = next((p for limit in range(even, count) if len(p := split(limit)) <= len(panels)), panels) or [[]]
    return ColumnPlan(TextGrid(grid.head, body, left), heads, widths, panels, list(map(total, panels)))


def fold(text: str, width: float, measure: Measure) -> list[str]:
    """Break a text into lines of at most `width`, at blanks or inside wider words.

    Of a `MeasuredText` the first line is one, too.
    """
    lines, rest = [], text
    while measure(rest) > width + 1e-6:
        n = max(1, bisect_right(range(1, len(rest)), width, key=lambda end: measure(rest[:end].rstrip())))
        blank = rest.rfind(" ", 1, n + 1)
        n = blank if blank > 0 else n
        if n >= len(rest):
            break
        lines.append(rest[:n].rstrip())
        rest = rest[n:].lstrip()
    lines.append(rest)
    return [type(text)(lines[0]), *map(str, lines[1:])]


def of_panel(plan: ColumnPlan, columns: Sequence[int]) -> list[list[list[str]]]:
    """The part of the grid's body that a panel shows: lines with a value in its columns, and sections with such lines.

    If the printed values of a row are all in other panels, its label moves to its measured values.
    """
    if len(plan.panels) == 1:
        return plan.grid.body
    left = plan.grid.left
    sections: list[list[list[list[str]]]] = [[]]
    for block in plan.grid.body:
        if len(block[0]) == 1:
            sections.append([block])
            continue
        lines = [line for line in block if any(line[i] for i in columns)]
        if lines:
            sections[-1].append([[*block[0][:left], *lines[0][left:]], *lines[1:]])
    body = []
    for section in sections:
        title_alone = len(section) == 1 and len(section[0][0]) == 1
        body += [] if title_alone else section
    return body


def shrink(widths: Sequence[float], budget: float) -> list[float]:
    """Narrow the widest widths to a common one so that the sum is at most `budget`."""
    for n, width in enumerate(order := sorted(widths)):
        level = (budget - sum(order[:n])) / (len(order) - n)
        if width > level:
            return [min(w, level) for w in widths]
    return list(widths)


def _fold_values(line: list[str], left: int, width: float, measure: Measure) -> list[list[str]]:
    cells = [fold(text, width, measure) if i >= left else [text] for i, text in enumerate(line)]
    return [list(deep) for deep in zip_longest(*cells, fillvalue="")]
