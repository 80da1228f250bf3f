"""Spans of an iteration: of known copies, of a tiny shape on the CPU, and as a picture with a lane each."""

import json

import numpy as np
import pytest
import torch
from test_offload_time import CPU, SHAPE, least

from repro.core.errors import NotMeasurable, UserError
from repro.engine import shapes
from repro.engine.traffic import Copy
from repro.jobs.target import Target
from repro.methods import subspec
from repro.metrics import timeline
from repro.metrics.timeline import Timeline, spans_of
from repro.render import figure_files
from repro.specs import scale as scales
from repro.store import observations
from repro.store.observations import Observations, Series
from repro.workflow.workflow import Workflow

DRAFT = subspec.Config(depth=2)


@pytest.fixture
def tiny(monkeypatch):
    """A tiny shape."""
    monkeypatch.setitem(shapes.SHAPES, "tiny", SHAPE)


def job_of(params, **protocol):
    at = scales.load({"timeline": protocol} if protocol else {}, name="pocket").on("cpu")
    return params.jobs(Target(at, "pocket-3m", "fp16"))["spans"]


def test_the_spans_of_an_iteration_are_counted_from_its_beginning():
    """Two draft passes and a verification; a copy that began before, one inside, and those of other iterations."""
    lanes = {
        "copies": [Copy(0.0, 1.0, 5), Copy(9.5, 11.0, 5), Copy(13.0, 14.0, 5), Copy(16.0, 17.0, 5)],
        "draft passes": [Copy(1, 2, 0), Copy(2, 3, 0), Copy(10, 11, 0), Copy(11, 12.5, 0), Copy(20, 21, 0)],
        "verification": [Copy(3, 9, 0), Copy(12.5, 15.5, 0)],
    }
    result = spans_of(lanes, DRAFT, 1)
    assert result["draft passes"] == [(0, 1000), (1000, 2500)] and result["verification"] == [(2500, 5500)]
    assert result["copies"] == [(-500, 1000), (3000, 4000)]
    plain = spans_of(lanes | {"draft passes": []}, None, 1)  # it begins where the step before ended
    assert plain["verification"] == [(3500, 6500)] and plain["copies"] == [(500, 2000), (4000, 5000)]
    assert plain["draft passes"] == []


@pytest.mark.parametrize("draft, prefetch", [("subspec", True), ("subspec", False), ("none", False)])
def test_a_tiny_shape_copies_drafts_and_verifies_once(tiny, draft, prefetch):
    params = Timeline("tiny", least(draft), "copies", draft=draft, prefetch=prefetch)
    options = job_of(params, context=96, warm=1).parsed_options()
    result = timeline.measured(options | {"draft": options["draft"] and vars(DRAFT)}, CPU, torch.float32)
    passes, ((begin, end),) = result["draft passes"], result["verification"]
    assert len(passes) == (2 if draft == "subspec" else 0)
    if passes:
        assert passes[0][0] == 0 and passes[0][1] <= passes[1][0] and passes[1][1] <= begin
    copies = result["copies"]
    assert begin < end and copies == sorted(copies) and all(start < stop for start, stop in copies)
    assert copies[-1][0] < end and copies[0][1] > 0
    if not prefetch:  # a weight is copied when it is needed
        assert len(copies) % 4 == 0 and all(begin <= one and two <= end for one, two in copies)


def test_a_job_declares_a_configuration_and_no_lane():
    all_params = [
        Timeline("Qwen2.5-7B", "8GiB", "copies"),
        Timeline("Qwen2.5-7B", "8GiB", "copies", prefetch=False),
        Timeline("Qwen2.5-7B", "8GiB", "copies", draft="none", prefetch=False),
    ]
    assert len({job_of(params).id for params in all_params}) == 3
    assert job_of(Timeline("Qwen2.5-7B", "8192MiB", "verification", show="begin")).id == job_of(all_params[0]).id
    assert json.loads(job_of(all_params[0]).inputs)["draft"] == vars(subspec.Config())


def test_what_is_shown_of_known_spans():
    series = {
        "copies begin": Series(np.array([0.0, 4.0]), "spans"),
        "copies length": Series(np.array([1.0, 3]), "spans"),
    }
    result = {"spans": Observations(series, {})}
    params = Timeline("Qwen2.5-7B", "8GiB", "copies")
    assert params.series(result, None)["copies length"].values.tolist() == [1, 3]
    assert params.value({"copies length": 2.0}) == 2 and params.limits[0] == 0
    assert Timeline("Qwen2.5-7B", "8GiB", "draft passes").series(result, None) == {}


def test_without_a_gpu_the_result_is_unsupported(tmp_path):
    job = job_of(Timeline("Qwen2.5-7B", "8GiB", "copies"))
    with pytest.raises(NotMeasurable, match="need a GPU"):
        timeline.Timeline.run(job, {}, tmp_path, observations.origin(job, {}))
    with pytest.raises(UserError, match="unknown shape"):
        Timeline("Qwen-9B", "8GiB", "copies")


def test_the_figure_has_a_lane_for_each_stream_of_three_ways(tmp_path, monkeypatch):
    """From the jobs' files to the picture."""
    monkeypatch.chdir(tmp_path)
    flow = Workflow(scales.load(name="pocket").on("cpu"), stored=False)
    spans = {"copies": [(-1.0, 2.0), (2.0, 4.0)], "draft passes": [(0.0, 1.0)], "verification": [(1.0, 5.0)]}

    def measured(options, device, dtype):
        return spans if options["draft"] else spans | {"draft passes": []}

    monkeypatch.setattr(timeline, "measured", measured)
    monkeypatch.setattr(timeline, "refuse_without_gpu", lambda device: None)
    for job in flow.every_job(flow.cells("subspec", "timeline", "figure")):
        job.folder.mkdir(parents=True)
        timeline.Timeline.run(job, {}, job.folder, observations.origin(job, {}))
    panels = figure_files.build(flow, "subspec/timeline")
    (lanes,) = panels.values()
    assert len(lanes) == 8 and [point[:2] for point in lanes["asynchronous: copies"]] == [(-1.0, 3.0), (2.0, 2.0)]
    picture = (tmp_path / "figures" / "subspec" / "timeline.svg").read_text()
    assert "speculative: draft passes" in picture and "plain: verification" in picture
