"""Build targets with Snakemake behind one progress line."""

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from repro.core.errors import UserError
from repro.core.files import HOME, writing
from repro.core.machine import gpus
from repro.workflow import fork_server

LOG = Path("build") / "logs" / "snakemake.log"
STEPS = re.compile(r"(\d+) of (\d+) steps \((\d+)%\) done")


def build(
    targets: Sequence[str],
    cores: int,
    scale: str,
    configfile: Path | None = None,
    config: Sequence[str] = (),
) -> int:
    """Run Snakemake on `targets`, which exist; returns its exit code, 2 for bad input.

    Args:
        scale: its name.
        configfile: a scale's file, in place of the one of that name in config/.
        config: KEY=VALUE for single keys of it.

    Raises:
        UserError: another build at work in this folder.
    """
    words = [sys.executable, "-m", "snakemake", "-s", str(HOME / "Snakefile"), "--cores", str(cores)]
    words += ["--rerun-incomplete", "--nocolor", "--resources", f"gpu={max(1, gpus())}"]
    words += ["--configfile", str(configfile)] if configfile else []
    words += ["--config", *config] if config else []
    env = os.environ | ({} if configfile else {"SCALE": scale})
    with _alone(Path.cwd()) as lock, fork_server.running() as server:
        return _watched([*words, "--", *targets], env | server, lock)


def _watched(words: list[str], env: dict[str, str], lock: int) -> int:
    """Run Snakemake, its output to the log; one line of progress, and the first sentence of what failed last.

    Snakemake inherits the descriptor `lock`, so that the folder stays locked while it lives, whatever becomes of us.
    """
    with writing(LOG):
        LOG.parent.mkdir(parents=True, exist_ok=True)
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with open(LOG, "w", encoding="utf-8") as log:
            process = subprocess.Popen(words, env=env, **pipe, pass_fds=(lock,), start_new_session=True)
            try:
                shown, code = _follow(process.stdout, log), process.wait()
            except KeyboardInterrupt:
                _end(process, log)
                print("\ninterrupted; run again to resume", file=sys.stderr)
                return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    if shown and sys.stderr.isatty():
        print(file=sys.stderr)
    if code:
        text = LOG.read_text(encoding="utf-8")
        said = [line.strip() for line in text.splitlines() if line.strip().startswith("error: ")]
        if not said:
            print(f"the whole log: {LOG}", file=sys.stderr)
        print(said[0] if said else _reason(text), file=sys.stderr)
        return 2
    if not shown:
        print("Nothing to be done: everything is up to date.", file=sys.stderr)
    return 0


def _end(process: subprocess.Popen, log: Any) -> None:
    """End Snakemake and its jobs: it cleans up behind itself, unless it is interrupted once more."""
    try:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        log.writelines(process.stdout)
    except KeyboardInterrupt:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _follow(lines: Any, log: Any) -> bool:
    """Copy lines to the log, print progress; whether any job ran."""
    total, shown = 0, False
    for line in lines:
        log.write(line)
        log.flush()
        if match := re.match(r"total\s+(\d+)$", line):
            total = total or int(match[1])
            if total:
                shown = _say(0, total)
        elif match := STEPS.search(line):
            shown = _say(int(match[1]), int(match[2]))
    return shown


def _say(done: int, total: int) -> bool:
    end = "\r" if sys.stderr.isatty() else "\n"
    if sys.stderr.isatty() or done in (0, total) or done * 10 // total != (done - 1) * 10 // total:
        print(f"{done} of {total} jobs done", end=end, file=sys.stderr, flush=True)
    return True


def _reason(text: str) -> str:
    """What Snakemake itself says of a failure, as one sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["Snakemake failed without a word"]
    marked = []
    for mark in ("Exception", "Error"):
        marked += [i for i, line in enumerate(lines) if mark in line]
    return "error: " + " ".join(lines[marked[0] : marked[0] + 3] if marked else lines[-1:])[:400]


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[int]:
    """One build at a time in a folder; a lock that a dead Snakemake left is removed. Yields the lock's descriptor.

    Raises:
        UserError: another build is at work.
    """
    path = folder / ".snakemake" / "repro.lock"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "w", encoding="utf-8")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left = list((folder / ".snakemake" / "locks").glob("*.lock"))
            busy = bool(left) and _working(folder)
        except BlockingIOError:
            busy = True
        if busy:
            raise UserError(f"{folder}: another build is running here; wait until it ends")
        for lock in left:
            lock.unlink(missing_ok=True)
        yield file.fileno()


def _working(folder: Path) -> bool:
    """Whether a Snakemake that a user started directly works in a folder."""
    import psutil  # only where a lock was left

    for process in psutil.process_iter(["pid", "cmdline", "cwd"]):
        if process.info["pid"] == os.getpid() or process.info["cwd"] != str(folder.resolve()):
            continue
        words = (process.info["cmdline"] or [])[:3]
        if any(re.search(r"(^|/)snakemake$", word) for word in words):
            return True
    return False
