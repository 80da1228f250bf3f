"""A table's cells, from raw scores of the test's own: every printed cell once, each with a value or a reason."""

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from repro import papers, perplexity, provenance, record, render, spec, table
from repro.errors import UserError
from repro.jobs import tables
from repro.record import Measurement
from repro.workflow import Workflow

PRINTED = papers.printed("spear", "1")
ROWS = {"FP16": "fp16", "RTN pc": "rtn-w4-pc", "GPTQ pc": "gptq-w4-pc"}
COLUMNS = {
    "Wiki": spec.Column("perplexity", "wikitext2"),
    "C4": spec.Column("perplexity", "c4"),
    "ZS": spec.Column("zeroshot"),
}
MODELS = {"Llama-3.2-1B": "pocket-3m", "Llama-2-7B": "pocket-10m"}
CONFIG = {
    "name": "test",
    "about": "a test",
    "models": MODELS,
    "corpora": {"wikitext2": "pocket-sample", "c4": "pydoc-topics"},
    "calibration": {"corpus": "pocket-sample-calib", "sequences": 1, "length": 8, "seed": 7},
    "zeroshot": {"tasks": ["piqa", "arc_easy"]},
}
META = {"device": "a device", "commit": "0123456789", "code": "abcdef01", "environment": "{}"}
SHIFT = {"fp16": 0.0, "rtn-w4-pc": 0.2, "gptq-w4-pc": 0.1, "rtn-w3-pc": 1.0}
BITS = {"fp16": 16.0, "rtn-w4-pc": 4.125, "gptq-w4-pc": 4.125, "rtn-w3-pc": 3.125}


def nlls(text, recipe):
    base = np.random.default_rng(len(text)).normal(3.0, 0.3, 20)
    return base + SHIFT[recipe] + np.random.default_rng(len(recipe)).normal(0, 0.01, 20)


def write_scores(path, recipe, text):
    frame = pd.DataFrame({"window": range(20), "first": 0, "second": 1, "targets": 2047, "nll": nlls(text, recipe)})
    kl = [SHIFT[recipe] / 2 + 0.01 * i if i < 4 and recipe != "fp16" else None for i in range(20)]
    frame = frame.assign(kl=kl, top1=[None if v is None else 0.75 + 0.01 * i for i, v in enumerate(kl)])
    bits = f'{{"bpw": {BITS[recipe]}, "bytes": 2500000, "block": {{"codes": 8}}}}'
    meta = META | {"protocol": "gptq-2048-v1", "label": f"{text}-x", "bits": bits}
    perplexity.save_frame(path, frame.astype({"kl": "Float64", "top1": "Float64"}), meta)


def write_items(path, correct):
    lines = [
        {"task": task, "item": i, "subject": "", "correct": int(right), "metric": "acc_norm", "truncated": False}
        for task, answers in correct.items()
        for i, right in enumerate(answers)
    ]
    content = pa.Table.from_pandas(pd.DataFrame(lines), preserve_index=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(content.replace_schema_metadata(META | {"protocol": "lm-eval 0.4 n40"}), path)


def answers(share, n=40):
    return [i < share * n for i in range(n)]


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A folder with the scores of every run of spear/1; call it for a flow, with changes to profile or spec."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(record.accepted, "__defaults__", ("*", "*", "*", tmp_path / "results"))

    def build(config=None, extra=("rtn-w3-pc",), correct=None, rows=None):
        table.scores.cache_clear()
        table.items.cache_clear()
        made = spec.TableSpec("t", ROWS if rows is None else rows, COLUMNS, extra)
        monkeypatch.setattr(spec, "table", lambda paper, number: made)
        flow = Workflow(CONFIG | (config or {}))
        for _, _, column, _, run in flow.cells("spear", "1"):
            if run and column.measure == "perplexity":
                write_scores(flow.source(column, run), run.recipe.name, flow.profile.corpora[column.corpus])
            elif run and flow.profile.zeroshot:
                default = {"piqa": answers(0.9), "arc_easy": answers(0.7)}
                write_items(flow.source(column, run), (correct or {}).get(run.recipe.name, default))
        return flow

    yield build
    table.scores.cache_clear()
    table.items.cache_clear()


def place(m):
    return (m.row, m.col, m.model)


def cells_of(flow):
    return table.measure(flow, "spear", "1")


def at(flow, *key):
    (found,) = [m for m in cells_of(flow) if place(m) == key]
    return found


# --- nothing is dropped -----------------------------------------------------------------------------------------------


def test_every_printed_cell_appears_once_and_first(world):
    for config in ({}, {"models": {}}, {"zeroshot": None}):
        cells = cells_of(world(config))
        assert [place(m) for m in cells[: len(PRINTED)]] == [(c.row, c.col, c.model) for c in PRINTED]
        assert [m.printed for m in cells[: len(PRINTED)]] == [c.value for c in PRINTED]
        assert set(Counter((*place(m), m.metric) for m in cells).values()) == {1}
        assert all(m.status in record.STATUSES for m in cells)
        assert all((m.value is None) == (m.status not in ("ok", "floor")) for m in cells)


@pytest.mark.parametrize(("paper", "number"), [(p, n) for p in papers.PAPERS for n in papers.tables(p)])
def test_every_printed_cell_of_every_table_appears_once_without_any_run(paper, number):
    flow = Workflow(CONFIG | {"models": {}, "corpora": {"wikitext2": "pocket-sample", "c4": "pocket-sample"}})
    cells = table.measure(flow, paper, number)
    assert [(*place(m), m.metric, m.printed) for m in cells] == [
        (c.row, c.col, c.model, c.metric, c.value) for c in papers.printed(paper, number)
    ]
    assert {m.status for m in cells} <= {"not_run", "no_stand_in"}
    sheet = tables.table_sheet(flow, paper, number, cells)
    words = Counter(word for row in sheet.rows if len(row) > 1 for cell in row for word in cell.split(" / "))
    for value, count in Counter(c.value for c in papers.printed(paper, number)).items():
        assert words[value or "–"] >= count or " / " in value, f"{value} is printed {count} times"


def test_the_file_holds_every_cell(world, tmp_path):
    flow = world()
    tables.build_table(flow, "spear", "1", tmp_path / "out")
    read = record.from_csv(tmp_path / "out" / "spear" / "table1.csv")
    assert [(*place(m), m.status) for m in read] == [(*place(m), m.status) for m in cells_of(flow)]
    sheet = render.read_markdown((tmp_path / "out" / "spear" / "table1.md").read_text())
    shown = Counter(cell for row in sheet.rows for cell in row)
    for value, count in Counter(c.value for c in PRINTED).items():
        assert shown[value] >= count, f"{value} is printed {count} times"


# --- live -------------------------------------------------------------------------------------------------------------


def test_a_live_perplexity(world):
    flow = world()
    m = at(flow, "RTN pc", "Wiki", "Llama-3.2-1B")
    values = nlls("pocket-sample", "rtn-w4-pc")
    assert m.value == pytest.approx(np.exp(values.mean())) and m.n == 20 and m.status == "ok" and m.live == "live"
    index = np.random.default_rng(5).integers(20, size=(4000, 20))
    low, high = np.quantile(np.exp(values[index].mean(1)), [0.025, 0.975])
    assert m.lo == pytest.approx(low, abs=0.1 * (high - low)) and m.hi == pytest.approx(high, abs=0.1 * (high - low))
    assert (m.printed, m.stand_in, m.recipe, m.grade, m.profile) == ("20.46", "pocket-3m", "rtn-w4-pc", "C", "test")
    assert m.protocol == "gptq-2048-v1 on pocket-sample-x"
    assert {name: getattr(m, name) for name in META} == META
    assert m.seed == "" and at(flow, "GPTQ pc", "Wiki", "Llama-3.2-1B").seed == "7"
    assert at(flow, "RTN pc", "C4", "Llama-2-7B").value == pytest.approx(
        np.exp(nlls("pydoc-topics", "rtn-w4-pc").mean())
    )


def test_live_rows_are_acceptable(world, tmp_path):
    flow = world()
    path = tmp_path / "live.csv"
    path.write_text(record.to_csv(cells_of(flow)))
    live = [m for m in cells_of(flow) if m.live == "live"]
    assert list(record.accept(path, tmp_path / "elsewhere").values()) == [len(live)] and len(live) > 30


def test_live_zero_shot_is_the_plain_mean_of_tasks(world):
    flow = world(correct={"rtn-w4-pc": {"piqa": answers(0.8), "arc_easy": answers(0.5)}})
    m = at(flow, "RTN pc", "ZS", "Llama-3.2-1B")
    unit = next(c.unit for c in PRINTED if c.col == "ZS")
    scale = 100 if unit == "%" else 1
    assert m.value == pytest.approx(0.65 * scale) and m.n == 80 and m.status == "ok"
    noise = scale * np.sqrt(0.8 * 0.2 / 40 + 0.5 * 0.5 / 40) / 2
    assert m.hi - m.lo == pytest.approx(2 * 1.96 * noise, rel=0.15) and m.lo < m.value < m.hi
    assert m.protocol == "lm-eval 0.4 n40, 2 tasks"


def test_floor_is_decided_by_full_precision(world):
    chance = {"piqa": answers(0.5), "arc_easy": answers(0.25)}
    good = {"piqa": answers(0.95), "arc_easy": answers(0.95)}
    flow = world(correct={"fp16": chance, "rtn-w4-pc": good})
    assert at(flow, "RTN pc", "ZS", "Llama-3.2-1B").status == at(flow, "FP16", "ZS", "Llama-3.2-1B").status == "floor"
    flow = world(correct={"fp16": good, "rtn-w4-pc": chance})
    assert at(flow, "RTN pc", "ZS", "Llama-3.2-1B").status == "ok"


def test_other_items_than_the_reference_are_refused(world):
    flow = world(correct={"rtn-w4-pc": {"piqa": answers(0.8, 30), "arc_easy": answers(0.5)}})
    with pytest.raises(UserError, match="other zero-shot items"):
        cells_of(flow)


def test_a_place_with_two_metrics_is_measured_in_its_first(world, monkeypatch):
    flow = world()
    made = spec.TableSpec("t", {"1B": "rtn-w4-pc"}, {"tau=0.6": COLUMNS["Wiki"]})
    monkeypatch.setattr(spec, "table", lambda paper, number: made)
    cells = [m for m in table.measure(flow, "spear", "15") if (m.row, m.col) == ("1B", "tau=0.6")]
    assert {m.model for m in cells} == {"Llama-3.2-1B"}, "no other model is printed in that row"
    here = {m.metric: m for m in cells}
    assert here["wikitext2_ppl"].status == "ok" and here["wikitext2_ppl"].printed == "32.50"
    assert here["k_percent"].status == "not_run" and here["k_percent"].printed == "21.4"


# --- why there is no value --------------------------------------------------------------------------------------------


def test_a_model_without_a_stand_in(world):
    cells = [m for m in cells_of(world()) if m.model == "Llama-3.2-3B"]
    assert {m.status for m in cells} == {"no_stand_in"} and all(m.value is None and not m.live for m in cells)
    assert {m.printed for m in cells if m.printed} == {
        c.value for c in PRINTED if c.model == "Llama-3.2-3B" and c.value
    }


def test_a_row_without_a_recipe_was_not_run(world):
    cells = [m for m in cells_of(world()) if m.model in MODELS and m.row not in (*ROWS, "rtn-w3-pc")]
    assert cells and {(m.status, m.value, m.live) for m in cells} == {("not_run", None, "")}


def test_a_column_that_the_profile_does_not_measure(world):
    m = at(world({"zeroshot": None}), "RTN pc", "ZS", "Llama-3.2-1B")
    assert (m.status, m.value, m.note) == ("not_run", None, "profile test does not measure zeroshot of this here")


def test_a_corpus_that_the_profile_does_not_map(world):
    flow = world()
    (run,) = {
        run.id: run
        for *_, run in flow.cells("spear", "1")
        if run and run.recipe.name == "fp16" and run.model == "pocket-3m"
    }.values()
    with pytest.raises(UserError, match="^profile test: unknown corpus 'c5': there is c4, wikitext2"):
        flow.source(spec.Column("perplexity", "c5"), run)


# --- rows of one's own and companions ---------------------------------------------------------------------------------


def test_a_row_of_your_own_stands_at_the_end_and_has_no_printed_value(world):
    flow = world()
    mine = [m for m in cells_of(flow) if m.row == "rtn-w3-pc"]
    assert {m.printed for m in mine} == {""} and {m.col for m in mine} >= {"Wiki", "C4", "ZS", "BPW"}
    m = at(flow, "rtn-w3-pc", "Wiki", "Llama-2-7B")
    assert m.value == pytest.approx(np.exp(nlls("pocket-sample", "rtn-w3-pc").mean())) and m.recipe == "rtn-w3-pc"
    assert at(flow, "rtn-w3-pc", "Wiki", "Llama-3.2-3B").status == "no_stand_in"
    assert m.metric == at(flow, "FP16", "Wiki", "Llama-2-7B").metric


def test_companions_are_of_the_first_column(world):
    flow = world()
    kl = at(flow, "RTN pc", "KL", "Llama-3.2-1B")
    assert kl.value == pytest.approx(0.1 + 0.015) and kl.n == 4 and kl.lo < kl.value < kl.hi and kl.unit == "nats"
    top = at(flow, "RTN pc", "Top-1", "Llama-3.2-1B")
    assert top.value == pytest.approx(76.5) and top.unit == "%" and top.printed == ""
    bpw = at(flow, "RTN pc", "BPW", "Llama-3.2-1B")
    assert (bpw.value, bpw.lo, bpw.hi, bpw.n, bpw.note) == (4.125, None, None, None, '{"codes": 8}')
    assert at(flow, "RTN pc", "MB", "Llama-2-7B").value == 2.5
    assert kl.protocol.endswith("on pocket-sample-x") and kl.recipe == "rtn-w4-pc"
    companions = [m for m in cells_of(flow) if m.row == "FP16" and m.col in ("KL", "Top-1")]
    assert companions == [], "full precision is not compared with itself"


# --- recorded ---------------------------------------------------------------------------------------------------------


def recorded(flow, **change):
    """A measurement of GPTQ pc on the 1B model from elsewhere, made by today's code; put into results/."""
    run = flow.run("pocket-3m", "gptq-w4-pc")
    code = provenance.code_hash([Path(p) for p in flow.code("perplexity", run)])
    c = next(c for c in PRINTED if (c.row, c.col, c.model) == ("GPTQ pc", "Wiki", "Llama-3.2-1B"))
    old = Measurement(
        "spear", "table", "1", c.row, c.col, c.model, c.metric, c.value, value=11.5, lo=11.0, hi=12.0, n=190,
        unit=c.unit, status="ok", grade="C", live="live", stand_in="pocket-3m", recipe="gptq-w4-pc",
        protocol="gptq-2048-v1 on wikitext2", profile="test", device="NVIDIA H200", commit="0123456789", code=code,
        environment="{}",
    )  # fmt: skip
    old = dataclasses.replace(old, **change)
    path = Path("in.csv")
    path.write_text(record.to_csv([old]))
    record.accept(path, record.RESULTS)
    return old


WITHOUT = {row: text for row, text in ROWS.items() if row != "GPTQ pc"}
PLACE = ("GPTQ pc", "Wiki", "Llama-3.2-1B")


def test_a_recorded_cell_fills_what_is_not_live_and_is_marked(world):
    flow = world(rows=WITHOUT)
    assert at(flow, *PLACE).status == "not_run"
    old = recorded(flow)
    m = at(flow, *PLACE)
    assert m == dataclasses.replace(old, live="recorded") and m.status == "ok"
    assert tables.here(m) == "11.50* [11.00, 12.00]"
    notes = tables.notes(cells_of(flow))
    assert any("NVIDIA H200, commit 0123456789" in note for note in notes)
    assert [note for note in notes if note.startswith("*")] and not [note for note in notes if note.startswith("†")]


def test_a_live_cell_wins_over_a_recorded_one(world):
    flow = world()
    recorded(flow)
    m = at(flow, *PLACE)
    assert m.live == "live" and m.value == pytest.approx(np.exp(nlls("pocket-sample", "gptq-w4-pc").mean()))


@pytest.mark.parametrize("change", [{"code": "00000000"}, {"recipe": "gptq-w4-nosuch"}, {"stand_in": "pocket-4m"}])
def test_a_recorded_cell_of_other_code_is_stale(world, change):
    flow = world(rows=WITHOUT)
    recorded(flow, **change)
    m = at(flow, *PLACE)
    assert m.recipe == change.get("recipe", "gptq-w4-pc")
    assert (m.status, m.live, m.value) == ("stale", "recorded", 11.5)
    assert tables.here(m) == "11.50*† [11.00, 12.00]"
    assert [note[0] for note in tables.notes(cells_of(flow))][-2:] == ["*", "†"]


def test_what_another_profile_recorded_is_not_shown(world):
    flow = world(rows=WITHOUT)
    recorded(flow, profile="pocket-full")
    assert at(flow, *PLACE).status == "not_run"


def test_only_the_named_cells_are_read(world):
    flow = world()
    Path(flow.source(COLUMNS["C4"], flow.run("pocket-3m", "rtn-w4-pc"))).unlink()
    cells = {place(m): m for m in table.measure(flow, "spear", "1", {("RTN pc", "Wiki", "Llama-3.2-1B")})}
    assert len(cells) >= len(PRINTED) and cells["RTN pc", "Wiki", "Llama-3.2-1B"].live == "live"
    assert {m.status for m in cells.values() if place(m) != ("RTN pc", "Wiki", "Llama-3.2-1B") and m.printed} == {
        "not_run", "no_stand_in",
    }  # fmt: skip


def test_a_recorded_floor_keeps_its_mark(world):
    flow = world(rows=WITHOUT)
    recorded(flow, status="floor")
    assert tables.here(at(flow, *PLACE)) == "11.50*‡ [11.00, 12.00]"


# --- how it is shown --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "text"),
    [("not_run", "not run"), ("no_stand_in", "no stand-in"), ("too_long", "too long"), ("oom", "oom"),
     ("unsupported", "unsupported"), ("diverged", "diverged")],
)  # fmt: skip
def test_a_status_is_shown_in_words(status, text):
    assert tables.here(Measurement("p", "table", "1", "r", "c", "m", "ppl", status=status)) == text


@pytest.mark.parametrize(
    ("x", "text"),
    [(None, ""), (0.12345, "0.123"), (1.234, "1.23"), (20.456, "20.46"), (123.46, "123.5"), (1234.5, "1234"),
     (2.5e6, "2.5e+06"), (0.0, "0.000"), (-3.14159, "-3.14")],
)  # fmt: skip
def test_numbers_have_few_digits(x, text):
    assert tables.number(x) == text


def test_the_sheet_says_what_stands_in(world):
    flow = world()
    sheet = tables.table_sheet(flow, "spear", "1", cells_of(flow))
    heads = [row[0] for row in sheet.rows if len(row) == 1]
    assert heads == [
        "Llama-3.2-1B; here: pocket-3m, grade C",
        "Llama-3.2-3B; here: no stand-in in this profile",
        "Llama-2-7B; here: pocket-10m, grade C",
        "Llama-2-13B; here: no stand-in in this profile",
    ]
    assert sheet.head[:3] == ["", "Wiki", "here"] and sheet.head[-4:] == ["KL", "Top-1", "BPW", "MB"]
    assert "nan" not in render.markdown(sheet).lower() and "None" not in render.markdown(sheet)
    assert {len(row) for row in sheet.rows} == {1, len(sheet.head)}
