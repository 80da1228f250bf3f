"""Three formats of a table: LaTeX that fits its page, Markdown that is read back, a terminal that is not overrun."""

import re
import shutil
import string
import subprocess
import unicodedata
from itertools import chain

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from repro import papers
from repro.render import content
from repro.render.latex import GHOSTS, UNICODE, _of_ghost, align, latex, layout, text_width
from repro.render.sheet import MeasuredText, Pair, Sheet, markdown, read_markdown, terminal, under
from repro.render.text_grid import ColumnPlan, of_panel

HERE = "1.119 [1.112, 1.126] 30.78"
PLAIN = Sheet(
    "50 % of {everything} & more_",
    ["", "Wiki | C4", "here"],
    [
        ["Llama-3.2-1B; here: pocket-3m"],
        ["RTN pc", "20.46", "21.1 [20.9, 21.3]*"],
        ["[w2a2] ~ 10^3 \\ #1 $5", "–", "not run"],
        ["Llama-2-7B"],
        ["*starred", "|sigma|>0.2", "≥ 1 × 2 → 3 ± 4 ≤ 5 … — <x>"],
    ],
    ["A note: 95 % of a_b.", "† stale | pipe"],
)
PAIRS = Sheet(
    "Pairs",
    ["", "Wiki", "C4", "KL"],
    [
        ["FP16", Pair("9.71", "1.000 [1.000, 1.000] 8.02"), Pair("13.80", "not run"), Pair("", "0.000")],
        ["Llama-2-7B"],
        ["RTN", Pair("20.46", HERE), "31.34", ""],
        ["mine", Pair("", "-0.5 [-0.7, -0.3]"), "", Pair("", "0.012")],
    ],
)


def wide(columns, rows=6):
    values = [Pair("20.46", HERE)] * columns
    return Sheet("wide", ["", *(f"col {i}" for i in range(columns))], [[f"row {i}", *values] for i in range(rows)])


def of_paper(paper, number):
    """A printed table with a section a model, each cell with a measured value of the usual length."""
    cells = papers.printed(paper, number)
    columns = list(dict.fromkeys(c.col for c in cells))
    at = {(c.model, c.row, c.col): Pair(c.value, HERE) for c in cells}
    rows = []
    for model in dict.fromkeys(c.model for c in cells):
        rows.append([model])
        for row in dict.fromkeys(c.row for c in cells if c.model == model):
            rows.append([row, *(at.get((model, row, col), "") for col in columns)])
    return Sheet(f"{paper} {number}", ["", *columns], rows)


printed = []
for a_paper in papers.PAPERS:
    printed += [(a_paper, number) for number in papers.tables(a_paper)]

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ascii_text = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S", "Zs"]), max_size=12)


@st.composite
def any_sheets(draw, text=any_text, columns=5, rows=5):
    left = draw(st.integers(1, 2))
    count = left + draw(st.integers(1, columns))
    value = text | st.builds(Pair, text, text)
    row = st.tuples(*[text] * left, *[value] * (count - left))
    heads = st.lists(text, min_size=count, max_size=count)
    return Sheet(
        draw(text),
        draw(heads),
        draw(st.lists(row | st.tuples(text), max_size=rows)),
        draw(st.lists(text, max_size=2)),
        left,
    )


@st.composite
def large_sheets(draw):
    """Up to 30 columns and 60 rows with long labels: few drawn texts, repeated."""
    left, count = draw(st.integers(1, 3)), draw(st.integers(1, 30))
    long = st.text(st.sampled_from(string.ascii_letters + "  -_%WM…×中é5."), max_size=120)
    labels, heads = draw(st.lists(long, min_size=1, max_size=3)), draw(st.lists(long, min_size=1, max_size=3))
    values = draw(st.lists(st.builds(Pair, ascii_text, st.sampled_from([HERE, "not run", "x" * 200])), min_size=1))
    rows = []
    for i in range(draw(st.integers(0, 60))):
        row = [labels[(i + j) % len(labels)] for j in range(left)]
        row += [values[(i * j) % len(values)] for j in range(count)]
        rows.append(row)
    head = [heads[i % len(heads)] for i in range(left + count)]
    return Sheet("t", head, rows, left=left)


def texts(sheet):
    """Every text that a format has to show."""
    cells = []
    for cell in chain.from_iterable(sheet.rows):
        cells += cell if isinstance(cell, Pair) else [cell]
    return [text for text in [sheet.title, *sheet.head, *cells, *sheet.notes] if text]


# --- the sheet --------------------------------------------------------------------------------------------------------


def test_a_sheet_has_one_kind_of_values():
    assert PAIRS.rows[2][2:] == [Pair("31.34", ""), Pair("", "")]
    assert Sheet("t", ["", "a"], [["x", Pair("1", " ")]]).rows == [["x", "1"]]
    assert Sheet("t", ["", "a"], [["x\ny", " 1 "]]).rows == [["x y", "1"]]


def test_a_sheet_refuses_a_row_that_it_would_cut():
    with pytest.raises(ValueError):
        Sheet("t", ["", "a"], [["x", "1", "2"]])


def test_under_folds_at_the_interval():
    lines = under(PAIRS, folded=True, short=True).body
    assert lines[2] == [
        ["RTN", "20.46", "31.34", ""],
        ["here", "1.119 30.78", "", ""],
        ["", "[1.112, 1.126]", "", ""],
    ]
    assert lines[3][0] == ["mine", "-0.5", "", "0.012"], "a row of one's own needs no empty printed line"


# --- LaTeX ------------------------------------------------------------------------------------------------------------


def structure(text):
    """Check what a compiler would trip over; returns the cells of each table's lines."""
    plain = re.sub(r"\\[{}\\]", "", text)
    depth = 0
    for c in plain:
        depth += (c == "{") - (c == "}")
        assert depth >= 0, "a brace closes that was never opened"
    assert depth == 0
    stack = []
    for verb, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        assert verb == "begin" or stack.pop() == name
        stack += [name] if verb == "begin" else []
    assert not stack
    rows = []
    for columns, body in re.findall(r"\\begin\{longtable\}\{@\{\}([^\n]*)@\{\}\}\n(.*?)\\end\{longtable\}", text, re.S):
        count = len(re.sub(r">\{[^{}]*\}p\{[^{}]*\}", "p", columns))
        for line in body.splitlines():
            if re.fullmatch(r"(\\(midrule|toprule|bottomrule|endhead|endfoot|addlinespace\[\dpt\]|cmidrule.*))+", line):
                continue
            assert re.search(r" \\(\\\*?|kill)$", line), line
            cells = [cell.strip() for cell in re.split(r"(?<!\\)&", re.sub(r" \\(\\\*?|kill)$", "", line))]
            spanned = sum(int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", line))
            assert len(cells) + spanned == count, line
            assert line[:1] not in ("[", "*"), "read as an argument of the row end above"
            rows += [] if line.endswith(r"\kill") else [cells]
    shown = text.split(r"\begin{document}")[1]
    for special in "%#_^~":
        assert not re.search(rf"(?<!\\){re.escape(special)}", re.sub(r"\$\^(\d|\\circ)\$|\\textascii\w+", "", shown)), (
            special
        )
    math = {name for name, _ in UNICODE.values() if name.startswith("$")}
    assert not re.sub(r"\\\$|\$[^$]*\$", lambda m: "" if m[0] in math | {r"\$"} else m[0], shown).count("$")
    assert set(text) <= set(string.printable), "a character that LaTeX does not draw"
    return rows


def test_special_characters_are_escaped_in_latex():
    rows = structure(latex(PLAIN))
    assert rows[0] == ["", r"Wiki \textbar{} C4", "here"]
    assert rows[3] == [r"{}[w2a2] \textasciitilde{} 10\textasciicircum{}3 \textbackslash{} \#1 \$5", "--", "not run"]
    assert rows[5] == [
        "{}*starred",
        r"\textbar{}sigma\textbar{}\textgreater{}0.2",
        r"$\ge$ 1 $\times$ 2 $\to$ 3 $\pm$ 4 $\le$ 5 \ldots{} --- \textless{}x\textgreater{}",
    ]
    assert r"\textbf{50 \% of \{everything\} \& more\_}" in latex(PLAIN)
    assert r"A note: 95 \% of a\_b.\par" in latex(PLAIN)


def test_latex_of_odd_characters():
    text = latex(Sheet("–", ["", "a"], [["é ᵀ 中 --x", "-0.5"]]))
    assert r"e T U+4E2D -{}-x & $-$0.5 \\" in text


def test_measured_values_stand_beside_or_below_printed_ones_in_latex():
    rows = structure(latex(PAIRS))
    assert [r"\hfill\textit{here}", r"\textbf{1.119} [1.112, 1.126] 30.78", "", ""] in rows or [
        "RTN", "20.46", r"\textbf{1.119} [1.112, 1.126] 30.78", "31.34", "", ""
    ] in rows  # fmt: skip


def test_every_mark_is_drawn():
    for mark in content.MARKS.values():
        text = latex(Sheet(f"t{mark}", ["", "a"], [["x", Pair("1", f"2{mark}")]], [f"{mark} {content.LEGEND[mark]}"]))
        assert "U+" not in text and text.count(UNICODE[mark][0] if mark in UNICODE else mark) == 3, mark
        structure(text)


def test_a_ratio_is_bold():
    assert r"\textbf{$\times$1.114} [1.109, 1.118]; 20.16*" in latex(
        Sheet("t", ["", "a"], [["x", Pair("20.46", "×1.114 [1.109, 1.118]; 20.16*")]])
    )


def test_what_stands_behind_the_mark_of_chance_is_bold():
    text = latex(Sheet("t", ["", "a"], [["x", Pair("0.477", "‡; -0.402 [-0.444, -0.361] nats")]]))
    assert re.search(r"\\textbf\{[^{}]*0\.402", text) and r"\textbf{0.477" not in text


def test_values_of_a_column_align_at_their_points():
    here = ["9.5*", "113.25", "×1.114 [1.109, 1.118]; 20.16*", "×1.2 [-0.109, 11.118]; 2.5*", "not run", "[1, 2]"]
    sheet = Sheet("t", ["", "a"], [["x", Pair("", text)] for text in here])
    column = [line[1] for line in chain.from_iterable(align(under(sheet, short=True)).body)]
    shown = _plain_latex(column)
    assert shown[0] == r"9.5\phantom{0}*" and shown[1] == r"113.25\phantom{*}"
    assert shown[2] == r"×1.114 [\phantom{+}1.109, \phantom{0}1.118]; 20.16*"
    assert shown[3] == r"×1.2\phantom{00} [-0.109, 11.118]; \phantom{0}2.5\phantom{0}*"
    assert shown[4:] == ["not run", "[1, 2]"]
    brief = [["9.5*8", "113.25°"], ["a*8; 2.5*8 [1, 2]", "1"]]
    for pair in brief:
        sheet = Sheet("t", ["", "a"], [["x", Pair("", text)] for text in pair])
        assert len(align(under(sheet, short=True)).body) == 2
    assert _plain_latex(
        [align(under(Sheet("t", ["", "a"], [["x", Pair("", t)] for t in brief[0]]), short=True)).body[0][0][1]]
    ) == [r"9.5\phantom{0}*8"]


def _plain_latex(column):
    return [GHOSTS.sub(lambda run: "\\phantom{" + "".join(map(_of_ghost, run[0])) + "}", text) for text in column]


def test_structure_sees_what_is_broken():
    """The checker itself: each of these would stop a compiler."""
    good = latex(PLAIN)
    for a, b in ((r"\%", "%"), (r"\_", "_"), (" & here", ""), (r"\end{longtable}", ""), ("}", ""), ("{}*s", "*s"),
                 ("not run", "not & run"), ("not run", "τ"), (r"\#1", "#1"), (r"\$5", "$5")):  # fmt: skip
        with pytest.raises((AssertionError, IndexError)):
            structure(good.replace(a, b, 1))


@given(any_sheets())
@settings(deadline=None, max_examples=50)
def test_latex_of_any_text_is_sound(sheet):
    structure(latex(sheet))


@given(any_sheets(ascii_text))
@example(Sheet("", ["", "", "000"], [["", Pair("", ""), Pair("", "0")]]))  # a bold head, wider than its column
@settings(deadline=None)
def test_latex_loses_no_text(sheet):
    names = {"textasciitilde": "~", "textasciicircum": "^", "textbackslash": "\\", "textbar": "|", "textless": "<"}
    text = re.sub(
        r"\\(textbf|textit|multicolumn\{\d+\})(\{(@\{\})?c(@\{\})?\})?", "", latex(sheet).split("ragged", 1)[1]
    )
    text = re.sub(r"\\phantom\{[^}]*\}|\\allowbreak\{\}", "", text).replace("$-$", "-")
    text = re.sub(r"\\(text\w+)\{\}", lambda m: {**names, "textgreater": ">"}[m[1]].replace("\\", "\\\\"), text)
    squeezed = re.sub(r"[\\{}\s]", "", text)
    for word in chain.from_iterable(text.split() for text in texts(sheet)):
        folded = [c for c in re.sub(r"[\\{}]", "", word)]
        assert len(word) > 12 or "".join(folded) in squeezed, word


@given(large_sheets())
@settings(deadline=None, max_examples=25)
def test_latex_fits_its_page(sheet):
    made = layout(sheet)
    assert max(made.plan.totals) <= made.page + 1e-6
    shown = list(chain.from_iterable(made.plan.panels))
    assert shown == list(range(sheet.left, len(made.plan.grid.head))), "each column in one panel"


@pytest.mark.parametrize("paper, number", printed)
def test_every_printed_table_fits_its_page(paper, number):
    sheet = of_paper(paper, number)
    made = layout(sheet)
    assert max(made.plan.totals) <= made.page and len(made.plan.panels) <= 8
    structure(latex(sheet))


def test_a_panel_has_no_lines_without_values():
    """Two panels of a table of two sections: each shows the rows and lines that have a value there."""
    none = Pair("", "")
    first = ["printed", Pair("1", ""), Pair("2", ""), none, none]
    second = ["both", Pair("", "5"), none, Pair("3", ""), Pair("", "4")]
    grid = under(Sheet("t", ["", *"abcd"], [["one"], first, ["two"], second]))
    plan = ColumnPlan(grid, [[text] for text in grid.head], [1.0] * 5, [[1, 2], [3, 4]], [3.0, 3.0])
    labels = []
    for columns in plan.panels:
        labels.append([])
        for block in of_panel(plan, columns):
            labels[-1].append([line[0] for line in block])
    assert labels[0] == [["one"], ["printed"], ["two"], ["both"]], "its printed value is in the other panel"
    assert labels[1] == [["two"], ["both", "here"]]
    assert isinstance(of_panel(plan, [1, 2])[3][0][1], MeasuredText)
    whole = ColumnPlan(grid, plan.heads, plan.widths, [[1, 2, 3, 4]], [5.0])
    assert of_panel(whole, whole.panels[0]) == grid.body


def test_few_columns_stand_beside_and_many_under():
    assert layout(wide(2)).plan.grid.head[2] == "here" and not layout(wide(2)).landscape
    assert "here" not in layout(wide(7)).plan.grid.head
    assert len(layout(wide(12)).plan.panels) == 1 < len(layout(wide(30)).plan.panels)


def test_text_is_as_wide_as_its_letters():
    assert text_width("0000") == 20 and text_width("0 0") == pytest.approx(13.33)
    assert text_width(MeasuredText("1.25 [1, 2]")) > text_width("1.25 [1, 2]")


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="no LaTeX here")
@pytest.mark.parametrize(
    "sheet", [PLAIN, PAIRS, of_paper("subspec", "1"), wide(20, 80)], ids=["plain", "pairs", "52", "80"]
)
def test_latex_compiles_alone(sheet, tmp_path):
    (tmp_path / "t.tex").write_text(latex(sheet))
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    overfull = [float(x) for x in re.findall(r"Overfull \\hbox \(([\d.]+)pt", (tmp_path / "t.log").read_text())]
    assert max(overfull, default=0) <= 1
    result = [float(x) for x in re.findall(r"\\LT@entry\s*\{\d\}\{([\d.]+)pt\}", (tmp_path / "t.aux").read_text())]
    total = sum(layout(sheet).plan.totals)
    assert 0.999 <= total / sum(result) <= 1.001, "columns are as wide as estimated, none is wider"
    if shutil.which("pdftotext"):
        done = subprocess.run(["pdftotext", "-raw", "t.pdf", "-"], cwd=tmp_path, capture_output=True, text=True)
        drawn = letters(done.stdout)
        assert all(letters(row[0]) in drawn for row in sheet.rows)


def letters(text):
    return re.sub(r"[^a-z0-9]", "", unicodedata.normalize("NFKD", text).lower())


# --- Markdown ---------------------------------------------------------------------------------------------------------


def test_markdown_is_a_pipe_table():
    lines = markdown(PLAIN).splitlines()
    assert lines[0] == "**50 % of {everything} & more_**"
    assert lines[2] == r"|  | Wiki \| C4 | here |" and lines[3] == "| --- | ---: | ---: |"
    assert lines[4] == "| *Llama-3.2-1B; here: pocket-3m* |  |  |"
    assert lines[8] == r"| \*starred | \|sigma\|>0.2 | ≥ 1 × 2 → 3 ± 4 ≤ 5 … — \<x> |"


def test_measured_values_stand_beside_or_below_printed_ones_in_markdown():
    lines = markdown(PAIRS).splitlines()
    assert lines[2] == "|  | Wiki | *here* | C4 | *here* | KL *here* |"
    assert lines[6] == f"| RTN | 20.46 | {HERE} | 31.34 |  |  |"
    lines = markdown(wide(7)).splitlines()
    assert lines[4] == "| row 0 |" + " 20.46 |" * 7 and lines[5] == "| *here* |" + f" {HERE} |" * 7


MEASURED = Sheet("t", ["", "a", "here"], [["x", Pair("1", ""), Pair("", "2")]])


@pytest.mark.parametrize("sheet", [PLAIN, PAIRS, MEASURED, wide(7), wide(3), Sheet("t", ["a", "b"], [], left=0)])
def test_markdown_is_read_back(sheet):
    assert read_markdown(markdown(sheet)) == sheet


@given(any_sheets(st.sampled_from(["*here*", "here", "a\\", "<br>", "|", "*a*", "x *here*", "---", ":"]) | any_text, 9))
@settings(deadline=None, max_examples=150)
def test_markdown_of_any_text_is_read_back(sheet):
    assert read_markdown(markdown(sheet)) == sheet


# --- terminal ---------------------------------------------------------------------------------------------------------


def test_numbers_end_in_one_column_of_the_terminal():
    lines = terminal(PLAIN, 120).splitlines()
    assert lines[1] == lines[3] == lines[-3] and set(lines[1]) == {"─"}
    values = [line for line in lines if "20.46" in line or "–" in line]
    assert len({re.search(r"20\.46|–", line).end() for line in values}) == 1, "numbers end in one column"
    assert "· Llama-2-7B" in lines and lines[-2:] == list(PLAIN.notes)


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("sheet", [PLAIN, PAIRS, wide(25), of_paper("subspec", "1"), of_paper("spear", "8")])
def test_terminal_shows_all_within_its_width(sheet, width):
    text = terminal(sheet, width)
    assert max(map(len, text.splitlines())) <= width
    for word in set(chain.from_iterable(re.sub(r"\[.*?\]", "", text).split() for text in texts(sheet))):
        assert word in text
    assert text.count("20.46") == sum(text.startswith("20.46") for text in texts(sheet))


EMPTY = Sheet("t", ["", "", ""], [["", *[Pair("", "1.119 [1.112, 1.126] 30.78")] * 2]])  # columns without any text


@example(EMPTY, 60)
@given(large_sheets(), st.integers(60, 200))
@settings(deadline=None, max_examples=25)
def test_terminal_keeps_its_width(sheet, width):
    assert max(map(len, terminal(sheet, width).splitlines())) <= width


def test_terminal_wraps_texts():
    rows = [["claim " * 9, "says " * 20, "printed " * 6, "12.345 [1, 2]"], ["c", "s", "p", "1"]]
    text = terminal(Sheet("t", ["a", "b", "c", "value"], rows, ["note " * 60], left=3), 100)
    for word, count in (("claim", 9), ("says", 20), ("printed", 6), ("note", 60), ("12.345 [1, 2]", 1)):
        assert text.count(word) == count
    assert text.splitlines()[4].endswith("12.345 [1, 2]"), "numbers are not wrapped"


@pytest.mark.parametrize(
    "sheet", [Sheet("t", ["", "b"], []), Sheet("t", ["a"], [["s"]]), Sheet("t", ["a" * 300], [], left=0)]
)
def test_sheets_of_any_text_are_written(sheet):
    assert terminal(sheet, 100).startswith("t\n") and structure(latex(sheet))


def test_a_minus_is_one_in_texts_and_notes_too():
    text = latex(Sheet("t", ["", "what"], [["a", "-0.5 to 2-3"]], ["from -1.15 %"], left=2))
    assert "$-$0.5 to 2-3" in text and "from $-$1.15" in text
