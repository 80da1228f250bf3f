"""How a rebuilt cell compares with a stored one, and which cells are rebuilt."""

import dataclasses
import os
import shutil
from itertools import chain
from pathlib import Path

import pytest
import tiny

from repro.core.errors import UserError
from repro.results import measure, stored_rows, verify
from repro.results.verify import compare
from repro.specs import scale
from repro.store import accepted
from repro.store import job as jobs
from repro.store.measurement import Measurement, inputs_hash
from repro.workflow import runner
from repro.workflow.workflow import Workflow

pytestmark = pytest.mark.usefixtures("no_pooled_seeds")

POCKET = scale.load(name="pocket")


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
def test_a_rebuilt_value_is_identical_within_or_differs(change, word):
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

        def rebuild(jobs, folder, *rest):
            seen.update(jobs=jobs, folder=folder)
            return left

        by_row = {row.row: row for row in new}
        monkeypatch.setattr(verify.pool, "rebuild", rebuild)
        monkeypatch.setattr(accepted, "every", lambda: old)
        blank = dataclasses.replace(OLD, value=None, status="not_run")
        monkeypatch.setattr(measure, "fresh", lambda flow, cell: by_row.get(cell.row, blank))
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
    assert code == 0
    assert out == [
        f"identical  spear/table1 | RTN pc | {where} 12.5",
        f"within     spear/table1 | RTN g128 | {where} 12.75",
        f"absent     spear/table1 | FP16 | {where} not_run",
        f"absent     spear/table1 | no such row | {where} –",
        "4 cells: 1 identical, 1 within, 0 differs, 2 absent",
    ]
    needed = chain.from_iterable(stored_rows.jobs(small, cell) for cell in bits.values())
    wanted = {job.id for job in needed}
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
    return rows


def test_a_sample_is_drawn_by_its_seed(small, stored):
    def labels(seed, cells=3):
        return [row.row for row in verify.sampled(small, stored, verify.Sample(cells, seed))]

    assert labels(1) == labels(1) and len(set(labels(1))) == 3 and labels(1) == labels(1, 5)[:3]
    assert len({tuple(labels(seed)) for seed in range(8)}) > 4
    assert sorted(labels(0, 1000)) == sorted(row.row for row in stored), "all, where fewer are stored"
    assert [row.row for row in verify.sampled(small, stored[::-1], verify.Sample(3, 1))] == labels(1)


def test_a_sample_has_what_this_machine_can_compare(small, stored, monkeypatch):
    other = dataclasses.replace(stored[0], inputs="01234567", observations="f" * 16)
    bare = dataclasses.replace(stored[0], observations="")
    same = dataclasses.replace(stored[0], number="2")  # the same series in another table
    for rows in ([other], [bare]):
        with pytest.raises(UserError, match="of 1 stored cells none can be rebuilt and compared on this machine$"):
            verify.sampled(small, rows, verify.Sample(1))
    assert len(verify.sampled(small, [stored[0], same, other, bare], verify.Sample(4))) == 1
    monkeypatch.setattr(verify.data, "lacking", lambda jobs: "zeroshot/raw/mmlu.tar.xz")
    with pytest.raises(UserError, match="none can be rebuilt"):
        verify.sampled(small, stored, verify.Sample(1))


def test_a_sample_is_what_is_rebuilt_in_its_minutes(small, stored, monkeypatch, capsys):
    """The lightest cells first; one that was not begun is left out, one that failed is not forgotten."""
    sample = verify.Sample(3, 0, 5)
    rows = verify.sampled(small, stored, sample)
    by_cell = [jobs.distinct(stored_rows.jobs(small, measure.cell_if_specified(small, row))) for row in rows]
    by_cell.sort(key=lambda made: sum(map(verify.pool.weight, made)))
    done, failed = {job.id for job in by_cell[0]}, by_cell[2][-1]
    begun, options = list(by_cell[0]), {}

    def rebuild(wanted, folder, minutes, turns):
        turns_of_cells = [max(turns[job.id] for job in needed) for needed in by_cell]
        options.update(minutes=minutes, turns=turns_of_cells)
        with jobs.built_under(folder):
            for job in begun:
                job.folder.mkdir(parents=True, exist_ok=True)
        return len(wanted) - len(done)

    monkeypatch.setattr(runner, "done", lambda job: job.id in done)
    monkeypatch.setattr(accepted, "every", lambda: stored)
    monkeypatch.setattr(accepted, "series", lambda row: [])
    monkeypatch.setattr(verify.pool, "rebuild", rebuild)
    assert verify.verify(small, [], sample) == 0
    out = capsys.readouterr().out
    assert "1 of 3 cells were rebuilt in 5 minutes" in out and "1 cells: " in out
    assert options == {"minutes": 5, "turns": [0, 1, 2]}
    begun.append(failed)
    assert verify.verify(small, [], sample) == 2, "a job that was begun is not done"


def test_only_the_sample_is_rebuilt(small, stored, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(accepted, "every", lambda: stored)
    monkeypatch.setattr(accepted, "series", lambda row: [])
    monkeypatch.setattr(verify.pool, "rebuild", lambda jobs, *rest: seen.extend(jobs) or 0)
    assert verify.verify(small, [], verify.Sample(2, 3)) == 0
    wanted = [measure.cell_if_specified(small, row) for row in verify.sampled(small, stored, verify.Sample(2, 3))]
    needed = chain.from_iterable(stored_rows.jobs(small, cell) for cell in wanted)
    names = {job.id for job in needed}
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
    with pytest.raises(UserError, match="^unknown table with a spec 'spear/table25'; did you mean"):
        rebuilt([OLD], [], names=("spear/table25",))
    with pytest.raises(UserError, match="^verify: the stored cells of scale pocket are in no spec any more"):
        rebuilt([dataclasses.replace(OLD, row="no such row")], [], names=())
