"""Three faces of a table: LaTeX that compiles, Markdown that is read back, a terminal that is not overrun."""

import re
import shutil
import string
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro import papers, spec
from repro.jobs import tables
from repro.render import Sheet, latex, markdown, read_markdown, terminal
from repro.workflow import Workflow

SHEET = Sheet(
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
ESCAPES = re.compile(r"\\(?:[&%$#_{}\\]|[A-Za-z]+(?:\{\})?)")
DRAWN = {"†": "base LaTeX, textcomp", "‡": "base LaTeX, textcomp"}


def structure(text):
    """Check what a compiler would trip over; returns the body's rows as lists of cells."""
    plain = re.sub(r"\\[{}\\]", "", text)
    depth = 0
    for c in plain:
        depth += (c == "{") - (c == "}")
        assert depth >= 0, "a brace closes that was never opened"
    assert depth == 0
    assert re.findall(r"\\begin\{(\w+)\}", text) == re.findall(r"\\end\{(\w+)\}", text)[::-1]
    columns = re.search(r"\\begin\{tabular\}\{((?:[^{}]|\{[^{}]*\})*)\}", text)[1]
    count = len(re.sub(r"\{[^{}]*\}", "", columns))
    body = text.split(r"\toprule" + "\n")[1].split(r"\bottomrule")[0]
    rows = []
    for line in body.splitlines():
        if line == r"\midrule":
            continue
        assert line.endswith(r" \\"), line
        line = line[:-3]
        cells = re.split(r"(?<!\\)&", line)
        if line.startswith(r"\multicolumn"):
            assert line.startswith(rf"\multicolumn{{{count}}}{{l}}") and len(cells) == 1
        else:
            assert len(cells) == count, line
            assert line[:1] not in ("[", "*"), "read as an argument of the row end above"
        rows.append([cell.strip() for cell in cells])
    for special in "%#_^~":
        assert not re.search(rf"(?<!\\){re.escape(special)}", text.replace(r"\textasciitilde", "")), special
    assert not re.search(r"(?<!\\)\$(?!\\(times|to|pm|ge|le)\$|$|[^\\])", text)
    odd = {c for c in text if c not in string.printable} - set(DRAWN)
    assert not odd, f"characters that LaTeX does not draw: {odd}"
    return rows


def compiles(text, folder):
    """Run pdflatex where there is one; booktabs alone."""
    if shutil.which("pdflatex"):
        (folder / "t.tex").write_text(
            "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\n" + text + "\\end{document}\n"
        )
        done = subprocess.run(
            ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"], cwd=folder, capture_output=True
        )
        assert done.returncode == 0, done.stdout[-2000:]


# --- LaTeX ------------------------------------------------------------------------------------------------------------


def test_latex_escapes(tmp_path):
    text = latex(SHEET)
    rows = structure(text)
    assert rows[0] == ["", r"Wiki \textbar{} C4", "here"]
    assert (
        rows[3][0] == r"{}[w2a2] \textasciitilde{} 10\textasciicircum{}3 \textbackslash{} \#1 \$5"
        and rows[3][1] == "--"
    )
    assert rows[5] == [
        "{}*starred",
        r"\textbar{}sigma\textbar{}\textgreater{}0.2",
        r"$\ge$ 1 $\times$ 2 $\to$ 3 $\pm$ 4 $\le$ 5 \ldots{} --- \textless{}x\textgreater{}",
    ]
    assert r"\caption{50 \% of \{everything\} \& more\_}" in text
    assert text.count(r"\multicolumn{3}{l}") == 2 and r"\raggedright A note: 95 \% of a\_b." in text
    assert text.count(r"\midrule") == 2, "one under the head, one before the second section"
    compiles(text, tmp_path)


def test_latex_columns():
    assert r"\begin{tabular}{lrr}" in latex(SHEET)
    assert r"\begin{tabular}{llr}" in latex(Sheet("t", ["a", "b", "c"], [], left=2))
    assert r"\begin{tabular}{lp{4cm}}" in latex(Sheet("t", ["a", "b"], [], widths=("l", "p{4cm}")))


cells = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S", "Zs"]), max_size=8)


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(cells, min_size=n, max_size=n), min_size=2, max_size=5)))
def test_latex_of_any_text_has_its_columns(lines):
    rows = structure(latex(Sheet("t", lines[0], lines[1:])))
    assert len(rows) == len(lines)


def test_structure_sees_what_is_broken():
    """The checker itself: each of these would stop a compiler."""
    good = latex(SHEET)
    for a, b in ((r"\%", "%"), (r"\_", "_"), (" & here", ""), (r"\end{tabular}", ""), ("}", ""), ("{}*star", "*star"),
                 ("not run", "not & run"), ("not run", "τ"), (r"\#1", "#1")):  # fmt: skip
        with pytest.raises((AssertionError, TypeError, IndexError)):
            structure(good.replace(a, b, 1))


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_every_printed_table_is_sound_in_latex_and_markdown(paper, tmp_path, monkeypatch):
    monkeypatch.setattr(tables.table, "measure", unmeasured)
    flow = Workflow(None, "pocket")
    for number in papers.tables(paper):
        sheet = tables.build_table(flow, paper, number, tmp_path)
        structure((tmp_path / paper / f"table{number}.tex").read_text())
        compiles((tmp_path / paper / f"table{number}.tex").read_text(), tmp_path)
        same(read_markdown((tmp_path / paper / f"table{number}.md").read_text()), sheet)


def test_the_audit_is_sound_in_latex(tmp_path):
    sheet = tables.build_audit(tmp_path)
    structure((tmp_path / "audit.tex").read_text())
    same(read_markdown((tmp_path / "audit.md").read_text()), sheet)
    assert len(sheet.rows) == sum(len(papers.audit(paper)) for paper in papers.PAPERS)


def unmeasured(flow, paper, number, only=None):
    from repro.record import Measurement

    return [
        Measurement(paper, "table", number, c.row, c.col, c.model, c.metric, c.value, unit=c.unit)
        for c in papers.printed(paper, number)
    ]


def test_every_claim_can_be_drawn():
    head = spec.headline()
    rows = [[c.claim, c.says, c.printed] for c in head.claims]
    structure(latex(Sheet(head.title, ["a", "b", "c"], rows, head.figures_only)))


# --- Markdown ---------------------------------------------------------------------------------------------------------


def same(read, made):
    assert read.title == made.title and list(read.head) == list(made.head) and read.left == made.left
    assert [list(row) for row in read.rows] == [list(row) for row in made.rows]
    assert list(read.notes) == list(made.notes)


def test_markdown_is_a_pipe_table():
    lines = markdown(SHEET).splitlines()
    assert lines[0] == "**50 % of {everything} & more_**"
    assert lines[2] == r"|  | Wiki \| C4 | here |" and lines[3] == "| --- | ---: | ---: |"
    assert lines[4] == "| *Llama-3.2-1B; here: pocket-3m* |  |  |"
    assert lines[8] == r"| *starred | \|sigma\|>0.2 | ≥ 1 × 2 → 3 ± 4 ≤ 5 … — <x> |"
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines[2:9]} == {4}


@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_markdown_is_read_back(left):
    sheet = Sheet(SHEET.title, SHEET.head, SHEET.rows, SHEET.notes, left=left)
    same(read_markdown(markdown(sheet)), sheet)


def test_markdown_without_rows_or_notes():
    same(read_markdown(markdown(Sheet("t", ["a", "b"], []))), Sheet("t", ["a", "b"], []))


def test_rows_of_dashes_are_rows():
    sheet = Sheet("t", ["a", "b"], [["-", "-"], ["---", ":"], ["", "-"]], ["-", "- a list"])
    same(read_markdown(markdown(sheet)), sheet)


words = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=8).map(str.strip)


@given(st.data())
def test_markdown_of_any_text_is_read_back(data):
    width = data.draw(st.integers(2, 4))
    cell = words.filter(lambda t: not t.startswith("*") and not t.endswith("\\") and not t.isspace())
    row = st.lists(cell, min_size=width, max_size=width)
    rows = data.draw(st.lists(row | cell.map(lambda t: [f"x{t}"]), max_size=4))
    note = words.filter(lambda t: t != "" and not t.startswith("|"))
    sheet = Sheet(
        data.draw(words),
        data.draw(row),
        rows,
        data.draw(st.lists(note, max_size=2)),
        left=data.draw(st.integers(0, width)),
    )
    same(read_markdown(markdown(sheet)), sheet)


# --- terminal ---------------------------------------------------------------------------------------------------------


def table_lines(text):
    lines = text.splitlines()
    rules = [i for i, line in enumerate(lines) if set(line) == {"─"}]
    return lines[rules[0] : rules[2] + 1]


def test_terminal_aligns():
    lines = table_lines(terminal(SHEET, 120))
    width = len(lines[0])
    assert lines[1].index("Wiki") < lines[1].index("here") and {
        len(line) for line in (lines[0], lines[2], lines[-1])
    } == {width}
    assert all(len(line) <= width for line in lines)
    values = [line for line in lines if "20.46" in line or "–" in line]
    assert len({re.search(r"20\.46|–", line).end() for line in values}) == 1, "numbers end in one column"
    assert "· Llama-2-7B" in lines and terminal(SHEET, 120).splitlines()[-2:] == list(SHEET.notes)


@pytest.mark.parametrize("width", [100, 120, 160])
def test_terminal_wraps_to_its_width_and_loses_no_word(width):
    texts = [["claim " * 9, "says " * 20, "printed " * 6, "12.345 [1, 2]"], ["c", "s", "p", "1"]]
    sheet = Sheet("t", ["a", "b", "c", "value"], texts, ["note " * 60], left=3)
    text = terminal(sheet, width)
    assert max(map(len, text.splitlines())) <= width
    for word, count in (("claim", 9), ("says", 20), ("printed", 6), ("note", 60), ("12.345 [1, 2]", 1)):
        assert text.count(word) == count
    rows = table_lines(text)
    assert "12.345 [1, 2]" in rows[3], "numbers are never wrapped, and stand in the first line of their row"


def test_terminal_does_not_wrap_what_fits():
    assert "x " * 20 + " 1" in terminal(Sheet("t", ["a", "b"], [["x " * 20, "1"]]), 100).replace("   1", "  1")


@pytest.mark.parametrize(
    "sheet", [Sheet("t", ["", "b"], []), Sheet("t", ["a" * 300], [], left=0), Sheet("t", ["a"], [["s"]])]
)
def test_terminal_of_odd_sheets(sheet):
    assert terminal(sheet, 100).startswith("t\n")
