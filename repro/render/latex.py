"""A table as a LaTeX document that compiles alone and fits its page; needs texlive-latex-base and -recommended only.

Widths are estimated from the characters of Computer Modern and are 0 to 5 % too wide. Values of a column are aligned at
their decimal points, without a package: phantoms fill what a value lacks compared with the widest of its column.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain

from repro.render.sheet import Sheet, grids
from repro.render.text_grid import ColumnPlan, MeasuredText, TextGrid, fit, fold, of_panel

# Points at 10 pt, from cmr10.tfm.
OF_WIDTH = {
    2.78: "!',.:;[]`il", 3.06: "fj", 3.2: "|", 3.33: "- ", 3.61: "I", 3.89: "()t", 3.92: "r", 3.94: "s",
    4.44: "cez", 4.72: "?", 5.0: '"$*/0123456789ago', 5.1: "{}_^~\\", 5.14: "J", 5.28: "kqvxy", 5.56: "Sbdhnpu",
    6.11: "Z", 6.25: "L", 6.53: "F", 6.81: "EP", 7.08: "B", 7.22: "CTw", 7.36: "R", 7.5: "AHNUVXY", 7.64: "D",
    7.78: "&+=@KOQ<>", 7.85: "G", 8.33: "#%m", 9.17: "M", 10.28: "W",
}  # fmt: skip
WIDTHS: dict[str, float] = {}
for _width, _chars in OF_WIDTH.items():
    WIDTHS |= dict.fromkeys(_chars, _width)
BOLD = 1.2  # cmbx over cmr, for digits
# Each size as (command, its characters over those at 10 pt, points between columns); footnotesize is cmr8.
SIZES = (("footnotesize", 0.851, 8.0), ("scriptsize", 0.816, 6.0))
LINES = {"footnotesize": 9.5, "scriptsize": 8.0}  # points from one line to the next
MARGIN = 42.7  # points; 15 mm
A4 = (597.5, 845.0)

ASCII = {c: f"\\{c}" for c in "&%$#_{}"}
ASCII |= {
    c: rf"\text{name}{{}}" for c, name in zip("~^\\|<>", "asciitilde asciicircum backslash bar less greater".split())
}
# Width to characters and their names in math mode, in turn.
MATH = {
    7.78: r"× \times ± \pm ≥ \ge ≤ \le ≠ \ne ≈ \approx ∼ \sim − - ⊙ \odot",
    6.6: r"α \alpha β \beta γ \gamma δ \delta ε \epsilon κ \kappa λ \lambda μ \mu π \pi"
    r" ρ \rho σ \sigma τ \tau θ \theta φ \phi",
    10.0: r"→ \to ← \gets ∞ \infty",
    8.4: r"Δ \Delta √ \surd",
    7.3: r"Σ \Sigma",
    5.4: "² ^2 ³ ^3",
    5.1: r"‖ \Vert",
    4.6: r"† \dagger ‡ \ddagger § \S ° ^\circ",
    3.2: r"· \cdot",
}
UNICODE = {"–": ("--", 5.0), "—": ("---", 10.0), "…": (r"\ldots{}", 13.4)}
for _width, _names in MATH.items():
    _words = _names.split()
    UNICODE |= {c: (f"${name}$", _width) for c, name in zip(_words[::2], _words[1::2])}

LIGATURES = ("--", "``", "''", "?`", "!`")  # that would be read as another character
MINUS = re.compile(r"(?<![\w.)])-(?=[\d.])")


@dataclass(frozen=True)
class Layout:
    """How a sheet is set: font size, orientation and columns; `page` is the width of the text in points."""

    size: str
    scale: float
    gap: float
    landscape: bool
    page: float
    plan: ColumnPlan


def layout(sheet: Sheet) -> Layout:
    """The largest readable setting in which the sheet fits its page; in panels if even the smallest is too wide."""
    tried = []
    every_grid = [align(grid) for grid in grids(sheet, short=True)]
    for landscape in (False, True):
        page = A4[landscape] - 2 * MARGIN
        for size, scale, gap in SIZES:
            for grid in every_grid:
                plan = fit(grid, lambda text, scale=scale: scale * text_width(text), page, gap)
                tried.append(Layout(size, scale, gap, landscape, page, plan))
                texts_alone = grid.left == len(grid.head)
                if len(plan.panels) == 1 and not (
                    texts_alone and _height(tried[-1], sheet) > A4[not landscape] - 2 * MARGIN
                ):
                    return tried[-1]
    if len(tried[0].plan.panels) == 1:  # texts that take several pages in any size
        return tried[0]
    panels = [candidate for candidate in tried if candidate.size == SIZES[1][0]]
    return min(panels, key=lambda candidate: (len(candidate.plan.panels), candidate.landscape))


# --- decimal points in one line -------------------------------------------------------------------------------------

# Phantoms of ASCII characters are kept in text as characters of Unicode's private use area, from this code point on.
GHOST = 0xE000
GHOSTS = re.compile(rf"[{chr(GHOST + 33)}-{chr(GHOST + 126)}]+")
NUMERAL = re.compile(r"(?<![\w.])[-−+×]?(?:\d+(?:,\d{3})*)?\.?\d+(?![\w.])")
MARK = r"[*°≠†‡§‖]+\d*"  # what may follow a number without a blank, as `*8`: on 8 windows


def align(grid: TextGrid) -> TextGrid:
    """Pad values with phantoms so that the decimal points of each column are aligned.

    Values of one shape (the text with every number replaced by 0) are aligned with each other. Words, and intervals on
    a line of their own, are not aligned.
    """
    body = [[list(line) for line in block] for block in grid.body]
    lines = [line for line in chain.from_iterable(body) if len(line) > 1]
    for i in range(grid.left, len(grid.head)):
        shapes: dict[str, list[list[str]]] = {}
        for line in lines:
            if NUMERAL.search(line[i]) and not line[i].startswith("["):
                shape = NUMERAL.sub("0", re.sub(MARK, "", line[i]))
                shapes.setdefault(shape, []).append(line)
        for lines_of_shape in shapes.values():
            for line, text in zip(lines_of_shape, _aligned([line[i] for line in lines_of_shape])):
                line[i] = type(line[i])(text)
    return TextGrid(grid.head, body, grid.left)


def _aligned(texts: Sequence[str]) -> list[str]:
    """Texts of one shape, padded with phantoms so that their numbers are aligned."""
    split = [re.split(rf"({NUMERAL.pattern}(?:{MARK})?)", text) for text in texts]
    for n in range(1, len(split[0]), 2):
        pieces = []
        for parts in split:
            number, marks = re.fullmatch(rf"(.*?)({MARK})?", parts[n]).groups()
            whole, point, decimals = number.partition(".")
            pieces.append((whole, point + decimals, marks or ""))
        most = [max(column, key=len) for column in zip(*pieces)]  # the longest whole part, decimals and marks
        for parts, (whole, decimals, marks) in zip(split, pieces):
            before = _ghosts(most[0][: len(most[0]) - len(whole)].replace("-", "+")) if n > 1 else ""
            after = _ghosts(most[1][len(decimals) :])
            parts[n] = before + whole + decimals + after + marks + _ghosts(most[2][len(marks) :])
    return ["".join(parts) for parts in split]


def _ghosts(text: str) -> str:
    """The phantom of a text; all digits have one width, and marks nearly one."""
    text = re.sub(r"\d", "0", text)
    return "".join(chr(GHOST + (ord(c) if ord(c) < 128 else ord("*"))) for c in text)


def _of_ghost(c: str) -> str:
    """The character of a phantom; empty for any other character."""
    return chr(ord(c) - GHOST) if GHOST + 32 < ord(c) < GHOST + 127 else ""


# --- LaTeX ----------------------------------------------------------------------------------------------------------


def _height(chosen: Layout, sheet: Sheet) -> float:
    """The approximate height of a sheet of texts with its title and notes, in points."""
    line = LINES[chosen.size]

    def lines(text: str, width: float) -> int:
        return len(fold(text, width, lambda part: chosen.scale * text_width(part)))

    total = 3 * 12.0 + 2 * line
    for block in chosen.plan.grid.body:
        (row,) = block
        if len(row) == 1:
            total += line + 6
        else:
            total += line * max(lines(text, width) for text, width in zip(row, chosen.plan.widths)) + 2
    return total + sum(line * lines(note, chosen.page) + 4 for note in sheet.notes)


@lru_cache(100_000, typed=True)  # typed: a Measured equals its text
def text_width(text: str) -> float:
    """The width of a text in points, at 10 pt."""
    wide = sum(map(_char_width, MINUS.sub("−", text)))
    if isinstance(text, MeasuredText) and (number := _number(text)):
        wide += (BOLD - 1) * text_width(str(number))
    return wide


def latex(sheet: Sheet) -> str:
    """A sheet as a complete document; the rows after its `endfoot` can be copied into a paper's `tabular`."""
    chosen = layout(sheet)
    lines = [
        r"\documentclass{article}",
        rf"\usepackage[a4paper,{'landscape,' * chosen.landscape}margin=15mm]{{geometry}}",
        r"\usepackage{array,booktabs,longtable}",
        r"\setlength{\LTleft}{0pt}\setlength{\LTright}{\fill}\setcounter{LTchunksize}{1000}",
        rf"\setlength{{\tabcolsep}}{{{chosen.gap / 2}pt}}",
        r"\setlength{\parindent}{0pt}\setlength{\parskip}{4pt}\hyphenpenalty=10000\pagestyle{empty}\frenchspacing",
        r"\begin{document}\raggedright",
        rf"\textbf{{{_tex(sheet.title, 0.8 * chosen.page)}}}\par",
        rf"\{chosen.size}",
    ]
    for columns in chosen.plan.panels:
        lines += _panel(chosen, columns)
    if sheet.paired:
        lines.append(r"Upright: printed. \textbf{Bold}: measured here.\par")
    lines += [rf"{_tex(note, chosen.page)}\par" for note in sheet.notes]
    return "\n".join([*lines, r"\end{document}", ""])


def _panel(chosen: Layout, columns: list[int]) -> list[str]:
    left = chosen.plan.grid.left
    body = of_panel(chosen.plan, columns)
    shown_columns = [*range(left), *columns]
    texts = [_text_column(chosen, i) for i in range(left)]
    wrapped = any(text != "l" for text in texts)
    lines = [rf"\begin{{longtable}}{{@{{}}{''.join(texts)}{'r' * len(columns)}@{{}}}}"]
    # longtable sets the head before the body: without this line they agree only after a second run of LaTeX
    lines.append(" & ".join(rf"\hspace{{{chosen.plan.widths[i]:.2f}pt}}" for i in shown_columns) + r" \kill")
    lines.append(r"\toprule")
    heads = [chosen.plan.heads[i] for i in shown_columns]
    deep = max(map(len, heads), default=0)
    for part in zip(*([""] * (deep - len(head)) + head for head in heads)):
        lines.append(_row(chosen, list(map(str, part)), shown_columns))
    lines += [r"\midrule", r"\endhead", r"\bottomrule", r"\endfoot"]
    for n, block in enumerate(body):
        if len(block[0]) == 1:
            text = rf"\itshape {_tex(block[0][0], chosen.page)}\strut"
            text = rf"\rlap{{\parbox[t]{{{chosen.page:.1f}pt}}{{\raggedright{text}}}}}"
            lines += [r"\addlinespace[6pt]"] if n else []  # no rule: it would stay behind where the page ends
            lines.append(rf"\multicolumn{{{len(shown_columns)}}}{{@{{}}l@{{}}}}{{{text}}} \\*")
        else:
            lines += [r"\addlinespace[2pt]"] if (len(block) > 1 or wrapped) and n and len(body[n - 1][0]) > 1 else []
            rows = [_row(chosen, [line[i] for i in shown_columns], shown_columns) for line in block]
            lines += [row + "*" for row in rows[:-1]] + rows[-1:]
    return [*lines, r"\end{longtable}"]


def _text_column(chosen: Layout, i: int) -> str:
    grid = chosen.plan.grid
    texts = [grid.head[i], *(line[i] for line in chain.from_iterable(grid.body) if len(line) > 1)]
    widest = chosen.scale * max(map(text_width, texts))
    width = chosen.plan.widths[i]
    return "l" if widest <= width + 1e-6 else rf">{{\raggedright\arraybackslash}}p{{{width:.2f}pt}}"


def _row(chosen: Layout, cells: Sequence[str], columns: list[int]) -> str:
    left = chosen.plan.grid.left
    text = " & ".join(_cell(c, chosen, i if i < left else None) for c, i in zip(cells, columns)) + r" \\"
    return "{}" + text if text[0] in "[*" else text  # the line above ends in a command that would read these


def _cell(cell: str, chosen: Layout, text_column: int | None) -> str:
    if text_column is not None:
        return (
            rf"\hfill\textit{{{cell}}}"
            if isinstance(cell, MeasuredText)
            else _tex(cell, chosen.plan.widths[text_column] / chosen.scale)
        )
    text = str(cell)
    number = _number(text) if isinstance(cell, MeasuredText) else ""
    return rf"\textbf{{{_tex(number)}}}{_tex(text[len(number) :])}" if number else _tex(text)


def _number(text: str) -> str:
    """The leading number of a measured value with its unit, or after the mark of chance; empty for a word."""
    match = re.match(rf"(‡; )?[-−+×]?\.?\d[\d.,]*(e[-+]?\d+)?[%x×]?({GHOSTS.pattern})?", text)
    return match[0] if match else ""


@cache
def _char_width(c: str) -> float:
    if character := _of_ghost(c):
        return WIDTHS[character]
    return sum(UNICODE[p][1] if p in UNICODE else WIDTHS[p] for p in _plain(c))


@cache
def _plain(c: str) -> str:
    """The character as characters that LaTeX can typeset: itself, its base letter, or its code point."""
    if c in UNICODE or c in WIDTHS:
        return c
    if _of_ghost(c):
        return c
    parts = [p for p in unicodedata.normalize("NFKD", c) if not unicodedata.combining(p)]
    can_be_set = parts and all(p in UNICODE or p in WIDTHS for p in parts)
    return "".join(parts) if can_be_set else f"U+{ord(c):04X}"


def _tex(text: str, width: float | None = None) -> str:
    """Escaped text; words wider than `width` (points at 10 pt) may be broken anywhere."""
    words = []
    for word in "".join(map(_plain, MINUS.sub("−", text))).split(" "):
        parts = [UNICODE[c][0] if c in UNICODE else ASCII.get(c, c) for c in word]
        for n, pair in enumerate(zip(word, word[1:])):
            parts[n] += "{}" if "".join(pair) in LIGATURES else ""
        words.append((r"\allowbreak{}" if width is not None and text_width(word) > width else "").join(parts))
    return GHOSTS.sub(lambda run: rf"\phantom{{{''.join(map(_of_ghost, run[0]))}}}", " ".join(words))
