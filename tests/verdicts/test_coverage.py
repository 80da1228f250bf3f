"""Coverage counts a printed cell once, tells fresh from stored, and leaves no table or figure out."""

import csv
from dataclasses import replace
from functools import cache

import pytest

from repro import papers
from repro.core.errors import UserError
from repro.metrics import bench, tpot
from repro.results import measure, stored_rows
from repro.specs import scale, tables
from repro.store import accepted, kernel_rows
from repro.store.measurement import Measurement, inputs_hash
from repro.verdicts import coverage
from repro.verdicts.coverage import HEADER, summary, to_csv, to_text
from repro.workflow import versions
from repro.workflow.workflow import Workflow

ALL = papers.PAPERS
# Table 15 of SPEAR has 24 printed cells, all possible at scale pocket: 4 thresholds, 3 models, perplexity and share.


@pytest.fixture(scope="module")
def flow():
    return Workflow(scale.load(name="pocket"), stored=False)


@pytest.fixture
def at(flow, monkeypatch, tmp_path):
    """`coverage` of scale pocket with the given accepted rows, and rows that the jobs of their cells would give.

    Of one table and one figure of SPEAR, or of those named, or of `only=ALL` papers.
    """
    figures = papers.data_figures

    def lines(stored=(), fresh=(), on=flow, only=("spear",), numbers=("15",)):
        kept = {(row.table, row.cell_key, row.scale): row for row in stored}
        built = {(row.table, row.cell_key): row for row in fresh}
        with monkeypatch.context() as patch:
            patch.setattr(papers, "PAPERS", only)
            patch.setattr(kernel_rows, "files", lambda: [])  # no accepted times of kernels
            for kind in (bench, tpot):  # nor of steps
                patch.setattr(kind, "STORED", tmp_path)
            if only != ALL:
                patch.setattr(papers, "tables", lambda paper: list(numbers))
                patch.setattr(
                    papers, "data_figures", lambda paper: [one for one in figures(paper) if one.number == "13"]
                )
            patch.setattr(accepted, "find", lambda scale, cell: kept.get((cell.table, cell.cell_key, scale)))
            patch.setattr(stored_rows, "_recomputed", lambda *which: {})  # these rows have no observations
            patch.setattr(accepted, "equal", lambda scale, inputs: [])
            patch.setattr(Workflow, "is_measured_here", lambda self, cell: (cell.table, cell.cell_key) in built)
            blank = {"status": "not_run", "value": None, "source": ""}  # of a setting, which is fresh without any job
            patch.setattr(measure, "fresh", lambda f, c: built.get((c.table, c.cell_key)) or row(f, c, **blank))
            return coverage.coverage(on)

    return lines


def rows(flow, number="15", kind="table", **changes):
    """A row for every printed cell (every point of a figure) as a build of today's code would write it."""
    return [replace(one, **changes) for one in fresh(flow, number, kind)]


@cache
def fresh(flow, number, kind):
    cells = [c for c in flow.cells("spear", number, kind) if c.printed or kind == "figure"]
    return [row(flow, cell) for cell in cells if cell.stand_in and flow.is_measured(cell)]


def row(flow, cell, **changes):
    names = ("paper", "kind", "number", "row", "col", "model", "metric", "printed", "unit", "stand_in")
    facts = {name: getattr(cell, name) for name in names}
    facts |= {
        "value": 1.0,
        "status": "ok",
        "grade": "C",
        "source": "fresh",
        "scale": flow.scale.name,
        "device": "a cpu",
    }
    facts |= {"inputs": inputs_hash(flow.inputs(cell)), "versions": versions.text(versions.of_cell(flow, cell))}
    return Measurement(**facts | changes)


def line(lines, paper="spear", kind="table", number="15"):
    (result,) = [x for x in lines if (x.paper, x.kind, x.number) == (paper, kind, number)]
    return result


def test_nothing_measured_is_seventy_lines(at):
    lines = at(only=ALL)
    assert [x.kind for x in lines].count("table") == 45 and len(lines) == 70
    assert {x.measured for x in lines} == {0}
    values = []
    for paper in papers.PAPERS:
        for table in papers.tables(paper):
            values += [cell.value for cell in papers.printed(paper, table)]
    assert sum(x.printed for x in lines) == len([v for v in values if v]) == len(values) - 83, "a blank is not due"
    by_status = {(x.paper, x.kind, x.number) for x in lines if x.status == "other_device"}
    apple = {("spqt", "table", n) for n in "12"} | {("spqt", "figure", n) for n in ("7", "8", "9", "10")}
    assert by_status == apple | {("bitbybit", "table", n) for n in "78"} | {("bitbybit", "figure", "6")}
    assert line(lines, number="25").status == "no_stand_in"
    assert line(lines).status == line(lines, number="7").status == "missing", "settings name no model"


def test_possible_is_what_has_a_stand_in_and_a_protocol(at, flow):
    bare = Workflow(scale.load({"zeroshot": None}, "pocket"), stored=False)
    lines = at(on=bare, numbers=("1", "7", "10"))
    assert (line(lines, number="1").possible, line(lines, number="1").printed) == (102, 204), "no zero-shot, no 13B"
    assert line(lines, number="7").possible == 16 and line(lines, number="10").possible == 102, "no spec is needed"
    assert line(at(numbers=("1",)), number="1").possible == 153
    less = Workflow(replace(flow.scale, models={"Llama-3.2-1B": "pocket-3m"}), stored=False)
    result = at(on=less, numbers=("1", "25"))
    assert line(result, number="1").possible == 51 and line(result, number="25").status == "no_stand_in"
    assert line(result, kind="figure", number="13").status == "no_stand_in"


@pytest.mark.parametrize(
    ("measured", "status"), [(0, "missing"), (1, "partial"), (19, "partial"), (20, "fresh"), (24, "fresh")]
)
def test_four_fifths_is_the_boundary(at, flow, measured, status):
    result = line(at(fresh=rows(flow)[:measured]))
    assert (result.status, result.measured, result.possible, result.printed) == (status, measured, 24, 24)
    assert result.grades == ({"C": measured} if measured else {})


def test_stored_is_not_fresh_and_a_cell_counts_once(at, flow):
    old, new = rows(flow, source=""), rows(flow)
    assert line(at(old)).status == line(at(old, new[:19])).status == "stored"
    assert line(at(old, new[:20])).status == "fresh"
    both = line(at(old, new[:5]))
    assert (both.measured, dict(both.origins)) == (24, {"fresh": 5, "stored": 19})


@pytest.mark.parametrize(
    "change", [{"inputs": "01234567"}, {"versions": "perplexity=0"}, {"scale": "gpu"}, {"row": "tau=9"},
               {"status": "stale"}, {"status": "oom"}, {"number": "16"}]
)  # fmt: skip
def test_what_does_not_stand_is_not_counted(at, flow, change):
    assert line(at(rows(flow, source="", **change))).measured == 0
    if "status" in change:
        assert line(at(fresh=rows(flow, **change))).measured == 0


def test_at_chance_is_a_measurement(at, flow):
    assert line(at(fresh=rows(flow, status="at_chance"))).measured == 24


def test_own_rows_and_columns_beside_do_not_count(at, flow):
    beside = [c for c in flow.cells("spear", "1") if not c.printed and flow.is_measured(c)]
    assert len(beside) > 100
    assert line(at(fresh=[row(flow, c) for c in beside[:9]], numbers=("1",)), number="1").measured == 0


def test_a_figure_counts_its_declared_points(at, flow, monkeypatch):
    points = rows(flow, number="13", kind="figure", source="")
    result = [line(at(points[:n]), kind="figure", number="13") for n in range(3)]
    assert [(x.status, x.measured, x.possible, x.printed) for x in result] == [
        ("missing", 0, 2, 0),
        ("partial", 1, 2, 0),
        ("stored", 2, 2, 0),
    ]
    here = rows(flow, number="13", kind="figure")
    assert line(at(fresh=here), kind="figure", number="13").status == "fresh"


def test_a_list_of_other_devices_names_what_the_paper_has(tmp_path, monkeypatch):
    monkeypatch.setattr(coverage, "ROOT", tmp_path)
    folder = tmp_path / "repro" / "papers" / "spqt"
    folder.mkdir(parents=True)
    (folder / "other_devices.yaml").write_text('tables: ["4"]\n')
    with pytest.raises(UserError, match="other_devices.yaml: unknown table.* '4'"):
        coverage.other_device("spqt", "table", "1")


def test_what_would_have_to_come(at, flow):
    lines = at(rows(flow, source=""), only=ALL)
    assert not line(lines).wanted, "all 24 are measured"
    wanted = {f"{x.paper} {x.kind} {x.number}": x.wanted for x in lines}
    assert wanted["spear table 1"] == {
        "a run": 153, "a stand-in for Llama-2-13B": 51,
    }  # fmt: skip
    assert wanted["bitbybit table 6"] == {"a run": 22}
    six = {why: count for why, count in wanted["subspec table 6"].items() if not why.startswith("a stand-in for ")}
    reasons = tables.table("subspec", "6").absent
    assert six == {"a run": 16, **dict(zip(reasons.values(), (4, 4, 6)))}, "reasons of columns, in a spec's words"
    assert wanted["spear table 3"] == {"a run": 36} and wanted["spear table 5"] == {"a run": 36}
    assert wanted["spear table 7"]["a kind of cell that holds words"] == 2
    assert wanted["flexquant table 2"]["the judge that it names, DeepSeek-V3, an outside service"] == 8
    assert "a kind and a spec" not in set().union(*wanted.values())
    assert sum(wanted["bitbybit table 4"].values()) == 20
    assert "a run" in wanted["bitbybit table 5"] and "a stand-in for Llama2-13B" in wanted["bitbybit table 5"]
    assert wanted["spear table 25"] == {"a stand-in for Llama-2-13B": 153}
    assert wanted["spqt table 1"] == {"the machines that it names": 16}
    assert wanted["spear figure 13"] == {"a run": 2} and wanted["spear figure 8"] == {"a run": 15}
    assert wanted["spear figure 10"] == {"a run": 36}
    assert wanted["spear figure 9"] == {"a run": 30}, "a shape needs no stand-in"
    assert all(sum(x.wanted.values()) + x.measured == (x.printed or x.possible) for x in lines)
    text = to_text(lines)
    assert "\n  spear/table25: a stand-in for Llama-2-13B (153)\n" in text and "spear/table15:" not in text
    assert "\n  spear/figure8: a run (15)\n" in text


def test_what_a_result_that_is_none_waits_for(at, flow):
    stale, other = rows(flow, source="", versions="perplexity=0"), rows(flow, source="", inputs="01234567")
    refused = rows(flow, source="", status="oom")
    result = line(at([*stale[:3], *other[3:5], *refused[5:9], *rows(flow, source="")[9:]]))
    assert result.wanted["another outcome than oom"] == 4
    assert result.wanted["a run"] == 5


@pytest.mark.parametrize("value", ["", "-", "–", "—"])
def test_blanks_and_dashes_are_not_due(at, flow, monkeypatch, value):
    cells = flow.cells
    blank = lambda paper, number, kind="table": [replace(c, printed=value) for c in cells(paper, number, kind)[:3]]  # noqa: E731
    monkeypatch.setattr(flow, "cells", lambda *table: blank(*table) + cells(*table)[3:])
    assert line(at()).printed == 21


def test_a_figure_whose_models_have_no_stand_in(at):
    lines = at(only=ALL)
    by_status = {(x.paper, x.number) for x in lines if (x.kind, x.status) == ("figure", "no_stand_in")}
    assert by_status == {("spear", "9")}


def test_csv_is_exact(at, flow):
    lines = at(fresh=rows(flow)[:20], only=ALL)
    text = to_csv(lines)
    assert text.splitlines()[0] == "paper,kind,number,status,measured,printed" == ",".join(HEADER)
    assert text.splitlines()[1] == "spear,table,1,missing,0,204"
    assert "\nspear,table,15,fresh,20,24\n" in text and "\nspqt,table,1,other_device,0,16\n" in text
    assert text.endswith("\nsubspec,figure,6,missing,0,0\n")
    assert [len(fields) for fields in csv.reader(text.splitlines())] == [6] * 71


def test_text_is_aligned_and_totalled(at, flow):
    lines = at(rows(flow, source=""), rows(flow)[:2], only=ALL)
    shown, waiting = to_text(lines).split("What would have to come, and for how many cells:\n")
    head, *body, total, tables, figures = shown.splitlines()
    last = waiting.splitlines()[-1]
    assert head.split() == [*HEADER[:5], "fresh", "stored", "possible", "printed", *"ABCD"]
    (result,) = [text for text in body if text.split()[:3] == ["spear", "table", "15"]]
    assert result.split()[3:] == ["stored", "24", "2", "22", "24", "24", "0", "0", "24", "0"]
    assert len(body) == 70 and len({len(text) for text in (head, *body, total)}) == 1
    assert total.split()[:4] == ["total", "24", "2", "22"] and total.split()[-4:] == ["0", "0", "24", "0"]
    assert tables == "45 tables: 0 fresh, 1 stored, 0 partial, 39 missing, 1 no_stand_in, 4 other_device"
    assert figures == "25 figures: 0 fresh, 0 stored, 0 partial, 19 missing, 1 no_stand_in, 5 other_device"
    assert last == summary(lines)


def test_the_summary_is_one_sentence(at, flow):
    assert summary(at(rows(flow, source=""), only=ALL)) == (
        "1 of 45 tables and 0 of 25 figures measured at scale pocket (24 of 3,348 printed cells)"
    )
    more = [*rows(flow), *rows(flow, number="13", kind="figure"), *rows(flow, number="1")[:3]]
    assert summary(at(more, only=ALL)) == (
        "1 of 45 tables and 1 of 25 figures measured at scale pocket, and 1 more in part (27 of 3,348 printed cells)"
    )
