"""A metric is a subclass and the defaults of what it leaves out: nobody looks whether a part of it is there."""

import dataclasses
from types import SimpleNamespace

import pytest

from repro.metrics import KINDS, NONE, metric_of
from repro.metrics.metric import External, Metric
from repro.stats.quantity import Quantity


@dataclasses.dataclass(frozen=True)
class Mean(Metric):
    VERSION = 3

    unit: str = ""

    def value(self, mean):
        return mean["x"]


@dataclasses.dataclass(frozen=True)
class Ratio(Mean):
    JOBLESS = True

    @property
    def against(self):
        return "q / f"

    @property
    def limits(self):
        return 0.0, 1.0


def test_what_a_metric_leaves_out_is_the_default():
    metric = Mean()
    assert metric.VERSION == 3 and metric.value({"x": 2.0}) == 2.0
    assert metric.jobs(None) == {} and metric.operands() == {} and metric.brief("whole", None) == "whole"
    assert (metric.against, metric.lacking()) == ("", "")
    assert metric.limits == Quantity.limits and metric.reference is None and metric.itself is None
    nothing = (metric.run, metric.status, metric.fewest_bits, metric.PROTOCOL)
    assert nothing == (None,) * len(nothing) and not (metric.JOBLESS or metric.PUBLIC or metric.FULL_FIRST)


def test_what_a_metric_names_replaces_the_default():
    metric = Ratio()
    assert (metric.against, metric.limits) == ("q / f", (0.0, 1.0)) and metric.JOBLESS
    assert Mean().against == "" and not Mean.JOBLESS, "another metric is none the wiser"


def test_a_cell_has_the_metric_of_its_parameters_and_one_that_nothing_measures_says_nothing():
    metric = KINDS["perplexity"]("wikitext2")
    assert metric_of(SimpleNamespace(params=metric)) is metric and metric_of(SimpleNamespace(params=None)) is NONE
    assert NONE.run is None and NONE.jobs(None) == {}


@pytest.mark.parametrize("name", KINDS)
def test_every_metric_says_its_version_and_its_parameters(name):
    metric = KINDS[name]
    assert metric.VERSION >= 1 and metric.__dataclass_params__.frozen and issubclass(metric, Metric)
    assert "unit" in {field.name for field in dataclasses.fields(metric)}
    assert {part for part in vars(metric) if part.isupper()} <= set(dir(Metric)) | {"VERSION"}, "no such part"
    if issubclass(metric, External):
        assert {"read", "origin"} <= set(vars(metric)) and metric.run is None
