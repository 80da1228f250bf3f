"""What a target costs, by hand on recorded runs; and how a rebuilt cell compares with a recorded one."""

import csv
import dataclasses
import json
import os
import shutil
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny

from repro import __main__ as command
from repro.core.errors import UserError
from repro.make import plan
from repro.recipes.recipe import STEPS
from repro.results import measure, replicate, stored_rows, verify
from repro.results.verify import compare
from repro.specs import scale
from repro.store import accepted
from repro.store import job as jobs
from repro.store.measurement import Measurement, inputs_hash
from repro.workflow import job_times as estimates
from repro.workflow import runner
from repro.workflow.job_times import START_S, JobTime, estimate
from repro.workflow.workflow import Workflow

pytestmark = pytest.mark.usefixtures("no_pooled_seeds")

POCKET = scale.load(name="pocket")
START = START_S  # a job that takes no longer is not scaled


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def small(here):
    """A flow whose 1B column is a tiny model without a tokenizer: enough for cells that only count bits."""
    tiny.model("llama").bfloat16().save_pretrained(here / "tiny")
    return Workflow(dataclasses.replace(POCKET, models={"Llama-3.2-1B": "tiny"}), stored=False)


# --- plan: seconds of a job -------------------------------------------------------------------------------------------


def job(kind="compress", recipe="rtn-w4-pc", steps=("rtn",), model="pocket-3m", device="cpu", **options):
    given = {"model": model, "recipe": recipe, "device": device, **options}
    return jobs.make(kind, model, {"x": recipe + model}, given, steps=steps)


def run(seconds, kind="compress", steps="rtn", recipe="rtn-w4-pc", model="pocket-3m", tokens=0, device="cpu"):
    return JobTime(kind, steps, recipe, estimates.parameters(model), tokens, device, seconds)


def test_parameters_are_those_of_the_files_or_of_the_name(small):
    assert 1.0 <= estimates.parameters("tiny") / sum(p.numel() for p in tiny.model("llama").parameters()) < 1.05
    names = {"Llama-2-70b-hf": 70e9, "Llama-2-13b-hf": 13e9, "Qwen2.5-14B": 14e9, "Llama-3.2-3B": 3.21e9,
             "Meta-Llama-3-8B": 8.03e9, "Mistral-7B-v0.1": 6.9e9, "Llama-3.2-1B": 1.24e9}  # fmt: skip
    assert {name: estimates.parameters(f"some/{name}@abcdef0") for name in names} == names


def test_the_closest_runs_decide_by_their_median():
    far = [run(999, recipe="rtn-w3-pc"), run(999, steps="gptq", recipe="gptq-w4-pc"), run(999, kind="tokens")]
    exact = [run(START + s) for s in (1, 2, 9)]
    assert estimate(job(), [*far, *exact]) == (pytest.approx(START + 2), False)
    assert estimate(job(), [*far, run(START + 5, model="pocket-10m")])[0] == pytest.approx(
        START + 5 * estimates.parameters("pocket-3m") / estimates.parameters("pocket-10m")
    )
    assert estimate(job(), [run(START + 3, recipe="rtn-w3-pc")]) == (pytest.approx(START + 3), False)
    assert estimate(job(), [run(START, model="pocket-10m")]) == (START, False), "a start is not scaled"


def test_seconds_grow_with_tokens():
    known = [run(START + 2, tokens=32 * 512)]
    more = job(calibration={"sequences": 128, "length": 2048})
    assert estimate(more, known)[0] == pytest.approx(START + 2 * 16)
    scored = job("perplexity", length=2048, windows=8, texts=["a", "b"])
    assert estimates.job_time(scored).tokens == 2 * 8 * 2048
    whole = job("perplexity", length=2048, windows=None, texts=["a"])
    assert estimates.job_time(whole).tokens == estimates.WINDOWS * 2048
    assert estimates.job_time(job("zeroshot", tasks=["a", "b"], limit=100)).tokens == 200 * estimates.ITEM_TOKENS


def test_other_steps_and_other_devices_are_guesses():
    costly = estimate(job(recipe="rtn-w4-pc + spear", steps=("rtn", "spear")), [run(START + 1)])
    assert costly == (pytest.approx(START + (2 + STEPS["spear"].COST) / 2), True)
    assert estimate(job(device="cuda"), [run(START + 100)]) == (
        pytest.approx(START + 100 / estimates.SPEED["cuda"]),
        True,
    )
    assert estimate(job(device="cuda"), [run(START + 100), run(START + 7, device="cuda")])[1] is False
    assert estimate(job(), []) == estimate(job(), [run(99, kind="tokens")]) == (START, True)


def test_tokenizing_does_not_grow_with_the_model():
    given = {"corpus": "a", "model": "some/Big-70b@abcdef0", "device": "cpu"}
    text = jobs.make("tokens", "a", {}, given)
    assert estimate(text, [JobTime("tokens", "", "", 0, 0, "cpu", START + 3)]) == (pytest.approx(START + 3), False)


def test_recorded_runs_are_read_from_a_build_and_the_committed_file(here):
    one = job(calibration={"sequences": 2, "length": 8})
    one.folder.mkdir(parents=True)
    (one.folder / "job.json").write_text(json.dumps(one.to_json()))
    for each in (one.id, "compress/gone/rtn.00000000"):  # the second one's folder was deleted
        path = Path("build/benchmarks", f"{each}.tsv")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("s\th:m:s\tmax_rss\n12.5\t0:00:12\t88\n")
    known = here / "known.csv"
    known.write_text("kind,steps,recipe,parameters,tokens,device,seconds\nperplexity,,fp16,7,8,cuda,9.5\n")
    assert estimates.measured_times(known=known) == [
        run(12.5, tokens=16),
        JobTime("perplexity", "", "fp16", 7, 8, "cuda", 9.5),
    ]


def test_the_committed_runs_are_of_jobs_that_there_are(here):
    runs = estimates.measured_times()
    assert runs and all(r.kind in runner.JOBS and set(r.steps.split()) <= set(STEPS) for r in runs)
    assert all(r.device in estimates.SPEED and 0 < r.seconds < 3600 for r in runs)


def test_nothing_of_table_1_at_the_default_scale_is_a_guess():
    result = replicate.jobs(Workflow(POCKET), "spear/table1")
    runs = estimates.measured_times()
    assert len(result) > 20 and not [one.id for one in result if estimate(one, runs)[1]]


def test_times_of_public_shapes_which_have_no_model_are_planned(monkeypatch):
    flow = Workflow(POCKET)
    result = jobs.distinct(
        chain.from_iterable(stored_rows.jobs(flow.brief, cell) for cell in flow.cells("bitbybit", "decode"))
    )
    assert {one.kind for one in result} == {"shape_decode"} and not any("model" in one.given() for one in result)
    assert all(replicate.expected_seconds(one) > 0 for one in result)
    monkeypatch.setattr(plan, "to_do", lambda *given: (result, 1))
    assert "5 shape_decode" in plan.plan(flow, ["tables/bitbybit/decode.tex"], [])


# --- plan: what there is to do ----------------------------------------------------------------------------------------


@pytest.fixture
def dry(monkeypatch):
    """`to_do` with Snakemake replaced: it says the given text, and what it was asked is kept."""
    asked = {}

    def replace(text, code=0):
        def snakemake(words, **how):
            asked.update(words=words, scale=json.loads(Path(words[words.index("--configfile") + 1]).read_text()))
            return SimpleNamespace(returncode=code, stdout=text)

        monkeypatch.setattr(plan.subprocess, "run", snakemake)
        return asked

    return replace


def dry_run(*lines):
    return "Building DAG of jobs...\n" + "".join(f"rule x:\n    jobid: 1\n    wildcards: {line}\n" for line in lines)


def test_the_jobs_are_those_of_the_dry_run(dry):
    flow = Workflow(dataclasses.replace(POCKET, threads=2), stored=False)
    every = replicate.jobs(Workflow(flow.scale), "spear/table1")
    kinds = {one.kind: one for one in every}
    said = [f"kind={kind}, job={one.id.partition('/')[2]}" for kind, one in kinds.items()]
    asked = dry(dry_run(*said, "table=spear/table1", "figure=spear/figure13"))
    result, written = plan.to_do(flow, ["tables/spear/table1.tex"], [])
    assert {one.id for one in result} == {one.id for one in kinds.values()} and written == 2
    words = asked["words"]
    assert words[-2:] == ["--", "tables/spear/table1.tex"] and "-n" in words
    assert words[words.index("--configfile") + 1].endswith("/pocket.yaml") and asked["scale"]["threads"] == 2


def test_what_snakemake_refuses_is_one_sentence(dry):
    flow = Workflow(POCKET, stored=False)
    dry("x\nerror: unknown corpus 'a'\nmore\n", code=1)
    with pytest.raises(UserError, match="^unknown corpus 'a'$"):
        plan.to_do(flow, ["tables/spear/table1.tex"], [])
    dry("Some\nException:\nof Snakemake\n", code=1)
    with pytest.raises(UserError, match="^Snakemake's dry run failed: Some Exception: of Snakemake$"):
        plan.to_do(flow, ["tables/spear/table1.tex"], [])


def test_a_real_dry_run_wants_every_job(here):
    result, written = plan.to_do(Workflow(POCKET), ["tables/spear/table15.tex"], [])
    wanted = replicate.jobs(Workflow(POCKET), "spear/table15")
    assert {one.id for one in result} == {one.id for one in wanted} and written == 1


def test_a_plan_for_a_device_that_is_not_here(here, dry, monkeypatch):
    monkeypatch.setattr(plan, "has_cuda", lambda: False)
    asked = dry("", code=1)
    gpu = scale.load(name="gpu")
    flow = Workflow(dataclasses.replace(gpu, models={"Llama-3.2-1B": "hub"}), stored=False)
    cells = [cell for cell in flow.table_cells("spear/table1") if cell.row in ("FP16", "RTN pc")]
    text = plan.plan(flow, ["tables/spear/table1.tex"], cells)
    assert not asked, "Snakemake would plan recorded cells here"
    lines = dict(zip(("title", "jobs", "minutes", "gpu", "downloads", "disk", "guesses"), text.splitlines()))
    assert lines["title"] == "tables/spear/table1.tex at scale gpu"
    assert lines["jobs"] == "jobs          3 tokens, 4 perplexity, 2 compress, 1 table/figure"
    assert lines["minutes"].endswith(" with 1 side by side") and float(lines["gpu"].split()[1]) >= 1
    assert lines["downloads"].endswith("/Llama-3.2-1B@4e20de362430cd3b72f300e6b0f18e50e7166e08 2.5 GB")
    assert lines["disk"] == "disk          3.72 GB", "the model, and one of its compressed copies"
    assert "perplexity rtn" in lines["guesses"]
    done = flow.every_job(cells)[0]
    monkeypatch.setattr(runner, "done", lambda job: job.id == done.id)
    assert "jobs          2 tokens," in plan.plan(flow, ["tables/spear/table1.tex"], cells)


def test_a_plan_in_words(here, dry, monkeypatch):
    flow = Workflow(POCKET, stored=False)
    cells = flow.table_cells("spear/table1")
    one = next(each for each in flow.every_job(cells) if each.kind == "perplexity" and each.steps == ("gptq",))
    monkeypatch.setattr(plan, "measured_times", lambda: [dataclasses.replace(estimates.job_time(one), seconds=600.0)])
    monkeypatch.setattr(
        plan, "SnakemakeAdapter", lambda config: SimpleNamespace(jobs_behind=lambda targets: {one.id: one})
    )
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    dry(dry_run(*[f"kind=perplexity, job={one.id.partition('/')[2]}"], "table=spear/table1"))
    assert plan.plan(flow, ["tables/spear/table1.tex"], cells) == (
        "tables/spear/table1.tex at scale pocket\n"
        "jobs          1 perplexity, 1 table/figure\n"
        "minutes       about 10 one by one, 10 with 4 side by side\n"
        "GPU-minutes   0\n"
        "downloads     none\n"
        "disk          0.00 GB\n"
        "guesses       none, such jobs were timed before"
    )
    dry("Nothing to be done (all requested files are present and up to date).\n")
    assert "jobs          none, everything is built\n" in plan.plan(flow, ["tables/spear/table1.tex"], cells)


def test_the_verb_takes_the_names_that_a_user_types(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(plan, "plan", lambda flow, files, cells: asked.append((files, len(cells))) or "a plan")
    for words in (["spear/1", "tables/spear/memory.tex", "table1.tex"], ["spear/figure13"], ["all"]):
        command.run("plan", words)
    assert capsys.readouterr().out == "a plan\n" * 3
    files = ["tables/spear/table1.tex", "tables/spear/memory.tex", "tables/table1.tex"]
    assert [files for files, _ in asked] == [files, ["figures/spear/figure13.svg"], ["all"]]
    assert asked[1][1] == 2 and asked[2][1] > 3500
    with pytest.raises(UserError, match="unknown table 'spaer/table1'; did you mean 'spear/table1'"):
        command.run("plan", ["tables/spaer/table1.tex"])


# --- verify -----------------------------------------------------------------------------------------------------------

OLD = Measurement("spear", "table", "1", "RTN pc", "BPW", "Llama-3.2-1B", "BPW", value=12.5, lo=12.0, hi=13.0,
                  status="ok", scale="pocket", device="a GPU")  # fmt: skip
NEW = dataclasses.replace(OLD, source="fresh")


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
        ({"value": None, "status": "diverged"}, "differs"),
        ({"source": "stored"}, "absent"),
        ({"source": "", "value": None, "status": "not_run"}, "absent"),
    ],
)
def test_compare(change, word):
    assert compare(OLD, dataclasses.replace(NEW, **change)) == word


def test_compare_without_an_interval_a_value_or_a_cell():
    bare, refused = (dataclasses.replace(NEW, lo=None, hi=None), dataclasses.replace(NEW, value=None, status="oom"))
    assert compare(bare, bare) == "identical" and compare(OLD, None) == "absent"
    assert compare(bare, dataclasses.replace(bare, value=12.50001)) == "differs"
    assert compare(refused, refused) == "identical" and compare(refused, NEW) == "differs"
    assert compare(refused, dataclasses.replace(refused, status="diverged")) == "differs"


@pytest.fixture
def bits(small):
    """The cells of Table 1 that count bits of RTN models."""
    cells = {cell.row: cell for cell in small.cells("spear", "1") if cell.col == "BPW" and cell.stand_in}
    return {row: cells[row] for row in ("RTN pc", "RTN g128", "FP16")}


@pytest.fixture
def rebuilt(small, bits, monkeypatch):
    """`verify` with rows recorded, and rows (by label) that its jobs are said to give; code, jobs and folder seen."""

    def go(old, new, names=("spear/table1",), left=0):
        seen = {}

        def rebuild(jobs, folder):
            seen.update(jobs=jobs, folder=folder)
            return left

        given = {row.row: row for row in new}
        monkeypatch.setattr(verify.pool, "rebuild", rebuild)
        monkeypatch.setattr(accepted, "every", lambda: old)
        blank = dataclasses.replace(OLD, value=None, status="not_run")
        monkeypatch.setattr(measure, "fresh", lambda flow, cell: given.get(cell.row, blank))
        return verify.verify(small, list(names)), seen

    return go


def at(flow, cell, **changes):
    return dataclasses.replace(OLD, row=cell.row, inputs=inputs_hash(flow.inputs(cell)), **changes)


def test_verify_says_per_cell_and_counts(rebuilt, small, bits, capsys):
    old = [at(small, cell) for cell in bits.values()]
    elsewhere = dataclasses.replace(old[0], scale="gpu", value=99.0)
    gone = dataclasses.replace(old[0], row="no such row")
    new = [dataclasses.replace(NEW, row="RTN pc"), dataclasses.replace(NEW, row="RTN g128", value=12.75)]
    code, seen = rebuilt([*old, elsewhere, gone], new)
    out = capsys.readouterr().out.splitlines()
    where = "BPW | Llama-3.2-1B | BPW: stored 12.5, now"
    assert code == 0 and out == [
        f"identical  spear/table1 | RTN pc | {where} 12.5",
        f"within     spear/table1 | RTN g128 | {where} 12.75",
        f"absent     spear/table1 | FP16 | {where} not_run",
        f"absent     spear/table1 | no such row | {where} –",
        "4 cells: 1 identical, 1 within, 0 differs, 2 absent",
    ]
    wanted = {job.id for job in chain.from_iterable(stored_rows.jobs(small, cell) for cell in bits.values())}
    assert {job.id for job in seen["jobs"]} == wanted, "nothing but what is recorded is rebuilt"
    assert seen["folder"] == verify.FOLDER and jobs.BUILD == Path("build")


def test_verify_fails_when_a_cell_differs_or_a_job_fails(rebuilt, small, bits, capsys):
    old = [at(small, bits["RTN pc"])]
    assert rebuilt(old, [dataclasses.replace(NEW, value=20.0)], left=1)[0] == 1
    assert "1 cells: 0 identical, 0 within, 1 differs, 0 absent" in capsys.readouterr().out
    assert rebuilt(old, [NEW], left=1)[0] == 2
    assert rebuilt(old, [NEW], names=())[0] == 0


def test_verify_says_when_declared_inputs_have_changed(rebuilt, small, bits, capsys):
    rebuilt([at(small, bits["RTN pc"])], [NEW])
    assert "changed" not in capsys.readouterr().out
    rebuilt([dataclasses.replace(OLD, inputs="01234567")], [NEW])
    assert "stored 12.5, now 12.5; its declared inputs have changed\n" in capsys.readouterr().out


def test_verify_needs_the_device_of_the_cells(rebuilt, small, bits, monkeypatch):
    monkeypatch.setattr(verify, "has_cuda", lambda: False)
    awq = next(c for c in small.cells("spear", "1") if (c.row, c.col, c.stand_in) == ("AWQ pc", "BPW", "tiny"))
    small.scale = small.scale.on("cuda")
    with pytest.raises(UserError, match="^verify: the stored cells of scale pocket need a CUDA device, and this"):
        rebuilt([at(small, awq)], [])


def test_verify_says_what_is_not_here(rebuilt, small, bits, monkeypatch):
    monkeypatch.setattr(Workflow, "lacking", lambda self, cell: "no prompts here")
    with pytest.raises(
        UserError, match="^verify: the stored cells of scale pocket cannot be rebuilt: no prompts here$"
    ):
        rebuilt([at(small, bits["RTN pc"])], [])


def test_verify_rebuilds_from_nothing(small, bits, here, monkeypatch, capsys):
    """For real: a first build's value is recorded; results that lie there are not taken; another value differs."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    cell = bits["RTN pc"]
    (one,) = jobs.distinct(stored_rows.jobs(small, cell))
    verify.pool.run_all([one])
    first = measure.fresh(small, cell)
    assert first.status == "ok" and first.value > 4
    series = [dict(seed) for seed in small.quantity(cell).seeds]
    monkeypatch.setattr(accepted, "every", lambda: [dataclasses.replace(first, source="")])
    monkeypatch.setattr(accepted, "series", lambda row: series)
    there = shutil.copytree(one.folder, verify.FOLDER / one.id)
    (there / "old").write_text("from an earlier verify")
    assert verify.verify(small, ["spear/1"]) == 0
    assert {path.name for path in there.iterdir()} >= {"job.json"} and not (there / "old").exists()
    out = capsys.readouterr().out
    assert "identical  spear/table1 | RTN pc | BPW" in out and "now 4." in out and " units to the last bit\n" in out
    series[0]["bits/bpw"] = dataclasses.replace(series[0]["bits/bpw"], values=series[0]["bits/bpw"].values + 1e-9)
    assert verify.verify(small, []) == 1, "stored bits are exact, whatever their digits show"
    assert "mean difference" in capsys.readouterr().out
    monkeypatch.setattr(accepted, "series", lambda row: [])
    monkeypatch.setattr(accepted, "every", lambda: [dataclasses.replace(first, source="", value=first.value + 1)])
    assert verify.verify(small, []) == 1


@pytest.fixture
def stored(small, monkeypatch):
    """A stored row of every cell of Table 1 that counts bits; all have observations of their own."""
    cells = [cell for cell in small.cells("spear", "1") if cell.col == "BPW" and cell.stand_in]
    rows = [at(small, cell, observations=f"{i:016x}") for i, cell in enumerate(cells)]
    monkeypatch.setattr(estimates, "measured_times", lambda: [])
    monkeypatch.setattr(estimates, "estimate", lambda job, runs: (60.0, False))
    return rows


def test_a_sample_is_drawn_by_its_seed(small, stored):
    def labels(seed, cells=3):
        return [row.row for row in verify.drawn(small, stored, verify.Sample(cells, seed))]

    assert labels(1) == labels(1) and len(set(labels(1))) == 3 and labels(1) == labels(1, 5)[:3]
    assert len({tuple(labels(seed)) for seed in range(8)}) > 4
    assert sorted(labels(0, 1000)) == sorted(row.row for row in stored), "all, where fewer are stored"
    assert [row.row for row in verify.drawn(small, stored[::-1], verify.Sample(3, 1))] == labels(1)


def test_a_sample_has_what_this_machine_can_compare(small, stored, monkeypatch):
    other = dataclasses.replace(stored[0], inputs="01234567", observations="f" * 16)
    bare = dataclasses.replace(stored[0], observations="")
    same = dataclasses.replace(stored[0], number="2")  # the same series in another table
    for rows in ([other], [bare]):
        with pytest.raises(UserError, match="of 1 stored cells none can be rebuilt and compared on this machine$"):
            verify.drawn(small, rows, verify.Sample(1))
    assert len(verify.drawn(small, [stored[0], same, other, bare], verify.Sample(4))) == 1
    monkeypatch.setattr(verify.data, "lacking", lambda jobs: "zeroshot/raw/mmlu.tar.xz")
    with pytest.raises(UserError, match="none can be rebuilt"):
        verify.drawn(small, stored, verify.Sample(1))


def test_a_sample_fits_into_its_minutes(small, stored):
    """Every job takes a minute here, and a job that several cells need is counted once."""
    for minutes in (1, 3, 7):
        rows = verify.drawn(small, stored, verify.Sample(100, 0, minutes))
        cells = [measure.asked(small, row) for row in rows]
        needed = jobs.distinct(chain.from_iterable(stored_rows.jobs(small, cell) for cell in cells))
        assert 1 <= len(needed) <= minutes and len(rows) >= 1
    with pytest.raises(UserError, match="on this machine within 0.5 minutes"):
        verify.drawn(small, stored, verify.Sample(1, 0, 0.5))


def test_only_the_sample_is_rebuilt(small, stored, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(accepted, "every", lambda: stored)
    monkeypatch.setattr(accepted, "series", lambda row: [])
    monkeypatch.setattr(verify.pool, "rebuild", lambda jobs, folder: seen.extend(jobs) or 0)
    assert verify.verify(small, [], verify.Sample(2, 3)) == 0
    wanted = [measure.asked(small, row) for row in verify.drawn(small, stored, verify.Sample(2, 3))]
    names = {job.id for job in chain.from_iterable(stored_rows.jobs(small, cell) for cell in wanted)}
    assert names <= {job.id for job in seen} and "2 cells: " in capsys.readouterr().out


def test_verify_needs_something_to_compare_with(rebuilt, small):
    with pytest.raises(UserError, match="^nothing is stored for spear/table1 at scale pocket; build it and accept"):
        rebuilt([], [])
    with pytest.raises(UserError, match="^nothing is stored at scale pocket; build a table"):
        rebuilt([], [], names=())
    with pytest.raises(UserError, match="^nothing is stored for spear/figure13 at scale pocket"):
        rebuilt([OLD], [], names=("spear/figure13",))
    with pytest.raises(UserError, match="^unknown table 'spear/table99'"):
        rebuilt([OLD], [], names=("spear/table99",))
    with pytest.raises(UserError, match="^unknown table with a spec 'spear/table3'; did you mean"):
        rebuilt([OLD], [], names=("spear/table3",))
    with pytest.raises(UserError, match="^verify: the stored cells of scale pocket are in no spec any more"):
        rebuilt([dataclasses.replace(OLD, row="no such row")], [], names=())


def test_the_committed_file_reads_as_csv():
    lines = list(csv.reader(estimates.KNOWN.read_text().splitlines()))
    assert lines[0] == [field.name for field in dataclasses.fields(JobTime)] and {len(line) for line in lines} == {7}
