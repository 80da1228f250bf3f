"""One table, three texts: LaTeX (booktabs alone), Markdown and the terminal."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field

SPECIAL = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
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
    table = [line for line in lines if line.startswith("| ")]
    cells = [[c.strip().replace("\\|", "|") for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]
    rule = next(
        line
        for line in lines
        if line.startswith("|") and not line.startswith("| -") and "---" in line or "| --- |" in line
    )
    left = sum(not part.strip().endswith(":") for part in rule.strip("|").split("|"))
    body = [row for row in cells[1:] if not set("".join(row)) <= set("-: ")]
    rows = [[row[0][1:-1]] if row[0].startswith("*") and not any(row[1:]) else row for row in body]
    notes = [line for line in lines[len(table) :] if line and not line.startswith("|")]
    return Sheet(title.strip("*"), cells[0], rows, notes, left=left)


def terminal(sheet: Sheet, width: int | None = None) -> str:
    """Aligned columns; the first text column is cut where the terminal is too narrow."""
    width = width or max(80, shutil.get_terminal_size((160, 40)).columns)
    body = [row for row in sheet.rows if len(row) > 1]
    wide = [max(len(row[i]) for row in (sheet.head, *body)) for i in range(len(sheet.head))]
    excess = sum(wide) + 2 * (len(wide) - 1) - width
    if excess > 0:
        longest = max(range(len(wide)), key=lambda i: wide[i] if i < sheet.left else 0)
        wide[longest] = max(16, wide[longest] - excess)

    def line(row: Sequence[str]) -> str:
        cells = [cell if len(cell) <= w else cell[: w - 1] + "…" for cell, w in zip(row, wide)]
        return "  ".join(
            c.ljust(w) if i < sheet.left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, wide))
        ).rstrip()

    rule = "─" * min(width, sum(wide) + 2 * (len(wide) - 1))
    lines = [sheet.title, rule, line(sheet.head), rule]
    lines += [f"· {row[0]}" if len(row) == 1 else line(row) for row in sheet.rows]
    return "\n".join([*lines, rule, *sheet.notes, ""])


def _tex(text: str) -> str:
    return "".join(SPECIAL.get(c, c) for c in text)


def _tex_row(row: Sequence[str]) -> str:
    return " & ".join(_tex(cell) for cell in row) + r" \\"
