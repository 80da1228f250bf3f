"""The kind `training`: tokens that a method saw, and where its loss ended; beside which table the headline makes."""

from types import SimpleNamespace

import numpy as np
import pytest

from repro import papers
from repro.core.errors import UserError
from repro.jobs.target import Target
from repro.make.snake import SnakemakeAdapter
from repro.metrics import training
from repro.recipes import recipe
from repro.specs import scale as scales
from repro.specs import tables
from repro.specs.templates import build
from repro.store import observations
from repro.store.observations import Observations, Series
from repro.workflow.pool import weight


def value(show, *before, **facts):
    """Of a recipe whose last step left `facts`, and the steps before it those in `before`."""
    params, steps = training.Training(show), {}
    for i, one in enumerate((facts, *before)):
        by_name = {name: Series(np.asarray(values, dtype=float), "layers") for name, values in one.items()}
        steps[f"step {i}"] = Observations(by_name, {})
    result = params.series(steps, None)
    return params.value({name: one.values.mean() for name, one in result.items()}) if result else None


def test_tokens_are_those_that_the_trainer_counted_and_none_without_training():
    assert value("tokens", **{"training/tokens": [50_331_648], "training/loss": [3, 2]}) == 50_331_648
    assert value("tokens", **{"bits/bpw": [2.5]}) == 0, "rounding saw none"
    first, last = {"training/tokens": [16], "training/loss": [9.0]}, {"training/tokens": [32]}
    assert value("tokens", first, {"bits/bpw": [2.5]}, **last) == 48, "those of all steps of a recipe"
    assert value("loss", first, **last) is None


@pytest.mark.parametrize(
    ("curve", "end"), [([5.0], 5.0), (range(16), 15.0), (range(32), 30.5), ([9.0] * 60 + [1.0] * 4, 1.0)]
)
def test_the_end_of_a_loss_curve_is_its_last_sixteenth(curve, end):
    assert value("loss", **{"training/loss": list(curve)}) == end


def test_a_loss_is_not_shown_where_nothing_was_trained():
    assert value("loss", **{"bits/bpw": [2.5]}) is None
    with pytest.raises(UserError, match="show"):
        build(training.Training, {"show": "seconds"}, "a spec")


def test_its_jobs_are_those_that_compress_step_by_step():
    text = "efficientqat(tokens=64) + e2e_qp(tokens=64)"
    target = Target(scales.load(name="pocket"), "pocket-3m", recipe.parse(text).name)
    jobs = training.Training().jobs(target)
    assert [(role, job.kind, job.steps[-1]) for role, job in jobs.items()] == [
        ("step 0", "compress", "e2e_qp"),
        ("step 1", "compress", "efficientqat"),
    ]


def test_the_headline_makes_its_papers_table_and_those_that_take_no_job():
    """Another paper's Table 1 is built when it is asked for: the headline stays within seven minutes."""
    made = map(str, SnakemakeAdapter(scales.load(name="pocket").as_config(), None).drawn_inputs(["table1"]))
    beside = {path.split("/")[1] for path in made if path.startswith("tables/") and path.endswith("/table1.tex")}
    assert papers.LEADING in beside and "spqt" in beside
    with_jobs = {"bitbybit", "subspec"}
    assert not with_jobs & beside
    assert {(paper, "1") for paper in with_jobs} <= set(tables.specified())


def test_the_longest_way_through_the_headline_is_begun_first():
    """SPEAR's training alone behind everything else was two minutes of one idle core."""
    snake = SnakemakeAdapter(scales.load(name="pocket").as_config(), None)
    jobs = {job.id: job for job in [*snake.jobs_of("table1"), *snake.jobs_of("spear/table1")]}

    def priority(job):
        kind, _, name = job.id.partition("/")
        return snake.priority(SimpleNamespace(kind=kind, job=name))

    first = max(jobs.values(), key=priority)
    trained = next(job for job in jobs.values() if job.kind == "compress" and "spear" in job.steps)
    assert first.id in {need.id for need in trained.every()}
    way = [need for need in trained.every() if need.id != trained.id]
    others = [job for job in jobs.values() if job not in way and job != trained]
    assert min(map(priority, way)) > priority(trained) > 2 * max(map(priority, others))
    for job in jobs.values():
        assert all(priority(need) >= priority(job) + weight(need) for _, need in job.needs)


def test_a_training_of_no_epochs_is_kept_without_a_curve(tmp_path):
    """Rows are all that a file holds, so that a series without values could not be read back."""
    path = tmp_path / "observations.parquet"
    observations.save(path, {"training/loss": Series(np.asarray([]), "layers"), "a": Series(np.ones(2), "model")}, {})
    assert set(observations.load(path).series) == {"a"}
