"""Bit-by-Bit's specs: budget axis and figures run Table 1's and Table 3's own jobs; parts of figures; choices."""

import re
from dataclasses import replace
from itertools import chain

import pytest
from fake_jobs import fake  # noqa: F401
from test_specs import write  # noqa: F401

from repro.papers.cell import is_printed, table_name
from repro.recipes import recipe
from repro.render import figure_files as rendered
from repro.results import measure
from repro.specs import figures, tables
from repro.specs import scale as scales
from repro.specs.names import canonical
from repro.store import accepted, job
from repro.verdicts import coverage
from repro.workflow.workflow import Workflow

PARTS = ("figure1", "figure2a", "figure2b", "figure2c", "figure3", "codes")


@pytest.fixture
def at(monkeypatch):
    """Scale pocket with a rate chosen for every method; `at(name)` is another scale."""
    kept = tables.table
    rates = kept("bitbybit", "rates")
    chosen = replace(rates, selected=tuple(label for label in rates.rows if label.endswith("x 10")))
    monkeypatch.setattr(tables, "table", lambda *both: chosen if both == ("bitbybit", "rates") else kept(*both))
    return lambda name="pocket": Workflow(scales.load(name=name), stored=False)


def ids(flow, cell):
    """The jobs of each seed of a cell, without those that score."""
    by_seed = []
    for each in flow.jobs(cell):
        needs = chain.from_iterable(job.every() for job in each.values())
        by_seed.append([need.id for need in needs if need.kind == "compress"])
    return by_seed


METHODS = ("ParetoQ", "EfficientQAT", "BitDistiller", "Bit-by-Bit")


def test_the_ends_of_the_budget_axis_are_rows_of_table_1_and_of_the_full_budget(at):
    flow = at()
    table1 = {c.row: c for c in flow.cells("bitbybit", "1") if c.col == "WikiText2 3.2-3B"}
    whole = {
        c.row: c for c in flow.cells("bitbybit", "full-budget") if (c.metric, c.stand_in) == ("WikiText-2", "pocket-5m")
    }
    budget = {(c.row, c.col): c for c in flow.cells("bitbybit", "budget") if c.metric == "WikiText-2"}
    assert len(budget) == 12 and {len(flow.jobs(c)) for c in budget.values()} == {1}
    for method in METHODS:
        own = f"{method} [w2a16 {'g-1' if method == 'ParetoQ' else 'g32'}]"
        for share, there in (("1", whole[method]), ("1/64", table1[own])):
            here = budget[method, f"share {share}"]
            assert flow.jobs(here)[0]["scores"].id == flow.jobs(there)[0]["scores"].id, (own, share)
            assert recipe.parse(here.recipe).config == recipe.parse(there.recipe).config


def test_every_budget_has_the_same_epochs_and_a_share_of_the_tokens(at):
    flow = at()
    for cell in (c for c in flow.cells("bitbybit", "budget") if c.metric == "tokens"):
        divisor = {"1": 1, "1/16": 16, "1/64": 64}[cell.col.removeprefix("share ")]
        steps = recipe.parse(cell.recipe).steps
        assert {step.config.tokens for step in steps} == {8388608 // divisor}
        epochs = sum(step.config.epochs for step in steps if step.name != "bitbybit")
        assert epochs in (0, 6), "Bit-by-Bit's are two of three stages"


def test_the_axis_of_figure_2c_is_what_the_recipe_trains_on_and_needs_no_run(at):
    """All tokens have no count of those that trained, so that an axis of counts had two of its three shares."""
    flow = at()
    by_point = {(c.row, c.col): c for c in flow.cells("bitbybit", "2c", "figure") if c.metric == "six epochs"}
    assert len(by_point) == 12
    for (method, share), cell in by_point.items():
        divisor = {"1": 1, "1/16": 16, "1/64": 64}[share.removeprefix("share ")]
        result = measure.measurement_of(flow, cell)
        assert (result.status, result.value) == ("ok", 6 * 8388608 / divisor), (method, share)


def test_a_figure_names_no_device_for_what_no_device_measured(at):
    cells = at().cells("bitbybit", "2c", "figure")
    result = [measure.measurement_of(at(), cell) for cell in cells if cell.metric == "six epochs"]
    text = rendered._markdown("t", figures.figure("bitbybit", "2c"), result)
    assert text.endswith("Measured on nothing yet.\n")


def epochs_of(text):
    """Passes over the tokens that a recipe's steps train in."""
    total = 0
    for step in recipe.parse(text).steps:
        passes = len(step.config.stages) if hasattr(step.config, "stages") else 1
        total += passes * getattr(step.config, "epochs", 0)
    return total


def test_what_is_judged_trains_on_the_tokens_that_its_rate_was_chosen_at(at):
    """1/64 of the paper's: 6 epochs of 131,072 tokens at w2a16 and of a master, 12 at w2a2, in every row."""
    flow, seen = at(), 0
    rows = list(chain.from_iterable(flow.cells("bitbybit", number) for number in ("1", "2", "3", "4", "6")))
    rows += flow.cells("bitbybit", "rates")
    for cell in rows:
        trained = [s for s in recipe.parse(cell.recipe or "fp16").steps if hasattr(s.module, "work")]
        if not trained or trained[0].name == "spinquant":
            continue
        seen += 1
        assert {step.config.tokens for step in trained} == {131072}, cell.row
        assert epochs_of(cell.recipe) == (12 if "a=2" in cell.recipe or "-a2" in cell.recipe else 6), cell.recipe
    assert seen > 300


def test_the_middle_size_has_five_seeds(at):
    flow, same = at(), ("BPW", "tokens")  # for every seed
    for cell in flow.cells("bitbybit", "1"):
        if cell.metric in same:
            assert len(cell.seeds) == 1
        elif cell.row not in ("FP16", "RTN [w2a16 g32] (ours)") and cell.recipe:
            five = cell.stand_in == "pocket-5m" and cell.row.partition(" ")[0] not in ("SmoothQuant", "SpinQuant")
            assert len(cell.seeds) == (5 if five else 3), (cell.row, cell.model)
            assert not cell.stand_in or len(flow.jobs(cell)) == len(cell.seeds)


def test_every_row_of_table_6_chooses_channels_on_its_text(at):
    names = {"RedPajama": "", "WikiText2": "wikitext2", "C4": "c4"}
    cells = [cell for cell in at().cells("bitbybit", "6") if cell.printed]
    assert len(cells) == 22 and all(cell.recipe and cell.stand_in == "pocket-3m" for cell in cells)
    seen = set()
    for cell in cells:
        _, calibrated, text = cell.row.partition("calib ")
        config = recipe.parse(cell.recipe).steps[0].config
        if calibrated:
            reads_none = config.split_metric == "weight"
            assert config.split_text == ("" if reads_none else names[text.split()[0]]), cell.row
            assert config.group == int(text.split("g")[1][:-1]) and cell.seeds == (0, 1, 2)
            seen.add((config.split_metric, config.split_text, config.group))
    assert len(seen) == 8, "no two of them are one recipe"


def test_figure_2_runs_table_3s_trainings(at):
    flow = at()
    table3 = {c.row: c for c in flow.cells("bitbybit", "3") if c.col == "Llama-2-7B (ours)"}
    rows = {
        "at 2 bits at once": "block-wise [w2a16 g32]",
        "8, 4, 2 bits": "block-wise + progressive [w2a16 g32]",
        "8, 4, 2 bits, channels split": "block-wise + progressive + OCS(activation norm x weight max) [w2a16 g32]",
    }
    for name, kind in (("2a", "figure"), ("2b", "figure"), ("spikes", "table"), ("blocks", "table")):
        of_model = [c for c in flow.cells("bitbybit", name, kind) if c.model == "Llama-2-7B"]
        mine = [c for c in of_model if c.row in rows]
        others = {c.row for c in of_model} - set(rows)
        assert mine
        assert others == {"at 2 bits at once, x 300", "8, 4, 2 bits, x 10"} if name == "spikes" else not others
        for cell in mine:
            assert ids(flow, cell) == ids(flow, table3[rows[cell.row]])[: len(cell.seeds)], (name, cell.row)


def test_an_accuracy_and_its_log_probability_are_of_one_job(at):
    """Neither MMLU nor BoolQ is answered for them; the mean's nats are those of `likelihood`, which has all seeds."""
    flow, mean = at(), "zeroshot_avg"
    for number, col in (("2", "Avg"), ("3", "Task avg"), ("4", "Task avg")):
        result = [c for c in flow.cells("bitbybit", number) if c.col == col and c.stand_in and c.recipe]
        kinds = {c.metric: (c.unit, c.params.show, c.params.percent) for c in result}
        assert kinds == {mean: ("%", "correct", True), f"{mean}{tables.LOG_PROBABILITY}": ("nats", "choice", False)}
        in_percent = [c for c in result if c.unit == "%"]
        in_nats = [c for c in result if c.unit == "nats"]
        for right, log in zip(in_percent, in_nats):
            assert right.row == log.row and log.seeds == right.seeds[:1]
            assert ids(flow, right)[0] == ids(flow, log)[0]
    own = {c.row: c for c in flow.cells("bitbybit", "likelihood")}
    for cell in flow.cells("bitbybit", "2"):
        if cell.metric == mean + tables.LOG_PROBABILITY:
            assert flow.inputs(cell)["jobs"] == flow.inputs(own[cell.row])["jobs"][:1]


def test_the_rule_of_spikes_is_written_in_the_spec(at):
    (metric,) = [m for m in tables.table("bitbybit", "spikes").measure.values() if m.get("show") == "spikes"]
    assert (metric["factor"], metric["window"]) == (1.25, 8)
    all_params = {c.row: c.params for c in at().cells("bitbybit", "spikes") if c.metric == "spikes"}
    other_rates = {"at 2 bits at once, x 300": 1, "8, 4, 2 bits, x 10": 3}
    merged = {row: params.merged for row, params in all_params.items()}
    assert merged == {"at 2 bits at once": 1, "8, 4, 2 bits": 3} | other_rates


def test_figures_1_and_3_are_of_the_smallest_model(at):
    flow = at("pocket")
    assert {c.stand_in for c in flow.cells("bitbybit", "3", "figure")} == {"pocket-3m"}
    (master,) = {
        job.parsed_options()["recipe"] for job in flow.every_job(flow.cells("bitbybit", "3", "figure"))
        if job.kind == "compress" and job.steps == ("bitbybit",)
    }  # fmt: skip
    assert "tokens=131072" in master and "any_precision" in master
    grid = [
        job.parsed_options() for job in flow.every_job(flow.cells("bitbybit", "1", "figure")) if job.kind == "surface"
    ]
    assert {(options["points"], options["directions"]) for options in grid} == {(11, 0)} and len(grid) == 8


def test_without_a_choice_cells_are_there_and_not_run(monkeypatch):
    kept = tables.table
    bare = replace(kept("bitbybit", "rates"), selected=())
    monkeypatch.setattr(tables, "table", lambda *both: bare if both == ("bitbybit", "rates") else kept(*both))
    flow = Workflow(scales.load(name="pocket"), stored=False)
    for name, kind, count in (("2b", "figure", 3), ("spikes", "table", 12)):
        cells = [
            cell for cell in flow.cells("bitbybit", name, kind) if ", x " not in cell.row
        ]  # those have rates of their own
        assert len(cells) == count and {measure.measurement_of(flow, c).status for c in cells} == {"not_run"}
    assert flow.every_job(cells) == []


def test_a_part_of_a_figure_has_a_name_of_its_own():
    assert [is_printed("figure", n) for n in ("2", "2a", "13c", "a", "2z", "2ab", "peers-m1")] == [
        True, True, True, False, False, False, False,
    ]  # fmt: skip
    assert not is_printed("table", "2a") and table_name("bitbybit", "figure", "2c") == "bitbybit/figure2c"
    assert canonical("figures/bitbybit/figure2c.svg") == "bitbybit/figure2c"
    assert figures.split("bitbybit/figure2a") == ("bitbybit", "2a")
    assert {f"bitbybit/{name}" for name in PARTS} <= set(figures.names())


def test_coverage_counts_the_parts_of_a_figure_together(monkeypatch):
    monkeypatch.setattr(coverage.papers, "PAPERS", ("bitbybit",))
    monkeypatch.setattr(coverage.papers, "tables", lambda paper: ["7", "8"])  # those of other devices
    flow = Workflow(scales.load(name="pocket"), stored=False)
    (line,) = [x for x in coverage.coverage(flow) if (x.paper, x.kind, x.number) == ("bitbybit", "figure", "2")]
    monkeypatch.undo()
    parts = [flow.cells("bitbybit", number, "figure") for number in ("2a", "2b", "2c")]
    assert line.possible == sum(map(len, parts)) > 0


OWN = {
    "title": "t",
    "recipe": "rtn-w{bits}-{group} + spear(lr1={lr1})",
    "rows": {"RTN": {"group": "pc"}},
    "models": ["Llama-3.2-1B"],
    "sweep": {"share": ["1", "1/4"]},
    "columns": {"share 1": {"bits": 4}, "share 1/4": {"bits": 3}},
    "tuned_by": "spear/rates",
    "measure": {"ppl": {"kind": "perplexity", "corpus": "wikitext2"}},
    "extra_columns": {"BPW": {"kind": "storage"}},
}
RATES = {
    "title": "t",
    "recipe": "rtn-w4-pc + spear(lr1={lr1})",
    "rows": {"x 1": {"lr1": 1.0e-4}, "x 3": {"lr1": 3.0e-4}},
    "models": ["Llama-3.2-1B"],
    "measure": {"ppl": {"kind": "perplexity", "corpus": "held-out"}},
}
DRAWN = {
    "title": "t",
    "x": "x",
    "y": "y",
    "series": {"a": "rtn-w4-pc + spear(lr1={lr1})"},
    "models": ["Llama-3.2-1B"],
    "measure": {"kind": "sensitivity", "show": "damage"},
    "points": "axis",
    "tuned_by": "spear/rates",
}


def test_columns_of_a_spec_of_our_own_give_variables_and_its_choice_rates(write):  # noqa: F811
    write("tables/spear/rates.yaml", RATES)
    write("tables/spear/grid.yaml", OWN)
    bare = tables.cells("spear", "grid")
    assert [(c.col, c.recipe, c.measure) for c in bare] == [("share 1", "", ""), ("share 1/4", "", "")]
    write("tables/spear/rates.yaml", RATES | {"selected": "x 3"})
    result = {(c.col, c.metric): c.recipe for c in tables.cells("spear", "grid")}
    assert result == {
        ("share 1", "ppl"): "rtn-w4-pc + spear-lr1=0.0003",
        ("BPW, share 1", "BPW"): "rtn-w4-pc + spear-lr1=0.0003",
        ("share 1/4", "ppl"): "rtn-w3-pc + spear-lr1=0.0003",
        ("BPW, share 1/4", "BPW"): "rtn-w3-pc + spear-lr1=0.0003",
    }


def test_a_figure_takes_a_choice_too(write):  # noqa: F811
    write("tables/spear/rates.yaml", RATES)
    write("figures/spear/figure4.yaml", DRAWN)
    (bare,) = figures.cells("spear", "4")
    assert (bare.recipe, bare.measure, bare.row) == ("", "", "a")
    write("tables/spear/rates.yaml", RATES | {"selected": "x 1"})
    (made,) = figures.cells("spear", "4")
    assert made.recipe == "rtn-w4-pc + spear-lr1=0.0001" and made.measure == "sensitivity"


def test_every_figure_draws_before_anything_is_measured(at, tmp_path, monkeypatch):
    monkeypatch.setattr(accepted, "RESULTS", tmp_path / "results")
    accepted.forget()
    for name in PARTS:
        with job.built_under(tmp_path / "build"):  # not what a run left in this checkout
            panels, _, text = rendered.draw(at(), f"bitbybit/{name}", [tmp_path / f"{name}.svg"])
        picture = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
        said = " ".join(re.findall(">([^<]+)</text>", picture))
        assert said.startswith("bitbybit, ") and said.endswith("Scale pocket: not measured"), name
        assert "not run" in text, name
        assert not any(chain.from_iterable(of.values() for of in panels.values()))
    monkeypatch.undo()
    accepted.forget()
