"""SpQt's Table 3 as a spec: what it asks, on which models, against what, and its claims on printed numbers."""

from dataclasses import replace
from itertools import chain

import pytest
from fake_jobs import fake  # noqa: F401
from test_specs import flow, write  # noqa: F401

from repro import papers
from repro.core.errors import UserError
from repro.specs import scale as scales
from repro.specs import tables
from repro.verdicts import table_results
from repro.workflow.workflow import Workflow

SPARSE = "q4_k-layout=zigzag + spqt"
QUALITY = {"Q06", "Q07", "Q08", "Q09"}  # what claims.csv says about perplexity


@pytest.fixture(scope="module")
def at():
    return Workflow(scales.load(name="pocket"), stored=False)


def test_every_row_is_live_on_all_pocket_sizes_and_on_no_other(at):
    cells = [c for c in at.cells("spqt", "3") if c.metric == "wikitext2_ppl"]
    rows = {c.row for c in papers.printed("spqt", "3")}
    assert {c.stand_in for c in cells if c.printed} == {"pocket-10m", ""}
    assert {c.model for c in cells if not c.stand_in} == {"Llama-2-13B", "Llama-2-70B", "Llama-3-8B"}
    for stand_in in ("pocket-3m", "pocket-5m", "pocket-10m"):
        mine = [c for c in cells if c.stand_in == stand_in]
        assert {c.row for c in mine} == rows | {"Q4_K zigzag (ours)"} and all(map(at.is_measured_here, mine))
        assert {c.col for c in mine} == {{"pocket-3m": "Llama-3.2-1B (ours)", "pocket-5m": "Llama-3.2-3B (ours)"}.get(
            stand_in, "Llama-2-7B")}  # fmt: skip


def test_recipes_are_the_rows(at):
    result = {c.row: c.recipe for c in at.cells("spqt", "3") if c.model == "Llama-2-7B"}
    assert result["Baseline-F16"] == "fp16" and result["Baseline-Q4K"] == "q4_k"
    assert result["Q4_K zigzag (ours)"] == "q4_k-layout=zigzag"
    assert result["Unified 25%"] == f"{SPARSE}-sparsity=0.25"
    assert result["TEAL 65%"] == f"{SPARSE}-sparsity=0.65-thresholds=teal" and len(set(result.values())) == 11


def test_both_protocols_are_shown_and_ratios_are_paired(at):
    cells = {(c.row, c.metric): c for c in at.cells("spqt", "3") if c.model == "Llama-2-7B"}
    half = at.operands(cells["Unified 50%", "second half"])["h"]
    assert half.recipe == f"{SPARSE}-positions=second_half" and half.stand_in == "pocket-10m"
    over = at.operands(cells["TEAL 40%", "over Q4_K"])
    assert {name: part.recipe for name, part in over.items()} == {
        "s": f"{SPARSE}-sparsity=0.4-thresholds=teal", "q": "q4_k"
    }  # fmt: skip
    alone = at.operands(cells["TEAL 40%", "sparse half over its dense"])
    assert alone["d"].recipe == "q4_k-layout=zigzag" and "second_half" in alone["h"].recipe
    assert at.operands(cells["Baseline-Q4K", "second half"])["h"].recipe == "q4_k"


def test_every_claim_on_quality_has_a_predicate_and_a_verdict_on_printed_cells():
    known = tables.table("spqt", "3").claims
    assert set(chain.from_iterable(claim.claim.split()[1:] for claim in known)) >= QUALITY
    assert {name for name, line in papers.claims("spqt").items() if "ppl" in line["statement"]} <= QUALITY
    bare = Workflow(replace(scales.load(name="pocket"), models={}), stored=True)
    judged = [table_results.judge(bare, claim) for claim in known]
    assert {one.verdict for one in judged} == {"no verdict: without a stand-in"}
    assert [one.own_numbers for one in judged] == [
        "inconsistent", "consistent", "within rounding", "consistent", "consistent", ""
    ]  # fmt: skip


MORE = {"title": "t", "rows": {"FP16": "fp16"}, "extra_rows": {"mine": {"recipe": "rtn-w{bits}-pc", "bits": 3}}}


def test_rows_of_your_own_have_variables_and_models_of_your_own_have_columns(write):  # noqa: F811
    write("tables/spear/table1.yaml", MORE | {"extra_models": ["Llama-3-8B"]})
    result = {(c.row, c.col, c.model): c for c in flow().cells("spear", "1")}
    assert result["mine", "Wiki", "Llama-3.2-1B"].recipe == "rtn-w3-pc"
    column = {row: c for (row, col, model), c in result.items() if col == "Llama-3-8B (ours)"}
    assert column["FP16"].recipe == "fp16" and column["mine"].recipe == "rtn-w3-pc"
    assert {c.printed for c in column.values()} == {""} and {c.model for c in column.values()} == {"Llama-3-8B"}
    assert len(column) == len({c.row for c in papers.printed("spear", "1")}) + 1


@pytest.mark.parametrize("model", ["Llama-9-1B", "Llama-3.2-1B"])
def test_a_model_that_is_unknown_or_printed_is_no_column_of_your_own(write, model):  # noqa: F811
    write("tables/spear/table1.yaml", MORE | {"extra_models": [model]})
    with pytest.raises(UserError, match="extra_models: unknown model that is not printed"):
        tables.table("spear", "1")
