"""Coverage counts a printed cell once, tells live from recorded, and leaves no table or figure out."""

import csv

import pytest

from repro import papers
from repro.coverage import HEADER, coverage, to_csv, to_text
from repro.errors import UserError

EVERYTHING = {p: {c.model for t in papers.tables(p) for c in papers.printed(p, t)} for p in papers.PAPERS}


def row(cell, **changes):
    keys = {k: getattr(cell, k) for k in ("paper", "kind", "row", "col", "model", "metric")}
    return keys | {"number": cell.table, "status": "ok", "live": "live", "grade": "C"} | changes


def point(number="2a", at="0", **changes):
    keys = {
        "paper": "subspec",
        "kind": "figure",
        "number": number,
        "row": "SubSpec",
        "col": at,
        "model": "",
        "metric": "tau",
    }
    return keys | {"status": "ok", "live": "live", "grade": "C"} | changes


def line(lines, paper, kind, number):
    (found,) = [x for x in lines if (x.paper, x.kind, x.number) == (paper, kind, number)]
    return found


def spqt3(rows, possible=EVERYTHING):
    return line(coverage(rows, possible), "spqt", "table", "3")


CELLS = papers.printed("spqt", 3)  # 40 cells: 10 rows x 4 models


def test_nothing_measured_is_seventy_missing_lines():
    lines = coverage([], EVERYTHING)
    assert len(lines) == 70
    assert [x.kind for x in lines].count("table") == 45
    assert {x.status for x in lines} == {"missing"}
    assert sum(x.printed for x in lines) == sum(
        len(papers.printed(p, t)) for p in papers.PAPERS for t in papers.tables(p)
    )
    assert all(x.printed == 0 for x in lines if x.kind == "figure")


@pytest.mark.parametrize(
    "measured,status", [(0, "missing"), (1, "partial"), (31, "partial"), (32, "live"), (40, "live")]
)
def test_four_fifths_is_the_boundary(measured, status):
    found = spqt3([row(c) for c in CELLS[:measured]])
    assert (found.status, found.measured, found.possible, found.printed) == (status, measured, 40, 40)


def test_only_cells_with_a_stand_in_are_due():
    some = {"spqt": {"Llama-2-7B"}}
    mine = [c for c in CELLS if c.model == "Llama-2-7B"]
    assert spqt3([row(c) for c in mine[:8]], some).status == "live"
    assert spqt3([row(c) for c in mine[:7]], some).status == "partial"
    assert spqt3([row(c) for c in mine[:8]], lambda cell: cell.model == "Llama-2-7B").possible == 10
    other = [c for c in CELLS if c.model != "Llama-2-7B"]
    found = spqt3([row(c) for c in other], some)
    assert (found.status, found.measured, found.possible) == ("partial", 30, 10)
    assert spqt3([row(CELLS[0])], {}).status == "partial"
    assert spqt3([], {}).status == "missing"


def test_recorded_is_not_live():
    rows = [row(c, live="recorded", grade="B") for c in CELLS]
    assert spqt3(rows).status == "recorded"
    assert spqt3(rows + [row(c) for c in CELLS[:31]]).status == "recorded"
    assert spqt3(rows + [row(c) for c in CELLS[:32]]).status == "live"
    assert spqt3(rows[:10] + [row(c) for c in CELLS[10:32]]).status == "recorded"


def test_a_cell_counts_once_by_its_best_grade():
    rows = [row(CELLS[0]), row(CELLS[0], grade="B", live="recorded"), row(CELLS[1], grade="D")]
    found = spqt3(rows)
    assert (found.measured, found.grades) == (2, {"A": 0, "B": 1, "C": 0, "D": 1})


def test_only_ok_and_floor_are_measurements():
    states = ["ok", "floor", "too_long", "oom", "unsupported", "diverged", "stale", "no_stand_in", "not_run"]
    assert spqt3([row(c, status=s) for c, s in zip(CELLS, states)]).measured == 2


def test_own_rows_do_not_count():
    assert spqt3([row(c, row="my method") for c in CELLS]) == spqt3([])
    assert coverage([row(CELLS[0], paper="project"), row(CELLS[0], number="4")], EVERYTHING) == coverage([], EVERYTHING)


def test_numbers_may_be_integers():
    assert spqt3([row(c, number=3) for c in CELLS]).status == "live"


def test_parts_of_a_figure_are_one_line():
    rows = [point(), point("2b"), point("2b"), point("2c", at="64", status="floor"), point("2c", at="8", status="oom")]
    found = line(coverage(rows, {}), "subspec", "figure", "2")
    assert (found.status, found.measured, found.printed) == ("partial", 3, 0)


@pytest.mark.parametrize("points,status", [(16, "partial"), (15, "live"), (12, "live"), (0, "partial")])
def test_a_figure_is_covered_when_its_declared_points_are(points, status):
    rows = [point(at=str(i)) for i in range(12)]
    assert line(coverage(rows, {}, {("subspec", "2"): points}), "subspec", "figure", "2").status == status
    rows = [r | {"live": "recorded"} for r in rows]
    status = "recorded" if status == "live" else status
    assert line(coverage(rows, {}, {("subspec", "2"): points}), "subspec", "figure", "2").status == status


@pytest.mark.parametrize(
    "change,message", [({"grade": "E"}, "unknown grade 'E'"), ({"live": "yes"}, "unknown origin 'yes'")]
)
def test_bad_rows_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        coverage([row(CELLS[0], **change)], EVERYTHING)


def test_csv_is_exact():
    text = to_csv(coverage([row(c) for c in CELLS[:32]] + [point()], EVERYTHING))
    assert text.splitlines()[0] == "paper,kind,number,status,measured,printed" == ",".join(HEADER)
    assert text.splitlines()[1] == "spear,table,1,missing,0,204"
    assert "\nspqt,table,3,live,32,40\n" in text
    assert "\nsubspec,figure,2,partial,1,0\n" in text
    assert text.endswith("\nsubspec,figure,6,missing,0,0\n")
    assert [len(fields) for fields in csv.reader(text.splitlines())] == [6] * 71


def test_text_is_aligned_and_totalled():
    lines = coverage([row(c, grade="B") for c in CELLS[:32]] + [point()], EVERYTHING)
    head, *body, total, tables, figures = to_text(lines).splitlines()
    assert head == "paper      kind    number  status   measured  possible  printed  A   B  C  D"
    assert "spqt       table        3  live           32        40       40  0  32  0  0" in body
    assert len(body) == 70 and len({len(text) for text in (head, *body, total)}) == 1
    assert total.split() == ["total", "33", str(sum(x.possible for x in lines)), "3431", "0", "32", "1", "0"]
    assert tables == "45 tables: 1 live, 0 recorded, 0 partial, 44 missing"
    assert figures == "25 figures: 0 live, 0 recorded, 1 partial, 24 missing"
