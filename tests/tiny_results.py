"""A tiny table in this process: one scale, one spec, a random Llama; jobs built once, results of each test's own."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import dag
import pytest

from repro.core.errors import UserError
from repro.results import measure
from repro.specs import scale as scales
from repro.specs import scale_files, tables
from repro.store import accepted, provenance
from repro.store.job import distinct
from repro.store.measurement import to_csv
from repro.workflow import runner
from repro.workflow.workflow import Workflow

COMMIT, UNKNOWN = "0123456789", "ffffffffff"
MODEL = "Llama-3.2-1B"
SPEC = tables.Spec(
    "a tiny table",
    rows={
        "FP16": "fp16",
        "RTN pc": "rtn-w4-pc",
        "GPTQ g128": "gptq-w4-g128",
        "+SPEAR pc on RTN": "rtn-w4-pc + spear(budget=1e-09, epochs1=0, epochs2=0, samples=2, tokens=16)",  # refused
    },
    extra_columns={
        "KL": {"kind": "perplexity", "corpus": "wikitext2", "show": "kl", "unit": "nats"},
        "BPW": {"kind": "storage"},
    },
    seeds=(0, 1),
)


def scale(model: Path, **changes) -> scales.Scale:
    """The tiny scale with a model of one's own."""
    settings = {
        "name": "tiny",
        "about": "a random Llama on short texts",
        "models": {MODEL: str(model)},
        "corpora": {"wikitext2": "tiny-c4-docs", "c4": "tiny-c4-docs"},
        "calibration": {"corpus": "tiny-held-out", "sequences": 4, "length": 64},
        "perplexity": {"length": 32, "windows": 100, "kl_windows": 8},
    }
    return scales._build(settings | changes, "the tiny scale")


@dataclass
class House:
    """A working folder with built jobs, results and a scale of its own."""

    folder: Path
    scale: scales.Scale

    @property
    def flow(self) -> Workflow:
        """A fresh workflow: nothing is remembered."""
        return Workflow(self.scale, stored=False)

    @property
    def results(self) -> Path:
        """Where accepted results are."""
        return self.folder / "results"

    def cell(self, row="RTN pc", col="Wiki"):
        """One cell."""
        return next(cell for cell in self.flow.cells("spear", "1") if cell.cell_key[:3] == (row, col, MODEL))

    def job(self, row="RTN pc", col="Wiki"):
        """The job of a cell's first seed."""
        return next(iter(self.flow.jobs(self.cell(row, col))[0].values()))

    def table(self, change=None, rows=None) -> Path:
        """The built table as a CSV; `change` gets and returns its text."""
        result = [measure.measurement_of(self.flow, cell) for cell in self.flow.cells("spear", "1")]
        text = to_csv([m for m in result if rows is None or m.row in rows])
        path = self.folder / "table1.csv"
        path.write_text(change(text) if change else text, encoding="utf-8")
        return path

    def edited(self, row, col, **changes) -> Path:
        """The built table with one row edited by hand."""
        result = {cell.cell_key: measure.measurement_of(self.flow, cell) for cell in self.flow.cells("spear", "1")}
        key = self.cell(row, col).cell_key
        result[key] = measure.replace(result[key], **changes)
        path = self.folder / "table1.csv"
        path.write_text(to_csv(result.values()), encoding="utf-8")
        return path

    def stored_row(self, row="RTN pc", col="Wiki"):
        """A cell as a machine shows it that takes everything from results/."""
        return measure.measurement_of(Workflow(self.scale, stored=True), self.cell(row, col))

    def files(self) -> dict[str, bytes]:
        """Everything under results/."""
        result = sorted(path for path in self.results.rglob("*") if path.is_file())
        return {str(path.relative_to(self.results)): path.read_bytes() for path in result}


def patch(patcher: pytest.MonkeyPatch, folder: Path, at: scales.Scale) -> House:
    """Make the tiny scale and spec those of this process, with `folder` as its working folder."""
    table, load, names = tables.table, scales.load, scale_files.names

    def loaded(config=None, name=None, path=None):
        return at if name == at.name else load(config, name, path)

    patcher.setattr(
        tables, "table", lambda paper, number: SPEC if (paper, number) == ("spear", "1") else table(paper, number)
    )
    patcher.setattr(scales, "load", loaded)
    for module in (scales, scale_files):
        patcher.setattr(module, "names", lambda: [*names(), at.name])
    patcher.setenv("REPRO_COMMIT", COMMIT)
    patcher.setattr(provenance, "_git", lambda *words: None)  # a tree without its history, whatever is edited here
    patcher.setattr(provenance, "has_commit", lambda commit: commit != UNKNOWN)
    patcher.setattr(accepted, "RESULTS", folder / "results")
    patcher.chdir(folder)
    provenance.commit.cache_clear()
    accepted.forget()
    return House(folder, at)


@pytest.fixture(scope="session")
def tiny_jobs(tmp_path_factory) -> Path:
    """A folder with the tiny model and every job of the tiny table."""
    folder = tmp_path_factory.mktemp("tiny")
    dag.save_model(folder / "tiny-llama")
    with pytest.MonkeyPatch.context() as patcher:
        flow = patch(patcher, folder, scale(folder / "tiny-llama")).flow
        for job in distinct(flow.every_job(flow.cells("spear", "1"))):
            runner.run(job)
    provenance.commit.cache_clear()
    return folder


@pytest.fixture
def house(tiny_jobs, tmp_path, monkeypatch) -> House:
    """A copy of what was built, with empty results."""
    shutil.copytree(tiny_jobs / "build", tmp_path / "build")
    yield patch(monkeypatch, tmp_path, scale(tiny_jobs / "tiny-llama"))
    monkeypatch.undo()
    provenance.commit.cache_clear()
    accepted.forget()


def refusal(function, *arguments) -> str:
    """The one sentence with which bad input ends."""
    with pytest.raises(UserError) as error:
        function(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def rewrite(path: Path, **meta: str) -> None:
    """Write a file of observations anew with other metadata and a checksum that fits."""
    from repro.store import observations

    stored = observations.load(path)
    facts = {key: value for key, value in (stored.meta | meta).items() if key not in ("checksum", "made")}
    observations.save(path, stored.series, facts)
