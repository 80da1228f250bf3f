"""kill -9 of the build and its children at random moments: the next `make` resumes and ends as if nothing had happened.

Two kills by default, SOAK=N for N of them (`make soak`). A build that ends before its kill is compared as well, and
begun anew.
"""

import os
import random
import shutil
import signal
import time

import dag
import psutil
import pytest

KILLS = int(os.environ.get("SOAK") or 2)


def wait_for_lock(place, process) -> None:
    """Wait until the Snakemake in `place` has locked it."""
    while not list((place / ".snakemake" / "locks").glob("*.lock")):
        assert process.poll() is None, (place / "log").read_text()
        time.sleep(0.05)


def wait_until_gone(place) -> None:
    """Wait until the killed processes are out of the process table, which takes a moment and no longer."""
    end = time.monotonic() + 5
    while dag.processes(place):
        assert time.monotonic() < end, "a job outlived the kill: it is not in the process group"
        time.sleep(0.02)


@pytest.mark.timeout(300 * (KILLS + 1))
def test_killed_builds_resume(built, tmp_path):
    place = dag.folder(tmp_path / "work")
    clock, kills, locked = random.Random(KILLS), 0, 0
    while kills < KILLS:
        process = dag.start(dag.repro("make", dag.TARGET, "--cores", 2), place, built.place, place / "log")
        moment = time.monotonic() + clock.uniform(0.5, built.seconds)
        while time.monotonic() < moment and process.poll() is None:
            time.sleep(0.02)
        if process.poll() is None:
            dag.kill(process)
            kills += 1
            wait_until_gone(place)
            locked += bool(list((place / ".snakemake" / "locks").glob("*.lock")))
        else:
            assert process.returncode == 0, (place / "log").read_text()
            assert dag.outputs(place) == built.tables
            for name in ("build", "tables", ".snakemake"):
                shutil.rmtree(place / name)
    if not locked:  # every kill came before the lock: one more that comes after it
        process = dag.start(dag.repro("make", dag.TARGET, "--cores", 2), place, built.place, place / "log")
        wait_for_lock(place, process)
        dag.kill(process)
    done = dag.run(dag.repro("make", dag.TARGET, "--cores", 2), place, built.place, timeout=500)
    assert done.code == 0, done.text
    assert dag.outputs(place) == built.tables
    assert dag.dry_run(place, built.place, dag.TARGET) == set()
    assert not list((place / ".snakemake" / "locks").glob("*.lock"))


def test_the_lock_of_a_living_snakemake_stays(built, tmp_path):
    place = dag.folder(tmp_path / "work")
    first = dag.start(dag.repro("make", dag.TARGET, "--cores", 1), place, built.place, place / "log")
    try:
        wait_for_lock(place, first)
        locks = sorted((place / ".snakemake" / "locks").glob("*.lock"))
        second = dag.run(dag.repro("make", dag.TARGET, "--cores", 1), place, built.place)
        assert second.code == 2
        (sentence,) = second.err.strip().splitlines()
        assert sentence.startswith(f"error: {place}: Snakemake (process ") and "is at work here" in sentence
        assert first.poll() is None and all(lock.is_file() for lock in locks)
    finally:
        dag.kill(first)


def test_the_lock_stays_while_snakemake_outlives_make(built, tmp_path):
    """Only `make` is killed: the Snakemake that it started goes on, and nothing takes its lock."""
    place = dag.folder(tmp_path / "work")
    first = dag.start(dag.repro("make", dag.TARGET, "--cores", 1), place, built.place, place / "log")
    try:
        wait_for_lock(place, first)
        psutil.Process(first.pid).send_signal(signal.SIGKILL)
        first.wait()
        second = dag.run(dag.repro("make", dag.TARGET, "--cores", 1), place, built.place)
        assert second.code == 2 and "is at work here" in second.err
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        wait_until_gone(place)
