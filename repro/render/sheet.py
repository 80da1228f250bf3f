"""A table to show: printed and measured cells, as Markdown and as terminal text (`latex.py` has the third format)."""

import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from math import ceil, floor
from operator import itemgetter
from typing import NamedTuple

from repro.render.text_grid import ColumnPlan, MeasuredText, TextGrid, fit, fold, of_panel

HERE = "here"  # labels measured values: the second line of a row, or the column next to a printed one
SIDE_BY_SIDE = 6  # with up to this many measured columns, measured values are next to printed ones, else below them
MARKED = f"*{HERE}*"
NARROWEST = 60  # characters that a terminal is taken to have at least


class Pair(NamedTuple):
    """The printed and the measured text of a cell; empty if there is none."""

    printed: str
    here: str


@dataclass(frozen=True)
class Sheet:
    """A table to show.

    Args:
        head: one text per column.
        rows: each has one cell per column, or a single text, the heading of a section. The first `left` cells are text,
            the others text or a `Pair`. If any `Pair` has a measured text, every plain value x becomes `Pair(x, "")`;
            otherwise pairs become plain text. White space is collapsed.
        notes: paragraphs below the table.
        left: number of leading columns that are text, left-aligned and wrapped.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str | Pair]]
    notes: Sequence[str] = field(default=())
    left: int = 1

    def __post_init__(self) -> None:
        paired = any(isinstance(cell, Pair) and cell.here.strip() for cell in chain.from_iterable(self.rows))

        def clean(row: Sequence[str | Pair]) -> list[str | Pair]:
            if len(row) not in (1, len(self.head)):
                raise ValueError(f"{len(row)} cells in a row of {len(self.head)} columns: {row}")
            cells: list[str | Pair] = []
            for i, cell in enumerate(row):
                pair = Pair(*map(_one_line, cell)) if isinstance(cell, Pair) else Pair(_one_line(cell), "")
                is_value = paired and len(row) > 1 and i >= self.left
                cells.append(pair if is_value else pair.printed)
            return cells

        fields = {
            "title": _one_line(self.title),
            "head": [_one_line(text) for text in self.head],
            "rows": [clean(row) for row in self.rows],
            "notes": [text for note in self.notes if (text := _one_line(note))],
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def paired(self) -> bool:
        """Whether rows hold pairs."""
        return any(isinstance(cell, Pair) for cell in chain.from_iterable(self.rows))


# --- one line or more per row -----------------------------------------------------------------------------------------


def grids(sheet: Sheet, short: bool = False) -> list[TextGrid]:
    """The arrangements to choose from, the preferred one first."""
    if not sheet.paired:
        return [under(sheet)]
    rows = [row for row in sheet.rows if len(row) > 1]
    measured_columns = 0
    for i in range(sheet.left, len(sheet.head)):
        measured_columns += any(row[i].here for row in rows)
    arrangements = [side_by_side(sheet)] if measured_columns <= SIDE_BY_SIDE else []
    return [*arrangements, under(sheet, folded=False, short=short), under(sheet, folded=True, short=short)]


def side_by_side(sheet: Sheet) -> TextGrid:
    """Measured values in columns of their own, next to the printed ones."""
    rows = [row for row in sheet.rows if len(row) > 1]
    head: list[str] = list(sheet.head[: sheet.left])
    columns: list[Callable[[Sequence[str | Pair]], str]] = [itemgetter(i) for i in range(sheet.left)]
    for i in range(sheet.left, len(sheet.head)):
        text = sheet.head[i]
        has_printed = any(row[i].printed for row in rows)
        has_measured = any(row[i].here for row in rows)
        only_measured = has_measured and not has_printed and text not in ("", HERE)
        if not only_measured:
            head.append(text)
            columns.append(lambda row, i=i: row[i].printed)
        if has_measured:
            head.append(MeasuredText(text if only_measured else HERE))
            columns.append(lambda row, i=i: MeasuredText(row[i].here))
    body = []
    for row in sheet.rows:
        is_section = len(row) == 1
        body.append([[row[0]] if is_section else [cell_of(row) for cell_of in columns]])
    return TextGrid(head, body, sheet.left)


def under(sheet: Sheet, folded: bool = False, short: bool = False) -> TextGrid:
    """Measured values on a second line, labelled `here`.

    Args:
        folded: break a measured value before its interval; what follows the interval stays on the first line.
        short: one line for a row without printed values.
    """
    body = []
    for row in sheet.rows:
        label = list(row[: sheet.left])
        pairs = row[sheet.left :]
        if len(row) == 1 or not sheet.paired or not any(pair.here for pair in pairs):
            body.append([[c.printed if isinstance(c, Pair) else c for c in row]])
            continue
        cells = [_folded(pair.here) if folded else [pair.here] for pair in pairs]
        first, *more = zip_longest(*cells, fillvalue="")
        blank = [""] * (sheet.left - 1)
        measured = [MeasuredText(text) for text in first]
        if short and not any(pair.printed for pair in pairs):
            lines = [[*label, *measured]]
        else:
            lines = [[*label, *(pair.printed for pair in pairs)], [MeasuredText(HERE), *blank, *measured]]
        body.append(lines + [["", *blank, *line] for line in more])
    return TextGrid(list(sheet.head), body, sheet.left)


def _folded(text: str) -> list[str]:
    """`×1.12 [1.11, 1.13]; 30.8` as `×1.12; 30.8` and, on a line of its own, the interval."""
    parts = re.fullmatch(r"([^[]*) (\[[^]]*\])(.*)", text)
    return [parts[1] + parts[3], parts[2]] if parts else [text]


# --- Markdown ---------------------------------------------------------------------------------------------------------


def markdown(sheet: Sheet) -> str:
    """A Markdown table under its title; `read_markdown` reads it back.

    Measured values stand in columns headed `*here*`, or in lines labelled so.
    """
    grid = grids(sheet)[0]
    heads = [_escape(text, "*") for text in grid.head]
    for i, text in enumerate(grid.head):
        if isinstance(text, MeasuredText):
            heads[i] = MARKED if text == HERE else f"{heads[i]} {MARKED}"
    rows = [heads, ["---" if i < sheet.left else "---:" for i in range(len(heads))]]
    for block in grid.body:
        if len(block[0]) == 1:
            rows.append([f"*{_escape(block[0][0])}*", *[""] * (len(heads) - 1)])
        else:
            first, *more = [[_escape(cell, first="*") for cell in line] for line in block]
            rows += [first, *([MARKED, *line[1:]] for line in more)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"**{sheet.title}**", "", *lines, *(f"\n{note}" for note in sheet.notes), ""])


def _cells_of(line: str) -> list[str]:
    """The cells of a line of a Markdown table, in which `\\|` is no border."""
    cells = re.findall(r"((?:\\.|[^|\\])*)\|", line[1:])
    return [cell.strip() for cell in cells]


def read_markdown(text: str) -> Sheet:
    """The sheet that `markdown` wrote."""
    title, _, *lines = text.splitlines()
    table = lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    raw, rule, *body = [_cells_of(line) for line in table]
    if not all(re.fullmatch("-+:?", part) for part in rule) or {len(cells) for cells in [rule, *body]} != {len(raw)}:
        raise ValueError("its lines have different numbers of cells")
    left = sum(not part.endswith(":") for part in rule)
    columns: list[tuple[int | None, int | None]] = []  # where each column's printed and its measured values stand
    for i, head in enumerate(raw):
        if head == MARKED:
            columns[-1] = (i - 1, i)
        else:
            columns.append((None, i) if head.endswith(MARKED) else (i, None))
    heads = [raw_i if p is None else p for p, raw_i in columns]
    rows: list[list[str | Pair]] = []
    for cells in body:
        texts = [_plain(cell) for cell in cells]
        if cells[0].startswith("*") and len(cells) > 1 and not any(cells[1:]) or len(cells) == 1:
            rows.append([_plain(cells[0][1:-1])])
        elif cells[0] == MARKED:
            rows[-1] = [*rows[-1][:left], *(Pair(p.printed, t) for p, t in zip(rows[-1][left:], texts[left:]))]
        else:
            pairs = [Pair("" if p is None else texts[p], "" if m is None else texts[m]) for p, m in columns[left:]]
            rows.append([*texts[:left], *pairs])
    head = [_plain(raw[i].removesuffix(f" {MARKED}")) for i in heads]
    return Sheet(title[2:-2], head, rows, [line for line in lines[len(table) :] if line], left)


def _escape(text: str, always: str = "", first: str = "") -> str:
    text = re.sub(rf"[\\|<{always}]", r"\\\g<0>", text)
    return "\\" + text if first and text.startswith(first) else text


def _plain(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


# --- terminal ---------------------------------------------------------------------------------------------------------


def terminal(sheet: Sheet, width: int | None = None) -> str:
    """A sheet as aligned columns of at most `width` characters, by default the terminal's width.

    Text is wrapped first; columns that still do not fit go below, in further panels.
    """
    width = max(NARROWEST, width or shutil.get_terminal_size((120, 40)).columns)
    plans = [fit(grid, len, width, 2) for grid in grids(sheet)]
    plan = next((plan for plan in plans if len(plan.panels) == 1), plans[-1])
    rule = "─" * min(width, ceil(max(plan.totals)))
    text = [*textwrap.wrap(sheet.title, width), rule]
    for columns in plan.panels:
        text += [*_panel(plan, columns, rule, width), rule]
    for note in sheet.notes:
        text += textwrap.wrap(note, width)
    return "\n".join([*text, ""])


def _panel(plan: ColumnPlan, columns: list[int], rule: str, width: int) -> list[str]:
    """One panel's lines, from its head to its last row."""
    left = plan.grid.left
    wide = {i: max(1, floor(w)) if w else 0 for i, w in enumerate(plan.widths)}  # 0: a column of empty texts
    shown = [*range(left), *columns]

    def lines(line: Sequence[str]) -> list[str]:
        cells = [fold(line[i], wide[i], len) if i < left else [line[i]] for i in shown]
        return [joined(part) for part in zip_longest(*cells, fillvalue="")]

    def joined(part: Sequence[str]) -> str:
        words = [i < left and not isinstance(cell, MeasuredText) for i, cell in zip(shown, part)]
        sides = [c.ljust(wide[i]) if word else c.rjust(wide[i]) for i, c, word in zip(shown, part, words)]
        return "  ".join(sides).rstrip()

    heads = [fold(plan.heads[i][0], wide[i], len) if i < left else plan.heads[i] for i in shown]
    deep = max(map(len, heads))
    aligned_heads = [[""] * (deep - len(head)) + head for head in heads]
    out = [*map(joined, zip(*aligned_heads)), rule]
    for block in of_panel(plan, columns):
        if len(block[0]) == 1:
            out += textwrap.wrap(f"· {block[0][0]}", width)
        else:
            for line in block:
                out += lines(line)
    return out


def _one_line(text: str) -> str:
    return " ".join(text.split())
