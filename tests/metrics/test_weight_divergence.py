"""Divergence of weights, layer by layer: the job's numbers are those of the weights it was given."""

import pytest

from repro.jobs import compress
from repro.jobs.target import Target
from repro.methods.flexquant.config import Config
from repro.methods.flexquant.order import weight_divergence as divergence
from repro.metrics.weight_divergence import WeightDivergence
from repro.models.lowbit import block_linears
from repro.specs import scale as scales
from repro.store import observations
from repro.store.job import built_under, distinct
from repro.workflow import runner


@pytest.mark.parametrize("direction", ["quantized", "full"])
def test_every_layer_in_model_order(direction, tmp_path):
    result = {}
    for bits in (8, 4):
        target = Target(scales.load(name="pocket").on("cpu"), "pocket-3m", f"rtn-w{bits}-g64")
        params = WeightDivergence("layers", direction)
        with built_under(tmp_path):
            (job,) = params.jobs(target).values()
            for each in distinct([job]):
                if not runner.done(each):
                    runner.run(each)
            made = compress.load(job.parsed_options(), dict(job.needs)["weights"].folder).model
            needs = {"layers": observations.load(job.folder / observations.FILE)}
        full = compress.load(job.parsed_options(), None).model
        wanted = [
            divergence(linear.weight.detach(), block_linears(made)[name].weight.detach(), Config(direction=direction))
            for name, linear in block_linears(full).items()
        ]
        result[bits] = params.series(needs, target)["layers"].values
        assert result[bits].tolist() == pytest.approx(wanted) and min(wanted) > 0
        spread = WeightDivergence("spread", direction).series(needs, target)["spread"].values
        assert spread.tolist() == pytest.approx([max(wanted) / min(wanted)])
        assert WeightDivergence("mean").value({"mean": 2.0}) == 2.0
    assert (result[4] > result[8]).all()


def test_full_precision_has_no_job_and_no_divergence():
    target = Target(scales.load(name="pocket").on("cpu"), "pocket-3m", "fp16")
    assert WeightDivergence().jobs(target) == {} and WeightDivergence().itself == 0.0
    assert WeightDivergence().series({}, target) == {} and WeightDivergence("spread").itself is None
