"""Log probability next to an accuracy: what a table shows, what a claim on accuracy is judged on; made-up items."""

import dataclasses

import numpy as np
import pytest

from repro.core.errors import UserError
from repro.metrics import likelihood
from repro.render import content
from repro.results import measure
from repro.specs import scale as scales
from repro.specs import tables
from repro.specs.claims import ClaimSpec
from repro.store import accepted, observations
from repro.store.observations import Series
from repro.verdicts import judging, table_results
from repro.workflow import versions
from repro.workflow.workflow import Workflow

pytestmark = pytest.mark.usefixtures("no_pooled_seeds")

MODEL, ITEMS = "Llama-3.2-1B", 200
SHARED = ("piqa", "arc_easy", "arc_challenge", "hellaswag-1916", "winogrande", "lambada_openai")
SETTINGS = {
    "name": "test",
    "about": "a test",
    "models": {MODEL: "pocket-3m"},
    "corpora": {"wikitext2": "tiny-wikitext", "c4": "tiny-c4-docs"},
    "calibration": {"corpus": "tiny-held-out", "sequences": 2, "length": 16},
    "seeds": 1,
    "zeroshot": {"limit": 40, "tasks": [*SHARED, "boolq"]},
    "likelihood": {"limit": 40, "tasks": [*SHARED, "blimp-100"]},
}
DAMAGE = {"FP16": 0.0, "RTN 4-bit pc": 0.3, "+SPEAR on RTN 4-bit pc": 0.1}  # nats of every item
ROWS = {"b": "RTN 4-bit pc | {task}", "s": "+SPEAR on RTN 4-bit pc | {task}"}
RISES = ClaimSpec(
    "spear C086", "it rises", "-", "spear/19", ROWS, ({"model": MODEL, "task": "PIQA"},), "s - b", "> 0",
    log_probability="> 0",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("observed")


@pytest.fixture
def flow(folder, monkeypatch):
    """Table 19 with three rows observed: ARC-E is right in 3 of 4 items, all else at chance, whatever the recipe."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(accepted, "find", lambda scale, cell: None)
    monkeypatch.setattr(accepted, "equal", lambda scale, inputs: [])
    at = Workflow(scales.load(SETTINGS), stored=False)
    for cell in at.cells("spear", "19"):
        if cell.row not in DAMAGE:
            continue
        for jobs in at.jobs(cell):
            for job in jobs.values():
                path = job.folder / observations.FILE
                if not path.is_file():
                    series = observed(job.kind, job.parsed_options()["tasks"], DAMAGE[cell.row])
                    observations.save(path, series, observations.origin(job, versions.of_job(job)))
    return at


def observed(kind, tasks, lost):
    """Items differ by 0.8 nats; a recipe costs each the same."""
    series = {}
    for task in tasks:
        right = np.arange(ITEMS) % 4 < (3 if task == "arc_easy" else 1)
        log = np.random.default_rng(len(task)).normal(-1.5, 0.8, ITEMS) - lost
        kept = {"correct": right, "choice": log, "nll": -log} if kind == "likelihood" else {"correct": right}
        for name, values in kept.items():
            series[f"{task}/{name}"] = Series(values.astype(float), "items", f"lm-eval 0: {task}")
    return series


def shown(flow):
    """The measured text of the table by row and column, and its notes."""
    sheet = content.sheet(table_results.table_results(flow, "spear", "19"))
    texts = {}
    for row in sheet.rows:
        if len(row) > 1:
            texts |= {(row[0], col): pair.here for col, pair in zip(sheet.head[1:], row[1:])}
    return texts, " ".join(sheet.notes)


def test_a_table_shows_the_change_in_nats_and_accuracy_where_it_is_above_chance(flow):
    texts, notes = shown(flow)
    assert texts["RTN 4-bit pc", "PIQA"] == "‡; -0.300 nats", "every item lost the same: no interval to show"
    assert texts["RTN 4-bit pc", "ARC-E"] == "0.750; -0.300 nats"
    assert texts["FP16", "PIQA"].startswith("‡; -1.") and texts["FP16", "PIQA"].endswith("] nats")
    assert texts["RTN 4-bit pc", "BoolQ"] == "‡", "which has none"
    assert texts["RTN 4-bit pc", "BLiMP"] == "‡; -0.300 nats"
    assert texts["GPTQ 4-bit pc", "PIQA"] == "not run" and "not run nats" not in str(texts)
    assert "full precision's: pocket-3m PIQA 0.250, ARC-C 0.250" in notes and "ARC-E 0.750" not in notes
    assert f"{content.NATS} Where none stand" in notes and "nats not run" not in str(texts) and "nats of" not in notes


def test_lambada_s_is_of_its_word_and_larger_is_better(flow):
    texts, _ = shown(flow)
    assert texts["+SPEAR on RTN 4-bit pc", "LAMBADA"].endswith("; -0.100 nats")
    cells = [c for c in flow.cells("spear", "19") if c.cell_key[:2] == ("FP16", "LAMBADA")]
    accuracy, log = (measure.measurement_of(flow, cell).value for cell in cells)
    assert log < 0 < accuracy


def test_a_mean_is_that_of_five_tasks(flow):
    cells = [c for c in flow.cells("spear", "19") if c.cell_key[:2] == ("RTN 4-bit pc", "Avg")]
    log = measure.measurement_of(flow, cells[-1])
    assert log.n == 5 * ITEMS // likelihood.NEIGHBOURS and log.unit == "nats" and "boolq" not in log.protocol


def test_a_claim_on_accuracy_is_judged_on_nats(flow):
    bare = table_results.judge(flow, dataclasses.replace(RISES, log_probability=""))
    assert bare.said == "no verdict: at chance"
    judged = table_results.judge(flow, RISES)
    (case,) = judged.cases
    assert judged.verdict == judging.ON_STAND_INS and case.measured == pytest.approx(0.2, abs=2.0**-8)
    assert case.printed == pytest.approx(0.738 - 0.692), "the paper's own numbers stay those of accuracy"
    assert judged.own_numbers == "consistent"
    assert "0.200 (of log probability, in nats)" in content.verdict_line(judged)


def test_the_predicate_in_nats_is_another_than_that_of_the_printed_numbers(flow):
    judged = table_results.judge(flow, dataclasses.replace(RISES, holds="< 0.05", log_probability="> 0.25"))
    assert (judged.own_numbers, judged.cases[0].verdict) == ("consistent", judging.FAILS)
    assert judged.verdict == "same direction, smaller", "in nats it is not compared with the printed size"


def test_a_column_without_nats_is_judged_by_its_accuracy(flow):
    on_boolq = dataclasses.replace(RISES, cases=({"model": MODEL, "task": "BoolQ"},))
    assert table_results.judge(flow, on_boolq).said == "no verdict: at chance"
    share = dataclasses.replace(on_boolq, quantity="(s - b) / (s - b)")
    assert table_results.judge(flow, share).said == "no verdict: at chance", "equal accuracies have no quotient"


def test_a_log_probability_that_cannot_be_asked_names_its_place(monkeypatch):
    monkeypatch.setattr(tables, "log_probabilities", lambda paper: {"acc_piqa": {"kind": "likelihod"}})
    with pytest.raises(UserError, match="spear/table19: acc_piqa: unknown kind of cell 'likelihod'"):
        tables.cells("spear", "19")
