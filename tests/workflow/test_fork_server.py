"""The process that imports once and forks for each job of a build."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from repro.core.files import ROOT
from repro.workflow import fork_server

TESTS = str(ROOT / "tests")
PATH = {"PYTHONPATH": os.pathsep.join([str(ROOT), TESTS])}


@pytest.fixture(scope="module")
def server():
    """The environment of those who ask a running server."""
    before = os.environ.get("PYTHONPATH")
    os.environ |= PATH
    with fork_server.running() as named:
        yield named
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def ask(work: str, *arguments: object, **env: str) -> subprocess.Popen:
    """A process that hands over work, as Snakemake's scripts do."""
    code = f"import sys; from repro.workflow.fork_server import call; call({work!r}, sys.argv[1:])"
    words = [sys.executable, "-c", code, *map(str, arguments)]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=os.environ | PATH | env, **pipe)


def until(condition) -> None:
    """Wait until something is so."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Whether a process has ended, also while this asks."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_work_is_done_in_a_fork_with_the_askers_output_and_environment(server, tmp_path):
    done = ask("fork_work:tell", tmp_path / "told", ASKED="yes", **server)
    out, err = done.communicate()
    assert (done.returncode, out, err) == (0, "to the asker's output\n", "")
    parent, asked, folder, ready = (tmp_path / "told").read_text().split("\n")
    assert psutil.Process(int(parent)).cmdline()[1:3] == ["-m", "repro.workflow.fork_server"]
    assert (asked, folder, ready) == ("yes", os.getcwd(), "True")
    again = ask("fork_work:tell", tmp_path / "again", **server)
    assert again.wait() == 0 and (tmp_path / "again").read_text().split("\n")[:2] == [parent, ""]


@pytest.mark.parametrize("named", ({}, {fork_server.VARIABLE: "/nowhere/socket"}), ids=("none", "ended"))
def test_without_a_server_the_asker_does_it(tmp_path, named):
    done = ask("fork_work:tell", tmp_path / "told", **named)
    assert done.communicate() == ("to the asker's output\n", "") and done.returncode == 0
    assert (tmp_path / "told").read_text().split("\n")[0] == str(os.getpid())


def test_failures_come_back(server):
    for named in ({}, server):
        done = ask("fork_work:fail", **named)
        assert done.communicate() == ("", "error: a sentence\n") and done.returncode == 1
        done = ask("fork_work:stumble", **named)
        assert "KeyError: 'ours'" in done.communicate()[1] and done.returncode == 1


def test_a_fork_ends_with_its_asker(server, tmp_path):
    asking = ask("fork_work:wait", tmp_path / "pid", **server)
    until(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text())
    asking.kill()
    asking.wait()
    until(lambda: gone(int((tmp_path / "pid").read_text())))


def test_a_killed_fork_is_a_failure(server, tmp_path):
    asking = ask("fork_work:wait", tmp_path / "pid", **server)
    until(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text())
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert "fork_work:wait: its process was killed" in asking.communicate()[1] and asking.returncode == 1


@pytest.mark.parametrize("number", (0, signal.SIGKILL), ids=("block", "starter"))
def test_the_server_ends_with_its_block_and_with_its_starter(number):
    code = "import os, psutil\nfrom repro.workflow import fork_server\nwith fork_server.running():\n"
    code += f"    print(psutil.Process().children()[0].pid, flush=True)\n    os.kill(os.getpid(), {int(number)})"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | PATH, capture_output=True, text=True)
    assert done.returncode == -number
    until(lambda: gone(int(done.stdout)))
