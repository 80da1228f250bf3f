"""A table's cells and sheet: every printed cell once, each with a value or a reason, printed and measured together."""

import dataclasses
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from fake_jobs import CONFIG, answers, fake, items, nll, recipe  # noqa: F401

from repro import papers
from repro.core.errors import UserError
from repro.render import content
from repro.render import table_files as rendered
from repro.render.sheet import Pair, markdown, read_markdown
from repro.results import measure
from repro.results.stored_rows import ORIGIN
from repro.specs import scale as scales
from repro.specs import tables
from repro.specs.tables import Spec
from repro.stats.statistics import Interval
from repro.store import accepted, job, observations
from repro.store.measurement import STATUSES, Measurement, from_csv
from repro.verdicts.table_results import table_results
from repro.workflow import runner
from repro.workflow.workflow import Workflow

pytestmark = pytest.mark.usefixtures("no_pooled_seeds")

PRINTED = papers.printed("spear", "1")
ONE, SEVEN = "Llama-3.2-1B", "Llama-2-7B"
ROWS = {"FP16": "fp16", "RTN pc": "rtn-w4-pc", "GPTQ pc": "gptq-w4-pc"}
BESIDE = {
    "KL": {"kind": "perplexity", "corpus": "wikitext2", "show": "kl", "unit": "nats"},
    "Top-1": {"kind": "perplexity", "corpus": "wikitext2", "show": "top1", "unit": "%"},
    "BPW": {"kind": "storage"},
    "MB": {"kind": "storage", "count": "megabytes", "unit": "MB"},
}


@pytest.fixture
def world(fake, monkeypatch, tmp_path):  # noqa: F811
    """A flow whose spec of spear/1 is the test's own and whose jobs are run; call it with changes."""
    known = tables.table

    def build(config=None, correct=None, number="1", **spec):
        made = Spec("t", **{"rows": ROWS, "extra_columns": BESIDE, "extra_rows": ("rtn-w3-pc",)} | spec)
        monkeypatch.setattr(tables, "table", lambda p, n: made if (p, n) == ("spear", number) else known(p, n))
        if correct:
            monkeypatch.setattr(runner.JOBS["zeroshot"], "run", items(correct))
        flow = Workflow(scales.load(CONFIG | (config or {})), stored=False)
        fake(flow.every_job(flow.cells("spear", number)))
        return flow

    monkeypatch.setattr(accepted, "RESULTS", tmp_path / "results")
    return build


def cells_of(flow, number="1"):
    return table_results(flow, "spear", number).measurements


def at(flow, *key, number="1"):
    every = [m for m in cells_of(flow, number) if m.cell_key[: len(key)] == key]
    (result,) = [m for m in every if not m.metric.endswith(tables.LOG_PROBABILITY)]
    return result


def the_job(flow, row, col="Wiki", model=ONE):
    (cell,) = [c for c in flow.cells("spear", "1") if c.cell_key[:3] == (row, col, model)]
    return next(iter(flow.jobs(cell)[0].values()))


# --- nothing is dropped -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [{}, {"models": {}}, {"zeroshot": None}], ids=["all", "no model", "no tasks"])
def test_every_printed_cell_appears_once_and_first(world, config):
    cells = cells_of(world(config))
    assert [m.cell_key for m in cells[: len(PRINTED)]] == [(c.row, c.col, c.model, c.metric) for c in PRINTED]
    assert [m.printed for m in cells[: len(PRINTED)]] == [c.value for c in PRINTED]
    assert set(Counter(m.cell_key for m in cells).values()) == {1}
    assert all(m.status in STATUSES for m in cells)
    assert all((m.value is None) == (m.status not in ("ok", "at_chance")) for m in cells)


@pytest.mark.parametrize(("paper", "number"), [(p, n) for p in papers.PAPERS for n in papers.tables(p)])
def test_every_printed_cell_of_every_table_appears_without_any_job(paper, number, monkeypatch, tmp_path):
    monkeypatch.setattr(accepted, "RESULTS", tmp_path)
    monkeypatch.setattr(job, "BUILD", tmp_path)  # what somebody has built beside it is no part of this test
    flow = Workflow(scales.load(CONFIG | {"models": {}}), stored=False)
    results = table_results(flow, paper, number)
    result = results.measurements
    wanted = [(c.row, c.col, c.model, c.metric, c.value) for c in papers.printed(paper, number)]
    assert [(*m.cell_key, m.printed) for m in result][: len(wanted)] == wanted
    assert {m.status for m in result if m.printed} <= {"not_run", "no_stand_in", "other_device", "ok", "stale"}
    sheet = content.sheet(results)
    if not tables.path_of(paper, number).is_file():
        assert "no spec yet" in sheet.notes[0] and str(len(result)) in sheet.notes[0]
    shown = []
    for row in sheet.rows:
        shown += [one.printed if isinstance(one, Pair) else one for one in row[1:]]
    words = Counter(chain.from_iterable(text.split(" / ") for text in shown))
    for value, count in Counter(c.value for c in papers.printed(paper, number) if c.value).items():
        assert words[value] >= count or " / " in value, f"{value} is printed {count} times"


def test_the_file_holds_every_cell(world, tmp_path):
    flow = world()
    rendered.build(flow, "spear/table1", tmp_path / "out")
    read = from_csv(tmp_path / "out" / "spear" / "table1.csv")
    assert [(m.cell_key, m.status) for m in read] == [(m.cell_key, m.status) for m in cells_of(flow)]
    text = (tmp_path / "out" / "spear" / "table1.md").read_text()
    assert read_markdown(text)
    printed = {cell.value for cell in PRINTED}
    assert not [value for value in printed if value not in text]
    assert (tmp_path / "out" / "spear" / "table1.tex").is_file()


def test_a_table_of_machines_that_are_not_here_says_other_device(tmp_path):
    flow = Workflow(scales.load(CONFIG), stored=False)
    sheet = rendered.build(flow, "spqt/table2", tmp_path)
    result = from_csv(tmp_path / "spqt" / "table2.csv")
    assert {m.status for m in result} == {"other_device"}
    assert not sheet.paired and "Other device: the whole table." in sheet.notes
    assert "14.78" in set(chain.from_iterable(sheet.rows))
    assert list(sheet.head) == ["", "tokens/s", "speedup"], "one column for all models, which are sections"


def test_columns_that_are_not_measured_say_what_they_lack(tmp_path):
    sheet = rendered.build(Workflow(scales.load(name="pocket"), stored=True), "subspec/table6", tmp_path)
    (missing,) = [note for note in sheet.notes if "GPQA's questions" in note]
    cause = "GPQA's questions, which its authors ask not to spread in the clear"
    assert missing.startswith(f"Not run, for lack of {cause}: ")
    assert missing.endswith(": GPQA Diamond tokens/s; GPQA Diamond tau.")
    assert any(note.startswith("Not run, for lack of two of the four sets: Mean ") for note in sheet.notes)


def test_a_device_of_ours_is_beside_the_printed_ones(tmp_path):
    """SpQt's Table 1 has datasheets; of the GPU that kernels are timed on, the rate that a read reaches."""
    sheet = rendered.build(Workflow(scales.load(CONFIG), stored=False), "spqt/table1", tmp_path)
    result = from_csv(tmp_path / "spqt" / "table1.csv")
    assert {m.status for m in result if m.printed} == {"other_device"} and len(sheet.rows) == 5
    (ours,) = [m for m in result if m.status == "ok"]
    assert ours.metric == "mem_bandwidth_gbs" and 4000 < ours.value < 4800 and "H200" in ours.device


# --- fresh ------------------------------------------------------------------------------------------------------------


def test_a_cell_of_several_measures_says_which_they_are(stored):
    assert (
        "In a cell: WikiText-2 / C4 / tokens / six epochs."
        in content.sheet(table_results(stored, "bitbybit", "budget")).notes
    )
    assert not any(note.startswith("In a cell:") for note in content.sheet(table_results(stored, "spear", "4")).notes)


def test_a_live_perplexity(world):
    flow = world()
    m, job = at(flow, "RTN pc", "Wiki", ONE), the_job(flow, "RTN pc")
    values = nll("tiny-wikitext", job)
    assert m.value == pytest.approx(np.exp(values.mean()))
    assert m.n == 120
    assert m.status == "ok"
    assert m.source == "fresh"
    assert m.lo < m.value < m.hi and m.covers == "windows only"
    assert (m.printed, m.stand_in, m.recipe, m.grade, m.scale) == ("20.46", "pocket-3m", "rtn-w4-pc", "C", "test")
    meta = observations.load(job.folder / observations.FILE).meta
    assert {name: getattr(m, name) for name in ORIGIN} == {name: meta[name] for name in ORIGIN}
    assert m.protocol == "gptq-2048-v1 on tiny-wikitext-x"
    assert m.seeds == "" and at(flow, "GPTQ pc", "Wiki", ONE).seeds == "0"
    assert at(flow, "RTN pc", "C4", SEVEN).protocol.endswith("on tiny-c4-docs-x")


def test_live_zero_shot_is_the_plain_mean_of_tasks(world):
    flow = world(correct={"rtn-w4-pc": {"piqa": answers(0.8), "arc_easy": answers(0.5)}})
    m = at(flow, "RTN pc", "ZS", ONE)
    assert m.value == pytest.approx(0.65) and m.n == 80 and m.status == "ok"
    noise = np.sqrt(0.8 * 0.2 / 40 + 0.5 * 0.5 / 40) / 2
    assert m.hi - m.lo == pytest.approx(2 * 1.99 * noise, rel=0.15) and m.lo < m.value < m.hi
    assert m.protocol == "lm-eval 0: piqa; lm-eval 0: arc_easy"


def test_chance_is_decided_by_full_precision(world):
    chance = {"piqa": answers(0.5), "arc_easy": answers(0.25)}
    good = {"piqa": answers(0.95), "arc_easy": answers(0.95)}
    flow = world(correct={"": chance, "rtn-w4-pc": good})
    assert at(flow, "RTN pc", "ZS", ONE).status == at(flow, "FP16", "ZS", ONE).status == "at_chance"


def test_a_good_full_precision_is_not_at_chance_for_a_bad_model(world):
    chance = {"piqa": answers(0.5), "arc_easy": answers(0.25)}
    flow = world(correct={"": {task: answers(0.95) for task in chance}, "rtn-w4-pc": chance})
    assert at(flow, "RTN pc", "ZS", ONE).status == "ok"


def test_other_items_than_full_precision_are_refused(world):
    flow = world(correct={"rtn-w4-pc": {"piqa": answers(0.8, 30)}})
    cell, _ = (c for c in flow.cells("spear", "1") if c.cell_key[:3] == ("RTN pc", "ZS", ONE))
    with pytest.raises(UserError, match="differ in length"):
        _ = measure.one_measured(flow, cell).against


def test_a_place_with_two_metrics_is_two_cells_and_one_entry(world):
    flow = world(
        number="8",
        recipe="{q}-w{bits}-{group} + spear",
        rows={"RTN": {"q": "rtn"}},
        extra_rows=(),
        extra_columns={},
        columns=("{bits}-bit {group} K%/r", "{bits}-bit {group} BPW"),
    )
    cells = [c for c in flow.cells("spear", "8") if (c.row, c.col) == ("RTN", "4-bit pc K%/r") and c.model == ONE]
    assert [c.metric for c in cells] == ["k_percent", "rank"]
    result = [measure.one_measured(flow, cell) for cell in cells]
    assert [one.measurement.value for one in result] == [50.0, 3.0], "2 of 4 layers, of rank 4 and 2"
    entry = content._pair(result)
    assert entry.printed == " / ".join(c.printed for c in cells) and entry.here == "50 / 3"


def test_kl_and_bits_stand_beside_and_are_of_the_first_column(world):
    flow = world()
    kl = at(flow, "RTN pc", "KL", ONE)
    assert kl.value == pytest.approx(0.1 + 0.015) and kl.n == 4 and kl.unit == "nats"
    top = at(flow, "RTN pc", "Top-1", ONE)
    assert top.value == pytest.approx(76.5) and top.unit == "%" and top.printed == ""
    bpw = at(flow, "RTN pc", "BPW", ONE)
    assert (bpw.value, bpw.lo, bpw.hi) == (4.125, None, None)
    assert at(flow, "RTN pc", "MB", SEVEN).value == 2.5
    assert "on tiny-wikitext-x" in kl.protocol and kl.recipe == "rtn-w4-pc"
    assert all(at(flow, "FP16", col, ONE).value is None for col in ("KL", "Top-1")), "it is not compared with itself"


def test_a_row_of_your_own_is_at_the_end_without_a_printed_value(world):
    flow = world()
    mine = [m for m in cells_of(flow) if m.row == "rtn-w3-pc"]
    assert {m.printed for m in mine} == {""} and {m.col for m in mine} >= {"Wiki", "C4", "ZS", "BPW"}
    m = at(flow, "rtn-w3-pc", "Wiki", SEVEN)
    job = the_job(flow, "rtn-w3-pc", model=SEVEN)
    assert recipe(job) == "rtn-w3-pc" and m.value == pytest.approx(np.exp(nll("tiny-wikitext", job).mean()))
    assert at(flow, "rtn-w3-pc", "Wiki", "Llama-3.2-3B").status == "no_stand_in"
    assert m.metric == at(flow, "FP16", "Wiki", SEVEN).metric


# --- why there is no value --------------------------------------------------------------------------------------------


def test_a_model_without_a_stand_in(world):
    cells = [m for m in cells_of(world()) if m.model == "Llama-3.2-3B"]
    exact = [m for m in cells if m.col in ("BPW", "MB") and m.status == "ok"]  # from its public shape
    assert exact and all((m.source, m.grade, m.device) == ("arithmetic", "D", "") and m.value for m in exact)
    cells = [m for m in cells if m not in exact]
    assert {m.status for m in cells} == {"no_stand_in"} and all(m.value is None and not m.source for m in cells)
    assert {m.printed for m in cells if m.printed} == {
        c.value for c in PRINTED if c.model == "Llama-3.2-3B" and c.value
    }


def test_a_row_without_a_recipe_was_not_run(world):
    cells = [m for m in cells_of(world()) if m.model in (ONE, SEVEN) and m.row not in (*ROWS, "rtn-w3-pc")]
    assert cells and {(m.status, m.value, m.source) for m in cells} == {("not_run", None, "")}


def test_a_column_that_the_scale_does_not_measure(world):
    m = at(world({"zeroshot": None}), "RTN pc", "ZS", ONE)
    assert (m.status, m.value, m.note) == ("not_run", None, "scale test does not measure it")


def test_what_is_not_built_says_so(world):
    flow = world()
    (the_job(flow, "RTN pc").folder / observations.FILE).unlink()
    m = at(flow, "RTN pc", "Wiki", ONE)
    assert m.value is None and m.status == "not_run" and m.note == "its observations are not built"


def test_a_corpus_that_the_scale_does_not_map(world):
    with pytest.raises(UserError, match="^scale test: unknown corpus 'wikitext2'|^scale test: unknown corpus 'c4'"):
        world({"corpora": {"c5": "tiny-c4-docs"}})


# --- stored -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(world, monkeypatch):
    """A flow that takes GPTQ from results, where today's row and series of it are, some columns changed."""
    flow = world()
    key = ("GPTQ pc", "Wiki", ONE)
    cell = next(c for c in flow.cells("spear", "1") if c.cell_key[:3] == key)
    row, series = measure.fresh(flow, cell), [dict(seed) for seed in flow.quantity(cell).seeds]

    def make(**changes):
        kept = dataclasses.replace(row, source="", **changes)
        fits = lambda scale, other: scale == kept.scale and other.cell_key == cell.cell_key  # noqa: E731
        monkeypatch.setattr(accepted, "find", lambda scale, other: kept if fits(scale, other) else None)
        monkeypatch.setattr(accepted, "series", lambda row: series)
        return Workflow(flow.scale, stored=True), kept

    return make


def test_a_recorded_cell_has_no_mark(recorded):
    flow, kept = recorded()
    m = at(flow, "GPTQ pc", "Wiki", ONE)
    assert m == dataclasses.replace(kept, source="stored") and m.status == "ok"
    assert content.measured_text(m).startswith(f"{content.number(m.value)} [")
    remarks = content.remarks(table_results(flow, "spear", "1"))
    assert any(f"{kept.device}, commit {kept.commit}" in remark for remark in remarks)
    assert {r[0] for r in remarks} & {*content.LEGEND} <= {"§"}
    assert at(flow, "RTN pc", "Wiki", ONE).status == "not_run"


@pytest.mark.parametrize(
    ("change", "why"),
    [({"inputs": "00000000"}, "its declared inputs have changed"), ({"versions": "gptq=0"}, "other versions: ")],
    ids=["inputs", "versions"],
)
def test_a_recorded_cell_of_other_inputs_or_versions_is_stale(recorded, change, why):
    flow, kept = recorded(**change)
    m = at(flow, "GPTQ pc", "Wiki", ONE)
    assert (m.status, m.source, m.value) == ("stale", "stored", kept.value) and m.note.startswith(why)
    assert content.measured_text(m).startswith(f"{content.number(m.value)}†")
    assert [r[0] for r in content.remarks(table_results(flow, "spear", "1"))][-1:] == ["†"]


def test_a_stored_row_at_chance_keeps_its_mark_and_another_scale_is_not_shown(recorded):
    flow, kept = recorded(status="at_chance")
    assert "‡" in content.measured_text(at(flow, "GPTQ pc", "Wiki", ONE))
    flow, kept = recorded(scale="gpu")
    assert at(flow, "GPTQ pc", "Wiki", ONE).status == "not_run"


# --- how it is shown --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "text"),
    [("not_run", "not run"), ("no_stand_in", "no stand-in"), ("too_long", "too long"), ("oom", "out of memory"),
     ("unsupported", "unsupported"), ("diverged", "diverged"), ("other_device", "other device")],
)  # fmt: skip
def test_a_status_is_shown_in_words(status, text):
    assert content.measured_text(Measurement("p", "table", "1", "r", "c", "m", "ppl", status=status)) == text


@pytest.mark.parametrize(
    ("x", "text"),
    [(None, ""), (0.12345, "0.123"), (1.234, "1.23"), (20.456, "20.46"), (123.46, "123.5"), (1234.5, "1234"),
     (2.5e6, "2.5e6"), (0.0, "0.000"), (-3.14159, "-3.14"), (5e-5, "5e-5"), (5e-4, "0.001")],
)  # fmt: skip
def test_numbers_have_few_digits(x, text):
    assert content.number(x) == text


@pytest.mark.parametrize(
    ("value", "ratio", "shown"),
    [(20.16, 1.1142, "×1.114 [1.000, 1.228]; 20.16"), (169.4, 13.826, "×13.83 [13.71, 13.94]; 169.4"),
     (14573.0, 1189.2, "×1189; 14573")],
)  # fmt: skip
def test_a_ratio_has_four_digits(value, ratio, shown):
    m = Measurement("p", "table", "1", "r", "c", "m", "ppl", unit="ppl", status="ok", value=value)
    assert content.measured_text(m, Interval(ratio, ratio - 0.114, ratio + 0.114, 9, 8, "", {})) == shown


@pytest.mark.parametrize(
    ("value", "lo", "hi", "shown"),
    [(16.0, None, None, "16"), (0.0, 0.0, 0.0, "0"), (16.0, 15.0, 17.0, "16.00 [15.00, 17.00]")],
)  # fmt: skip
def test_a_count_has_no_decimals(value, lo, hi, shown):
    m = Measurement("p", "table", "1", "r", "c", "m", "bpw", status="ok", value=value, lo=lo, hi=hi)
    assert content.measured_text(m) == shown


def test_devices_are_named_with_their_commits():
    whole, short = "3359d512c45a5b6acdfe77a91930c65c71d1cf46", "2e8859e306+"
    m = Measurement("p", "table", "1", "r", "c", "m", "ppl", device="H200", commit=f"{whole} + {short}")
    other = dataclasses.replace(m, device="CPU", commit=short)
    same = dataclasses.replace(m, commit=whole)
    assert content.origins([m, other, same]) == ["CPU, commit 2e8859e306+", "H200, commits 2e8859e306+, 3359d512c4"]


def test_a_column_without_any_value_is_a_line_below_the_table(world):
    """The nats of a mean, too; a model without a stand-in has printed values alone, as its section says."""
    flow = world()
    results = table_results(flow, "spear", "1")
    lost = [cell for cell in results.cells if cell.col == "C4" or cell.metric == "bpw" or cell.col == "BPW"]
    sheet = content.sheet(results.marked({cell.cell_key: {"status": "not_run", "value": None} for cell in lost}))
    (missing,) = [note for note in sheet.notes if note.startswith("Not run: ")]
    assert {"C4", "BPW"} <= set(missing.removeprefix("Not run: ").rstrip(".").split("; "))
    assert "BPW" not in sheet.head, "nothing was printed there"
    at_c4 = [row[sheet.head.index("C4")] for row in sheet.rows if len(row) > 1]
    assert not any(pair.here for pair in at_c4) and any(pair.printed for pair in at_c4)
    for row in sheet.rows:
        assert all(pair.here != "no stand-in" for pair in row[1:])
    assert next(note for note in sheet.notes if note.startswith("Scale ")) and "Scale" not in sheet.title


def test_the_ratio_to_full_precision_comes_first(world):
    flow = world()
    sheet = content.sheet(table_results(flow, "spear", "1"))
    heads = [row[0] for row in sheet.rows if len(row) == 1]
    assert heads == [
        "Llama-3.2-1B; here: pocket-3m, grade C",
        "Llama-3.2-3B; here: no stand-in at this scale",
        "Llama-2-7B; here: pocket-10m, grade C",
        "Llama-2-13B; here: no stand-in at this scale",
    ]
    assert list(sheet.head) == ["", "KL", "Top-1", "Wiki", "C4", "ZS", "BPW", "MB"]  # KL settles with little text
    assert {len(row) for row in sheet.rows} == {1, len(sheet.head)}
    rows = {row[0]: row for row in sheet.rows if len(row) > 1}
    first = next(row for row in sheet.rows if row[0] == "RTN pc")
    job, full = the_job(flow, "RTN pc"), the_job(flow, "FP16")
    ratio = np.exp((nll("tiny-wikitext", job) - nll("tiny-wikitext", full)).mean())
    first, full = (dict(zip(sheet.head, row)) for row in (first, rows["FP16"]))
    assert first["Wiki"].printed == "20.46" and first["Wiki"].here.startswith(f"×{ratio:.3f} [")
    assert "; " in first["Wiki"].here and first["ZS"].here.startswith("+0.000; ") and first["BPW"].here == "4.12"
    assert full["Wiki"].here.count("×") == 0
    text = markdown(sheet)
    assert "nan" not in text.lower() and "None" not in text
