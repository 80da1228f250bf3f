"""Ctrl-C, and kill -9 at random moments: the next `make` resumes and ends as if nothing had happened.

One kill by default, SOAK=N for N of them (`make soak`). A build that ends before its kill is compared as well, and
begun anew. The last run has one core: its files are those of the build on two.
"""

import contextlib
import os
import random
import shutil
import signal
import time

import dag
import psutil
import pytest

KILLS = int(os.environ.get("SOAK") or 1)
MAKE = dag.repro("make", dag.TARGET, dag.PLOT, "--cores", 1)
ANOTHER = "another build is running here"


def locked(place) -> list:
    """The locks of Snakemake in `place`."""
    return list((place / ".snakemake" / "locks").glob("*.lock"))


def wait_until_gone(place) -> None:
    """Wait until the killed processes are out of the process table, which takes a moment and no longer."""
    end = time.monotonic() + 10
    while dag.processes(place):
        assert time.monotonic() < end, "a job outlived the kill: it is not in the process group"
        time.sleep(0.02)


def kill(process, place) -> None:
    """kill -9 for `make`, for the Snakemake that it started in a session of its own, and for its jobs."""
    result = psutil.Process(process.pid).children(recursive=True)
    dag.kill(process)
    for one in result:
        try:
            os.killpg(one.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    wait_until_gone(place)


@pytest.mark.timeout(600 * (KILLS + 1))
def test_an_interrupted_and_a_killed_build_resume(built, tmp_path):
    place = dag.folder(tmp_path / "work")
    process = dag.start_held(MAKE, place, built.twin, place / "log", "perplexity")  # which needs others that are done
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert (place / "log").read_text().strip().splitlines()[-1] == "interrupted; run again to resume"
    assert "Traceback" not in (place / "log").read_text()
    wait_until_gone(place)
    kept = dag.observed(place)
    assert kept and not list(place.rglob("*.tmp*")) and len(kept) < len(built.observed)

    clock, kills = random.Random(KILLS), 0
    while kills < KILLS:
        process = dag.start(MAKE, place, built.twin, place / "log")
        moment = time.monotonic() + clock.uniform(0.5, built.seconds)
        while time.monotonic() < moment and process.poll() is None:
            time.sleep(0.02)
        if process.poll() is None:
            kill(process, place)
            kills += 1
        else:
            assert process.returncode == 0, (place / "log").read_text()
            assert dag.outputs(place) == built.tables
            for name in ("build", "tables", "figures", ".snakemake"):
                shutil.rmtree(place / name)
    done = dag.quick(MAKE, place, built.twin, timeout=500)
    assert done.code == 0, done.text
    assert dag.outputs(place) == built.tables and dag.observed(place) == built.observed
    assert dag.dry_run(place, built.twin, dag.TARGET, dag.PLOT) == set()
    assert not locked(place) and not list(place.rglob("*.tmp*"))


def test_one_build_at_a_time_even_when_make_is_gone(built, tmp_path):
    """A second build is refused while the first lives, and while only the Snakemake that it started does."""
    place = dag.folder(tmp_path / "work")
    first = dag.start_held(MAKE, place, built.twin, place / "log", "compress")
    result = []
    try:
        assert locked(place)
        result = psutil.Process(first.pid).children(recursive=True)
        second = dag.quick(MAKE, place, built.twin)
        assert second.code == 2
        assert second.err.strip() == f"error: {place}: {ANOTHER}; wait until it ends"
        assert first.poll() is None and locked(place)
        result = psutil.Process(first.pid).children(recursive=True)
        for one in result:  # asleep, so that it cannot notice that nobody reads its output any more
            with contextlib.suppress(psutil.NoSuchProcess):
                one.suspend()
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        third = dag.quick(MAKE, place, built.twin)
        assert third.code == 2 and ANOTHER in third.err
    finally:
        for one in result:
            try:
                os.killpg(one.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        wait_until_gone(place)


def test_a_snakemake_that_a_user_started_is_a_build_too(built, tmp_path):
    place = dag.folder(tmp_path / "work")
    first = dag.start_held(dag.snakemake(built.twin, dag.TARGET), place, built.twin, place / "log", "compress")
    try:
        assert locked(place)
        second = dag.quick(MAKE, place, built.twin)
        assert second.code == 2 and ANOTHER in second.err
    finally:
        dag.kill(first)
        wait_until_gone(place)
