"""The Snakefile's view of specs and a scale: a function for each directive; bad input ends with one sentence."""

import functools
import gc
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from snakemake.io import ancient

from repro import models
from repro.core.errors import UserError, sentence, unknown
from repro.core.files import HOME, ROOT
from repro.make.build import everything
from repro.metrics import KINDS
from repro.papers.cell import table_name
from repro.results import replicate
from repro.specs import figures, scale, tables
from repro.specs.names import FORMATS, OWN, canonical, check_targets, page_with
from repro.store import accepted, kernel_rows, provenance
from repro.store.job import Job
from repro.store.stored_row import ENDING
from repro.workflow import runner, versions
from repro.workflow.pool import work_left
from repro.workflow.workflow import Workflow

__all__ = ["FORMATS", "SnakemakeAdapter", "config_file"]
gc.freeze()  # what was imported stays; going through it again and again is an eighth of listing all jobs
HASHED = 200_000_000  # bytes; inputs up to that size are known by content where only their time has changed


def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Bad input is one sentence on stderr and the end, where Snakemake would print a traceback."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except UserError as error:
            sys.exit(sentence(error))

    return wrapped


@plainly
def config_file() -> str:
    """The scale's file where the command line names none: `config/$SCALE.yaml`, by default pocket's."""
    return str(scale.file_of())


class SnakemakeAdapter:
    """One scale's targets and jobs as Snakemake sees them."""

    @plainly
    def __init__(self, config: Mapping[str, Any], workflow: Any = None) -> None:
        """Read the scale.

        Args:
            config: Snakemake's configuration.
            workflow: its workflow; the last one of its `--configfile`s names the scale.
        """
        at = scale.load(config)
        self.workflow = workflow
        files = workflow and (workflow.overwrite_configfiles or workflow.configfiles)
        if files and Path(files[-1]).stem != at.name:
            raise UserError(f"{files[-1]}: its name is {at.name!r}; a scale is named like its file")
        self.flow = Workflow(at, remember=True)  # what is to be done is asked before any job has run
        self.memory = at.memory_mb  # of a job
        self.config = json.dumps(at.as_config(), sort_keys=True)
        self.kinds = "|".join(name for name in KINDS if name in runner.JOBS)
        self._jobs_of: dict[str, list[Job]] = {}
        self._known: dict[str, Job] = {}
        self._work_left: dict[str, float] = {}

    def _settle(self) -> None:
        """Let contents decide a rerun, in Snakemake's settings, which it makes after it has read the Snakefile.

        Versions are an input like any other, as small files; Snakemake would also look at the time of `script:` files.
        """
        settings = self.workflow and self.workflow.dag_settings
        if settings:
            settings.rerun_triggers = {trigger for trigger in settings.rerun_triggers if trigger.name != "CODE"}
            # Who compares the hashes of inputs, and who keeps them when a job ends, has copied Snakemake's own limit of
            # 1 MB by now: larger inputs would be taken for changed where a copied checkout has made them new.
            for holder in (settings, self.workflow.dag, self.workflow.persistence):
                holder.max_checksum_file_size = max(HASHED, holder.max_checksum_file_size)

    def script(self, stem: str) -> str:
        """The script that a rule runs, for a job or for rendering; it is next to this file."""
        return str(Path(__file__).with_name(f"{stem}_script.py"))

    @cached_property
    def jobs(self) -> dict[str, Job]:
        """Every job that a build of any table or figure runs here, by id."""
        specified = [table_name(paper, "table", number) for paper, number in tables.specified()]
        by_id: dict[str, Job] = {}
        for name in ("table1", *specified, *figures.names()):
            by_id |= {job.id: job for job in self.jobs_of(name)}
        return by_id

    def jobs_of(self, name: str) -> list[Job]:
        """The jobs that a build of a table or figure runs here."""
        if name not in self._jobs_of:
            self._jobs_of[name] = replicate.jobs(self.flow, name)
            self._known |= {job.id: job for job in self._jobs_of[name]}
        return self._jobs_of[name]

    def _there(self, path: Path) -> Path:
        """A small file that was just written, made known to Snakemake, which lists a folder only once."""
        if self.workflow:
            self.workflow.iocache.exists_local[str(path)] = True
        return path

    @plainly
    def everything(self) -> list[str]:
        """Every table, figure and page."""
        return everything()

    @plainly
    def _job(self, wildcards: Any) -> Job:
        name = f"{wildcards.kind}/{wildcards.job}"
        if name in self._known:  # of a table or figure that is being built
            return self._known[name]
        if name not in self.jobs:
            raise unknown("job", name, self.jobs)
        return self.jobs[name]

    @plainly
    def job_inputs(self, wildcards: Any) -> list[str]:
        """The inputs of a job: a local model's files, outputs of the jobs that it needs, and the versions behind it.

        The times of a model's files decide nothing: its fingerprint is part of the job's id. Of a job that is done
        (`runner.done`), by whomever, no time decides anything.
        """
        self._settle()
        job = self._job(wildcards)
        done = runner.done(job)
        weights = models.weight_files(job.parsed_options()["model"]) if job.parsed_options().get("model") else []
        needed = []
        for _, need in job.needs:
            needed += runner.outputs(need)
        read_first = _known_as([self._there(versions.file(job, again=not done)), *needed])
        return [*(map(ancient, read_first) if done else read_first), *map(ancient, _known_as(weights))]

    @plainly
    def job_json(self, wildcards: Any) -> str:
        """The job, as the runner takes it."""
        return json.dumps(self._job(wildcards).to_json())

    def threads(self, wildcards: Any) -> int:
        """CPU threads of a job."""
        return int(self._job(wildcards).parsed_options().get("threads", 1))

    def priority(self, wildcards: Any) -> float:
        """How much work waits for a job, itself included, so that the longest chain is begun first."""
        if len(self._work_left) != len(self._known):
            self._work_left = work_left(self._known.values())
        return self._work_left[self._job(wildcards).id]

    def gpus(self, wildcards: Any) -> int:
        """GPUs of a job."""
        return int(self._job(wildcards).parsed_options().get("device") == "cuda")

    @plainly
    def drawn_inputs(self, wildcards: Any) -> list[str]:
        """The inputs of a table or figure: specs, printed cells, results, observations, and the code that draws it."""
        name = canonical(wildcards[0])
        observed = [runner.outputs(job)[-1] for job in self.jobs_of(name)]
        paths = [*self._drawing(), *filter(Path.is_file, _sources(name)), *observed]
        if name == "table1":
            for paper in self.flow.beside_headline():
                paths += [Path("tables") / paper / f"table1{form}" for form in FORMATS]
        return _known_as(paths)

    @plainly
    def page_inputs(self, wildcards: Any) -> list[str]:
        """The inputs of a paper's page: its specs, its printed numbers and accepted results; no job."""
        if wildcards.page not in tables.pages():
            raise unknown("page", wildcards.page, tables.pages())
        paths = [
            *(HOME / "tables" / wildcards.page).glob("*.yaml"),
            *(HOME / "figures" / wildcards.page).glob("*.yaml"),
        ]
        paths += (ROOT / "repro" / "papers" / wildcards.page).iterdir()
        paths += accepted.files()
        return _known_as([*self._drawing(), *sorted([HOME / "tables" / "table1.yaml", *paths])])

    @plainly
    def page_of_part(self, wildcards: Any) -> str:
        """The paper's page that the page of one of its tables, or of its figures, is written with."""
        part = f"docs/{wildcards.page}/{wildcards.part}.md"
        page = page_with(part)
        check_targets([page])
        return page

    def _drawing(self) -> list[Path]:
        """The file of the hash of the code that draws: drawing is cheap, so it is done again after any change of it."""
        self._settle()
        return [self._there(versions.input_file("sources", provenance.sources_hash()))]


def _known_as(paths: Iterable[Path]) -> list[str]:
    """Inputs by the names that Snakemake remembers: relative where they lie below the working directory.

    A checkout that is copied or moved with what it built (CI caches, containers) has the same inputs there.
    """
    working_directory = Path.cwd()
    absolute = [given_path.absolute() for given_path in paths]
    return [
        str(path.relative_to(working_directory) if path.is_relative_to(working_directory) else path)
        for path in absolute
    ]


def _sources(name: str) -> list[Path]:
    """Specs, printed cells and accepted results behind a table or figure: what rebuilds it besides its jobs."""
    if name in (*OWN, figures.LEADERBOARD):
        return [*sorted((HOME / "results").glob(f"*/*{ENDING}")), HOME / "tables" / "table1.yaml"]
    is_figure = figures.is_figure(name)
    paper, number = (figures if is_figure else tables).split(name)
    paths = accepted.files() + [ROOT / "repro" / "papers" / paper / "measures.yaml"] * (not is_figure)
    for specified in [(paper, number)] if is_figure else tables.behind(paper, number):
        paths += [(figures if is_figure else tables).path_of(*specified)]
        paths += [ROOT / "repro" / "papers" / paper / f"table{specified[1]}.csv"] * (not is_figure)
    if is_figure and (of := figures.figure(paper, number).table):
        paths += _sources(canonical(of))
    return paths + (kernel_rows.files() if paper in tables.FOLDERS else [])
