"""What a target costs, by hand on a tiny profile; and how a rebuilt cell compares with a recorded one."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import tiny

from repro import models, papers, plan, record, spec, study, verify
from repro.errors import UserError
from repro.record import Measurement
from repro.verify import compare
from repro.workflow import Workflow

SPEC = spec.TableSpec(
    "t",
    {"FP16": "fp16", "RTN pc": "rtn-w4-pc", "GPTQ pc": "gptq-w4-pc"},
    {
        "Wiki": spec.Column("perplexity", "wikitext2"),
        "C4": spec.Column("perplexity", "c4"),
        "ZS": spec.Column("zeroshot"),
    },
)
CONFIG = {
    "name": "test",
    "about": "a test",
    "corpora": {"wikitext2": "pocket-sample", "c4": "pydoc-topics"},
    "calibration": {"corpus": "pocket-sample-calib", "sequences": 3, "length": 10},
    "perplexity": {"length": 100, "windows": 7, "kl_windows": 2},
}


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A saved bf16 model of known size, and spear/1 as the only table with a spec."""
    models.fingerprint.cache_clear()
    folder = tmp_path / "tiny"
    tiny.model("llama").bfloat16().save_pretrained(folder)
    monkeypatch.setattr(spec, "specified", lambda: [("spear", "1")])
    monkeypatch.setattr(
        spec, "table", lambda paper, number: SPEC if (paper, number) == ("spear", "1") else spec.TableSpec("t")
    )
    return str(folder)


def flow(model, **more):
    return Workflow(CONFIG | {"models": {"Llama-3.2-1B": model}} | more)


def size(model):
    return next(p.stat().st_size for p in models.weight_files(model) if p.suffix == ".safetensors") / 2


# --- plan -------------------------------------------------------------------------------------------------------------


def test_parameters_are_counted_where_the_files_are(model):
    counted = sum(p.numel() for p in models.load(model).parameters())
    assert counted <= plan.parameters(model) < 1.05 * counted
    wanted = {"Llama-2-70b-hf": 70e9, "Llama-2-13b-hf": 13e9, "Qwen2.5-14B": 14e9, "Llama-3.2-3B": 3.2e9}
    wanted |= {"Meta-Llama-3-8B": 8e9, "Mistral-7B-v0.1": 7e9, "Llama-3.2-1B": 1.2e9}
    for hub_id, count in wanted.items():
        assert plan.parameters(f"a/{hub_id}@0123456") == count


def test_the_cost_of_a_table_by_hand(model):
    total = plan.cost(flow(model), ["tables/spear/table1.tex"])
    assert dict(total.jobs) == {"table": 1, "compress": 2, "perplexity": 3}
    two_texts = 2
    full, low = 7 * 100 * two_texts, (7 + 2 * 2) * 100 * two_texts
    gptq = 4 * 3 * 10
    tokens = full + 2 * low + gptq
    seconds = 5 * plan.START_S + 2 * size(model) * tokens / plan.FLOPS["cpu"]
    assert total.seconds == pytest.approx(seconds) and total.downloads == {}
    assert total.disk == pytest.approx(2 * 1.1 * size(model))


def test_zero_shot_adds_its_own_jobs(model):
    one = plan.cost(flow(model), ["tables/spear/table1.tex"])
    more = plan.cost(flow(model, zeroshot={"limit": 50}), ["tables/spear/table1.tex"])
    assert more.jobs - one.jobs == {"zeroshot": 3}
    seconds = 3 * (plan.START_S + 2 * size(model) * plan.LIMIT_TOKENS / 2 / plan.FLOPS["cpu"])
    assert more.seconds - one.seconds == pytest.approx(seconds)


def test_a_run_counts_once_whatever_asks_for_it(model):
    f = flow(model)
    alone = plan.cost(f, ["tables/spear/table1.tex"])
    twice = plan.cost(f, ["tables/spear/table1.tex", "tables/spear/table1.tex", "tables/table2.tex"])
    assert twice.jobs == alone.jobs and twice.seconds == alone.seconds


def test_a_target_without_runs_costs_no_run(model):
    assert dict(plan.cost(flow(model), ["tables/spqt/table3.tex"]).jobs) == {"table": 1}
    assert plan.cost(flow(model), ["tables/audit.tex"]).seconds == 0.0
    assert plan.cost(Workflow(CONFIG | {"models": {}}), ["all"]).seconds == 0.0


def test_a_study_counts_its_parts_where_it_is_run(model):
    what = study.load("spear", "memory")
    live = flow(model, name="pocket-full")
    total = plan.cost(live, ["tables/spear/memory.tex"])
    bases = len(what.grid["bits"])
    assert dict(total.jobs) == {"compress": bases, "study": len(what.columns()) * len(what.seeds), "table": 1}
    assert total.seconds > plan.START_S * total.jobs["study"]
    assert dict(plan.cost(flow(model), ["tables/spear/memory.tex"]).jobs) == {"table": 1}, "elsewhere it is recorded"


def test_the_headline_needs_every_table_that_it_names(model):
    total = plan.cost(flow(model), ["tables/table1.tex"])
    named = {tuple(claim.table.split("/")) for claim in spec.headline().claims}
    assert total.jobs["table"] == len(named | {(paper, "1") for paper in papers.PAPERS})
    assert total.jobs["perplexity"] == 3


def test_hub_models_are_downloaded_once(model):
    hub = "meta-llama/Llama-2-7b-hf@01c7f73"
    f = flow(model, models={"Llama-2-7B": hub}, hub=True, device="cuda")
    total = plan.cost(f, ["tables/spear/table1.tex"])
    assert total.downloads == {hub: 14e9}
    text = plan.plan(f, ["tables/spear/table1.tex"])
    assert f"downloads     {hub} 14.0 GB" in text and "on one GPU" in text
    assert re.search(r"GPU-minutes   [1-9]", text)
    disk = float(re.search(r"disk +([\d.]+) GB", text)[1])
    assert disk == pytest.approx((14e9 + 2 * 1.1 * 7e9) / 1e9, abs=0.01)


def test_the_plan_in_words(model):
    text = plan.plan(flow(model), ["tables/spear/table1.tex"])
    assert text.startswith("tables/spear/table1.tex in profile test\njobs          1 table, 2 compress, 3 perplexity\n")
    assert "GPU-minutes   0\ndownloads     none\n" in text
    assert re.search(r"minutes +about 1 on one core, 0 on two", text)


def test_an_unknown_target(model):
    with pytest.raises(
        UserError, match="^unknown target 'tables/spaer/table1.tex': did you mean 'tables/spear/table1.tex'"
    ):
        plan.cost(flow(model), ["tables/spaer/table1.tex"])


# --- verify -----------------------------------------------------------------------------------------------------------

OLD = Measurement("spear", "table", "1", "RTN pc", "Wiki", "Llama-3.2-1B", "ppl", value=12.5, lo=12.0, hi=13.0,
                  status="ok", live="live", profile="test")  # fmt: skip


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, "identical"),
        ({"value": 12.5000000001}, "identical"),
        ({"value": 12.50001}, "within"),
        ({"value": 12.0}, "within"),
        ({"value": 13.0}, "within"),
        ({"value": 11.999}, "differs"),
        ({"value": 13.001}, "differs"),
        ({"value": None}, "absent"),
        ({"live": "recorded"}, "absent"),
        ({"live": "", "value": None, "status": "not_run"}, "absent"),
    ],
)
def test_compare(change, word):
    assert compare(OLD, dataclasses.replace(OLD, **change)) == word


def test_compare_without_an_interval_or_a_cell():
    bare = dataclasses.replace(OLD, lo=None, hi=None)
    assert compare(bare, bare) == "identical" and compare(OLD, None) == "absent"
    assert compare(bare, dataclasses.replace(bare, value=12.50001)) == "differs"


@pytest.fixture
def rebuilt(model, tmp_path, monkeypatch):
    """`verify` with Snakemake replaced by a writer of the given rows; returns exit code and what was asked of it."""
    monkeypatch.chdir(tmp_path)

    def run(old, new, tables=("spear/table1",), code=0):
        asked = {}

        def snakemake(words):
            given = words[words.index("--configfile") + 1]
            asked.update(words=words, profile=json.loads(Path(given).read_text())["name"])
            path = verify.FOLDER / "tables" / "spear" / "table1.csv"
            path.parent.mkdir(parents=True)
            path.write_text(record.to_csv(new))
            return type("Done", (), {"returncode": code})

        monkeypatch.setattr(verify.subprocess, "run", snakemake)
        monkeypatch.setattr(record, "accepted", lambda *args: old)
        return verify.verify(flow(model), list(tables), 2), asked

    return run


def test_verify_says_per_cell_and_counts(rebuilt, capsys):
    old = [dataclasses.replace(OLD, row=row) for row in ("a", "b", "c")]
    other = dataclasses.replace(OLD, row="d", profile="another")
    new = [old[0], dataclasses.replace(old[1], value=12.75)]
    code, asked = rebuilt([*old, other], new)
    out = capsys.readouterr().out.splitlines()
    assert code == 0 and out[0] == "identical  spear/table1 | a | Wiki | Llama-3.2-1B: recorded 12.5, now 12.5"
    assert out[1].startswith("within ") and out[1].endswith("recorded 12.5, now 12.75")
    assert out[2].startswith("absent ") and out[2].endswith("now –")
    assert out[3:] == ["3 cells: 1 identical, 1 within, 0 differs, 1 absent"]
    assert asked["profile"] == "test" and asked["words"][-2:] == ["--", "tables/spear/table1.csv"]
    assert str(verify.FOLDER) in asked["words"]


def test_verify_fails_when_a_cell_differs(rebuilt, capsys):
    code, _ = rebuilt([OLD], [dataclasses.replace(OLD, value=20.0)])
    assert code == 1 and "1 cells: 0 identical, 0 within, 1 differs, 0 absent" in capsys.readouterr().out


def test_verify_of_a_build_that_fails(rebuilt):
    assert rebuilt([OLD], [OLD], code=1)[0] == 2


def test_verify_clears_its_folder_first(rebuilt, tmp_path):
    (tmp_path / verify.FOLDER).mkdir(parents=True)
    (tmp_path / verify.FOLDER / "old").write_text("x")
    rebuilt([OLD], [OLD])
    assert not (tmp_path / verify.FOLDER / "old").exists()


def test_verify_needs_something_to_compare_with(rebuilt):
    with pytest.raises(UserError, match="^nothing is recorded for spear/table1 in profile test"):
        rebuilt([], [])
    with pytest.raises(UserError, match="^nothing is recorded for profile test"):
        rebuilt([], [], tables=())
    with pytest.raises(UserError, match="^unknown table with a spec 'spear/table99'"):
        rebuilt([OLD], [OLD], tables=["spear/table99"])
