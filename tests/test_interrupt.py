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


def wait_until_gone(folder) -> None:
    """Wait until the killed processes are out of the process table, which takes a moment and no longer."""
    end = time.monotonic() + 10
    while dag.processes(folder):
        assert time.monotonic() < end, "a worker outlived the kill"
        time.sleep(0.02)


@pytest.mark.timeout(600 * (KILLS + 1))
def test_an_interrupted_and_a_killed_build_resume(built, tmp_path):
    folder = dag.folder(tmp_path / "work")
    process = dag.start_held(MAKE, folder, built.twin, folder / "log", "perplexity")  # which needs others that are done
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert (folder / "log").read_text().strip().splitlines()[-1] == "interrupted; run again to resume"
    assert "Traceback" not in (folder / "log").read_text()
    wait_until_gone(folder)
    kept = dag.observed(folder)
    assert kept and not list(folder.rglob("*.tmp*")) and len(kept) < len(built.observed)

    clock, kills = random.Random(KILLS), 0
    while kills < KILLS:
        process = dag.start(MAKE, folder, built.twin, folder / "log")
        moment = time.monotonic() + clock.uniform(0.5, built.seconds)
        while time.monotonic() < moment and process.poll() is None:
            time.sleep(0.02)
        if process.poll() is None:
            process.kill()  # whose workers end with it
            process.wait()
            wait_until_gone(folder)
            kills += 1
        else:
            assert process.returncode == 0, (folder / "log").read_text()
            assert dag.outputs(folder) == built.tables
            for name in ("build", "tables", "figures"):
                shutil.rmtree(folder / name)
    done = dag.quick(MAKE, folder, built.twin, timeout=500)
    assert done.code == 0, done.text
    assert dag.outputs(folder) == built.tables and dag.observed(folder) == built.observed
    drawn = {f"table {dag.TARGET}", f"figure {dag.PLOT}"}
    assert dag.dry_run(folder, built.twin, dag.TARGET, dag.PLOT) <= drawn, "Snakemake takes the results that lie there"
    assert not list(folder.rglob("*.tmp*"))


def test_one_build_at_a_time_even_when_make_is_gone(built, tmp_path):
    """A second build is refused while the first lives, and while only a worker that it started does."""
    folder = dag.folder(tmp_path / "work")
    first = dag.start_held(MAKE, folder, built.twin, folder / "log", "compress")
    workers = []
    try:
        second = dag.quick(MAKE, folder, built.twin)
        assert second.code == 2
        assert second.err.strip() == f"error: {folder}: {ANOTHER}; wait until it ends"
        assert first.poll() is None
        workers = psutil.Process(first.pid).children(recursive=True)
        for one in workers:  # asleep, so that it cannot notice that who started it is gone
            with contextlib.suppress(psutil.NoSuchProcess):
                one.suspend()
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        third = dag.quick(MAKE, folder, built.twin)
        assert third.code == 2 and ANOTHER in third.err
    finally:
        for one in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        wait_until_gone(folder)
