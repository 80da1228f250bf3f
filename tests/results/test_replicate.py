"""What a build measures itself: which cells, whether they agree with what is stored, and what the table says of it."""

import shutil
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from tiny_results import MODEL, SPEC

from repro import models
from repro.baselines import grid
from repro.data import corpora
from repro.models import perplexity as scoring
from repro.models.lowbit import LowBitModel, block_linears
from repro.recipes import recipe
from repro.render import table_files as rendered
from repro.results import measure, replicate, verify
from repro.results.accept import accept
from repro.specs import scale as scales
from repro.specs import tables
from repro.specs.claims import ClaimSpec
from repro.specs.scale import Replicate
from repro.store import accepted
from repro.store.observations import Series
from repro.workflow import runner
from repro.workflow.workflow import Workflow

ROWS = ("FP16", "RTN pc", "GPTQ g128")
CLAIM = ClaimSpec(
    claim="spear C005 C018-C020",
    says="4-bit per-channel RTN costs perplexity",
    printed="9.71 to 20.46",
    table="spear/1",
    cells={"f": "FP16 | Wiki", "b": "RTN pc | Wiki"},
    cases=(MODEL,),
    quantity="b / f - 1",
    holds="> 0",
)


# --- the comparison ---------------------------------------------------------------------------------------------------


class Asked:
    """A cell of perplexity under a recipe."""

    measure = "perplexity"

    def __init__(self, text: str) -> None:
        from repro.metrics.perplexity import Perplexity

        self.recipe, self.params = text, Perplexity("wikitext2")


def nll(values) -> dict[str, Series]:
    return {"nll": Series(np.asarray(values, dtype=float), "windows", "a text")}


def test_the_first_units_are_compared_one_by_one():
    stored = nll([3.0, 3.5, 4.0, 9.0])
    same = replicate.compare(Asked("rtn-w4-pc"), stored, nll([3.0, 3.5, 4.0]))
    assert (same.units, same.difference, same.identical, same.agrees) == (3, 0.0, True, True)
    assert same.stored == same.here == pytest.approx(np.exp(3.5))
    # differences that cancel in the mean do not cancel here
    apart = replicate.compare(Asked("rtn-w4-pc"), stored, nll([3.003, 3.497, 4.0]))
    assert apart.difference == pytest.approx(0.002) and not apart.agrees and apart.here == pytest.approx(np.exp(3.5))


@pytest.mark.parametrize(
    ("text", "shift", "agrees"),
    [("rtn-w4-pc", 9e-5, True), ("rtn-w4-pc", 1.1e-4, False), ("gptq-w4-g128", 2.9e-3, True),
     ("gptq-w4-g128", 3.1e-3, False), ("rtn-w4-pc + spear", 2.9e-3, True), ("rtn-w4-pc + spear", 3.1e-3, False),
     ("fp16", 1.1e-4, False)],
)  # fmt: skip
def test_the_bound_is_that_of_what_the_recipe_does(text, shift, agrees):
    result = replicate.compare(Asked(text), nll([3.0, 3.5]), nll([3.0 + shift, 3.5 - shift]))
    assert result.agrees is agrees and not result.identical


def test_more_units_than_are_stored_or_another_series_never_agree():
    assert not replicate.compare(Asked("rtn-w4-pc"), nll([3.0]), nll([3.0, 3.0])).agrees
    other = {"kl": Series(np.asarray([3.0]), "windows", "a text")}
    assert not replicate.compare(Asked("rtn-w4-pc"), nll([3.0]), other).agrees


def test_what_a_unit_is_decides_how_it_is_compared():
    names = ("nll", "kl", "top1", "piqa/correct", "bits/bpw", "at 0 3", "weights")
    units = ["nats", "nats", "tokens", "items", "bits", "nats", "shares"]
    assert [replicate.unit_of(name) for name in names] == units
    shares = np.asarray([10.0, 90.0])
    assert replicate.difference("weights", shares, shares + [0.01, -0.01]) == pytest.approx(0.01)
    assert {"surface", "histogram"} <= set(replicate.COMPARED), "figures 1 and 3 of Bit-by-Bit"
    answers = np.r_[np.ones(50), np.zeros(50)]
    flipped = np.where(np.arange(100) == 3, 0.0, answers)
    assert replicate.difference("piqa/correct", answers, flipped) == pytest.approx(0.01)
    assert replicate.difference("bits/bpw", np.asarray([4.0]), np.asarray([4.04])) == pytest.approx(0.01)
    assert replicate.bound("wikitext2/nll", "gptq-w2-g32") == replicate.bound("nll", "rtn-w4-pc + spear") == 3e-3
    assert replicate.bound("wikitext2/nll", "bitbybit-w2-g32") == 3e-3
    assert replicate.bound("bits/bpw", "rtn-w4-pc") == 0.0


def test_a_scale_that_is_off_by_one_percent_differs():
    """On the smallest pocket model and real text, also by the wider bound of what calibrates."""
    name = "pocket-3m"
    ids = corpora.token_ids("wikitext2", models.tokenizer(name))[: 8 * 256]
    windows = scoring.windows(torch.as_tensor(ids), 256, 8)
    scores = {}
    for factor in (1.0, 1.01):
        lm = LowBitModel(models.load(name, "cpu", "float32", False))
        for layer, linear in block_linears(lm.model).items():
            quantized = grid.rtn(linear.weight.data, recipe.parse("rtn-w4-pc").steps[0].config)
            lm.set_weight(layer, replace(quantized, scales=quantized.scales * factor))
        scores[factor] = nll(scoring.score(lm.model, windows)["nll"].to_numpy())
    for text in ("rtn-w4-pc", "gptq-w4-g128"):
        assert replicate.compare(Asked(text), scores[1.0], scores[1.0]).identical
        off = replicate.compare(Asked(text), scores[1.0], scores[1.01])
        assert not off.agrees, f"{off.difference:.2g} nats, bound {off.bound:.0e}"


# --- a build ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(house, monkeypatch):
    """The tiny house with three rows, a headline of one claim, and a scale that says what is replicated."""
    spec = replace(SPEC, rows={row: SPEC.rows[row] for row in ROWS})
    known, head = tables.table, tables.headline()
    monkeypatch.setattr(tables, "table", lambda *both: spec if both == ("spear", "1") else known(*both))
    monkeypatch.setattr(tables, "headline", lambda: replace(head, measured=(), claims=(CLAIM,)))
    named = {text: tuple(house.scale.models.values()) for text in ("fp16", "rtn-w4-pc", "gptq-w4-g128")}
    house.scale = replace(house.scale, replicate=Replicate(tables=("table1", "spear/table1"), recipes=named))
    return house


def make(house, name: str):
    """What `make` does of a table, without Snakemake: run its jobs, draw it. Its sheet."""
    for job in replicate.jobs(Workflow(house.scale), name):
        if not runner.done(job):
            runner.run(job)
    return rendered.build(Workflow(house.scale), name, house.folder / "tables")


def rows(house) -> dict[tuple[str, str], measure.Measurement]:
    """The rows of the built table by row and column."""
    read = measure.stored_rows.accepted.from_csv(house.folder / "tables" / "spear" / "table1.csv")
    return {(row.row, row.col): row for row in read if row.model == MODEL}


def alter(house, shift: float) -> None:
    """Shift the first stored window of RTN on the first text, and write the row so that everything in it fits."""
    path = next(house.results.glob("*/spear-table1.csv.xz"))
    kept = accepted._others(path, measure.Measurement, ())
    for key, one in kept.items():
        if (one.row.row, one.row.col) == ("RTN pc", "Wiki"):
            seeds = [dict(seed) for seed in one.seeds]
            values = seeds[0]["nll"].values.copy()
            values[0] += shift
            seeds[0]["nll"] = replace(seeds[0]["nll"], values=values)
            cell = house.cell("RTN pc")
            facts = measure.stored_rows.values(house.flow.of_series(cell, seeds))
            kept[key] = replace(one, row=replace(one.row, **facts), seeds=seeds)
    accepted.write(kept.values())
    accepted.forget()


def test_without_results_all_is_measured_here_and_marked_with_its_windows(small):
    head, sheet = make(small, "table1"), make(small, "spear/table1")
    result = rows(small)
    ran = [row for row in result.values() if row.source]
    assert {row.source for row in ran if row.metric != "BPW"} == {"partial"}
    assert {row.n for row in ran if row.unit == "ppl"} == {8} and {row.seeds for row in ran} <= {"", "0"}
    shown = []
    for row in sheet.rows:
        if row[0] == "RTN pc":
            shown += [cell[1] for cell in row[1:] if len(cell) > 1]
    assert any("*8" in text for text in shown) and any(note.startswith("* measured here") for note in sheet.notes)
    assert not any("replicated" in note for note in (*sheet.notes, *head.notes))
    (section,), line = head.rows
    assert section == "spear" and line[3].endswith("]*")


def test_with_results_they_are_shown_and_replicated_to_the_last_bit(small):
    accept(small.table())
    head, sheet = make(small, "table1"), make(small, "spear/table1")
    result = rows(small)
    wanted = {key: small.stored_row(*key).value for key in result if result[key].source}
    assert {key: result[key].value for key in wanted} == pytest.approx(wanted, rel=1e-6), "the stored values are shown"
    assert {result[row, "Wiki"].source for row in ROWS} == {"replicated"}
    (summary,) = [note for note in sheet.notes if note.startswith("replicated here")]
    count = sum(row.source == "replicated" for row in result.values())
    assert summary.startswith(f"replicated here: {count} of {count} cells agree") and "to the last bit" in summary
    assert [note for note in head.notes if note.startswith("replicated here: 2 of 2 cells agree")]


def test_a_stored_observation_that_was_altered_differs_and_is_named(small):
    accept(small.table())
    alter(small, 0.1)
    head, sheet = make(small, "table1"), make(small, "spear/table1")
    apart = [row for row in rows(small).values() if row.source == "differs"]
    assert [(row.row, row.col) for row in apart] == [("RTN pc", "Wiki")] and "here" in apart[0].note
    for shown in (sheet, head):
        (named,) = [note for note in shown.notes if note.startswith("differs: spear/table1 | RTN pc | Wiki")]
        assert "stored" in named and "here" in named and "bound 1e-04" in named
    cell = next(row[list(sheet.head).index("Wiki")] for row in sheet.rows if row[0] == "RTN pc")
    assert "≠" in cell.here


def test_verify_uses_the_same_bounds_and_ends_with_1(small, capsys, monkeypatch):
    accept(small.table())
    monkeypatch.setattr(verify.pool, "rebuild", lambda jobs, folder, *rest: shutil.copytree("build", folder) and 0)
    assert verify.verify(small.flow, ["spear/table1"]) == 0
    out = capsys.readouterr().out
    assert "identical  spear/table1 | RTN pc | Wiki" in out and " 0 differs" in out
    for shift, code, word in ((50e-4, 0, "within   "), (0.1, 1, "differs  ")):  # of one of 100 windows
        shutil.rmtree(small.folder / "build" / "verify")
        alter(small, shift)
        assert verify.verify(small.flow, ["spear/table1"]) == code
        assert f"{word}  spear/table1 | RTN pc | Wiki" in capsys.readouterr().out


def test_what_trains_is_not_run_and_says_so(small, monkeypatch):
    """Where it has no stored value: it would keep a build for hours."""
    monkeypatch.setattr(recipe.STEPS["gptq"], "work", lambda *arguments: None, raising=False)
    assert {job.steps for job in replicate.jobs(Workflow(small.scale), "spear/table1")} == {(), ("rtn",)}
    make(small, "spear/table1")
    trained = [row for row in rows(small).values() if row.row == "GPTQ g128" and row.unit == "ppl"]
    assert {row.status for row in trained} == {"too_long"}
    assert {row.note for row in trained} == {"trains for long; python -m repro run spear/table1 --missing measures it"}


def test_of_other_tables_what_only_rounds_is_replicated(small):
    accept(small.table())
    at = replace(small.scale.replicate, tables=())
    again, missing = replicate.chosen(Workflow(replace(small.scale, replicate=at)), "spear/table1")
    assert {cell.row for cell in again} == {"FP16", "RTN pc"}
    assert not any(cell.recipe != "fp16" for cell in missing)
    for name in ("table2", "leaderboard"):
        assert replicate.chosen(Workflow(replace(small.scale, replicate=at)), name)[0] == [], "what others show"


def test_a_row_is_named_by_its_label_where_a_sweep_chooses_its_rate(small):
    accept(small.table())
    named = {"spear/table1": {"GPTQ g128": tuple(small.scale.models.values())}, "spear/table2": {"RTN pc": ("x",)}}
    at = replace(small.scale.replicate, recipes={}, rows=named)
    again, _ = replicate.chosen(Workflow(replace(small.scale, replicate=at)), "spear/table1")
    assert {cell.row for cell in again} == {"GPTQ g128"}


def test_bit_by_bits_first_table_is_replicated_from_what_is_in_the_repository(monkeypatch):
    """RTN, GPTQ and one whole training are named, and none of them needs text that is not carried."""
    monkeypatch.delenv("REPRO_DATA", raising=False)
    at, kept = scales.load(name="pocket"), tables.table
    rates = kept("bitbybit", "rates")
    chosen = replace(rates, selected=tuple(label for label in rates.rows if label.endswith("x 30")))
    monkeypatch.setattr(tables, "table", lambda *both: chosen if both == ("bitbybit", "rates") else kept(*both))
    flow = Workflow(at, stored=None)
    named = [c for c in flow.cells("bitbybit", "1") if c.recipe and c.stand_in and replicate._named(flow, c)]
    result = {(cell.row, cell.stand_in) for cell in named if cell.measure == "perplexity"}
    everywhere = {(row, f"pocket-{size}m") for row, size in product(("FP16", "RTN [w2a16 g32] (ours)"), (3, 5, 10))}
    assert result == everywhere | {("GPTQ [w2a16 g32]", "pocket-3m"), ("Bit-by-Bit [w2a16 g32]", "pocket-3m")}
    assert not any(replicate.data_lacking(flow, cell) for cell in named)


def test_the_headline_waits_for_no_kind_that_was_never_timed():
    flow = Workflow(scales.load(name="pocket"))
    _, missing = replicate.chosen(flow, "table1")
    assert {cell.measure for cell in missing} == {"perplexity"}
