"""A result that changed without a new VERSION is red: known answers of every step, metric and shared job."""

import inspect
import json
import math

import answers
import pytest
import torch

from repro.workflow import versions

KNOWN = json.loads(answers.FILE.read_text(encoding="utf-8"))
EXACT = 1e-9  # of counts and arithmetic, which no rounding touches
CLOSE = 5e-3  # of what is computed in float32, where a code or two of thousands may round the other way
LEARNED = 2e-2  # of what is trained or sampled, where such a difference grows
VALIDATED = 1e-1  # of a loss on a few held-out sequences at the best of their steps: 0.04 apart between processors
GROWS = (
    *(
        "omniquant",
        "spinquant",
        "efficientqat",
        "staged_ap",
        "e2e_qp",
        "paretoq",
        "bitdistiller",
        "matquant",
        "group_qat",
    ),
    *("bitbybit", "sliced", "spear", "uniform"),
    *("placement", "sensitivity", "agreement", "similarity", "training", "curve", "switching"),
)
COUNTS = ("tokens", "requests", "questions", "memory", "setting", "kernel_time", "derived", "storage")


@pytest.fixture(scope="module")
def at():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with answers.workplace() as scale:
        yield scale
    torch.set_num_threads(threads)


def tolerance(name: str, key: str) -> float:
    """How far a number of an answer may lie from the known one, relative to it."""
    if name in COUNTS:
        return EXACT
    if key == "training/validation loss":
        return VALIDATED
    return LEARNED if name in GROWS else CLOSE


def difference(name: str, now: answers.Numbers, known: answers.Numbers) -> str:
    """The first number that is another than the known one; empty if there is none."""
    if now.keys() != known.keys():
        return f"its numbers are {', '.join(now)}, and were {', '.join(known)}"
    for key, value in now.items():
        if not math.isclose(value, known[key], rel_tol=tolerance(name, key), abs_tol=1e-9):
            return f"{key} is {value:.7g}, and was {known[key]:.7g}"
    return ""


@pytest.mark.parametrize("name", answers.names())
def test_a_changed_result_has_a_new_version(name, at):
    again = f"run python tests/contract/answers.py {name}"
    assert name in KNOWN, f"{name} has no known answer; {again}"
    known, version = KNOWN[name], versions.of(name)
    assert known["version"] == version, f"VERSION of {name} is {version}, its answer is of {known['version']}; {again}"
    result = difference(name, answers.answer(name, at), known["numbers"])
    file = inspect.getfile(versions.owner(name))
    assert not result, (
        f"{name}: {result}, and its VERSION is still {version}. If that is meant, set VERSION = {version + 1} in "
        f"{file}, which makes stored results of it stale, and {again}; else mend the change"
    )


def test_nothing_has_an_answer_that_does_not_exist_any_more():
    assert KNOWN.keys() == set(answers.names())


def test_a_changed_number_is_named():
    known = KNOWN["rtn"]["numbers"]
    key = "distance"
    moved = known | {key: known[key] * (1 + 3 * CLOSE)}
    assert difference("rtn", known, known) == ""
    assert difference("rtn", moved, known).startswith(f"{key} is ")
    assert "its numbers are" in difference("rtn", {key: 1.0}, known)
