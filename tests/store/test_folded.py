"""What is said often is said once, and comes back whole."""

import json

from hypothesis import given
from hypothesis import strategies as st

from repro.store import folded

LONG = {"name": "x" * folded.LONG, "more": [1, 2.5, None, True]}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.just("#12345678") | st.just(LONG),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(st.dictionaries(st.text("abc", min_size=1), JSON, max_size=6))
def test_what_was_folded_comes_back(facts):
    there = json.loads(json.dumps(folded.fold(facts)))
    assert folded.unfold(there) == facts


def test_a_repeated_value_is_written_once_also_inside_another():
    outer = {"steps": [LONG, LONG], "seed": 0}
    found = folded.fold({"a": outer, "b": outer, "c": [LONG], "d": "short"})
    assert json.dumps(found).count("xxxx" * (folded.LONG // 4)) == 1
    assert (
        len([key for key in found if key.startswith("#")]) == 2 and found["a"] == found["b"] and found["d"] == "short"
    )


def test_what_is_said_once_is_spelled_out_once():
    said = {"steps": [{"bits": 4, "group": 128, "clip": [0.25, 0.5, 0.75, 1.0]}]}
    found = folded.unfold(folded.fold({"a": {"recipe": said, "seed": 0}, "b": {"recipe": said, "seed": 1}}))
    assert found["a"]["recipe"] is found["b"]["recipe"] and found["a"] == {"recipe": said, "seed": 0}
