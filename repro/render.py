"""One table, three texts: LaTeX (booktabs alone), Markdown and the terminal."""

import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

NARROWEST = 12  # characters that a text column keeps

SPECIAL = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "|": r"\textbar{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "–": "--",
    "—": "---",
    "…": r"\ldots{}",
    "×": r"$\times$",
    "→": r"$\to$",
    "±": r"$\pm$",
    "≥": r"$\ge$",
    "≤": r"$\le$",
}


@dataclass(frozen=True)
class Sheet:
    """A table to show: `rows` hold cells, or one text alone that heads a section; the first `left` columns are text."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default=())
    left: int = 1
    widths: Sequence[str] = field(default=())


def latex(sheet: Sheet) -> str:
    """A LaTeX `table` environment that needs booktabs and nothing else."""
    columns = "".join(sheet.widths) or "l" * sheet.left + "r" * (len(sheet.head) - sheet.left)
    lines = [r"\begin{table}", r"\centering", r"\footnotesize", rf"\caption{{{_tex(sheet.title)}}}"]
    lines += [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", _tex_row(sheet.head), r"\midrule"]
    for i, row in enumerate(sheet.rows):
        if len(row) == 1:
            lines += [r"\midrule"] if i else []
            lines.append(rf"\multicolumn{{{len(sheet.head)}}}{{l}}{{\textit{{{_tex(row[0])}}}}} \\")
        else:
            lines.append(_tex_row(row))
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\smallskip\raggedright {_tex(note)}" for note in sheet.notes]
    return "\n".join([*lines, r"\end{table}", ""])


def markdown(sheet: Sheet) -> str:
    """A Markdown table under its title."""
    lines = [f"**{sheet.title}**", ""]
    body = [[f"*{row[0]}*", *[""] * (len(sheet.head) - 1)] if len(row) == 1 else row for row in sheet.rows]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in (sheet.head, *body)]
    lines.append("| " + " | ".join(escaped[0]) + " |")
    lines.append("|" + "|".join(" --- " if i < sheet.left else " ---: " for i in range(len(sheet.head))) + "|")
    lines += ["| " + " | ".join(row) + " |" for row in escaped[1:]]
    lines += [f"\n{note}" for note in sheet.notes]
    return "\n".join([*lines, ""])


def read_markdown(text: str) -> Sheet:
    """The sheet that `markdown` wrote."""
    title, _, *lines = text.splitlines()
    table = lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    head, rule, *body = [[c.strip().replace("\\|", "|") for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]
    rows = [[row[0][1:-1]] if row[0].startswith("*") and len(row) > 1 and not any(row[1:]) else row for row in body]
    notes = [line for line in lines[len(table) :] if line]
    return Sheet(title[2:-2], head, rows, notes, left=sum(not part.endswith(":") for part in rule))


def terminal(sheet: Sheet, width: int | None = None) -> str:
    """Aligned columns; text columns are wrapped, the widest first, where the terminal is too narrow."""
    width = width or max(100, shutil.get_terminal_size((160, 40)).columns)
    body = [row for row in sheet.rows if len(row) > 1]
    wide = [max(1, *(len(row[i]) for row in (sheet.head, *body))) for i in range(len(sheet.head))]
    while sum(wide) + 2 * (len(wide) - 1) > width and max(wide[: sheet.left], default=0) > NARROWEST:
        wide[max(range(sheet.left), key=wide.__getitem__)] -= 1

    def lines(row: Sequence[str]) -> list[str]:
        cells = [textwrap.wrap(cell, w) if i < sheet.left else [cell] for i, (cell, w) in enumerate(zip(row, wide))]
        sides = [str.ljust if i < sheet.left else str.rjust for i in range(len(wide))]
        deep = zip_longest(*cells, fillvalue="")
        return ["  ".join(side(c, w) for side, c, w in zip(sides, line, wide)).rstrip() for line in deep]

    rule = "─" * min(width, sum(wide) + 2 * (len(wide) - 1))
    text = [sheet.title, rule, *lines(sheet.head), rule]
    for row in sheet.rows:
        text += [f"· {row[0]}"] if len(row) == 1 else lines(row)
    text += [rule, *(part for note in sheet.notes for part in textwrap.wrap(note, width))]
    return "\n".join([*text, ""])


def _tex(text: str) -> str:
    return "".join(SPECIAL.get(c, c) for c in text)


def _tex_row(row: Sequence[str]) -> str:
    text = " & ".join(_tex(cell) for cell in row) + r" \\"
    return "{}" + text if text[0] in "[*" else text  # the line above ends in a command that would read these
