"""Data files that a machine lacks: a build measures what the others allow, and the sentence names the file."""

import dataclasses

import pytest

from repro.data import sources, tasks
from repro.jobs import data
from repro.results import replicate
from repro.specs import scale
from repro.store import job
from repro.workflow.workflow import Workflow

ARCHIVE = "zeroshot/raw/mmlu.tar.xz"


@pytest.fixture
def flow(monkeypatch):
    """The default scale on a machine without REPRO_DATA."""
    monkeypatch.delenv("REPRO_DATA", raising=False)
    return Workflow(scale.load(name="pocket"))


def requests(task: str) -> job.Job:
    return job.make("requests", task, {"task": task}, {"task": task, "device": "cpu"})


def tokens(corpus: str, **options) -> job.Job:
    return job.make("tokens", corpus, {"text": corpus}, {"corpus": corpus, "device": "cpu", **options})


def test_a_job_lacks_the_first_of_its_files_that_is_nowhere(flow, tmp_path, monkeypatch):
    pool = "training-wiki-part"
    assert data.lacking([requests("piqa"), tokens("wikitext2"), tokens(pool, excerpt=True)]) == ""
    assert data.lacking([requests("piqa"), requests("mmlu-10")]) == ARCHIVE
    assert data.lacking([tokens(pool)]) == "corpus/train-wiki-00.txt.xz"
    assert data.lacking([tokens("wikitext2-hub")]) == ""
    monkeypatch.setenv("REPRO_DATA", str(tmp_path))
    (tmp_path / ARCHIVE).parent.mkdir(parents=True)
    (tmp_path / ARCHIVE).write_bytes(b"")
    assert data.lacking([requests("mmlu-10")]) == "" and tasks.available("mmlu")


def test_another_copy_of_a_file_in_the_repository_is_not_the_one(flow):
    name = next(iter(sources.EMBEDDED))
    assert sources.available(name) and not sources.available(name, "0" * 64)


def test_a_build_measures_the_tasks_whose_files_are_here(flow):
    again, _ = replicate.chosen(flow, "spear/table24")
    columns = {cell.col for cell in again}
    assert "PIQA" in columns and "MMLU" not in columns
    names = {need.parsed_options()["task"] for need in replicate.jobs(flow, "spear/table24") if need.kind == "requests"}
    assert "piqa" in names and not names & {"mmlu", "mmlu-10"}


def test_a_mean_over_tasks_is_not_measured_without_one_of_them(flow):
    cell = next(cell for cell in flow.cells("spear", "24") if cell.col == "PIQA" and cell.recipe != "fp16")
    mean = dataclasses.replace(cell, params=dataclasses.replace(cell.params, tasks=()))
    assert flow.brief.jobs(cell) and not flow.brief.jobs(mean) and flow.jobs(mean)
