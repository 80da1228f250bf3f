"""Measuring one metric by command: it takes what that metric needs, and nothing of the scale's others."""

import pytest

from repro.__main__ import main
from repro.cli import options
from repro.metrics.likelihood import Likelihood
from repro.metrics.likelihood import Protocol as LikelihoodProtocol
from repro.metrics.zeroshot import Protocol, ZeroShot


class Stop(Exception):
    """Instead of running jobs."""


def jobs_of(monkeypatch, *words):
    """The jobs that a command would run, by kind and task."""
    requested = []

    def record(jobs):
        requested.extend(jobs)
        raise Stop

    monkeypatch.setattr(options, "run_now", record)
    with pytest.raises(Stop):
        main(list(words))
    return requested


@pytest.mark.parametrize("kind", ["zeroshot", "likelihood"])
def test_a_named_task_needs_no_other_tasks_files(kind, monkeypatch):
    """The pocket scale asks MMLU too, which is not in the repository."""
    (job,) = jobs_of(monkeypatch, kind, "pocket-3m", "--tasks", "arc_easy")
    assert job.parsed_options()["tasks"] == ["arc_easy"] and [role for role, _ in job.needs] == ["requests arc_easy"]


def test_what_is_left_out_needs_no_files(monkeypatch):
    words = ("--without", "mmlu", "mmlu-10", "boolq")
    (job,) = jobs_of(monkeypatch, "zeroshot", "pocket-3m", *words)
    tasks = job.parsed_options()["tasks"]
    assert len(tasks) == 6 and not {"mmlu", "mmlu-10", "boolq"} & set(tasks)


def test_a_draw_and_the_whole_set_stay_apart():
    protocol = Protocol(tasks=("arc_easy", "mmlu-10", "mmlu"))
    assert ZeroShot(("mmlu",)).only(protocol).absent == ("arc_easy", "mmlu")
    assert ZeroShot(("mmlu",), whole=True).only(protocol).absent == ("arc_easy", "mmlu-10")
    assert Likelihood(("piqa", "arc_easy")).only(LikelihoodProtocol()).tasks == LikelihoodProtocol().tasks


@pytest.mark.parametrize("kind, task", [("zeroshot", "blimp-100"), ("likelihood", "boolq")])
def test_a_task_that_the_scale_does_not_ask_is_named(kind, task, capsys):
    assert main([kind, "pocket-3m", "--tasks", task]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: unknown task of this scale '{task}'") and "choose from: arc_challenge, " in error
