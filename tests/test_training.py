"""The kind `training`: tokens that a method saw, and where its loss ended; beside which table the headline makes."""

import numpy as np
import pytest

from repro import papers
from repro.cells import KINDS, training
from repro.errors import UserError
from repro.jobs.target import Target
from repro.record.observations import Observations, Series
from repro.spec import recipe, tables
from repro.spec import scale as scales
from repro.spec.snake import Snake
from repro.spec.templates import build


def value(show, **facts):
    ask = training.Ask(show)
    held = {name: Series(np.asarray(values, dtype=float), "layers") for name, values in facts.items()}
    found = training.series(ask, {"training": Observations(held, {})}, None)
    return training.value(ask, {name: one.values.mean() for name, one in found.items()}) if found else None


def test_tokens_are_those_that_the_trainer_counted_and_none_without_training():
    assert value("tokens", **{"training/tokens": [50_331_648], "training/loss": [3, 2]}) == 50_331_648
    assert value("tokens", **{"bits/bpw": [2.5]}) == 0, "rounding saw none"


@pytest.mark.parametrize(
    ("curve", "end"), [([5.0], 5.0), (range(16), 15.0), (range(32), 30.5), ([9.0] * 60 + [1.0] * 4, 1.0)]
)
def test_the_end_of_a_loss_curve_is_its_last_sixteenth(curve, end):
    assert value("loss", **{"training/loss": list(curve)}) == end


def test_a_loss_is_not_shown_where_nothing_was_trained():
    assert value("loss", **{"bits/bpw": [2.5]}) is None
    with pytest.raises(UserError, match="show"):
        build(training.Ask, {"show": "seconds"}, "a spec")


def test_its_job_is_the_one_that_compresses():
    target = Target(scales.load(name="pocket"), "pocket-3m", recipe.parse("gptq-w4-pc").name)
    (job,) = training.jobs(training.Ask(), target).values()
    assert job.kind == "compress" and KINDS["training"] is training


def test_the_headline_makes_its_papers_table_and_those_that_take_no_job():
    """Another paper's Table 1 is built when it is asked for: the headline stays within ten minutes."""
    made = map(str, Snake(scales.load(name="pocket").as_config(), None).drawn_inputs(["table1"]))
    beside = {path.split("/")[1] for path in made if path.startswith("tables/") and path.endswith("/table1.tex")}
    assert papers.LEADING in beside and "subspec" in beside and "bitbybit" not in beside
    assert ("bitbybit", "1") in tables.specified()
