"""Verdicts on how the time of a layer grows with its tokens."""

import json

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


@pytest.mark.skipif(not RECORDS, reason="not recorded: python -m repro.studies.steps")
@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_two_of_three_targets_hold_where_they_are_recorded(path):
    """The log says which steps are larger; there are no more of them, and a complete record has every layer."""
    recorded = json.loads(path.read_text(encoding="utf-8"))["times"]
    assert set(recorded) == {f"{n}x{k}" for n, k in steps.shapes()}
    missed = steps.verdicts(recorded)
    assert not missed["dequantize"] and not missed["bf16"] and len(missed["step"]) <= 8
    of_llama_3 = {f"{n}x{k}": recorded[f"{n}x{k}"] for n, k in steps.LLAMA_3}
    assert len(steps.verdicts(of_llama_3)["step"]) <= 1
