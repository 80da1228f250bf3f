"""`python -m repro run`: the results of Snakemake's build without Snakemake; what fails, resumes and is refused."""

import io
import itertools
import json
import os
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import dag
import numpy as np
import pandas as pd
import pytest
import torch
from tqdm import tqdm

from repro.__main__ import main
from repro.core.errors import Crowded, NotMeasurable, UserError
from repro.store import observations
from repro.store.job import distinct, from_json, make
from repro.store.observations import Series
from repro.workflow import job_times, memory, pool, runner, versions

RUN = ("run", "spear/table1", "spear/figure13", "--side-by-side", 2)


# --- the tiny model ---------------------------------------------------------------------------------------------------


def test_the_same_bytes_as_snakemake_and_nothing_left_for_it_but_drawing(built, tmp_path):
    place = dag.folder(tmp_path / "work")
    done = dag.quick(dag.repro(*RUN), place, built.twin)
    assert done.code == 0 and "FAILED" not in done.text, done.text
    assert dag.observed(place) == built.observed
    again = dag.quick(dag.repro(*RUN), place, built.twin)
    assert again.code == 0 and again.out == "", again.text
    assert dag.dry_run(place, built.twin, dag.TARGET, dag.PLOT) == {
        f"table {dag.TARGET}", f"figure {dag.PLOT}"
    }, "Snakemake takes what lies there"  # fmt: skip
    for name in ("spear/table1", "spear/figure13"):
        assert dag.quick(dag.repro("table", name), place, built.twin).code == 0
    assert dag.outputs(place) == built.tables


def test_what_cannot_be_done_is_a_status_with_its_reason(built):
    frame = pd.read_csv(io.BytesIO(built.tables[dag.TARGET]), dtype=str, keep_default_na=False)
    rows = frame[(frame["row"] == "+SPEAR pc on RTN") & (frame["live"] == "fresh")]
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


def work(job, found, folder, origin):
    given = job.given()
    match given["do"]:
        case "fail":
            Path(given.get("tries", os.devnull)).open("a").write("x")
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
            Path(given["tries"]).open("a").write("x")
            if len(Path(given["tries"]).read_text()) <= given["times"]:
                raise Crowded("the GPU's memory did not suffice beside 100 GiB of other programs")
        case "train":
            for _ in tqdm(range(3), "loss goes down", mininterval=0, leave=False):
                print("a note", file=sys.stderr)
        case "hold":
            began = time.monotonic()
            begun(job.label, given["until"])
            facts = [began, time.monotonic(), os.environ.get("CUDA_VISIBLE_DEVICES"), given["bytes"], os.getpid()]
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
    assert "FAILED this cannot work" in out and "ZeroDivisionError: a bug; the traceback is in build/fake/bug" in out
    assert "Traceback" not in out + err and "said by" not in out
    assert "Traceback" in (bug.folder / "log.txt").read_text()
    assert (top.folder / "log.txt").read_text() == "said by top\n"
    assert pool.run_all(jobs) == 3, "what was done is not done again"
    assert "fake/top" not in capfd.readouterr().out


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


def test_the_seconds_of_a_job_are_kept_for_plan(job):
    """As Snakemake writes them; these are without the start of a process, which plan adds."""
    done, bad = job("done", device="cpu"), job("bad", "fail")
    assert pool.run_all([done, bad]) == 1
    text = done.benchmark.read_text()
    assert done.benchmark == Path("build/benchmarks") / f"{done.id}.tsv" and not bad.benchmark.exists()
    names, (seconds, clock) = (line.split("\t") for line in text.splitlines())
    assert names == ["s", "h:m:s"] and clock == str(timedelta(seconds=round(float(seconds))))
    (run,) = job_times.measured_times(known=write_runs())
    assert run.kind == "fake" and run.seconds == pytest.approx(float(seconds) + job_times.START_S)


def write_runs():
    """A file of committed runs with none in it."""
    path = Path("known.csv")
    path.write_text("kind,steps,recipe,parameters,tokens,device,seconds\n")
    return path


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


@pytest.mark.parametrize(("times", "room", "left"), [(1, {0: 100}, 0), (2, {0: 100}, 0), (9, {0: 100}, 1), (1, {}, 1)])
def test_a_job_that_declared_too_little_waits_for_more_room(job, monkeypatch, capfd, tmp_path, times, room, left):
    """Until it is alone on the GPU, where too little memory is the user's business; with no word of room, at once."""
    monkeypatch.setattr(memory, "gpu_bytes", lambda job: 10)
    monkeypatch.setattr(memory, "free", lambda gpus: room)
    tries = tmp_path / "tries"
    one = job("one", "crowd", tries=str(tries), times=times)
    assert pool.run_all([one, job("other")], 2) == left and runner.done(one) == (not left)
    assert len(tries.read_text()) == (times + 1 if not left else 3 if room else 1)
    assert ("FAILED the GPU's memory" in capfd.readouterr().out) == bool(left)


def test_bad_input_is_not_run_again(job, monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "gpu_bytes", lambda job: 10)
    monkeypatch.setattr(memory, "free", lambda gpus: {0: 100})
    assert pool.run_all([job("bad", "fail", tries=str(tmp_path / "tries"))], 1) == 1
    assert (tmp_path / "tries").read_text() == "x"


def test_jobs_of_an_earlier_turn_start_first(job, capfd):
    """So that a run that is cut off leaves whole tables; a need has the turn of the first that needs it."""
    shared = job("shared")
    one, other, third = job("one", needs=[shared]), job("other", needs=[shared]), job("third")
    turns = {third.id: 0, shared.id: 1, other.id: 1, one.id: 2}
    assert pool.run_all(distinct([one, other, third]), 1, turns=turns) == 0
    ran = [line.split()[1].partition(".")[0] for line in capfd.readouterr().out.splitlines()]
    assert ran == ["fake/third", "fake/shared", "fake/other", "fake/one"]


def test_what_is_compressed_is_measured_at_once(job, capfd):
    """Not after all that is to be compressed: a run that is cut off leaves cells, not weights that nobody scored."""
    first, second = job("first"), job("second")
    results = [job("score-first", needs=[first]), job("score-second", needs=[second])]
    assert pool.run_all([first, second, *results], 1) == 0
    ran = [line.split()[1].partition(".")[0] for line in capfd.readouterr().out.splitlines()]
    assert ran == ["fake/first", "fake/score-first", "fake/second", "fake/score-second"]


def test_a_worker_goes_on_with_the_steps_that_it_has_compiled(job):
    """A training step takes 30 to 75 s to compile; two workers of two methods compile one each, not two."""
    one, other = ("bitbybit",), ("paretoq",)
    jobs = [job(f"{i}", "hold", bytes=0, until=i // 2 * 2 + 2) for i in range(8)]  # neither gets ahead by two
    jobs = [replace(each, steps=other if i % 2 else one) for i, each in enumerate(jobs)]
    assert pool.run_all(jobs, 2) == 0
    ran = {each.steps: set() for each in jobs}
    for each in jobs:
        ran[each.steps] |= {json.loads((each.folder / "held.json").read_text())[-1]}
    assert len(ran[one]) == len(ran[other]) == 1 and ran[one] != ran[other]


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
    clock = itertools.count(0, 30)  # half a minute from one look to the next
    with monkeypatch.context() as patch:
        patch.setattr(pool, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        assert pool.run_all(jobs, 1, minutes=1.2) == 2
    assert [runner.done(one) for one in jobs] == [True, True, False, False]
    assert "2 of 4 jobs are not done; run again to resume" in capfd.readouterr().err
    assert pool.run_all(jobs, 2) == 0


def test_a_worker_that_dies(job):
    with pytest.raises(UserError, match="a worker died; run again to resume"):
        pool.run_all([job("dead", "die"), job("other")], 1)


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
    for name in ("other.json", "none.json"):
        with pytest.raises(UserError, match=f"^{name}: not a file of jobs"):
            runner.from_file(Path(name))


def test_the_mps_daemon_sees_every_gpu(monkeypatch):
    """It would number anew those that it was told of, and a worker on card 1 would find none."""
    told = []

    def run(words, **how):
        told.append((words, how.get("env", {})))
        return SimpleNamespace(returncode=0)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(pool.shutil, "which", lambda name: name)
    monkeypatch.setattr(pool.subprocess, "run", run)
    with pool._mps(1):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    (begun, environment), (ended, _) = told
    assert begun == ["nvidia-cuda-mps-control", "-d"] and ended == ["nvidia-cuda-mps-control"]
    assert "CUDA_VISIBLE_DEVICES" not in environment and "PATH" in environment


@pytest.mark.parametrize("visible, taken", [("3", ["3", "3", "3"]), ("1,0", ["1", "0", "1"]), ("", ["0", "1", "0"])])
def test_workers_stay_on_the_gpus_that_are_visible(monkeypatch, visible, taken):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(pool.built, "BUILD", Path("build"))
    found = []
    for place in range(3):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        pool._begin(place, 2, Path("build"))
        found.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert found == taken


# --- memory of GPUs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def holding(job, monkeypatch):
    """Run jobs that declare so many bytes on GPUs of some size, of which the first `until` fit beside each other.

    What each held: began, ended, GPU, bytes.
    """

    def run(sizes, room, workers, gpus, until):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(memory, "gpu_bytes", lambda job: job.given()["bytes"])
        monkeypatch.setattr(memory, "free", lambda count: room if count == gpus else pytest.fail("of other GPUs"))
        jobs = [job(f"job{i}", "hold", bytes=size, until=until) for i, size in enumerate(sizes)]
        assert pool.run_all(jobs, workers, gpus) == 0
        return [json.loads((one.folder / "held.json").read_text()) for one in jobs]

    return run


def together(held, moment):
    """Bytes that are held at a moment."""
    return [size for began, ended, _, size, _ in held if began <= moment < ended]


def test_side_by_side_run_only_jobs_whose_bytes_fit(holding):
    """A job that is too large for the GPU has it to itself; one that takes none of it waits for nobody."""
    held = holding([60, 200, 50, 40, 30, 0, 0], {0: 100}, 4, 0, until=4)
    moments = [began for began, *_ in held]
    for some in (together(held, moment) for moment in moments):
        assert sum(some) <= 100 or sum(size > 0 for size in some) == 1, some
    assert max(len([size for size in together(held, moment) if size]) for moment in moments) >= 2
    assert any(0 in together(held, moment) and sum(together(held, moment)) >= 60 for moment in moments)


def test_each_gpu_has_its_own_room(holding):
    held = holding([60] * 6, {0: 100, 1: 130}, 6, 2, until=3)
    for gpu, most in (("0", 1), ("1", 2)):
        own = [one for one in held if one[2] == gpu]
        assert own and max(len(together(own, began)) for began, *_ in own) == most
    assert max(len(together(held, began)) for began, *_ in held) == 3


def test_without_a_word_of_the_driver_every_worker_works(holding):
    held = holding([60] * 4, {}, 4, 1, until=4)
    assert max(len(together(held, began)) for began, *_ in held) == 4


def test_a_job_that_times_has_its_gpu_to_itself(job, monkeypatch):
    plain, timed = job("plain", device="cuda"), job("timed", device="cuda")
    on_cpu = job("on-cpu", device="cpu")
    monkeypatch.setattr(runner.JOBS["fake"], "TIMES", True, raising=False)
    monkeypatch.setattr(runner, "alone", lambda one, alone=runner.alone: alone(one) and one is not plain)

    def following(running, *ready):
        """Which job is started on which worker, where the first three of four workers have GPU 0 and the last GPU 1."""
        jobs = [*running, *[None] * (4 - len(running))]
        workers = [pool.Worker(None, None, int(i == 3), one) for i, one in enumerate(jobs)]
        order = {one.id: (0, False, i) for i, one in enumerate(ready)}
        found = pool._next(workers, ready, order, dict.fromkeys(order, 0), {})
        return found and (found[1].label, found[0].gpu)

    assert following([], timed, plain) == ("timed", 0)
    assert following([plain], timed, plain) == ("timed", 1), "on the other GPU"
    assert following([plain, None, None, on_cpu], timed, plain) == ("plain", 0), "it waits while another one runs"
    assert following([timed, None, None, timed], plain, timed) is None, "and others wait for it"
    assert following([on_cpu, None, None, on_cpu], on_cpu) == ("on-cpu", 0), "on a CPU nothing does"


def test_free_memory_is_that_of_the_visible_gpus(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-aa, 1000'\necho '1, GPU-bb, [N/A]'\necho '2, GPU-cc, 3000'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for visible, found in {"": {0: 1000}, "2,0": {0: 3000, 1: 1000}, "1,GPU-cc": {1: 3000}, "9": {}}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert memory.free(2) == {gpu: size * 2**20 for gpu, size in found.items()}
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert memory.free(2) == {}


def test_a_job_declares_what_its_training_holds():
    """Streams of hidden states above all: five in Bit-by-Bit's stages after the first, 4.3 GB each at full size."""
    given = {"model": "pocket-3m", "dtype": "bfloat16", "device": "cuda", "hub": False}
    crops = {"calibration": {"corpus": "x", "sequences": 4096, "length": 2048, "seed": 0}}

    def declared(kind, recipe, needs=None, **more):
        return memory.gpu_bytes(make(kind, "x", {"recipe": recipe}, given | {"recipe": recipe} | more, needs))

    stream = 4096 * 2048 * 256 * 2
    trained = declared("compress", "bitbybit-w2-g32", **crops)
    assert 5 * stream < trained < 5 * stream + 2**31
    first = make("compress", "y", {}, given | {"recipe": "bitbybit-w2-g32"} | crops)
    both = "rtn-w4-g32 + bitbybit-w2-g32"
    assert 5 * stream < declared("compress", both, {"start": first}, **crops) < 5 * stream + 2**31
    plain = declared("perplexity", "bitbybit-w2-g32")
    assert plain == declared("compress", "rtn-w4-pc") < 2**32 and plain > memory.ROOM
    assert declared("compress", "bitbybit-w2-g32", device="cpu", **crops) == 0
    assert declared("perplexity", "fp16", model="no such model") == declared("tokens", "", model="") == 0
    assert declared("perplexity", "fp16", model="some/model@0123abc") == 0, "its configuration may be on the hub alone"
