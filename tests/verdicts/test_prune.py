"""A row of results/ that nothing is made of is named and removed with all that only it needs; any other row stays."""

from dataclasses import replace

import pytest
from tiny_results import MODEL, SPEC

from repro.__main__ import main
from repro.results.accept import accept
from repro.specs import figures, names, tables
from repro.specs.figures import FigureSpec
from repro.store import accepted
from repro.store.accepted import AcceptedRow
from repro.verdicts import prune
from repro.workflow import draws
from repro.workflow.workflow import Workflow

GAIN = {"kind": "derived", "of": {"kind": "perplexity", "corpus": "wikitext2"}, "unit": "percent"}
GAIN |= {"quantity": "100 * (b - s) / (b - f)", "cells": {"s": "{recipe}", "b": "rtn-w4-pc", "f": "fp16"}}
QUESTION = tables.Spec(
    "some of the same cells again",
    rows={"drawn": "gptq-w4-g128"},
    models=(MODEL,),
    measure={"wiki": {"kind": "perplexity", "corpus": "wikitext2"}},
    seeds=(0, 1),
)
NAME = "memory"  # stands for any other table
NO_SPEC, OTHER_ROWS = "no spec has its cell", "its cell is taken from other rows"


@pytest.fixture
def stored(house, monkeypatch):
    """`house` with its table accepted; there is no other spec."""
    monkeypatch.setattr(names, "specified_tables", lambda: [("spear", "1")])
    monkeypatch.setattr(names, "specified_figures", lambda: [])
    accept(house.table())
    return house


def specify(monkeypatch, **specs) -> None:
    """Make these the specs of SPEAR's tables, by number or name."""
    known = tables.table
    monkeypatch.setattr(tables, "table", lambda paper, number: specs.get(number) or known(paper, number))
    monkeypatch.setattr(names, "specified_tables", lambda: [("spear", number) for number in specs])


def without(row: str) -> tables.Spec:
    """The tiny spec without a row."""
    return replace(SPEC, rows={name: recipe for name, recipe in SPEC.rows.items() if name != row})


def shown(house) -> dict:
    """The measurements of the tiny table by cell, as they are taken from results/."""
    flow = Workflow.of_results(house.scale)
    measured = {}
    for cell in flow.cells("spear", "1"):
        measured[cell.cell_key] = prune.measure.measurement_of(flow, cell)
    return measured


def test_every_row_of_a_table_is_used(stored, capsys):
    before = stored.files()
    assert prune.unused("tiny") == {}
    assert main(["prune", "--scale", "tiny"]) == 0
    assert capsys.readouterr().out == "every row is used\n" and stored.files() == before


def test_rows_of_no_spec_are_removed_with_all_that_only_they_need(stored, monkeypatch, capsys):
    specify(monkeypatch, **{"1": without("GPTQ g128")})
    gone = [row for row in accepted.every() if row.row == "GPTQ g128"]
    kept = [row for row in accepted.every() if row.row != "GPTQ g128"]
    assert prune.unused("tiny") == dict.fromkeys(gone, NO_SPEC)
    before, files = shown(stored), stored.files()

    assert main(["prune", "--scale", "tiny", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{len(gone)} rows are not used; results/ is unchanged" and stored.files() == files
    where = "spear table 1 / GPTQ g128 / Wiki / Llama-3.2-1B / wikitext2_ppl at scale tiny"
    assert f"{where}, measured on {gone[0].device}: {NO_SPEC}" in lines and len(lines) == len(gone) + 1

    assert main(["prune", "--scale", "tiny"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{len(gone)} rows are not used and were removed"
    assert accepted.every() == kept and shown(stored) == before and prune.unused("tiny") == {}
    needed = {digest for row in kept for digest in row.observations.split()}
    left = {}
    for path in stored.results.glob("*/observations/*.parquet"):
        for series in accepted.observations.unpack(path)[0].values():
            left[accepted.observations.digest(series)] = series
    assert left.keys() == needed
    (facts,) = stored.results.glob("*/inputs.json.xz")
    hashes = {name for name in accepted._facts(facts) if not name.startswith("#")}
    assert hashes == {row.inputs for row in kept}


def test_a_row_is_used_whose_inputs_another_table_declares(stored, monkeypatch):
    specify(monkeypatch, **{"1": without("GPTQ g128"), NAME: QUESTION})
    unused = prune.unused("tiny")
    assert {row.row for row in unused} == {"GPTQ g128"} and "Wiki" not in {row.col for row in unused}


def test_a_row_is_used_of_which_one_seed_is_shown(stored, monkeypatch):
    specify(monkeypatch, **{"1": without("GPTQ g128"), NAME: replace(QUESTION, seeds=(1,))})
    assert "Wiki" not in {row.col for row in prune.unused("tiny")}


def test_a_row_is_used_from_which_another_cell_is_composed(stored, monkeypatch):
    """Neither table shows RTN's perplexity, which is an operand of the gain."""
    specify(monkeypatch, **{"1": without("RTN pc"), NAME: replace(QUESTION, measure={"gain": GAIN})})
    unused = prune.unused("tiny")
    assert {row.row for row in unused} == {"RTN pc"} and "Wiki" not in {row.col for row in unused}


def test_a_row_is_used_from_which_a_figure_is_drawn(stored, monkeypatch):
    spec = FigureSpec(
        title="by width", x="bits", y="ppl", series={"RTN": {"scales": "pc"}}, recipe="rtn-w{bits}-{scales}",
        models=(MODEL,), sweep={"bits": (4,)}, measure={"kind": "perplexity", "corpus": "wikitext2"},
    )  # fmt: skip
    specify(monkeypatch, **{"1": without("RTN pc")})
    assert "Wiki" in {row.col for row in prune.unused("tiny")}
    known = figures.figure
    monkeypatch.setattr(figures, "figure", lambda *both: spec if both == ("spear", "4") else known(*both))
    monkeypatch.setattr(names, "specified_figures", lambda: [("spear", "4")])
    assert "Wiki" not in {row.col for row in prune.unused("tiny")}


def test_of_two_devices_the_one_that_is_not_shown_is_removed(stored, monkeypatch):
    row = next(row for row in accepted.every() if (row.row, row.col) == ("RTN pc", "Wiki"))
    later = replace(row, device="NVIDIA zzz", commit="89abcdef01")
    accepted.write([AcceptedRow(later, accepted.series(row), accepted.inputs_of(row))])
    assert prune.unused("tiny") == {row: OTHER_ROWS}
    before = shown(stored)
    prune.remove(prune.unused("tiny"))
    assert prune.unused("tiny") == {} and shown(stored) == before
    assert later in accepted.every() and row not in accepted.every()


def test_a_stale_row_that_is_shown_stays(stored):
    def older(old: AcceptedRow) -> AcceptedRow:
        return replace(old, row=replace(old.row, versions=old.row.versions.replace("rtn=1", "rtn=0")))

    accepted.rewrite(older)
    assert "stale" in {m.status for m in shown(stored).values()}
    assert prune.unused("tiny") == {}


def test_rows_of_which_the_variance_between_seeds_is_pooled_stay(stored, monkeypatch):
    specify(monkeypatch, **{"1": without("GPTQ g128")})
    assert prune.unused("tiny")
    monkeypatch.setattr(draws, "POOL", "spear/table1")
    assert prune.unused("tiny") == {}


def test_rows_of_another_scale_stay(stored):
    row = next(row for row in accepted.every() if (row.row, row.col) == ("RTN pc", "Wiki"))
    other = replace(row, scale="pocket")
    accepted.write([AcceptedRow(other, accepted.series(row), accepted.inputs_of(row))])
    assert prune.unused("tiny") == {} and other in accepted.every()


def test_a_scale_of_a_file_or_of_changed_keys_is_refused(stored, capsys):
    for words in (["--config", "threads=2"], ["--configfile", "mine.yaml"]):
        assert main(["prune", *words]) == 2
        assert "give --scale alone" in capsys.readouterr().err


def test_only_files_with_a_changed_row_are_written(stored, monkeypatch):
    row = next(row for row in accepted.every() if (row.row, row.col) == ("RTN pc", "Wiki"))
    accepted.write([AcceptedRow(replace(row, number="2"), accepted.series(row), accepted.inputs_of(row))])
    stamps = {path: path.stat().st_mtime_ns for path in stored.results.rglob("*.csv.xz")}
    assert len(stamps) == 2
    written = accepted.rewrite(lambda old: None if old.row.number == "2" else old)
    (kept,) = [path for path in stamps if path.name == "spear-table1.csv.xz"]
    assert kept.stat().st_mtime_ns == stamps[kept] and [*written.values()] == [0]
    assert not kept.with_name("spear-table2.csv.xz").exists()
