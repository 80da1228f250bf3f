"""A cell takes the accepted row of the same declared inputs, from any table; a derived one takes those of its parts."""

import shutil
from dataclasses import replace
from itertools import chain

import pytest
from test_accept import older
from tiny_results import MODEL, SPEC, refusal

from repro.core.errors import UserError
from repro.render import table_files as rendered
from repro.render.content import measured_text
from repro.results import measure, stored_rows
from repro.results.accept import accept
from repro.results.stored_rows import ORIGIN
from repro.specs import tables
from repro.specs.tables import Spec
from repro.stats.quantity import compose
from repro.store import accepted
from repro.store.job import distinct
from repro.store.measurement import MEASURED, from_csv, to_csv
from repro.workflow import runner
from repro.workflow.workflow import Workflow

GAIN = {"kind": "derived", "of": {"kind": "perplexity", "corpus": "wikitext2"}, "unit": "percent"}
GAIN |= {"quantity": "100 * (b - s) / (b - f)", "cells": {"s": "{recipe}", "b": "rtn-w4-pc", "f": "fp16"}}
QUESTION = Spec(
    "the same cells again, and others",
    rows={"full": "fp16", "ours": "rtn-w4-pc", "drawn": "gptq-w4-g128", "3 bits": "rtn-w3-pc"}
    | {"refused": SPEC.rows["+SPEAR pc on RTN"]},
    models=(MODEL,),
    measure={
        "wiki": {"kind": "perplexity", "corpus": "wikitext2"},
        "kl": {"kind": "perplexity", "corpus": "c4", "show": "kl"},
        "gain": GAIN,
    },
    seeds=(0, 1),
)
OLDER = "other versions: rtn was 0, is 1"
NAME = "memory"  # stands for any other table
SAME = ("value", "lo", "hi", "covers", "n", "status", "grade", "recipe", "seeds", "protocol", "inputs", "observations")


@pytest.fixture
def two_tables(house, monkeypatch):
    """`house` with a second table that asks for what Table 1 has, and more."""
    known = tables.table
    monkeypatch.setattr(tables, "table", lambda *both: QUESTION if both == ("spear", NAME) else known(*both))
    return house


def cell(house, row="ours", metric="wiki"):
    return next(c for c in house.flow.cells("spear", NAME) if (c.row, c.metric) == (row, metric))


def shown(house, row="ours", metric="wiki", **scale):
    """A cell of the second table as a machine shows it that takes everything from results/."""
    return measure.measurement_of(Workflow(replace(house.scale, **scale), stored=True), cell(house, row, metric))


def edit(house, name="table1", row="RTN pc", **changes):
    """Edit the accepted rows of one label, and sign them anew."""
    (path,) = house.results.glob(f"*/spear-{name}.csv.xz")
    accepted.store(path, [replace(m, **changes) if m.row == row else m for m in from_csv(path)])
    accepted.forget()


def accept_own(house, *rows):
    """Accept the second table's own fresh rows."""
    path = house.folder / "own.csv"
    result = [measure.measurement_of(house.flow, one) for one in house.flow.cells("spear", NAME)]
    path.write_text(to_csv(m for m in result if m.row in rows))
    return accept(path)


# --- equal inputs -----------------------------------------------------------------------------------------------------


def test_the_row_of_another_table_stands_for_a_cell_of_equal_inputs(two_tables):
    accept(two_tables.table())
    for row, twin in (("ours", "RTN pc"), ("drawn", "GPTQ g128"), ("full", "FP16")):
        result, fresh, other = (
            shown(two_tables, row),
            measure.measurement_of(two_tables.flow, cell(two_tables, row)),
            two_tables.stored_row(twin),
        )
        assert result == replace(fresh, source="stored") and result.status == "ok" and result.note == ""
        assert result.cell_key == (row, "", MODEL, "wiki") and other.cell_key == (twin, "Wiki", MODEL, "wikitext2_ppl")
        assert measured_text(result) == measured_text(other)
        assert [getattr(result, name) for name in SAME] == [getattr(other, name) for name in SAME]
    refused = shown(two_tables, "refused")
    assert (refused.status, refused.value) == ("unsupported", None) and refused.note


def test_whether_a_row_stands_needs_no_value(two_tables, monkeypatch):
    accept(two_tables.table())
    monkeypatch.setattr(stored_rows, "_recomputed", lambda *arguments: pytest.fail("a value was computed"))
    flow = Workflow(two_tables.scale, stored=True)
    assert stored_rows.stands(flow, cell(two_tables)) and not stored_rows.stands(flow, cell(two_tables, "3 bits"))
    edit(two_tables, versions="perplexity=1 rtn=0")
    assert not stored_rows.stands(Workflow(two_tables.scale, stored=True), cell(two_tables))


def test_peers_are_the_cells_of_a_column(two_tables):
    cells = two_tables.flow.cells("spear", "1")
    for one in cells:
        assert two_tables.flow.peers(one) == [other for other in cells if other.cell_key[1:] == one.cell_key[1:]]


def test_nothing_less_than_equal_inputs_counts(two_tables, monkeypatch):
    accept(two_tables.table())
    assert shown(two_tables).status == "ok"
    assert shown(two_tables, metric="kl").status == "not_run", "Table 1 shows KL on another text"
    assert shown(two_tables, "3 bits").status == "not_run", "another option of the recipe"
    assert shown(two_tables, name="other").status == "not_run", "another scale"
    assert shown(two_tables, dtype="bfloat16").status == "not_run"
    another = replace(cell(two_tables, "drawn"), seeds=(7,))
    assert measure.measurement_of(Workflow(two_tables.scale, stored=True), another).status == "not_run", "another seed"
    monkeypatch.setattr("repro.models.fingerprint", lambda name: "abcdef01")
    assert shown(two_tables).status == "not_run", "another model under the same name"


@pytest.mark.parametrize("seed", [0, 1])
def test_one_seed_of_a_row_with_several_stands_for_a_cell_of_this_seed(two_tables, seed):
    accept(two_tables.table())
    one = replace(cell(two_tables, "drawn"), seeds=(seed,))
    flow, fresh = Workflow(two_tables.scale, stored=True), measure.measurement_of(two_tables.flow, one)
    result = measure.measurement_of(flow, one)
    assert result == replace(fresh, source="stored", artifacts=result.artifacts) and result.seeds == str(seed)
    assert result.value != two_tables.stored_row("GPTQ g128").value and "seeds" not in result.covers
    both = [measure.one_measured(here, one).quantity.interval() for here in (flow, two_tables.flow)]
    assert both[0] == both[1]


def test_staleness_is_that_of_the_row(two_tables):
    older(two_tables, "RTN pc")
    accept(two_tables.table())
    assert (shown(two_tables).status, shown(two_tables).source, shown(two_tables).note) == ("stale", "stored", OLDER)
    assert shown(two_tables).value == two_tables.stored_row().value and shown(two_tables, "full").status == "ok"
    assert shown(two_tables, grade="B").status == "stale"


def test_its_own_row_wins_unless_only_the_other_stands(two_tables):
    accept(two_tables.table())
    accept_own(two_tables, "ours")
    edit(two_tables, protocol="of Table 1")
    edit(two_tables, NAME, "ours", protocol="its own")
    assert shown(two_tables).protocol == "its own" and two_tables.stored_row().protocol == "of Table 1"
    edit(two_tables, NAME, "ours", versions="perplexity=0")
    assert (shown(two_tables).protocol, shown(two_tables).status) == ("of Table 1", "ok")
    edit(two_tables, NAME, "ours", inputs="0" * 8)
    assert (shown(two_tables).protocol, shown(two_tables).status) == ("of Table 1", "ok")
    edit(two_tables, versions="perplexity=0")
    assert (shown(two_tables).protocol, shown(two_tables).status) == ("its own", "stale")


def test_of_several_devices_the_last_by_the_folders_name_that_stands(two_tables):
    accept(two_tables.table())
    (folder,) = two_tables.results.iterdir()
    for device in ("zz 1", "zz 2"):
        copy = shutil.copytree(folder, two_tables.results / device.replace(" ", "-"))
        path = copy / "spear-table1.csv.xz"
        accepted.store(path, [replace(m, device=device) for m in from_csv(path)])
    accepted.forget()
    assert shown(two_tables).device == two_tables.stored_row().device == "zz 2"
    accepted.store(path, [replace(m, versions="perplexity=0") for m in from_csv(path)])
    accepted.forget()
    assert (shown(two_tables).device, shown(two_tables).status) == ("zz 1", "ok")
    assert (two_tables.stored_row().device, two_tables.stored_row().status) == ("zz 1", "ok")


def test_an_edited_value_is_noticed_where_it_was_accepted(two_tables):
    accept(two_tables.table())
    edit(two_tables, value=10.0)
    assert "spear-table1.csv.xz: the value of spear table 1 / RTN pc" in refusal(shown, two_tables)


# --- derived cells ----------------------------------------------------------------------------------------------------


def test_a_derived_cell_is_composed_of_its_parts_series(two_tables):
    fresh = measure.fresh(two_tables.flow, cell(two_tables, "drawn", "gain"))
    assert fresh.status == "ok" and fresh.covers == "windows and seeds" and fresh.lo < fresh.value < fresh.hi
    accept(two_tables.table())
    result = shown(two_tables, "drawn", "gain")
    assert [getattr(result, name) for name in (*SAME, *ORIGIN)] == [getattr(fresh, name) for name in (*SAME, *ORIGIN)]
    assert (result.source, result.seeds, result.cell_key) == ("stored", "0 1", ("drawn", "", MODEL, "gain"))
    assert result.versions == fresh.versions == "compress=1 derived=1 gptq=1 perplexity=1 rtn=1 tokens=1"
    assert shown(two_tables, "3 bits", "gain").status == "not_run", "one part is not accepted"
    refused = shown(two_tables, "refused", "gain")
    assert (refused.status, refused.value) == ("unsupported", None)
    assert refused.note == shown(two_tables, "refused").note


def test_a_composed_cell_is_stale_if_a_part_is_and_its_origins_are_joined(two_tables):
    older(two_tables, "RTN pc")
    accept(two_tables.table())
    result = shown(two_tables, "drawn", "gain")
    assert (result.status, result.note) == ("stale", OLDER) and result.value is not None
    assert set(result.commit.split(" + ")) == {"0123456789", "9999999999"}


def test_an_accepted_derived_cell_is_shared_as_a_whole(two_tables):
    accept(two_tables.table())
    accept_own(two_tables, "drawn")
    assert shown(two_tables, "drawn", "gain").status == "ok"
    other = replace(cell(two_tables, "drawn", "gain"), row="again")
    flow = Workflow(two_tables.scale, stored=True)
    assert measure.measurement_of(flow, other) == replace(shown(two_tables, "drawn", "gain"), row="again")
    edit(two_tables, row="RTN pc", versions="perplexity=0")  # a part of it
    assert measure.measurement_of(flow, other).status == "ok"


def test_a_part_that_is_built_beside_accepted_ones_is_accepted_in_a_place_of_its_own(two_tables, monkeypatch):
    """What `run --missing` leaves out is not built: the other parts of a cell are taken, and the cell is composed."""
    accept(two_tables.table(rows=["FP16", "RTN pc"]))
    built_here, left_out = runner.origin, {two_tables.job("FP16").id}
    monkeypatch.setattr(runner, "origin", lambda job: {} if job.id in left_out else built_here(job))
    assert measure.measurement_of(two_tables.flow, cell(two_tables, "drawn", "gain")).status == "not_run"
    rendered.build(two_tables.flow, f"spear/{NAME}", two_tables.folder)
    path = two_tables.folder / "spear" / f"{NAME}.csv"
    rows = {(m.row, m.metric): m for m in from_csv(path)}
    parts = {key for key in rows if ": " in key[1]}
    assert parts == {("drawn", "gain: s"), ("refused", "gain: s")}, "others are accepted, not built, or another's twice"
    accept(path)
    twin = measure.measurement_of(two_tables.flow, cell(two_tables, "drawn"))
    part = accepted.find(two_tables.scale.name, stored_rows.with_seeds_of(cell(two_tables, "drawn", "gain"), twin))
    assert part is None, "the cell itself is not measured anew"
    monkeypatch.setattr(runner, "origin", built_here)
    fresh, result = (
        measure.fresh(two_tables.flow, cell(two_tables, "drawn", "gain")),
        shown(two_tables, "drawn", "gain"),
    )
    assert [getattr(result, name) for name in SAME] == [getattr(fresh, name) for name in SAME]
    assert shown(two_tables, "refused", "gain").status == "unsupported"
    row = next(m for m in accepted.every() if (m.row, m.metric) == ("drawn", "gain: s"))
    assert measure.cell_of(two_tables.flow, row).recipe == "gptq-w4-g128" and (row.printed, row.unit) == ("", "")
    assert measure.fresh_operands(two_tables.flow, [cell(two_tables, "drawn", "gain")]) == []
    with pytest.raises(UserError, match="has no cell drawn /  / Llama-3.2-1B / gain: x"):
        measure.cell_of(two_tables.flow, replace(row, metric="gain: x"))


# --- who sees it ------------------------------------------------------------------------------------------------------


def test_quantities_pair_over_the_windows_of_shared_cells(two_tables):
    ratio = measure.one_measured(two_tables.flow, cell(two_tables)).against
    accept(two_tables.table())
    flow = Workflow(two_tables.scale, stored=True)
    assert measure.one_measured(flow, cell(two_tables)).against == ratio is not None
    mine, theirs = cell(two_tables), two_tables.cell()
    both = {"x": measure.one_measured(flow, mine).quantity, "y": measure.one_measured(flow, theirs).quantity}
    gap = compose("x - y", both).interval()
    assert (gap.value, gap.lo, gap.hi) == (0, 0, 0)
    gain = cell(two_tables, "drawn", "gain")
    again = measure.one_measured(flow, gain).quantity.interval()
    assert again == two_tables.flow.quantity(gain).interval()


def test_full_precision_is_found_for_a_table_without_its_row(two_tables, monkeypatch):
    accept(two_tables.table())
    before = measure.one_measured(Workflow(two_tables.scale, stored=True), cell(two_tables)).against
    bare = replace(QUESTION, rows={"ours": "rtn-w4-pc"})
    known = tables.table
    monkeypatch.setattr(tables, "table", lambda *both: bare if both == ("spear", NAME) else known(*both))
    assert measure.one_measured(Workflow(two_tables.scale, stored=True), cell(two_tables)).against == before is not None


def test_nothing_is_written_for_a_shared_cell(two_tables):
    accept(two_tables.table())
    before = two_tables.files()
    rendered.build(Workflow(two_tables.scale, stored=True), f"spear/{NAME}", two_tables.folder)
    rows = from_csv(two_tables.folder / "spear" / f"{NAME}.csv")
    assert {(m.row, m.source) for m in rows if m.status in MEASURED and m.metric == "wiki"} == {
        (row, "stored") for row in ("full", "ours", "drawn")
    }
    assert "no measured row to accept" in refusal(accept, two_tables.folder / "spear" / f"{NAME}.csv")
    assert two_tables.files() == before


def test_what_is_accepted_next_is_seen(two_tables):
    assert shown(two_tables).status == "not_run"
    accept(two_tables.table())
    assert shown(two_tables).status == "ok"
    shutil.rmtree(two_tables.results)
    assert shown(two_tables).status == "ok", "results/ is read once"
    accepted.forget()
    assert shown(two_tables).status == "not_run"


# --- what is left to run ----------------------------------------------------------------------------------------------


def test_missing_are_the_jobs_that_no_accepted_result_stands_for(two_tables):
    flow, cells = two_tables.flow, two_tables.flow.cells("spear", NAME)
    every = chain.from_iterable(stored_rows.jobs(flow, c) for c in cells)
    assert set(measure.missing(flow, cells)) == set(distinct(every))
    accept(two_tables.table())
    kl = [c for c in cells if c.metric == "kl"]
    left = []
    for c in cells:
        if c.row == "3 bits" or c in kl:
            left += stored_rows.jobs(flow, c)
    part = measure.missing(flow, [cell(two_tables, "3 bits", "gain")])
    assert set(measure.missing(flow, cells)) == set(distinct(left))
    of_part = stored_rows.jobs(flow, cell(two_tables, "3 bits"))
    assert set(part) == set(distinct(of_part)), "not of the parts that are there"
    edit(two_tables, "table1", "RTN pc", inputs="01234567")
    assert set(stored_rows.jobs(flow, cell(two_tables))) < set(measure.missing(flow, [cell(two_tables)]))
