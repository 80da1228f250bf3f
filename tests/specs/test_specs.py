"""Specs: templates over rows and columns, patterns, seeds and grids; what is wrong in one is a sentence."""

import math
import re
from itertools import chain, product

import numpy as np
import pytest
import yaml
from fake_jobs import CONFIG, fake, nll  # noqa: F401

from repro import papers
from repro.baselines import bitdistiller, e2e_qp, efficientqat, group_qat, matquant, paretoq
from repro.core.errors import UserError
from repro.core.files import ROOT
from repro.methods import bitbybit, spear
from repro.render import figure_files as rendered
from repro.results import measure
from repro.specs import figures, names, tables, templates
from repro.specs import scale as scales
from repro.store import accepted
from repro.workflow.workflow import Workflow

pytestmark = pytest.mark.usefixtures("no_pooled_seeds")

ONE = "Llama-3.2-1B"
GAP = {
    "title": "what is recovered",
    "recipe": "rtn-w{bits}-pc + spear({options})",
    "rows": {"SPEAR": {"options": ""}, "gate off": {"options": "gate=false"}},
    "models": [ONE],
    "sweep": {"bits": [4, 3]},
    "seeds": [0, 1, 2],
    "measure": {
        "recovered": {
            "kind": "derived",
            "quantity": "100 * (b - s) / (b - f)",
            "cells": {"s": "{recipe}", "b": "rtn-w{bits}-pc", "f": "fp16"},
            "of": {"kind": "perplexity", "corpus": "wikitext2"},
            "unit": "%",
        },
        "share": {"kind": "storage", "count": "share", "unit": "%"},
    },
}
SHORT = {"title": "t", "rows": {"FP16": "fp16", "RTN pc": "rtn-w4-pc", "GPTQ pc": "gptq-w4-pc"}}


@pytest.fixture
def write(fake, monkeypatch, tmp_path):  # noqa: F811
    """Specs of the test's own: write(name, keys) makes the only ones that there are."""
    (tmp_path / "tables" / "spear").mkdir(parents=True)
    for module in (tables, figures, names):
        monkeypatch.setattr(module, "HOME", tmp_path)
    monkeypatch.setattr(accepted, "RESULTS", tmp_path / "results")
    tables.table.cache_clear()
    tables.measures.cache_clear()

    def add(name, keys):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(keys if isinstance(keys, str) else yaml.safe_dump(keys, sort_keys=False))
        tables.table.cache_clear()

    yield add
    tables.table.cache_clear()
    tables.measures.cache_clear()


def flow(**changes):
    return Workflow(scales.load(CONFIG | {"models": {ONE: "pocket-3m"}, "zeroshot": None} | changes), stored=False)


def cell(cells, row, col="Wiki", metric=None):
    (result,) = [c for c in cells if (c.row, c.col, c.model) == (row, col, ONE) and metric in (None, c.metric)]
    return result


# --- seeds ------------------------------------------------------------------------------------------------------------


def test_seeds_are_jobs_of_what_is_drawn_and_of_nothing_else(write):
    write("tables/spear/table1.yaml", SHORT)
    alone = flow()
    without = ids_by_row(alone)
    write("tables/spear/table1.yaml", SHORT | {"seeds": [0, 1]})
    at = flow()
    for row, ids in ids_by_row(at).items():
        assert len(ids) == (2 if row == "GPTQ pc" else 1 if row in SHORT["rows"] else 0), row
        assert ids[:1] == without[row], "seed 0 is the job without seeds"
    first, second = (dict(jobs["scores"].needs) for jobs in at.jobs(cell(at.cells("spear", "1"), "GPTQ pc")))
    draws = [needs.pop("weights").parsed_inputs()["calibration"]["seed"] for needs in (first, second)]
    assert draws == [7, 8], "a seed is the next draw of calibration text"
    assert first.keys() == second.keys()
    assert [job.id for job in first.values()] == [job.id for job in second.values()], "tokens are shared"


def ids_by_row(at):
    """The ids of the jobs of each seed, for every row of one column and model."""
    by_row = {}
    for c in at.cells("spear", "1"):
        if (c.col, c.model) == ("Wiki", ONE):
            by_row[c.row] = []
            for jobs in at.jobs(c):
                by_row[c.row].append([job.id for job in jobs.values()])
    return by_row


def test_the_interval_covers_windows_and_seeds(write, fake):  # noqa: F811
    write("tables/spear/table1.yaml", SHORT | {"seeds": [0, 1, 2]})
    at = flow()
    cells = at.cells("spear", "1")
    fake(at.every_job(cells))
    drawn, plain = (measure.measurement_of(at, cell(cells, row)) for row in ("GPTQ pc", "RTN pc"))
    assert (drawn.seeds, drawn.covers) == ("0 1 2", "windows and seeds")
    assert (plain.seeds, plain.covers) == ("", "windows only")
    jobs = [each["scores"] for each in at.jobs(cell(cells, "GPTQ pc"))]
    values = [np.exp(nll("tiny-wikitext", job).mean()) for job in jobs]
    assert drawn.value == pytest.approx(np.mean(values)) and drawn.lo < drawn.value < drawn.hi
    write("tables/spear/table1.yaml", SHORT)
    at = flow()
    one = measure.measurement_of(at, cell(at.cells("spear", "1"), "GPTQ pc"))
    assert (one.seeds, one.covers) == ("0", "windows only") and one.value == pytest.approx(values[0])
    assert one.hi - one.lo < drawn.hi - drawn.lo, "seeds that differ widen the interval"


def test_a_grid_of_our_own_with_a_derived_quantity(write, fake):  # noqa: F811
    """Known answer: with the made-up shifts of `fake_jobs` every number can be written down."""
    write("tables/spear/gap.yaml", GAP)
    at = flow()
    cells = at.cells("spear", "gap")
    assert [c.cell_key for c in cells] == [
        (row, f"bits {bits}", ONE, metric)
        for row, bits, metric in product(("SPEAR", "gate off"), (4, 3), GAP["measure"])
    ]
    assert {c.recipe for c in cells} == {
        f"rtn-w{b}-pc + {s}" for b, s in product((4, 3), ("spear", "spear-gate=false"))
    }  # fmt: skip
    fake(at.every_job(cells))
    result = {one.cell_key: measure.measurement_of(at, one) for one in cells}
    m = result["SPEAR", "bits 3", ONE, "recovered"]
    assert (m.status, m.unit, m.seeds, m.covers) == ("ok", "%", "0 1 2", "windows and seeds")
    jobs, values = at.jobs(cell(cells, "SPEAR", "bits 3", "recovered")), []
    for each in jobs:
        s, b, f = (math.exp(nll("tiny-wikitext", each[f"{n}:scores"]).mean()) for n in "sbf")
        values.append(100 * (b - s) / (b - f))
    assert m.value == pytest.approx(np.mean(values)) and m.lo < m.value < m.hi
    assert len({each["b:scores"].id for each in jobs}) == 1 and len({each["s:scores"].id for each in jobs}) == 3
    assert result["SPEAR", "bits 4", ONE, "share"].value == pytest.approx(0)
    write("tables/spear/gap.yaml", GAP | {"scales": ["gpu"]})
    assert flow().every_job(flow().cells("spear", "gap")) == [], "another scale's question"


def printed_cells(number):
    """Those of a table of SPEAR's without what is read next to an accuracy, which has one seed."""
    return [c for c in tables.cells("spear", number) if not c.metric.endswith(tables.LOG_PROBABILITY)]


def test_what_is_read_next_to_an_accuracy_has_its_place_and_its_first_seed(write):
    write("tables/spear/table1.yaml", SHORT | {"seeds": {"GPTQ {group}": [3, 1]}})
    result = [c for c in tables.cells("spear", "1") if c.metric.endswith(tables.LOG_PROBABILITY)]
    assert {c.col for c in result} == {"ZS"} and {c.printed for c in result} == {""}
    (gptq,) = (c for c in result if c.row == "GPTQ pc" and c.model == ONE)
    assert (gptq.seeds, gptq.metric, gptq.unit) == ((3,), "zeroshot_avg, log probability", "nats")
    tasks = {text["tasks"][0] for text in gptq.params.cells.values()}
    assert tasks == {"piqa", "arc_easy", "arc_challenge", "hellaswag-1916", "winogrande"}, "no BoolQ"


def test_seeds_of_a_column_may_be_others_than_its_row_s(write):
    blimp = {"kind": "likelihood", "tasks": ["blimp-100"], "seeds": [0]}
    write("tables/spear/table1.yaml", SHORT | {"seeds": [0, 1, 2], "extra_columns": {"grammar": blimp}})
    assert {c.seeds for c in tables.cells("spear", "1") if c.col == "grammar"} == {(0,)}


def test_seeds_of_some_rows_and_at_most_as_many_as_a_scale_draws(write):
    write("tables/spear/table1.yaml", SHORT | {"seeds": {"GPTQ {group}": [0, 1, 2]}})
    assert {c.row: c.seeds for c in printed_cells("1")}["GPTQ pc"] == (0, 1, 2)
    assert {c.seeds for c in tables.cells("spear", "1") if c.row == "RTN pc"} == {(0,)}
    for most, drawn in ((None, [0, 1, 2]), (2, [0, 1]), (9, [0, 1, 2])):
        at = flow(seeds=most)
        assert [target.seed for target in at.targets(cell(at.cells("spear", "1"), "GPTQ pc"))] == drawn
    with pytest.raises(UserError, match="seeds is 0; it must be 1 or more, or null"):
        flow(seeds=0)


def test_seeds_of_a_row_on_one_model(write):
    """The first label that matches counts, so a row on a model stands before the row."""
    of = {f"GPTQ {{group}} | {ONE}": [0, 1, 2, 3, 4], "GPTQ {group}": [0, 1, 2]}
    write("tables/spear/table1.yaml", SHORT | {"seeds": of})
    result = {(c.row, c.model): c.seeds for c in printed_cells("1")}
    assert result["GPTQ pc", ONE] == (0, 1, 2, 3, 4) and result["RTN pc", ONE] == (0,)
    assert {seeds for (row, model), seeds in result.items() if row == "GPTQ pc" and model != ONE} == {(0, 1, 2)}
    write("tables/spear/table1.yaml", SHORT | {"seeds": dict(reversed(of.items()))})
    assert {c.seeds for c in printed_cells("1") if c.row == "GPTQ pc"} == {(0, 1, 2)}
    write("tables/spear/table1.yaml", SHORT | {"seeds": {"GPTQ pc | LLaMA-9": [0, 1]}})
    with pytest.raises(UserError, match="seeds: unknown row 'GPTQ pc | LLaMA-9'"):
        tables.cells("spear", "1")


def test_a_recorded_row_with_some_of_the_seeds_stands_for_these(write, fake, monkeypatch):  # noqa: F811
    """More seeds in a spec make no accepted row stale; other seeds than the spec's do."""
    write("tables/spear/table1.yaml", SHORT)
    at = flow()
    fake(at.every_job(at.cells("spear", "1")))
    old = measure.measurement_of(at, cell(at.cells("spear", "1"), "GPTQ pc"))
    kept = {"row": old, "series": at.quantity(cell(at.cells("spear", "1"), "GPTQ pc")).seeds}
    monkeypatch.setattr(accepted, "find", lambda scale, one: kept["row"] if one.row == "GPTQ pc" else None)
    monkeypatch.setattr(accepted, "series", lambda row: kept["series"])
    for seeds, status in (([0, 1, 2], "ok"), ([0], "ok"), ([1, 2], "stale")):
        write("tables/spear/table1.yaml", SHORT | {"seeds": seeds})
        recorded = Workflow(at.scale, stored=True)
        result = measure.measurement_of(recorded, cell(recorded.cells("spear", "1"), "GPTQ pc"))
        assert (result.status, result.seeds, result.value) == (status, "0", old.value), seeds
        assert measure.cell_of(recorded, old).seeds == ((0,) if 0 in seeds else tuple(seeds))


RATES = {
    "title": "a choice", "recipe": "rtn-w4-pc + spear(lr1={lr1})",
    "rows": {"x 1": {"lr1": 5e-5}, "x 3": {"lr1": 1.5e-4}},
    "models": [ONE], "measure": {"share": {"kind": "storage", "count": "share"}},
}  # fmt: skip
TUNED = SHORT | {
    "extra_rows": {"ours": "rtn-w4-pc + spear(lr1={lr1})", "other": "rtn-w3-pc"}, "tuned_by": "spear/rates",
}  # fmt: skip


def test_a_row_of_a_choice_has_no_recipe_until_it_is_chosen(write):
    write("tables/spear/table1.yaml", TUNED)
    write("tables/spear/rates.yaml", RATES)
    recipes = {c.row: c.recipe for c in tables.cells("spear", "1") if c.model == ONE}
    assert (recipes["ours"], recipes["other"]) == ("", "rtn-w3-pc")
    shown = measure.measurement_of(at := flow(), cell(at.cells("spear", "1"), "ours"))
    assert (shown.status, shown.value) == ("not_run", None)
    write("tables/spear/rates.yaml", RATES | {"selected": "x 3"})
    assert {c.recipe for c in tables.cells("spear", "1") if c.row == "ours"} == {"rtn-w4-pc + spear-lr1=0.00015"}


def test_printed_rows_take_from_a_choice_of_several_rows_each_what_they_name(write):
    rows = {"FP16": "fp16", "RTN pc": "rtn-w4-pc + spear(lr1={lr1})", "GPTQ pc": "gptq-w4-pc + spear(lr2={lr2})"}
    write("tables/spear/table1.yaml", SHORT | {"rows": rows, "tuned_by": "spear/rates"})
    two = RATES | {"recipe": "{recipe}"}
    two["rows"] = {
        f"lr{i} x {k}": {"recipe": f"rtn-w4-pc + spear(lr{i}={k * 1e-4})", f"lr{i}": k * 1e-4}
        for i, k in product((1, 2), (1, 3))
    }

    def recipes():
        recipe_of = {c.row: c.recipe for c in tables.cells("spear", "1")}
        return [recipe_of[row] for row in rows]

    write("tables/spear/rates.yaml", two)
    assert recipes() == ["fp16", "", ""]
    write("tables/spear/rates.yaml", two | {"selected": ["lr2 x 3"]})
    assert recipes() == ["fp16", "", "gptq-w4-pc + spear-lr2=0.0003"]
    write("tables/spear/rates.yaml", two | {"selected": ["lr1 x 1", "lr2 x 3"]})
    assert recipes() == ["fp16", "rtn-w4-pc + spear-lr1=0.0001", "gptq-w4-pc + spear-lr2=0.0003"]
    write("tables/spear/rates.yaml", two | {"selected": ["lr1 x 1", "lr3 x 1"]})
    with pytest.raises(UserError, match="selected: unknown row 'lr3 x 1'"):
        recipes()


def test_the_rates_of_bit_by_bit_and_its_baselines_are_the_same_multiples_of_the_official_ones():
    """What is measured is what a chosen row gives to Tables 1 to 4 and 6, where every trained method's rate is open."""
    rates, official = tables.table("bitbybit", "rates"), {}
    assert rates.models == ("Llama-3.2-3B",) and rates.scales == ("pocket",)
    multiples = {}
    for label, row in rates.rows.items():
        method, k = label.split(", x ")
        of_row = {name: value for name, value in row.items() if name != "recipe"}
        first = official.setdefault(method, of_row)
        assert of_row == pytest.approx({name: float(k) * value for name, value in first.items()})
        assert set(re.findall(r"{(\w+)}", row["recipe"])) == set(of_row) and "tokens=131072" in row["recipe"]
        multiples.setdefault(method, []).append(float(k))
    assert all({1, 10, 30, 100, 300} <= set(each) for each in multiples.values()) and len(multiples) == 16
    base = bitbybit.Config().lr
    block_ap = {"lr": efficientqat.Config().lr, "quant_lr": efficientqat.Config().quant_lr}
    configs = {
        "Bit-by-Bit w2a16": [base],
        "EfficientQAT w2a16": [block_ap["lr"], block_ap["quant_lr"], e2e_qp.Config().lr],
        "Block-AP w2a16 at once": [*block_ap.values()],
        "ParetoQ w2a16": [paretoq.Config().lr],
        "BitDistiller w2a2": [bitdistiller.Config().lr],
        "next-token loss w2a16": [group_qat.Config().lr],
        "MatQuant master at 2 bits": [matquant.Config().lr],
    }
    for method, values in configs.items():
        assert sorted(official[method].values()) == sorted(values), method
    named = set()
    for number in ("1", "2", "3", "4", "6"):
        spec = tables.table("bitbybit", number)
        assert spec.tuned_by == "bitbybit/rates"
        texts = [
            row if isinstance(row, str) else row["recipe"]
            for row in [*spec.rows.values(), *dict(spec.extra_rows).values()]
        ]
        trained = [text for text in texts if re.search("bitbybit|qat|staged_ap|paretoq|bitdistiller|matquant", text)]
        assert trained and all("lr={" in text and "tokens=131072" in text for text in trained)
        named |= set(chain.from_iterable(re.findall(r"{(\w+lr)}", text) for text in trained))
    assert named == set(chain.from_iterable(official.values()))


def test_the_shipped_choice_feeds_three_tables():
    """One place holds the tuned rates; its first row is the paper's, and held-out text alone is measured."""
    rates = tables.table("spear", "rates")
    paper = spear.Config()
    assert rates.rows["x 1"] == {"lr1": paper.lr1, "lr2": paper.lr2}
    for factor in (1, 3, 10, 30):
        row = rates.rows[f"x {factor}"]
        assert row == pytest.approx({"lr1": factor * paper.lr1, "lr2": factor * paper.lr2})
    assert rates.models == ("Llama-3.2-3B",) and {m["of"]["corpus"] for m in rates.measure.values()} == {"held-out"}
    for number in ("1", "2", "4"):
        spec = tables.table("spear", number)
        (label,) = [label for label, text in spec.extra_rows.items() if "{lr1}" in text and "{lr2}" in text]
        assert spec.tuned_by == "spear/rates" and spec.seeds_of(label) == (0, 1, 2) and label.endswith("(ours)")


def test_seeds_share_a_pool_of_training_text_and_differ_in_what_is_drawn_from_it(write):
    row = {"recipe": "bitbybit(tokens=256, lr=0.001)", "calibration": "redpajama"}
    write("tables/spear/table1.yaml", SHORT | {"rows": {"RTN pc": row}, "seeds": {"RTN pc": [0, 1, 2]}})
    pool = {"corpus": "held-out", "sequences": 9, "length": 32}

    def drawn(**changes):
        at = flow(calibration_texts={"redpajama": pool | changes})
        of_rtn = cell(at.cells("spear", "1"), "RTN pc")
        return [dict(jobs["scores"].needs)["weights"].parsed_inputs() for jobs in at.jobs(of_rtn)]

    first, other = drawn(), drawn(draw=1)
    assert [job["steps"][0][1]["seed"] for job in first] == [0, 1, 2]
    for jobs in (first, other):
        (crops,) = {tuple(sorted(job["calibration"].items())) for job in jobs}
        assert (dict(crops)["sequences"], dict(crops)["length"]) == (9, 32)
    assert other[0]["calibration"]["seed"] == first[0]["calibration"]["seed"] + 1 > 2**20
    with pytest.raises(UserError, match="unknown corpus 'held'; did you mean 'held-out'"):
        drawn(corpus="held")
    with pytest.raises(UserError, match="sequences is 0; it must be 1 or more"):
        drawn(sequences=0)
    with pytest.raises(UserError, match="calibration_texts.redpajama: unknown key 'seed'"):
        drawn(seed=3)


# --- another calibration text -----------------------------------------------------------------------------------------


def test_a_cell_names_its_calibration_text(write):
    rows = {"RTN pc": "gptq-w4-pc", "GPTQ pc": {"recipe": "gptq-w4-pc", "calibration": "c4"}}
    write("tables/spear/table1.yaml", SHORT | {"rows": rows})
    at = flow(calibration_texts={"c4": "held-out"})
    drawn = {}
    for row in rows:
        (jobs,) = at.jobs(cell(at.cells("spear", "1"), row))
        drawn[row] = dict(jobs["scores"].needs)["weights"]
    texts = [job.parsed_options()["calibration"]["corpus"] for job in drawn.values()]
    assert texts == ["tiny-held-out", "held-out"]
    assert (
        len({job.parsed_inputs()["calibration"]["text"] for job in drawn.values()})
        == len({j.id for j in drawn.values()})
        == 2
    )
    assert len({job.parsed_inputs()["calibration"]["seed"] for job in drawn.values()}) == 1
    without = flow()
    of_gptq = cell(without.cells("spear", "1"), "GPTQ pc")
    assert without.jobs(of_gptq) == [] and measure.measurement_of(without, of_gptq).status == "not_run", (
        "no other text takes its place"
    )
    same = flow(calibration_texts={"c4": "tiny-wikitext"})
    with pytest.raises(UserError, match="calibrated on tiny-wikitext, and perplexity is measured on tiny-wikitext"):
        same.jobs(cell(same.cells("spear", "1"), "GPTQ pc"))
    with pytest.raises(UserError, match="calibration_texts: c4: unknown corpus 'c5'"):
        flow(calibration_texts={"c4": "c5"})


# --- what the headline needs ------------------------------------------------------------------------------------------


def test_a_row_that_ran_with_less_effort_says_so_in_its_name():
    result = []
    for table in [*tables.specified(), *tables.own()]:
        result += [cell for cell in tables.cells(*table) if "effort=" in cell.recipe]
    assert {"memory", "choices", "seeds"} <= {cell.number for cell in result}
    for cell in result:
        efforts = {float(value) for value in re.findall(r"effort=([0-9.]+)", cell.recipe)}
        assert efforts == {0.25} and cell.row.endswith(", effort .25"), f"{cell.table}: {cell.row}"


def test_the_headline_needs_the_cells_of_the_table_beneath_it_alone():
    """Claims on other tables are judged on what is stored; those on printed cells need none."""
    needed = {c.table for c in Workflow(scales.load(None, "pocket"), stored=True).table_cells("table1")}
    assert "spear/table1" in needed and not needed & {"spear/table2", "spear/gate", "bitbybit/table1"}


def test_a_figure_of_a_table_has_its_cells_and_takes_both_axes_from_them(write, fake, monkeypatch):  # noqa: F811
    """Known answer: two budgets at two widths; a panel a width, a point a budget, x the stored share."""
    drawn = {"title": "t", "table": "spear/gap", "metrics": ["share", "recovered"], "x": "x", "y": "y"}
    gap = GAP | {
        "recipe": "rtn-w{bits}-pc + spear(budget={budget}, {options})",
        "sweep": {"bits": [4, 3], "budget": [0.1, 0.2]},
    }
    gap["seeds"] = [0]
    gap["rows"] = {"SPEAR": {"options": "gate=true"}, "gate off": {"options": "gate=false"}}
    write("tables/spear/gap.yaml", gap)
    write("figures/spear/summary.yaml", drawn)
    at = flow()
    assert figures.names() == ["spear/summary", "leaderboard"]
    cells = at.cells("spear", "summary", "figure")
    assert cells == at.cells("spear", "gap") and at.table_cells("spear/summary") == cells
    fake(at.every_job(cells))
    panels, _, text = rendered.draw(at, "spear/summary", [])
    assert list(panels) == [f"bits {bits}, {ONE}; here: pocket-3m" for bits in (4, 3)]
    result = {(cell.row, cell.col, cell.metric): measure.measurement_of(at, cell) for cell in cells}
    points = panels[f"bits 3, {ONE}; here: pocket-3m"]["gate off"]
    columns = [f"bits 3, budget {budget}" for budget in (0.1, 0.2)]
    assert [p[4] for p in points] == columns
    for x, y, low, high, col in points:
        m = result["gate off", col, "recovered"]
        assert (x, y, low, high) == (result["gate off", col, "share"].value, m.value, m.lo, m.hi)
    assert "- gate off, Llama-3.2-1B, bits 3, budget 0.2:" in text
    for odd, message in (
        ({"metrics": ["share"]}, "a figure of a table has `table` and two `metrics`"),
        ({"series": {"a": "fp16"}}, "no series, models, measure or sweep"),
        ({"metrics": ["share", "recoverd"]}, "unknown metric of spear/gap 'recoverd'; did you mean 'recovered'"),
        ({"table": "spear/gaps"}, "unknown table 'spear/gaps'"),
    ):
        write("figures/spear/summary.yaml", drawn | odd)
        with pytest.raises(UserError, match=message):
            figures.cells("spear", "summary")


# --- templates over rows and columns ----------------------------------------------------------------------------------


def test_patterns_in_labels_give_variables(write):
    write("tables/spear/table8.yaml", {
        "title": "t", "recipe": "{quantizer}-w{bits}-{group} + spear", "rows": {"RTN": {"quantizer": "rtn"}},
        "columns": ["{bits}-bit {group} K%/r", "{bits}-bit {group} BPW"],
    })  # fmt: skip
    cells = tables.cells("spear", "8")
    printed = papers.printed("spear", "8")
    assert [c.cell_key for c in cells] == [(c.row, c.col, c.model, c.metric) for c in printed], "nothing is dropped"
    recipes = {c.col: c.recipe for c in cells if c.row == "RTN" and c.model == ONE and c.recipe}
    assert recipes["4-bit pc K%/r"] == recipes["4-bit pc BPW"] == "rtn-w4-pc + spear"
    assert recipes["3-bit g128 BPW"] == "rtn-w3-g128 + spear"
    several = [c for c in cells if (c.row, c.col, c.model) == ("RTN", "4-bit pc K%/r", ONE)]
    assert [(c.metric, c.measure, c.params.show) for c in several] == [
        ("k_percent", "placement", "share"), ("rank", "placement", "rank"),
    ]  # fmt: skip
    assert not [c for c in cells if c.row == "GPTQ" and c.recipe]


@pytest.mark.parametrize(
    ("label", "printed", "variables"),
    [
        ("tau={tau}", "tau=0.6", {"tau": "0.6"}),
        ("{bits}-bit {group} BPW", "4-bit g128 BPW", {"bits": "4", "group": "g128"}),
        ("RTN pc", "RTN pc", {}),
        ("RTN pc", "RTN pc+", None),
        ("{size}", "1B", {"size": "1B"}),
        ("a.b", "axb", None),
    ],
)
def test_a_label_matches_whole_labels(label, printed, variables):
    assert templates.bind(label, printed) == variables


def test_a_value_is_written_as_yaml_has_it():
    values = {"x": 1e-6, "n": 4, "on": True, "word": "pc"}
    assert templates.fill("rtn({x}, {n}, {on}, {word})", values, "here") == "rtn(1e-06, 4, true, pc)"
    assert templates.fill({"a": ["{n}", "w{n}"], "b": 2.5}, values, "here") == {"a": [4, "w4"], "b": 2.5}


def test_rows_of_ones_own_and_what_is_beside(write):
    extra_columns = {"BPW": {"kind": "storage"}, "KL": {"kind": "perplexity", "corpus": "wikitext2", "show": "kl"}}
    write("tables/spear/table1.yaml", SHORT | {"extra_rows": ["rtn-w3-pc"], "extra_columns": extra_columns})
    cells = tables.cells("spear", "1")
    n = len(papers.printed("spear", "1"))
    assert not [c for c in cells[:n] if c.row == "rtn-w3-pc"] and [c for c in cells[n:] if c.row == "rtn-w3-pc"]
    extra = [c for c in cells if c.col in extra_columns]
    assert {c.row for c in extra} == {*SHORT["rows"], "rtn-w3-pc"} and all(not c.printed for c in extra)
    assert len({c.cell_key for c in cells}) == len(cells)


# --- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "keys", "sentence"),
    [
        ("table1", SHORT | {"row": {}}, "tables/spear/table1.yaml: unknown key 'row'; did you mean 'rows'?"),
        ("table1", SHORT | {"rows": {"RTN cp": "fp16"}}, "unknown printed row 'RTN cp'; did you mean 'RTN pc'?"),
        ("table1", SHORT | {"columns": ["Wikki"]}, "unknown printed column 'Wikki'; did you mean 'Wiki'?"),
        (
            "table1",
            SHORT | {"extra_columns": {"X": {"kind": "storrage"}}},
            "unknown kind of cell 'storrage'; did you mean 'storage'?",
        ),
        (
            "table1",
            SHORT | {"extra_columns": {"X": {"kind": "storage", "cuont": "bpw"}}},
            "storage: unknown key 'cuont'",
        ),
        ("table1", SHORT | {"extra_columns": {"X": "storage"}}, "extra_columns.X: expected a mapping"),
        ("table1", SHORT | {"recipe": "{recip}"}, "'{recip}' names 'recip', which is no variable there"),
        ("table1", SHORT | {"recipe": "{recipe"}, "which is no variable there"),
        ("table1", SHORT | {"rows": {"RTN pc": "rnt-w4-pc"}}, "unknown step 'rnt'; did you mean 'rtn'?"),
        ("table1", SHORT | {"seeds": []}, "seeds: []; name at least one"),
        ("table1", SHORT | {"seeds": [1, 1]}, "seeds: [1, 1]; name at least one, each once"),
        ("table1", SHORT | {"seeds": {"GPTQ cp": [1]}}, "seeds: unknown row 'GPTQ cp'; did you mean 'GPTQ pc'?"),
        ("gap", GAP | {"selected": "gate of"}, "selected: unknown row 'gate of'; did you mean 'gate off'?"),
        ("table1", SHORT | {"absent": {"Wikki {x}": "a text"}}, "unknown printed column 'Wikki {x}'"),
        ("table1", SHORT | {"absent": {"Wiki": "a text"}}, "absent: column 'Wiki' is one of `columns`"),
        ("gap", GAP | {"absent": {"Wiki": "a text"}}, "absent belongs to a printed table"),
        ("table1", SHORT | {"row_measures": {"RTN cp": {}}}, "unknown printed row 'RTN cp'; did you mean 'RTN pc'?"),
        (
            "table1",
            SHORT | {"row_measures": {"RTN pc": {"wiki_pppl": {"kind": "storage"}}}},
            "row_measures: unknown printed metric 'wiki_pppl'",
        ),
        ("gap", GAP | {"row_measures": {"gate off": {}}}, "row_measures belongs to a printed table"),
        ("table1", SHORT | {"sweep": {"bits": [4]}}, "sweep belongs to a spec of our own"),
        ("table1", "[1, 2]", "expected a mapping with keys of Spec"),
        ("table1", "title: [", "not valid YAML"),
        ("gap", {"title": "t", "rows": {"a": "fp16"}}, "a spec of our own needs rows, models and measure"),
        ("gap", GAP | {"recipe": "{x}"}, "'{x}' names 'x', which is no variable there"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value)[:30],
)
def test_what_is_wrong_in_a_spec_is_named(write, name, keys, sentence):
    write(f"tables/spear/{name}.yaml", keys)
    with pytest.raises(UserError) as error:
        tables.cells("spear", name.removeprefix("table"))
    assert sentence in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 700


def test_a_metric_that_the_paper_does_not_have(write, tmp_path, monkeypatch):
    monkeypatch.setattr(templates, "ROOT", tmp_path)
    write("repro/papers/spear/measures.yaml", {"wikitxt2_ppl": {"kind": "perplexity", "corpus": "c4"}})
    write("tables/spear/table1.yaml", SHORT)
    with pytest.raises(UserError, match="measures.yaml: unknown metric 'wikitxt2_ppl'; did you mean 'wikitext2_ppl'"):
        tables.cells("spear", "1")


@pytest.mark.parametrize("name", ["spear/table99", "spaer/table1", "spear/memry", "", "spear/", "spear/table1/x"])
def test_an_unknown_table(name):
    with pytest.raises(UserError, match="^unknown table"):
        tables.split(name)


@pytest.mark.parametrize(
    ("name", "split"),
    [("spear/table1", ("spear", "1")), ("spear/1", ("spear", "1")), ("tables/spear/table1.csv", ("spear", "1")),
     ("spear/memory", ("spear", "memory")), ("tables/spear/memory.tex", ("spear", "memory"))],
)  # fmt: skip
def test_a_table_by_any_of_its_names(name, split):
    assert tables.split(name) == split


def test_every_table_can_be_asked_for_by_its_name_and_no_other():
    assert {tables.split(name) for name in names.tables()} >= set(names.own_tables())
    assert all(names._is_own_table(*both) for both in names.own_tables())
    printed = [("spear", "1"), ("spear", "table1"), ("", "table1")]
    assert not any(names._is_own_table(*both) for both in [*printed, ("nobody", "memory"), ("spear", "nothing")])


def test_every_spec_of_a_figure_can_be_asked_for():
    drawn = {names.figure_spec(*both) for both in figures.specified()}
    assert set((ROOT / "figures").glob("*/*.yaml")) <= drawn


def test_every_shipped_spec_has_cells_that_parse():
    at = Workflow(scales.load(None, "pocket"), stored=False)
    for paper, number in tables.specified():
        cells = at.cells(paper, number)
        assert len({c.cell_key for c in cells}) == len(cells) > 0, (paper, number)
        wanted = tables.table(paper, number)
        if number.isdecimal():
            assert sum(bool(c.printed) for c in cells) == sum(bool(c.value) for c in papers.printed(paper, number))
        elif wanted.sweep:
            grid = math.prod(map(len, wanted.sweep.values()))
            assert len(cells) == len(wanted.rows) * len(wanted.models) * grid * (
                len(wanted.measure) + len(wanted.extra_columns)
            )
    for paper, number in figures.specified():
        assert at.cells(paper, number, "figure")


@pytest.mark.parametrize("number", ["19", "20", "21", "22", "23", "24", "25"])
def test_accuracy_tables_have_a_recipe_in_every_printed_cell(number):
    """Tables 19 to 24: a template for each quantizer. 25 is of a model without a stand-in."""
    at = Workflow(scales.load(None, "pocket"), stored=False)
    cells = at.cells("spear", number)[: len(papers.printed("spear", number))]
    assert [c.cell_key for c in cells] == [(c.row, c.col, c.model, c.metric) for c in papers.printed("spear", number)]
    if number == "25":
        assert {measure.measurement_of(at, c).status for c in cells} == {"no_stand_in"}
        return
    steps = {"RTN": "rtn", "GPTQ": "gptq", "AWQ": "awq", "OmniQuant": "omniquant"}
    for c in cells:
        base, _, setting = c.row.removeprefix("+SPEAR on ").partition(" ")
        bits, _, group = setting.partition("-bit ")
        bare = f"{steps[base]}-w{bits}-{group}" if base in steps else "fp16"
        assert c.recipe == bare + (" + spear" if c.row.startswith("+SPEAR") else "")
        assert (c.measure, at.is_measured(c)) == ("zeroshot", True) and at.jobs(c)
    assert len({c.recipe for c in cells}) == 17 and {len(c.params.tasks) for c in cells} == {0, 1}


def test_a_row_may_name_what_the_column_or_the_model_gives(write):
    rows = {"FP16": "fp16", "RTN pc": {"recipe": "rtn-w{bits}-pc + lqer(rank={rank})"}}
    printed_models = {c.model for c in papers.printed("spear", "1")}
    ranks = {model: {"rank": 2 if model == ONE else 1} for model in printed_models}
    spec = {"title": "t", "rows": rows, "columns": {"Wiki": {"bits": 3}}, "of_models": ranks}
    write("tables/spear/table1.yaml", spec)
    assert cell(tables.cells("spear", "1"), "RTN pc").recipe == "rtn-w3-pc + lqer-r2"
    write("tables/spear/table1.yaml", spec | {"of_models": ranks | {"Llama-9": {"rank": 2}}})
    with pytest.raises(UserError, match="of_models: unknown printed model 'Llama-9'"):
        tables.cells("spear", "1")
    write("tables/spear/table1.yaml", spec | {"of_models": {ONE: {"r": 2}}})
    with pytest.raises(UserError, match="names 'rank', which is no variable there"):
        tables.cells("spear", "1")
