"""Studies: what is made, how a cell and its verdict come from per-window scores, and what is refused."""

import dataclasses
import json
import math

import numpy as np
import pandas as pd
import pytest
import tiny
import yaml

from repro import corpora, models, perplexity, record, spec, study
from repro.errors import UserError
from repro.files import ROOT
from repro.jobs.compress import compress
from repro.jobs.study import study as work
from repro.jobs.tables import build_study
from repro.study import StudySpec
from repro.workflow import Workflow

CONFIG = {"base": "pocket", "name": "pocket-full", "device": "cpu", "recorded": {}, "twin": {}, "judged_on": ""}
SMALL = {
    "title": "does the gate matter",
    "base": "rtn-w{bits}-pc",
    "step": "spear-budget={budget}-seed={seed}",
    "rows": {"SPEAR": "", "gate off": "gate=false"},
    "models": ["Llama-3.2-1B"],
    "grid": {"bits": ["4"], "budget": [0.01, 0.1]},
    "seeds": [0, 1],
    "corpus": "pydoc-topics",
    "live": ["pocket-full"],
}
ORIGIN = {"device": "a GPU", "commit": "0123456789", "code": "c0de", "environment": "{}", "dtype": "float32"}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A study of two variants, two budgets and two seeds in place of the project's own, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study, "load", lambda paper, name: study.build(StudySpec, SMALL, "small"))
    monkeypatch.setattr(record, "accepted", lambda *place: [])
    monkeypatch.setattr(spec, "studies", lambda: [("spear", "memory")])
    return Workflow(CONFIG)


def write(part, nll: dict[str, np.ndarray], refused: dict[str, str] | None = None) -> None:
    """Scores of one part: per-window values by `fp16`, `base` or row label."""
    names = {"fp16": "fp16", "base": part.base.recipe.name} | part.recipes
    frames = [
        pd.DataFrame(
            {"window": range(len(v)), "first": 0, "second": 1, "targets": 7, "nll": v, "kl": None, "top1": None}
        )
        .astype({"kl": "Float64", "top1": "Float64"})
        .assign(recipe=names[key])
        for key, v in nll.items()
    ]
    meta = ORIGIN | {
        "protocol": "gptq-2048-v1",
        "label": part.corpus,
        "shares": json.dumps(dict.fromkeys(part.recipes.values(), 0.02)),
        "refused": json.dumps(refused or {}),
    }
    perplexity.save_frame(part.path, pd.concat(frames, ignore_index=True), meta, "recipe")


def windows(seed: int, shift: float = 0.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(3.0, 0.2, 40) + shift


def test_every_committed_study_reads_and_names_recipes_that_parse():
    flow = Workflow(CONFIG)
    assert ("spear", "memory") in spec.studies()
    for paper, name in spec.studies():
        what = study.load(paper, name)
        parts = study.parts(flow, paper, name)
        assert len(parts) == len(what.columns()) * len(what.models) * len(what.seeds)
        assert len({part.path for part in parts}) == len(parts)
        assert all(flow.the(part.base.id).recipe.name == part.base.recipe.name for part in parts)


def test_a_share_is_that_of_the_gap_in_perplexity(small):
    """Known answer: with constant windows every number can be written down."""
    for part in study.parts(small, "spear", "memory"):
        gain = 0.5 if part.column.endswith("0.1") else 0.25
        back = math.log(math.e**2 - gain * (math.e**2 - math.e))
        flat = {"fp16": 1.0, "base": 2.0, "SPEAR": back, "gate off": 2.0}
        write(part, {key: np.full(8, value) for key, value in flat.items()})
    cells = {(m.row, m.col, m.metric): m for m in study.measure(small, "spear", "memory")}
    assert cells["SPEAR", "bits 4, budget 0.1", "recovered"].value == pytest.approx(50)
    assert cells["SPEAR", "bits 4, budget 0.01", "recovered"].value == pytest.approx(25)
    assert cells["gate off", "bits 4, budget 0.1", "recovered"].value == pytest.approx(0, abs=1e-9)
    assert cells["gate off", "bits 4, budget 0.1", "difference"].value == pytest.approx(50)
    assert all(m.status == "ok" and m.seed == "0 1" and m.code == "c0de" for m in cells.values())


def test_a_verdict_needs_the_whole_interval_and_every_seed(small):
    for part in study.parts(small, "spear", "memory"):
        clear = part.column.endswith("0.1")
        wins = clear or part.seed == 0  # at 0.01 the seeds disagree
        full = windows(0)
        ours, theirs = (0.3, 0.5) if wins else (0.5, 0.3)
        write(part, {"fp16": full, "base": full + 1, "SPEAR": full + ours, "gate off": full + theirs})
    cells = {m.col: m for m in study.measure(small, "spear", "memory") if m.metric == "difference"}
    assert study.verdict(cells["bits 4, budget 0.1"]) == "better"
    assert study.verdict(cells["bits 4, budget 0.01"]) == "no difference seen"
    lost = dataclasses.replace(cells["bits 4, budget 0.1"], lo=-5.0, hi=-1.0, note='{"seeds": [-2, -3]}')
    assert study.verdict(lost) == "worse"
    assert study.verdict(dataclasses.replace(lost, status="unsupported")) == "–"


def test_a_refused_variant_is_a_status_and_half_a_study_is_not_a_value(small):
    first, *others = study.parts(small, "spear", "memory")
    recipe = first.recipes["gate off"]
    full = windows(1)
    for part in (first, *others):
        if part.column == first.column:
            rows = {"fp16": full, "base": full + 1, "SPEAR": full + 0.5}
            refused = {part.recipes["gate off"]: "rank 1 does not fit"}
            write(part, rows, refused)
    cells = {(m.row, m.col, m.metric): m for m in study.measure(small, "spear", "memory")}
    assert cells["SPEAR", first.column, "recovered"].status == "ok"
    for metric in ("recovered", "difference"):
        cell = cells["gate off", first.column, metric]
        assert (cell.status, cell.note, cell.value) == ("unsupported", "rank 1 does not fit", None), recipe
    assert cells["SPEAR", others[-1].column, "recovered"].status == "not_run"


def test_a_refusal_is_accepted_with_its_reason_but_never_alone(small, tmp_path, monkeypatch):
    for part in study.parts(small, "spear", "memory"):
        full = windows(3)
        write(part, {"fp16": full, "base": full + 1, "SPEAR": full + 0.4}, {part.recipes["gate off"]: "no rank fits"})
    build_study(small, "spear", "memory", tmp_path / "tables")
    path, results = tmp_path / "tables" / "spear" / "memory.csv", tmp_path / "results"
    assert list(record.accept(path, results).values()) == [6]
    stored = record.from_csv(next(results.glob("*/spear-study-memory.csv")))
    monkeypatch.setattr(record, "accepted", lambda *place: stored)
    again = study.measure(Workflow({"base": "pocket", "name": "pocket"}), "spear", "memory")
    assert {(m.status, m.note) for m in again if m.row == "gate off"} == {("unsupported", "no rank fits")}
    path.write_text(record.to_csv([m for m in stored if m.status == "unsupported"]))
    with pytest.raises(UserError, match="no measured row"):
        record.accept(path, results)


def test_drawn_accepted_and_drawn_again_from_what_was_accepted(small, tmp_path, monkeypatch):
    for part in study.parts(small, "spear", "memory"):
        full = windows(2)
        write(part, {"fp16": full, "base": full + 1, "SPEAR": full + 0.4, "gate off": full + 0.6 + 0.01 * part.seed})
    sheet = build_study(small, "spear", "memory", tmp_path / "tables")
    assert any("2 better" in remark for remark in sheet.notes)
    assert (tmp_path / "figures" / "spear" / "memory.svg").is_file()
    results = tmp_path / "results"
    written = record.accept(tmp_path / "tables" / "spear" / "memory.csv", results)
    assert list(written.values()) == [6]
    monkeypatch.setattr(
        record, "accepted", lambda *place: record.from_csv(next(results.glob("*/spear-study-memory.csv")))
    )
    elsewhere = Workflow({"base": "pocket", "name": "pocket"})
    again = study.measure(elsewhere, "spear", "memory")
    assert [m.value for m in again] == pytest.approx(
        [m.value for m in study.measure(small, "spear", "memory")], rel=1e-6
    )
    assert {m.live for m in again} == {"recorded"} and {m.status for m in again} == {"stale"}, "its code is made up"
    odd = dataclasses.replace(again[0], row="gate on", live="live", status="ok")
    (tmp_path / "odd.csv").write_text(record.to_csv([odd]))
    with pytest.raises(UserError, match="gate on"):
        record.accept(tmp_path / "odd.csv", results)


def test_bad_specs():
    with pytest.raises(UserError, match="memry"):
        study.load("spear", "memry")
    text = yaml.safe_load((ROOT / "tables" / "spear" / "memory.yaml").read_text())
    odd = study.build(StudySpec, text | {"step": "spear-budget={bytes}"}, "odd")
    with pytest.raises(KeyError):
        odd.recipe("SPEAR", next(iter(odd.columns().values())), 0)


def test_a_job_scores_what_the_recipes_themselves_give(tmp_path, monkeypatch):
    """One process with a copied model gives the scores of a run from nothing; a variant that does not fit is noted."""
    monkeypatch.chdir(tmp_path)
    tiny.model("llama").save_pretrained("net")
    ids = tiny.tokens(1, 400)[0].numpy()
    monkeypatch.setattr(corpora, "load_tokens", lambda path: (ids, {"corpus": "random", "label": "random"}))
    monkeypatch.setattr(models, "fingerprint", lambda name: "tiny")
    compress("./net", "rtn-w3-pc", tmp_path / "base.safetensors")
    words = "spear-samples=8-tokens=16-cka_samples=4-batch=4-rank=2"
    recipes = [f"rtn-w3-pc + {words}", f"rtn-w3-pc + {words}-gate=false", "rtn-w3-pc + spear-samples=8-budget=0"]
    work("./net", tmp_path / "base.safetensors", recipes, tmp_path / "ids", tmp_path / "out.parquet", length=32)
    frame = perplexity.load_frame(tmp_path / "out.parquet", "recipe")
    assert json.loads(frame.attrs["refused"]).keys() == {recipes[2]}
    assert list(dict.fromkeys(frame["recipe"])) == ["fp16", "rtn-w3-pc", *recipes[:2]]
    for start in (None, tmp_path / "base.safetensors"):
        compress("./net", recipes[0], tmp_path / "whole.safetensors", start)
        from repro.jobs.compress import load

        alone = load("./net", tmp_path / "whole.safetensors", "cpu", "float32", False)
        cut = perplexity.windows(ids, 32)
        got = frame.loc[frame["recipe"] == recipes[0], "nll"].to_numpy()
        assert np.array_equal(got, perplexity.score(alone.model, cut)["nll"].to_numpy())
    share = json.loads(frame.attrs["shares"])[recipes[0]]
    assert share == pytest.approx(alone.extra_bits["spear"] / 4 / sum(w.codes.numel() for w in alone.weights.values()))
    with pytest.raises(UserError, match="goes on from 'gptq-w3-pc'"):
        compress("./net", f"gptq-w3-pc + {words}", tmp_path / "x.safetensors", tmp_path / "base.safetensors")
