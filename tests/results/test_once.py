"""What a table shows is looked up once and handed on: verdict, grid, CSV, figure and page find nothing themselves."""

import inspect
import sys
from collections import Counter
from pathlib import Path

import pytest

from repro.core.files import ROOT
from repro.jobs import compress, requests, tokens
from repro.jobs.target import Target
from repro.make.snake import SnakemakeAdapter
from repro.models import identity
from repro.render import content, draw, sheet, table_files
from repro.render.latex import latex
from repro.results import measure, stored_rows
from repro.specs import scale
from repro.specs import tables as specs
from repro.verdicts import coverage, judging, table_results
from repro.workflow.workflow import Workflow

TABLE = "bitbybit/table1"  # cells, ratios to full precision and claims over them, from stored results
FINDING = ("jobs", "metrics", "recipes", "results", "store", "workflow")  # folders in which something is looked up
ALLOWED = {"results/measured.py", "metrics/__init__.py", "metrics/metric.py", "metrics/perplexity.py"}  # a cell itself


def counted(monkeypatch, flow):
    """How often each of these is computed for a cell while the table is drawn."""
    counts = Counter()

    def count(owner, name, of):
        original = getattr(owner, name)

        def counting(*arguments):
            counts[name, id(arguments[0]), of(*arguments)] += 1
            return original(*arguments)

        monkeypatch.setattr(owner, name, counting)

    count(measure, "_computed", lambda flow, cell: cell.identity)
    count(stored_rows, "_quantity", lambda flow, cell, row: (cell.identity, row.observations))
    count(stored_rows, "_recomputed", lambda row, quantity: row.key)
    count(Workflow, "inputs", lambda flow, cell: cell.identity)
    count(Workflow, "of_series", lambda flow, cell, seeds: cell.identity)
    table_files.sheet_and_csv(flow, TABLE)
    return counts


def test_no_value_interval_or_hash_of_a_cell_is_computed_twice_when_a_table_is_drawn(monkeypatch):
    counts = counted(monkeypatch, Workflow(scale.load(name="pocket"), remember=True))
    assert {name for name, *_ in counts} == {"_computed", "_quantity", "_recomputed", "inputs", "of_series"}
    assert len(counts) > 300
    assert not [key for key, count in counts.items() if count > 1]


def test_a_workflow_whose_files_may_change_computes_again(monkeypatch):
    counts = counted(monkeypatch, Workflow(scale.load(name="pocket")))
    assert max(counts.values()) > 1


def traced(function):
    """Files of this package, below repro/, and their functions that a call passes through; and what it returns."""
    called, crossed = set(), set()

    def note(frame, event, _):
        if event == "call":
            called.add(frame.f_code)

    sys.setprofile(note)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    for code in called:
        path = Path(code.co_filename).resolve()
        whole = code.co_name == "<lambda>" or not code.co_name.startswith("<")  # no comprehension
        if whole and path.is_relative_to(ROOT.resolve() / "repro"):
            crossed.add((str(path.relative_to(ROOT.resolve() / "repro")), code.co_qualname))
    return crossed, result


def test_what_shows_a_table_looks_nothing_up(stored):
    """From measured cells to LaTeX a number passes through rendering and statistics alone."""
    whole = table_results.table_results(stored, *specs.split(TABLE))
    crossed, (text, plain) = traced(lambda: (latex(content.sheet(whole)), sheet.markdown(content.sheet(whole))))
    assert "18.11" in text and "18.11" in plain, "pocket-3m in full precision"
    files = {file for file, _ in crossed}
    assert not {file for file in files - ALLOWED if file.split("/")[0] in FINDING}
    assert len(files) <= 18 and len(crossed) <= 115, "more than a table takes; 46 and 246 once"


def test_a_claim_is_judged_on_the_cells_that_it_is_given(stored, monkeypatch):
    whole = table_results.table_results(stored, *specs.split(TABLE))
    first = next(judged for judged in whole.verdicts if judged.measured)
    cells = [measure.one_measured(stored, cell) for cell in stored.claim_cells(first.spec)]
    for owner, name in ((measure, "_computed"), (stored_rows, "find"), (Workflow, "quantity"), (Workflow, "cells")):
        monkeypatch.setattr(owner, name, lambda *arguments: pytest.fail("looked up"))
    assert judging.verdict(first.spec, cells, stored.scale.name) == first
    gone = [one.marked(status="not_run", value=None) for one in cells]
    assert judging.verdict(first.spec, gone, "x").said == "no verdict: not run"


def test_a_line_of_coverage_and_the_leaderboard_take_what_was_looked_up(stored, monkeypatch):
    cells = table_results.looked_up(stored, *specs.split(TABLE)).by_key.values()
    line = next(
        one for one in coverage.coverage(stored) if (one.paper, one.kind, one.number) == ("bitbybit", "table", "1")
    )
    alike = table_files.compared(stored)
    for owner in (measure, stored_rows, Workflow):
        for name in [name for name, part in vars(owner).items() if inspect.isfunction(part)]:
            monkeypatch.setattr(owner, name, lambda *arguments, **words: pytest.fail("looked up"))
    due = [one for one in cells if one.cell.printed not in coverage.NOTHING]
    again = coverage.line_of(stored.scale, "bitbybit", "table", "1", due, [one.cell.model for one in due])
    assert again == line and line.measured > 50
    entries, ratios = table_files.leaders(alike, stored.scale)
    assert ratios["pocket-3m", "rtn-w4-pc"].value > 1 and "bpw" in entries["pocket-3m"]["rtn-w4-pc"]


@pytest.mark.parametrize("what", ["table", "page"])
def test_a_rule_draws_with_a_workflow_that_remembers(monkeypatch, tmp_path, what):
    seen = []
    monkeypatch.setitem(draw.DRAWN, what, lambda flow, name: seen.append(flow))
    draw.draw("{}", what, "x", str(tmp_path / "log"))
    made = []
    (flow,) = seen
    assert [flow.once(("a key",), lambda: made.append(1) or 2) for _ in range(3)] == [2, 2, 2] and made == [1]
    assert flow.brief.once(("another",), lambda: 3) == flow.brief.once(("another",), lambda: 4) == 3
    assert not flow.is_of_results and Workflow.of_results(flow.scale).is_of_results, "a page makes one of results"


def test_an_interval_is_resampled_once(monkeypatch):
    flow = Workflow.of_results(scale.load(name="pocket"))
    cell = next(c for c in flow.cells("bitbybit", "1") if measure.measurement_of(flow, c).n)
    quantity = measure.one_measured(flow, cell).quantity
    first = quantity.interval()
    monkeypatch.setattr("repro.stats.statistics.interval", lambda *arguments: pytest.fail("again"))
    assert quantity.interval() is first
    assert (first.value, first.lo) == (
        measure.measurement_of(flow, cell).value,
        measure.measurement_of(flow, cell).lo,
    ), "as it is shown"


def test_a_listing_of_jobs_makes_each_once(monkeypatch):
    """A build with nothing to do lists the jobs of every cell before it may say so."""
    counts = Counter()

    def count(owner, name, key):
        original = getattr(owner, name)

        def counting(*arguments):
            counts[name, *key(*arguments)] += 1
            return original(*arguments)

        monkeypatch.setattr(owner, name, counting)

    def of_target(target):
        protocols = tuple(map(repr, target.scale.protocols.values()))  # whole or brief
        return (protocols, repr(target.scale.calibration), target.model, target.text, target.seed)

    count(compress, "_job", of_target)
    count(identity, "tokenizer_digest", lambda folder: ())
    count(stored_rows, "_recomputed", lambda row, quantity: row.key)
    adapter = SnakemakeAdapter(scale.load(name="pocket").as_config())
    assert adapter.jobs_of(TABLE)
    digests = counts.pop(("tokenizer_digest",))
    assert not [key for key in counts if key[0] == "_recomputed"], "whether a row stands needs no value"
    assert "_job" in {name for name, *_ in counts} and set(counts.values()) == {1}
    assert digests <= sum(name == "_job" for name, *_ in counts), "once a target, not once a text or task of it"
    assert adapter.flow.once(("a key",), lambda: 1) == adapter.flow.once(("a key",), lambda: 2) == 1


def test_a_target_names_its_tokenizer_once(monkeypatch):
    calls = []
    monkeypatch.setattr(identity, "tokenizer_digest", lambda folder: calls.append(folder) or "key")
    target = Target(scale.load(name="pocket"), "pocket-3m", "fp16")
    jobs = [requests.job(target, "piqa", None), requests.job(target, "boolq", None), tokens.job(target, "wikitext2")]
    assert len(calls) == 1 and {job.parsed_inputs()["tokenizer"] for job in jobs} == {"key"}
