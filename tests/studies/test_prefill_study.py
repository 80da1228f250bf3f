"""The prefill's study: what it counts and times, its verdicts, and those of what is recorded."""

import itertools
import json

import pytest
import torch
from tiny import llama_config

from repro.core.files import ROOT
from repro.engine import shapes
from repro.engine.prefill import together
from repro.generation import Engine
from repro.studies import prefill

RECORDS = sorted((ROOT / "results").glob("*/prefill.json"))
TINY = llama_config(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=97)


def content(**changes):
    """A file that meets every target, with changes of one name's seconds."""
    seconds = {
        "bf16": [0.046, 0.045, 0.090],  # the median counts, not one slow call
        "bf16 on device": [0.0449],
        "w4-g128": [0.047],
        "w4-g128 on device": [0.046],
        "transformers": [0.060],
        "bf16, 16 prompts": [0.737],
        "w4-g128, 16 prompts": [0.659],
    }
    return {"tokens": 2048, "prompts": 16, "seconds": seconds | changes}


def missed(**changes):
    return {target for target, words in prefill.verdicts(content(**changes)).items() if words.startswith("missed")}


def test_operations_are_those_of_the_blocks_weights():
    """6,979,321,856 weights of Llama 3.1 8B are neither embedding, head nor norm."""
    assert prefill.operations(1) == 2 * 6_979_321_856
    assert prefill.operations(2048) == 2048 * prefill.operations(1)


def test_all_targets_hold():
    verdicts = prefill.verdicts(content())
    assert len(verdicts) == 7 and not missed()
    assert verdicts["bf16"] == "holds: 46.0 ms, 0.787 of 790 T operations/s, 0.72 asked"
    assert verdicts["transformers"] == "holds: 0.767 of its 60.0 ms"


def test_each_target_is_missed_alone():
    assert missed(**{"w4-g128": [0.0604], "w4-g128 on device": [0.06], "w4-g128, 16 prompts": [0.9]}) == {"w4-g128"}
    assert missed(transformers=[0.0459]) == {"transformers"}
    assert missed(**{"bf16, 16 prompts": [16.6 * 0.046]}) == {"batch, bf16"}
    assert missed(**{"w4-g128, 16 prompts": [16.6 * 0.047]}) == {"batch, w4-g128"}
    assert missed(**{"bf16 on device": [0.0437]}) == {"idle, bf16"}
    slow = {"bf16": [0.0504], "bf16 on device": [0.05]}
    assert missed(**slow) == {"bf16"}


def test_calls_take_turns_and_the_first_of_a_turn_do_not_count():
    order, clock = [], itertools.count()

    def call(name):
        order.append(name)
        return float(next(clock))

    seconds = prefill.measure(1, 2, {name: lambda name=name: call(name) for name in "ab"})
    assert order == list("aaabbb") * prefill.TURNS
    assert seconds == {"a": [1.0, 2.0, 7.0, 8.0, 13.0, 14.0], "b": [4.0, 5.0, 10.0, 11.0, 16.0, 17.0]}


def test_what_is_timed_is_a_whole_prefill(monkeypatch):
    """Of the engine every prompt gets its first token; Transformers' logits are those of the last token alone."""
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    monkeypatch.setattr(prefill, "MODEL", "tiny")
    engine = Engine.load("shape/tiny", "fp16", 33, device="cpu", dtype="float32")
    assert prefill.of_engine(engine, 3, 32) > 0
    assert engine.stats.prompt_tokens == 96 and engine.stats.new_tokens == 3

    model = prefill.random_transformers(torch.device("cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    true, shown = model.forward, []

    def noted(*args, **kwargs):
        output = true(*args, **kwargs)
        shown.append((tuple(output.logits.shape), output.past_key_values.get_seq_length()))
        return output

    monkeypatch.setattr(model, "forward", noted)
    assert prefill.of_transformers(model, 32) > 0
    assert shown == [((1, 1, 97), 32)]


def test_what_the_device_is_timed_for_ends_with_the_first_token(monkeypatch):
    """So that wall over device is what the host adds, and nothing that the device computes besides."""

    class Backend:
        def capture(self, calls):
            self.outputs = [call() for call in calls]
            return self

        def replay(self):
            return 0.5

    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    engine = Engine.load("shape/tiny", "fp16", 33, device="cpu", dtype="float32")
    backend = Backend()
    assert prefill.on_device(engine, 32, backend)() == 0.5
    (token,) = backend.outputs
    (states,) = together(engine.model, engine.cache, [list(range(32))])
    assert token.tolist() == engine.model.head(states)[-1:].argmax(1).tolist()


@pytest.mark.skipif(not RECORDS, reason="not recorded: python -m repro.studies.prefill")
@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_targets_hold_where_they_are_recorded(path):
    verdicts = prefill.verdicts(json.loads(path.read_text(encoding="utf-8")))
    assert not [f"{target}: {words}" for target, words in verdicts.items() if words.startswith("missed")]
