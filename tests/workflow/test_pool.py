"""`python -m repro run`: the results of Snakemake's build without Snakemake; what fails, resumes and is refused."""

import io
import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import dag
import disk_errors
import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from tqdm import tqdm

from repro.__main__ import main
from repro.core import machine
from repro.core.errors import Crowded, NotMeasurable, UserError
from repro.core.files import ROOT
from repro.store import observations
from repro.store.job import distinct, from_json, make
from repro.store.observations import Series
from repro.workflow import pool, runner, versions

RUN = ("run", "spear/table1", "spear/figure13", "--side-by-side", 2)


# --- the tiny model ---------------------------------------------------------------------------------------------------


def test_the_same_bytes_as_snakemake_and_nothing_left_for_it_but_drawing(built, tmp_path):
    folder = dag.folder(tmp_path / "work")
    done = dag.quick(dag.repro(*RUN), folder, built.twin)
    assert done.code == 0 and "FAILED" not in done.text, done.text
    assert dag.observed(folder) == built.observed
    again = dag.quick(dag.repro(*RUN), folder, built.twin)
    assert again.code == 0 and again.text == "", again.text
    assert dag.dry_run(folder, built.twin, dag.TARGET, dag.PLOT) == {
        f"table {dag.TARGET}", f"figure {dag.PLOT}"
    }, "Snakemake takes what lies there"  # fmt: skip
    for name in ("spear/table1", "spear/figure13"):
        assert dag.quick(dag.repro("table", name), folder, built.twin).code == 0
    assert dag.outputs(folder) == built.tables


def test_what_cannot_be_done_is_a_status_with_its_reason(built):
    frame = pd.read_csv(io.BytesIO(built.tables[dag.TARGET]), dtype=str, keep_default_na=False)
    rows = frame[(frame["row"] == "+SPEAR pc on RTN") & (frame["source"] == "fresh")]
    assert set(rows["status"]) == {"unsupported"} and set(rows["value"]) == {""}
    assert {"Wiki", "C4", "KL", "BPW"} == set(rows["col"])
    (reason,) = set(rows["note"])
    assert "budget" in reason and "rank" in reason
    text = built.tables["tables/spear/table1.md"].decode()
    assert "unsupported" in text and f"Not possible: {reason}" in text
    noted = sorted(built.folder.glob("build/*/*/*spear*/refused.json"))
    assert [json.loads(path.read_text())["status"] for path in noted] == ["unsupported", "unsupported"]


# --- jobs of the test's own -------------------------------------------------------------------------------------------


def begun(label, until):
    """Announce that a job has begun, and wait until as many have: so they are side by side however busy the machine is.

    Raises:
        AssertionError: those that the pool was to start beside it do not come.
    """
    folder = Path("begun")
    folder.mkdir(exist_ok=True)
    (folder / label).touch()
    end = time.monotonic() + 60
    while len(list(folder.iterdir())) < until:
        assert time.monotonic() < end, f"{label}: fewer than {until} jobs have begun"
        time.sleep(0.01)


def work(job, needs, folder, origin):
    options = job.parsed_options()
    match options["do"]:
        case "fail":
            Path(options.get("tries", os.devnull)).open("a").write("x")
            raise UserError("this cannot\nwork")
        case "break":
            raise ZeroDivisionError("a bug")
        case "refuse":
            raise NotMeasurable("diverged", "the loss is not finite")
        case "exhaust":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nmore")
        case "die":
            os._exit(9)
        case "crowd":
            Path(options["tries"]).open("a").write("x")
            if len(Path(options["tries"]).read_text()) <= options["times"]:
                raise Crowded("the GPU's memory did not suffice beside 100 GiB of other programs")
        case "train":
            for _ in tqdm(range(3), "loss goes down", mininterval=0, leave=False):
                print("a note", file=sys.stderr)
        case "hold":
            began = time.monotonic()
            begun(job.label, options["until"])
            facts = [began, time.monotonic(), os.environ.get("CUDA_VISIBLE_DEVICES"), options["bytes"], os.getpid()]
            (folder / "held.json").write_text(json.dumps(facts))
    print("said by", job.label)
    observations.save(folder / observations.FILE, {"x": Series(np.ones(3), "windows")}, origin)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Make jobs of a kind of the test's own, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    kind = SimpleNamespace(run=work, OUTPUTS=(observations.FILE,), VERSION=1)
    monkeypatch.setitem(runner.JOBS, "fake", kind)
    monkeypatch.setitem(versions.SHARED, "fake", kind)

    def made(label, do="work", needs=(), **options):
        return make("fake", label, {"label": label}, {"do": do, **options}, {need.label: need for need in needs})

    return made


def test_a_failing_job_stops_what_needs_it_and_nothing_else(job, capfd):
    bad, bug = job("bad", "fail"), job("bug", "break")
    after, other = job("after", needs=[bad]), job("other")
    top = job("top", needs=[other])
    jobs = distinct([after, bug, top])
    assert pool.run_all(jobs, 2) == 3
    assert [runner.done(one) for one in (bad, after, bug, other, top)] == [False, False, False, True, True]
    out, err = capfd.readouterr()
    *_, count, last = err.strip().splitlines()
    assert count == "3 of 5 jobs are not done; run again to resume" and last.startswith("error: fake/b")
    assert "FAILED this cannot work" in err and "ZeroDivisionError: a bug; the traceback is in build/fake/bug" in err
    assert "Traceback" not in err and out == ""
    assert "Traceback" in (bug.folder / "log.txt").read_text()
    assert (top.folder / "log.txt").read_text() == "said by top\n"
    assert pool.run_all(jobs) == 3, "what was done is not done again"
    assert "fake/top" not in capfd.readouterr().err


def test_progress_inside_a_step_is_shown_where_a_job_runs_at_once(job, capfd, monkeypatch):
    """On a terminal. All else of its output goes to its log, the bars too."""
    pool.run_here([job("none", "train")])
    assert "loss goes down" not in capfd.readouterr().err, "nobody watches a file"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    one = job("one", "train")
    pool.run_here([one])
    out, err = capfd.readouterr()
    log = (one.folder / "log.txt").read_text()
    assert "loss goes down: 33%" in " ".join(err.split()) and "a note" not in out + err and out.startswith("1/1 fake/")
    assert log.count("a note") == 3 and "loss goes down" in log
    two = job("two", "train")
    pool.run_all([two])
    assert "loss goes down" not in capfd.readouterr().err, "beside others nobody could read them"


def test_what_a_job_took_is_kept(job):
    """As Snakemake writes it, and what it held of a GPU."""
    done, bad = job("done", device="cpu"), job("bad", "fail")
    assert pool.run_all([done, bad]) == 1
    text = done.benchmark.read_text()
    assert done.benchmark == Path("build/benchmarks") / f"{done.id}.tsv" and not bad.benchmark.exists()
    names, (seconds, clock, gpu_bytes) = (line.split("\t") for line in text.splitlines())
    assert names == ["s", "h:m:s", "gpu_bytes"] and clock == str(timedelta(seconds=round(float(seconds))))
    assert gpu_bytes == "0" and pool.gpu_bytes_of(done) == 0 and pool.gpu_bytes_of(bad) is None
    done.benchmark.write_text("s\th:m:s\tmax_rss\n12.5\t0:00:12\t88\n")
    assert pool.gpu_bytes_of(done) is None, "as Snakemake writes it"


def test_the_time_left_is_that_of_the_jobs_of_this_run(job, capfd, monkeypatch):
    ended = pool.Outcome(60.0)
    clock = iter((0.0, 120.0, 150.0))
    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with pool.Progress(4) as progress:
        progress.ended(job("one"), ended)
        progress.ended(job("two"), ended)
        progress.ended(job("three"), pool.Outcome(1.0, "it broke"))
        progress.ended(job("four"), ended)
    first, second, third, last = capfd.readouterr().err.splitlines()
    assert first.startswith("1/4 fake/one.") and first.endswith(" 60.0 s, 06:00 left")
    assert second.endswith(" 60.0 s, 02:30 left")
    assert third.endswith(" 1.0 s FAILED it broke") and last.startswith("4/4 fake/four.") and last.endswith(" 60.0 s")


def test_a_bar_is_shown_on_a_terminal(job, capfd, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert pool.run_all([job("one"), job("bad", "fail"), job("two")]) == 1
    out, err = capfd.readouterr()
    assert out == "" and "/3 [" in err and "FAILED this cannot work" in err
    assert "fake/one" not in err, "the bar counts what ends well"


def test_workers_after_cuda_was_touched_find_the_folder_of_the_build(tmp_path, monkeypatch):
    """They cannot be forked then; a job of another kind than those of the harness would not be known to them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pool.torch.cuda, "is_initialized", lambda: True)
    gone = make("tokens", "gone", {}, {"corpus": "no such text", "model": "pocket-3m", "device": "cpu"})
    assert pool.rebuild([gone], Path("build/again")) == 1
    assert (Path("build/again") / gone.id / "log.txt").is_file() and not gone.folder.exists()


def test_what_needs_a_refused_job_is_refused_with_its_reason(job):
    bad = job("bad", "refuse")
    after = job("after", needs=[bad])
    last = job("last", needs=[after])
    assert pool.run_all(distinct([last, job("other")]), 2) == 0
    for one in (bad, after, last):
        with pytest.raises(NotMeasurable, match="^the loss is not finite$") as refused:
            runner.check(one.folder)
        assert refused.value.status == "diverged" and runner.done(one)
    assert pool.run_all(distinct([last])) == 0


@pytest.mark.parametrize(("free", "own", "alone"), [(1, 77, True), (1, 40, False), (None, 0, True)])
def test_too_little_memory_is_a_result_only_on_a_gpu_that_is_not_shared(job, monkeypatch, free, own, alone):
    """Of 80 GiB: beside other programs the job may fit tomorrow, so it is no status and is run again."""
    cuda = runner.torch.cuda
    monkeypatch.setattr(cuda, "is_initialized", lambda: free is not None)
    monkeypatch.setattr(cuda, "mem_get_info", lambda: (free << 30, 80 << 30))
    monkeypatch.setattr(cuda, "memory_reserved", lambda: own << 30)
    one = job("large", "exhaust")
    if alone:
        runner.run(one)
        with pytest.raises(NotMeasurable, match="^CUDA out of memory. Tried to allocate 2.00 MiB.$") as refused:
            runner.check(one.folder)
        assert refused.value.status == "oom" and runner.done(one)
    else:
        with pytest.raises(UserError, match="beside 39.0 GiB of other programs; run it again with fewer side by side"):
            runner.run(one)
        assert not runner.done(one) and not (one.folder / runner.REFUSED).exists()


@pytest.mark.parametrize(("times", "left"), [(1, 0), (9, 1)])
def test_what_does_not_fit_beside_others_is_run_again_alone(job, capfd, tmp_path, times, left):
    """Too little memory for a job that has the GPU to itself is the user's business."""
    tries = tmp_path / "tries"
    one = job("one", "crowd", tries=str(tries), times=times)
    assert pool.run_all([one, job("other")], 2) == left and runner.done(one) == (not left)
    assert len(tries.read_text()) == 2
    assert ("FAILED the GPU's memory" in capfd.readouterr().err) == bool(left)


def test_bad_input_is_not_run_again(job, tmp_path):
    assert pool.run_all([job("bad", "fail", tries=str(tmp_path / "tries"))], 1) == 1
    assert (tmp_path / "tries").read_text() == "x"


def test_jobs_of_an_earlier_turn_start_first(job, capfd):
    """So that a run that is cut off leaves whole tables; a need has the turn of the first that needs it."""
    shared = job("shared")
    one, other, third = job("one", needs=[shared]), job("other", needs=[shared]), job("third")
    turns = {third.id: 0, shared.id: 1, other.id: 1, one.id: 2}
    assert pool.run_all(distinct([one, other, third]), 1, turns=turns) == 0
    ran = [line.split()[1].partition(".")[0] for line in capfd.readouterr().err.splitlines()]
    assert ran == ["fake/third", "fake/shared", "fake/other", "fake/one"]


def test_what_is_compressed_is_measured_at_once(job, capfd):
    """Not after all that is to be compressed: a run that is cut off leaves cells, not weights that nobody scored."""
    first, second = job("first"), job("second")
    results = [job("score-first", needs=[first]), job("score-second", needs=[second])]
    assert pool.run_all([first, second, *results], 1) == 0
    ran = [line.split()[1].partition(".")[0] for line in capfd.readouterr().err.splitlines()]
    assert ran == ["fake/first", "fake/score-first", "fake/second", "fake/score-second"]


def test_a_worker_goes_on_with_the_steps_that_it_has_compiled(job, monkeypatch):
    """A training step takes 30 to 75 s to compile on a GPU; two workers of two methods compile one each, not two."""
    monkeypatch.setattr(pool, "on_gpu", lambda one: True)
    one, other = ("bitbybit",), ("paretoq",)
    jobs = [job(f"{i}", "hold", bytes=0, until=i // 2 * 2 + 2) for i in range(8)]  # neither gets ahead by two
    jobs = [replace(each, steps=other if i % 2 else one) for i, each in enumerate(jobs)]
    assert pool.run_all(jobs, 2) == 0
    ran = {each.steps: set() for each in jobs}
    for each in jobs:
        ran[each.steps] |= {json.loads((each.folder / "held.json").read_text())[-1]}
    assert len(ran[one]) == len(ran[other]) == 1 and ran[one] != ran[other]


def test_the_longest_chain_is_begun_first(job, capfd, monkeypatch):
    """What a training needs comes before what is short itself: the training alone at the end would leave cores idle."""
    text = job("text")
    training, plain = job("training", needs=[text]), [job(f"plain{i}") for i in range(2)]
    monkeypatch.setattr(pool, "weight", lambda one: 100 if one is training else 1)
    scores = [job(f"score-{need.label}", needs=[need]) for need in (*plain, training)]
    assert pool.run_all(distinct([*scores, *plain]), 1) == 0
    ran = [line.split()[1].partition(".")[0] for line in capfd.readouterr().err.splitlines()]
    assert ran[:3] == ["fake/text", "fake/training", "fake/score-training"]


def test_the_needs_of_a_file_of_results_have_its_turn(job, tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(pool, "run_all", lambda jobs, *rest: seen.update(rest[-1]) or 0)
    monkeypatch.setattr(runner, "check_here", lambda jobs: None)
    for i in range(2):
        write = [job(f"score-{i}", needs=[job(f"weights-{i}")]).to_json()]
        (tmp_path / f"{i}.json").write_text(json.dumps(write))
    assert main(["run", str(tmp_path / "1.json"), str(tmp_path / "0.json")]) in (0, None)
    turns = {name.partition(".")[0]: turn for name, turn in seen.items()}
    assert turns == {"fake/score-1": 0, "fake/weights-1": 0, "fake/score-0": 1, "fake/weights-0": 1}


def test_minutes_stop_starting(job, capfd, monkeypatch):
    jobs = [job(f"{i}") for i in range(4)]
    clock = itertools.count(0, 10)  # ten seconds from one look to the next; a job takes four
    with monkeypatch.context() as patch:
        patch.setattr(pool, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        assert pool.run_all(jobs, 1, minutes=0.8) == 2
    assert [runner.done(one) for one in jobs] == [True, True, False, False]
    assert "2 of 4 jobs are not done; run again to resume" in capfd.readouterr().err
    assert pool.run_all(jobs, 2) == 0


def test_a_worker_that_dies(job):
    with pytest.raises(UserError, match="a worker died; run again to resume"):
        pool.run_all([job("dead", "die"), job("other")], 1)


@pytest.mark.parametrize(
    ("threads", "cores", "workers"),
    [([1, 1], 2, 2), ([2, 1], 2, 2), ([2, 2], 2, 1), ([4, 2], 8, 4), ([4], 2, 1), ([], 3, 3)],
)
def test_a_training_with_more_threads_runs_beside_other_jobs(job, monkeypatch, threads, cores, workers):
    """Jobs on a text have one thread and count for nothing."""
    jobs = [job(f"m{i}", threads=count, dtype="float32") for i, count in enumerate(threads)]
    monkeypatch.setattr(pool, "run_all", lambda jobs, side_by_side, *rest: side_by_side)
    assert pool.run_on_machine([*jobs, job("text", threads=1)], cores) == workers


def test_threads_of_a_build_that_wait_leave_their_core_to_other_jobs(monkeypatch):
    """libgomp reads it when torch is loaded, which `make` has not done before."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr("repro.make.build.build", lambda *_: 3)
    assert main(["make", "tables/table1.tex"]) == 3
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    code = "import sys, repro.__main__, repro.cli.make; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(("workers", "gpus"), [(0, 0), (-3, 0), (1, -1)])
def test_no_worker_is_refused(workers, gpus):
    with pytest.raises(UserError, match="at least one worker"):
        pool.run_all([], workers, gpus)


def test_a_job_from_its_file_is_the_same_job(job):
    need = job("need")
    made = job("made", needs=[need])
    pool.run_all(distinct([made]))
    (read,) = runner.from_file(made.folder / "job.json")
    assert read == made and read.id == made.id and read.needs == made.needs
    assert from_json(made.to_json()) == made
    Path("other.json").write_text('{"kind": "fake"}')
    with pytest.raises(UserError, match="^other.json: not a file of jobs"):
        runner.from_file(Path("other.json"))
    with pytest.raises(UserError, match=r"^none.json: cannot be read \(No such file or directory\); write one with"):
        runner.from_file(Path("none.json"))


def test_a_refusal_that_cannot_be_read_is_not_called_damaged(tmp_path):
    path = tmp_path / runner.REFUSED
    path.write_text("{")
    with pytest.raises(UserError, match="damaged; delete the folder and build it again"):
        runner.check(tmp_path)
    disk_errors.make_unreadable(path)
    with pytest.raises(UserError) as error:
        runner.check(tmp_path)
    assert str(error.value) == f"{path}: {disk_errors.WHY}"


def test_the_mps_daemon_sees_every_gpu(monkeypatch):
    """It would number anew those that it was told of, and a worker on card 1 would find none."""
    calls = []

    def run(words, **how):
        calls.append((words, how.get("env", {})))
        return SimpleNamespace(returncode=0)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(pool.shutil, "which", lambda name: name)
    monkeypatch.setattr(pool.subprocess, "run", run)
    with pool._mps(1):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    (begun, environment), (ended, _) = calls
    assert begun == ["nvidia-cuda-mps-control", "-d"] and ended == ["nvidia-cuda-mps-control"]
    assert "CUDA_VISIBLE_DEVICES" not in environment and "PATH" in environment


@pytest.mark.parametrize("visible, taken", [("3", ["3", "3", "3"]), ("1,0", ["1", "0", "1"]), ("", ["0", "1", "0"])])
def test_workers_stay_on_the_gpus_that_are_visible(monkeypatch, visible, taken):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(pool.built, "BUILD", Path("build"))
    seen_by_workers = []
    for number in range(3):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        pool._begin(number, 2, Path("build"))
        seen_by_workers.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert seen_by_workers == taken


# --- memory of GPUs ---------------------------------------------------------------------------------------------------


def started(memory, ready, *running, gpus=1):
    """Labels of what is started in turn on idle workers of GPUs beside what runs on the first of them, and where."""
    workers = [pool.Worker(None, None, i % gpus, one, bool(one) and memory.needs_gpu_alone(one))
               for i, one in enumerate([*running, *[None] * (6 - len(running))])]  # fmt: skip
    order = {one.id: (0, False, i) for i, one in enumerate(ready)}
    begun_jobs, ready = [], list(ready)
    while pair := pool._next(workers, ready, order, memory):
        worker, one = pair
        ready.remove(one)
        worker.job, worker.alone = one, memory.needs_gpu_alone(one)
        begun_jobs.append((one.label, worker.gpu))
    return begun_jobs


@pytest.fixture
def sized(job):
    """Jobs on a GPU, alike where they are of one model."""
    return lambda label, model: job(label, device="cuda", model=model)


def test_the_first_of_a_kind_is_measured_before_others_of_it_start(sized):
    one, two, other = sized("one", "a"), sized("two", "a"), sized("other", "b")
    memory = pool.GpuMemory({0: 100})
    assert started(memory, [one, two, other]) == [("one", 0), ("other", 0)]
    memory.note(one, 40)
    assert started(memory, [two, other], one) == [("two", 0), ("other", 0)]


def test_side_by_side_run_only_jobs_whose_measured_bytes_fit(sized):
    """A job that is too large for the GPU has it to itself."""
    large, middle, small = (sized(name, name) for name in ("large", "middle", "small"))
    memory = pool.GpuMemory({0: 100, 1: 130})
    for one, size in ((large, 200), (middle, 60), (small, 30)):
        memory.note(one, size)
    more = [sized(f"more{i}", "middle") for i in range(4)]
    assert started(memory, [large, middle, small]) == [("large", 0)]
    assert started(memory, [middle, large, small]) == [("middle", 0), ("small", 0)]
    assert sorted(started(memory, more, gpus=2)) == [("more0", 0), ("more1", 1), ("more2", 1)]
    assert len(started(pool.GpuMemory({}, memory.peaks), more)) == 4, "where the driver tells of no memory"
    memory.note(small, 10)
    assert memory.peaks[pool.alike(small)] == 30, "the most that one of them held"


def test_what_an_earlier_run_measured_is_used(sized, monkeypatch):
    one, two = sized("one", "a"), sized("two", "a")
    one.benchmark.parent.mkdir(parents=True)
    one.benchmark.write_text("s\th:m:s\tgpu_bytes\n1.0\t0:00:01\t40\n")
    monkeypatch.setattr(pool, "free_bytes", lambda gpus: {0: 100})
    assert pool.GpuMemory.measured([one, two], {two.id: two}, 1) == pool.GpuMemory({0: 100}, {pool.alike(two): 40})
    assert pool.GpuMemory.measured([one, two], {one.id: one, two.id: two}, 1).peaks == {}, "it is run again"


def test_what_a_worker_measures_decides_what_runs_beside(job, monkeypatch):
    """For real: peaks come back from the workers, and four jobs of one kind run two by two where two fit."""
    monkeypatch.setattr(pool, "free_bytes", lambda gpus: {0: 100})
    monkeypatch.setattr(pool, "on_gpu", lambda one: True)
    monkeypatch.setattr(pool, "_run", lambda one, run=pool._run: replace(run(one), gpu_bytes=45))
    jobs = [job("first"), *(job(f"job{i}", "hold", bytes=45, until=2) for i in range(4))]
    assert pool.run_all(jobs, 5, turns={jobs[0].id: -1}) == 0
    records = [json.loads((one.folder / "held.json").read_text()) for one in jobs[1:]]
    assert max(len(together(records, began)) for began, *_ in records) == 2


def together(records, moment):
    """Bytes that are held at a moment."""
    return [size for began, ended, _, size, _ in records if began <= moment < ended]


def test_a_job_that_times_has_its_gpu_to_itself(job, monkeypatch):
    plain, timed = job("plain", device="cuda", model="a"), job("timed", device="cuda", model="b")
    on_cpu = job("on-cpu", device="cpu")
    monkeypatch.setattr(runner.JOBS["fake"], "TIMES", True, raising=False)
    monkeypatch.setattr(runner, "alone", lambda one, alone=runner.alone: alone(one) and one is not plain)
    memory = pool.GpuMemory()

    def following(running, *ready):
        """Which job is started first, where the first three of four workers have GPU 0 and the last GPU 1."""
        jobs = [*running, *[None] * (4 - len(running))]
        workers = [pool.Worker(None, None, int(i == 3), one, bool(one) and memory.needs_gpu_alone(one))
                   for i, one in enumerate(jobs)]  # fmt: skip
        order = {one.id: (0, False, i) for i, one in enumerate(ready)}
        next_job = pool._next(workers, ready, order, memory)
        return next_job and (next_job[1].label, next_job[0].gpu)

    assert following([], timed, plain) == ("timed", 0)
    assert following([plain], timed, plain) == ("timed", 1), "on the other GPU"
    assert following([plain, None, None, on_cpu], timed) is None, "it waits while another one runs"
    assert following([timed, None, None, timed], plain, timed) is None, "and others wait for it"
    assert following([on_cpu, None, None, on_cpu], on_cpu) == ("on-cpu", 0), "on a CPU nothing does"


def test_free_memory_is_that_of_the_visible_gpus(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-aa, 1000'\necho '1, GPU-bb, [N/A]'\necho '2, GPU-cc, 3000'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for visible, free in {"": {0: 1000}, "2,0": {0: 3000, 1: 1000}, "1,GPU-cc": {1: 3000}, "9": {}}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert machine.free_bytes(2) == {gpu: size * 2**20 for gpu, size in free.items()}
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert machine.free_bytes(2) == {}


# --- the end of a pool ------------------------------------------------------------------------------------------------


def test_workers_end_with_the_process_that_started_them(job, tmp_path):
    """Also in the middle of a job, when that process is killed."""
    code = """
import os, signal, time
from types import SimpleNamespace
from repro.store.job import make
from repro.workflow import pool, runner, versions
def work(job, found, folder, origin):
    open("pid", "w").write(str(os.getpid()))
    os.rename("pid", "worker")
    time.sleep(60)
    os.kill(os.getppid(), signal.SIGTERM)
runner.JOBS["fake"] = versions.SHARED["fake"] = SimpleNamespace(run=work, OUTPUTS=("x",), VERSION=1)
pool.run_all([make("fake", "a", {}, {})], 1)
"""
    started = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)})
    until(lambda: Path("worker").is_file())
    worker = psutil.Process(int(Path("worker").read_text()))
    started.kill()
    started.wait()
    until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


def until(condition):
    """Wait until something is so."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
