"""A figure's points are accepted from their jobs, and drawn from what is stored where nothing is built."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_results import MODEL, refusal

from repro.__main__ import main
from repro.render import figure_files as rendered
from repro.results import measure
from repro.results.accept import accept, accept_figure
from repro.specs import figures
from repro.specs.figures import FigureSpec
from repro.store import accepted
from repro.workflow import runner
from repro.workflow.workflow import Workflow

NAME = "spear/figure4"
SPEC = FigureSpec(
    title="damage by layer",
    series={"RTN": "rtn-w3-pc"},
    models=(MODEL,),
    measure={"kind": "sensitivity", "show": "loss", "unit": "nats"},
    across={"kind": "sensitivity", "show": "damage", "unit": "1 - CKA"},
    points="axis",
    x="damage",
    y="loss",
)


@pytest.fixture
def drawn(house, monkeypatch):
    """The tiny house with Figure 4 as one series of layers, its jobs run."""
    known = figures.figure
    monkeypatch.setattr(figures, "figure", lambda *both: SPEC if both == ("spear", "4") else known(*both))
    protocol = type(house.scale.protocols["sensitivity"])(sequences=2, tokens=16)
    house.scale = replace(house.scale, protocols=house.scale.protocols | {"sensitivity": protocol})
    monkeypatch.setattr("repro.specs.scale.load", lambda *words, **named: house.scale)
    for job in house.flow.every_job(house.flow.cells("spear", "4", "figure")):
        if not runner.done(job):
            runner.run(job)
    return house


def points(flow: Workflow, folder: Path) -> list:
    """The points of the one series of the drawn figure."""
    ((panel,),) = [rendered.build(flow, NAME, folder).values()]
    return panel["RTN"]


def test_an_accepted_figure_is_drawn_from_what_is_stored(drawn, tmp_path):
    here = points(drawn.flow, tmp_path / "here")
    assert len(here) > 3 and len({x for x, *_ in here}) > 3
    (count,) = accept_figure(drawn.flow, NAME).values()
    assert count == 2 and {row.table for row in accepted.every()} == {NAME}
    shutil.rmtree("build")
    stored = points(Workflow(drawn.scale, stored=True), tmp_path / "stored")
    assert stored == here
    text = (tmp_path / "stored" / f"{NAME}.md").read_text()
    assert "RTN" in text and "nothing yet" not in text
    accepted.rewrite(lambda old: None)
    accepted.forget()
    assert rendered.build(Workflow(drawn.scale, stored=True), NAME, tmp_path / "none").popitem()[1] == {"RTN": []}


def test_what_is_built_of_a_point_is_accepted_beside_what_is_stored_of_it(house, monkeypatch):
    """As of a table: `run --missing` leaves out what is accepted, and the point is composed."""
    perplexity = {"kind": "perplexity", "corpus": "wikitext2"}
    cells = {"s": "{recipe}", "f": "fp16"}
    spec = FigureSpec(
        title="damage by width", x="bits", y="ppl", series={"RTN": {"scales": "pc"}}, recipe="rtn-w{bits}-{scales}",
        models=(MODEL,), sweep={"bits": (4,)},
        measure={"kind": "derived", "quantity": "s - f", "of": perplexity, "cells": cells},
    )  # fmt: skip
    known = figures.figure
    monkeypatch.setattr(figures, "figure", lambda *both: spec if both == ("spear", "4") else known(*both))
    accept(house.table(rows=["FP16"]))
    (point,) = house.flow.cells("spear", "4", "figure")
    whole = measure.fresh(house.flow, point)
    built_here, left_out = runner.origin, {house.job("FP16").id}
    monkeypatch.setattr(runner, "origin", lambda job: {} if job.id in left_out else built_here(job))
    assert list(accept_figure(house.flow, NAME).values()) == [1]
    (row,) = [row for row in accepted.every() if row.table == NAME]
    assert row.metric == "point: s" and row.status == "ok"
    monkeypatch.setattr(runner, "origin", built_here)
    shown = measure.measurement_of(Workflow(house.scale, stored=True), point)
    assert (shown.status, shown.source) == ("ok", "stored")
    assert (shown.value, shown.lo, shown.hi) == (whole.value, whole.lo, whole.hi)


def test_the_verb_takes_a_figure_by_its_name(drawn, capsys):
    assert main(["accept", "figures/spear/figure4.csv", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("2 rows into ") and len(accepted.every()) == 2
    assert main(["accept", "tables/spear/table1.csv", "--device", "cpu"]) == 2
    assert "--scale and --device belong to a figure" in capsys.readouterr().err


def test_a_figure_without_jobs_or_of_a_table_is_one_sentence(drawn, monkeypatch):
    shutil.rmtree("build")
    message = refusal(lambda: accept_figure(drawn.flow, NAME))
    assert message.startswith(f"{NAME}: no measured row to accept")
    table = FigureSpec("t", "x", "y", table="spear/shares", metrics=("a", "b"))
    monkeypatch.setattr(figures, "figure", lambda *both: table)
    assert "is drawn from the cells of spear/shares" in refusal(lambda: accept_figure(drawn.flow, NAME))
