"""Times of a public shape with random weights are of it and of grade B; what needs a model is of its stand-in."""

import dataclasses

import pytest

from repro.metrics import KINDS
from repro.render import content, figure_files
from repro.results import measure
from repro.specs import scale as scales
from repro.store import accepted
from repro.verdicts.table_results import table_results
from repro.workflow.workflow import Workflow


@pytest.fixture(scope="module")
def flow():
    return Workflow.of_results(scales.load(name="pocket"))


def cells(flow, name, kind="table"):
    return flow.cells(*name.split("/"), kind)


def test_every_metric_that_times_what_its_shape_names_says_so():
    named = set()
    for name, kind in KINDS.items():
        if "shape" in [field.name for field in dataclasses.fields(kind)]:
            named.add(name)
    assert {name for name, kind in KINDS.items() if kind.SHAPED} == named
    assert named == {"offload_time", "timeline", "shape_decode", "serving", "parallel_decode"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("spear/decode", "table"), ("spear/8", "figure"), ("bitbybit/decode", "table"), ("subspec/timeline", "figure"),
     ("subspec/6", "figure"), ("subspec/model", "figure"), ("subspec/printed", "table"),
     ("kernels/two-bit-decode", "table")],
)  # fmt: skip
def test_times_of_shapes_alone_are_of_grade_b(flow, name, kind):
    for cell in cells(flow, name, kind):
        shapes = {f"shape/{one.params.shape}" for one in flow.operands(cell).values() or [cell]}
        assert {cell.stand_in} == shapes and flow.grade(cell) == "B"
        row = measure.measurement_of(flow, cell)
        assert row.stand_in == cell.stand_in and row.status != "stale"
        assert row.value is None or row.grade == "B"


def test_lists_of_a_stand_in_are_of_that_stand_in(flow):
    by_row = {cell.row: (cell.stand_in, flow.grade(cell)) for cell in cells(flow, "spqt/decode") if "13B" in cell.col}
    assert by_row["50 %"] == by_row["Q4_K in rows"] == ("shape/Llama-2-13B", "B")
    assert by_row["50 %, lists of the stand-in"] == by_row["50 %, TEAL, lists of the stand-in"] == ("pocket-10m", "C")


def test_accepted_tokens_over_a_time_of_a_shape_are_of_the_stand_in(flow):
    one = {cell.row: cell for cell in cells(flow, "subspec/3") if cell.metric == "tokens_per_s"}
    mixed, alone = one["SubSpec"], one["Original (fp16)"]
    assert (mixed.stand_in, flow.grade(mixed)) == ("pocket-10m", "C")
    assert (alone.stand_in, flow.grade(alone)) == ("shape/Llama-3.1-8B", "B"), "its quantity is 1000 / t"
    for cell in (mixed, alone):
        on = {name: operand.stand_in for name, operand in flow.operands(cell).items()}
        assert on == {"a": "pocket-10m", "t": "shape/Llama-3.1-8B"}
        assert measure.measurement_of(flow, cell).status == "ok"


def test_a_shape_does_not_make_up_for_a_stand_in_that_an_operand_needs(flow):
    alone = next(cell for cell in cells(flow, "subspec/3") if cell.stand_in.startswith("shape/"))
    assert flow.stand_in(dataclasses.replace(alone, model="Qwen2.5-32B-Instruct")) == "", "its a would not run"
    of_model = [cell for cell in cells(flow, "subspec/1") if cell.model == "Qwen2.5-32B-Instruct"]
    lacking = [cell for cell in of_model if not cell.row.startswith("None")]
    assert lacking and {cell.stand_in for cell in lacking} == {""}
    assert {measure.measurement_of(flow, cell).status for cell in lacking} == {"no_stand_in"}


def test_a_table_says_what_each_model_is_measured_on(flow):
    heads = {}
    for name in ("subspec/3", "subspec/1", "spqt/decode", "spear/5", "subspec/5", "bitbybit/1"):
        sheet = content.sheet(table_results(flow, *name.split("/")))
        heads[name] = [row[0] for row in sheet.rows if len(row) == 1]
    assert heads["subspec/3"] == ["Llama-3.1-8B; here: pocket-10m, grade C; shape/Llama-3.1-8B, grade B"]
    assert "Qwen2.5-7B-Instruct; here: pocket-10m, grade C; shape/Qwen2.5-7B, grade B" in heads["subspec/1"]
    assert "Qwen2.5-32B-Instruct; here: shape/Qwen2.5-32B, grade B" in heads["subspec/1"]
    assert "LLaMA-3-8B; here: no stand-in at this scale" in heads["bitbybit/1"]
    (head,) = heads["spqt/decode"]
    shapes = " and ".join(f"shape/{name}" for name in ("Llama-3-8B", "Llama-2-7B", "Llama-2-13B", "Llama-2-70B"))
    assert head == f"Llama-2-7B; here: pocket-10m, grade C; {shapes}, grade B"
    assert "Llama-2-7B; here: shape/Llama-2-7B, grade B" in heads["spear/5"]
    assert heads["subspec/5"] == ["Qwen2.5-7B-Instruct; here: pocket-10m, grade C"]


def test_a_figure_over_shapes_is_one_panel(flow):
    named = {name: list(figure_files.draw(flow, name, [])[0]) for name in
             ("spear/figure8", "spqt/figure7", "subspec/figure6", "subspec/bus", "spear/figure9")}  # fmt: skip
    assert named["spear/figure8"] == named["spqt/figure7"] == ["shapes with random weights"]
    assert named["subspec/figure6"] == ["Qwen2.5-7B-Instruct; here: shape/Qwen2.5-7B"]
    assert named["subspec/bus"] == ["Qwen2.5-7B-Instruct; here: pocket-10m and shape/Qwen2.5-7B"]
    assert "Llama-2-13B; here: shape/Llama-2-13B" in named["spear/figure9"]


def test_every_stored_row_names_what_its_cell_does(flow):
    odd = []
    for row in accepted.every():
        cell = measure.cell_if_specified(flow, row) if row.scale == flow.scale.name else None
        if cell is None or row.inputs != flow.inputs_hash(cell):  # stale for that
            continue
        if (row.stand_in, row.grade) != (cell.stand_in, flow.grade(cell)):
            odd.append((row.where, row.stand_in, row.grade, cell.stand_in, flow.grade(cell)))
    assert not odd, f"{len(odd)}: {odd[:3]}"
