"""A metric is a module and the defaults of what it leaves out: whoever asks it never looks whether a part is there."""

from types import ModuleType

import pytest

from repro.metrics import KINDS, NONE, metric_of
from repro.metrics.metric import PARTS, Metric
from repro.stats.quantity import Quantity


def made(**parts):
    """The metric of a module with these parts."""
    module = ModuleType("toy")
    vars(module).update(parts)
    return Metric(module)


def test_what_a_module_leaves_out_is_the_default():
    metric = made(VERSION=3, Params=dict, value=lambda params, mean: mean["x"])
    assert metric.VERSION == 3 and metric.value(None, {"x": 2.0}) == 2.0
    assert metric.jobs(None, None) == {} and metric.parts(None) == {} and metric.brief("whole", None) == "whole"
    assert (metric.against(None), metric.lacking(None), metric.absent(None)) == ("", "", "")
    assert metric.limits(None) == Quantity.limits and metric.reference(None) is None and metric.itself(None) is None
    nothing = (metric.run, metric.status, metric.origin, metric.quantity, metric.fewest_bits, metric.Protocol)
    assert nothing == (None,) * len(nothing) and not (metric.JOBLESS or metric.PUBLIC or metric.FULL_FIRST)


def test_what_a_module_names_replaces_the_default():
    metric = made(against=lambda params: "q / f", JOBLESS=True, run=print, limits=lambda params: (0.0, 1.0))
    assert metric.against(None) == "q / f" and metric.JOBLESS and metric.run is print
    assert metric.limits(None) == (0.0, 1.0) and made().against(None) == "", "another metric is none the wiser"


def test_a_cell_that_nothing_measures_has_a_metric_that_says_nothing():
    assert metric_of("") is NONE and metric_of("perplexity") is KINDS["perplexity"]
    assert NONE.run is None and NONE.jobs(None, None) == {}


@pytest.mark.parametrize("name", KINDS)
def test_every_metric_says_its_version_and_what_it_can_be_asked(name):
    metric = KINDS[name]
    assert metric.VERSION >= 1 and metric.Params.__dataclass_params__.frozen
    assert bool(metric.run) <= bool(metric.OUTPUTS), "a job of its own leaves files"
    assert bool(metric.origin) == bool(metric.quantity)
    assert set(vars(metric)) - {"module"} <= set(PARTS)
