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
    folded_facts = folded.fold({"a": outer, "b": outer, "c": [LONG], "d": "short"})
    assert json.dumps(folded_facts).count("xxxx" * (folded.LONG // 4)) == 1
    assert len([key for key in folded_facts if key.startswith("#")]) == 2
    assert folded_facts["a"] == folded_facts["b"] and folded_facts["d"] == "short"


def test_what_is_said_once_is_spelled_out_once():
    recipe = {"steps": [{"bits": 4, "group": 128, "clip": [0.25, 0.5, 0.75, 1.0]}]}
    unfolded = folded.unfold(folded.fold({"a": {"recipe": recipe, "seed": 0}, "b": {"recipe": recipe, "seed": 1}}))
    assert unfolded["a"]["recipe"] is unfolded["b"]["recipe"] and unfolded["a"] == {"recipe": recipe, "seed": 0}
