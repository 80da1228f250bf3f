"""A build: the pool runs the jobs that the targets need, then tables, figures and pages are drawn here.

It does what the rules of the Snakefile do, in one process that has imported everything once.
"""

import contextlib
import fcntl
import gc
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from tqdm import tqdm

from repro.core.errors import UserError
from repro.core.files import write_text, writing
from repro.render.draw import DRAWN
from repro.results import replicate
from repro.specs import figures, tables
from repro.specs.names import OWN, canonical
from repro.specs.scale import Scale
from repro.store.job import Job, distinct
from repro.workflow import pool, runner
from repro.workflow.workflow import Workflow


def build(targets: Sequence[str], cores: int, at: Scale) -> int:
    """Build targets (`names.targets`) at a scale; returns the exit code, 2 where a job failed.

    Raises:
        UserError: another build at work in this folder, or damaged results.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _alone(Path.cwd()):
            gc.freeze()  # what was imported stays; going through it again and again is a tenth of what follows
            planned = Workflow(at, remember=True)  # what is to be done is asked before any job has run
            to_draw = drawn_for(planned, targets)
            jobs = jobs_behind(planned, to_draw)
            nothing_to_do = all(map(runner.done, jobs))
            if pool.run_on_machine(jobs, cores):
                return 2
            for folder in ("tables", "figures", "docs"):
                for left in Path(folder).glob("**/.*.tmp*"):  # half written by a build that was killed
                    left.unlink()
            flow = planned if nothing_to_do else Workflow(at, remember=True)
            gc.freeze()
            for kind, name in tqdm(to_draw, "drawing", leave=False, disable=not sys.stderr.isatty()):
                began = time.monotonic()
                DRAWN[kind](flow, name)
                _note_time(kind, name, time.monotonic() - began)
            return 0
    finally:
        signal.signal(signal.SIGTERM, before)


def _note_time(kind: str, name: str, seconds: float) -> None:
    """Keep what a table, figure or page took to draw, where the rules of the Snakefile keep it."""
    folder = "docs" if kind == "page" else f"{kind}s"
    path = Path("build") / "benchmarks" / folder / f"{name}.tsv"
    write_text(path, f"s\th:m:s\n{seconds:.4f}\t{timedelta(seconds=round(seconds))}\n")


def drawn_for(flow: Workflow, targets: Sequence[str]) -> list[tuple[str, str]]:
    """Kind (`draw.DRAWN`) and name of all that targets need drawn; tables that the headline shows come first."""
    to_draw: list[tuple[str, str]] = []
    for target in everything() if "all" in targets else targets:
        folder, _, name = target.partition("/")
        if folder == "docs":
            to_draw.append(("page", Path(name).stem))
            continue
        if canonical(target) == "table1":
            to_draw += [("table", f"{paper}/table1") for paper in flow.beside_headline()]
        to_draw.append((folder.removesuffix("s"), canonical(target)))
    return list(dict.fromkeys(to_draw))


def everything() -> list[str]:
    """A file of every table, figure and page."""
    written = [f"tables/{name}.tex" for name in (*tables.names(), *OWN)]
    pictures = [f"figures/{name}.svg" for name in figures.names()]
    return [*written, *pictures, *(f"docs/{paper}.md" for paper in tables.pages())]


def jobs_behind(flow: Workflow, to_draw: Sequence[tuple[str, str]]) -> list[Job]:
    """The jobs that a build of tables and figures runs here, in an order in which they can run; of a page none."""
    jobs: list[Job] = []
    for kind, name in to_draw:
        if kind != "page":
            jobs += replicate.jobs(flow, name)
    return distinct(jobs)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One build at a time in a folder, as long as one of its workers lives.

    Raises:
        UserError: another build is at work.
    """
    path = folder / "build" / "lock"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "w", encoding="utf-8")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another build is running here; wait until it ends") from None
        yield
