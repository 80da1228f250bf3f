"""Verdicts on how the time of a layer grows with its tokens."""

import json
from types import SimpleNamespace

import pytest

from repro.core.files import ROOT
from repro.studies import steps

RECORDS = sorted((ROOT / "results").glob("*/steps.json"))


def row(linear, library=10.0, dequantize=20.0):
    return {"linear": linear, "library": library, "dequantize": dequantize}


def times(**changes):
    """One layer that meets every target, with changes by number of tokens."""
    good = {"16": row(5.0), "17": row(5.7), "128": row(11.0), "129": row(12.0), "256": row(11.7), "257": row(12.0)}
    return {"4096x4096": good | {name[1:]: value for name, value in changes.items()}}


def test_all_targets_hold():
    assert steps.verdicts(times()) == {"step": [], "dequantize": [], "bf16": []}


def test_a_cliff_is_named_unless_the_library_has_it_too():
    assert steps.verdicts(times(_17=row(6.0)))["step"] == ["4096x4096, 16 to 17 tokens: 1.20, cuBLAS 1.00"]
    assert not steps.verdicts(times(_17=row(6.0, library=12.5)))["step"]


def test_slower_than_to_dequantize_is_named_between_96_and_512_tokens():
    assert steps.verdicts(times(_257=row(12.0, dequantize=10.0)))["dequantize"] == [
        "4096x4096, 257 tokens: 1.20 of its time"
    ]
    assert not steps.verdicts(times(_16=row(5.0, dequantize=1.0)))["dequantize"]
    smaller = {"2048x4096": times(_257=row(12.0, dequantize=10.0))["4096x4096"]}
    assert not steps.verdicts(smaller)["dequantize"]


def test_slower_than_bf16_is_named_in_the_mean_and_at_the_worst_layer():
    missed = steps.verdicts(times() | {"8192x8192": times(_128=row(15.0), _129=row(15.0))["4096x4096"]})
    assert missed["bf16"] == [
        "128 tokens: 0.78 in the geometric mean, 0.90 asked",
        "128 tokens, 8192x8192: 0.67, 0.70 asked",
    ]


def test_those_that_are_timed_take_turns_and_the_least_of_each_counts():
    order = []
    ends = {"linear": iter([4e-6, 5e-6, 6e-6, 2e-6]), "library": iter([9e-6, 3e-6, 9e-6, 8e-6])}

    def capture(calls):
        def replay():
            order.append(calls[0])
            return next(ends[calls[0]])

        return SimpleNamespace(replay=replay)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "TURNS", 2)
        patch.setattr(steps, "REPLAYS", 2)
        candidates = {"linear": ["linear", "linear"], "library": ["library"]}
        row = steps.in_turns(candidates, SimpleNamespace(capture=capture))
    assert row == {"linear": 1.0, "library": 3.0} and order == ["linear", "linear", "library", "library"] * 2


def test_a_file_of_the_same_device_is_completed_and_says_which_commit_measured_what(monkeypatch, tmp_path):
    measured = []

    def measure(shape, *_):
        measured.append(shape)
        return {"8": row(float(shape[0]))}

    monkeypatch.setattr(steps, "measure", measure)
    monkeypatch.setattr(steps, "shapes", lambda: [(64, 32), (128, 32)])
    monkeypatch.setattr(steps.timing, "Cuda", lambda: SimpleNamespace(release=lambda: None))
    origin = {"device": "card", "commit": "first", "environment": "", "date": ""}
    monkeypatch.setattr(steps.bench, "origin", lambda: dict(origin))
    out = tmp_path / "steps.json"
    assert steps.record(out)["commits"] == {"64x32": "first", "128x32": "first"}
    content = json.loads(out.read_text())
    del content["times"]["64x32"]
    out.write_text(json.dumps(content))
    origin["commit"] = "second"
    again = steps.record(out)
    assert again["commits"] == {"64x32": "second", "128x32": "first"} and "commit" not in again
    assert again == json.loads(out.read_text()) and measured == [(64, 32), (128, 32), (64, 32)]
    origin["device"] = "another card"
    assert set(steps.record(out)["commits"].values()) == {"second"} and len(measured) == 5


@pytest.mark.skipif(not RECORDS, reason="not recorded: python -m repro.studies.steps")
@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_all_targets_hold_where_they_are_recorded(path):
    """A complete record has every layer."""
    content = json.loads(path.read_text(encoding="utf-8"))
    recorded = content["times"]
    assert set(recorded) == set(content["commits"]) == {f"{n}x{k}" for n, k in steps.shapes()}
    assert steps.verdicts(recorded) == {"step": [], "dequantize": [], "bf16": []}
