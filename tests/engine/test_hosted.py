"""Copies on the host: the same tokens as with all copies on the device, in memory for one width and a tenth of it."""

from itertools import chain
from types import SimpleNamespace

import engines
import pytest
import torch

from repro import models
from repro.baselines import rtn
from repro.core.errors import UserError
from repro.engine import hosted
from repro.engine.copies import copies_of
from repro.engine.precision import SwitchingCore
from repro.engine.weights import LAYERS, layer_sizes
from repro.generation import switching_engine
from repro.generation.engine import configuration, random_decoder
from repro.jobs.target import Target
from repro.methods.flexquant.config import Config
from repro.models.lowbit import LowBitModel
from repro.specs import scale as scales

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
PROMPT = list(range(40, 70))
QUICK = {"window": 3, "layers": 3, "threshold": 1e30, "prompt_tokens": 4}


@pytest.fixture(scope="module")
def every_width(tmp_path_factory):
    """A random Llama of two blocks, whose key-value heads are shared, at three widths; layers at other widths."""
    name = engines.save("llama", tmp_path_factory.mktemp("hosted"))
    made = {}
    for bits in (16, 8, 4):
        made[bits] = LowBitModel(models.load(name))
        if bits < 16:
            rtn.apply(made[bits], None, rtn.Config(bits=bits, group=64))
    return made


def make(every_width, device="cpu", rule=None, share=0.5, **how):
    """A switching engine of the model; half of its bytes are more than a switch of three layers needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosted.joined, "__defaults__", (share,))
        dtype = torch.float32 if device == "cpu" else torch.float16
        return SwitchingCore.of("pocket-3m", every_width, Config(**how), 256, torch.device(device), dtype, rule)


def outcome(engine, count=60, **how):
    """Tokens, log probabilities and the log of one generation."""
    (text,) = engine.generate([PROMPT], count, eos=False, logprobs=True, **how)
    return text.tokens, text.logprobs, engine.switching.logs[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", [{}, {"order": "random", "layers": 1, "window": 1}, {"advance": "layer", "layers": 5}])
def test_every_token_is_that_of_copies_on_the_device(every_width, device, how):
    """Bit for bit, through all states, and again from the first width in a second generation."""
    there = make(every_width, device, **QUICK | how)
    here = make(every_width, device, copies="host", **QUICK | how)
    wanted = outcome(there)
    assert {bits for _, _, bits in map(vars_of, wanted[2])} == {8, 4} and outcome(here) == wanted
    assert outcome(here) == wanted and outcome(here, temperature=0.7) == outcome(there, temperature=0.7)


def vars_of(switch):
    """(step, layer, bits) of a switch."""
    return switch.step, switch.layer, switch.bits


@pytest.mark.parametrize("path", [[8, 4], [4, 3], [16, 4]])
def test_any_path_goes(every_width, path):
    if 3 in path:
        every_width = every_width | {3: every_width[4]}
    at = {bits: every_width[bits] for bits in path}
    wanted = outcome(make(at, path=path, **QUICK))
    assert wanted[2] and outcome(make(at, path=path, copies="host", **QUICK)) == wanted


def test_layers_that_nobody_expected_come_from_the_host_at_the_switch(every_width):
    def last_first(signal, token, state):
        return [move.layer for move in state.ahead[-2:]] if token % 4 == 0 and len(state.ahead) > 1 else []

    engine = make(every_width, copies="host", rule=last_first, advance="layer", path=[16, 4])
    assert outcome(engine) == outcome(make(every_width, rule=last_first, advance="layer", path=[16, 4]))
    assert engine.steps.staging.late > 0


def test_the_next_moves_come_while_decoding_goes_on(every_width, monkeypatch):
    """Each switch reads what began to come before it, right after the switch before; nothing waits for the host."""
    engine, events = make(every_width, copies="host", **QUICK), []
    begin, steps = hosted.Staging.begin, type(engine.steps).__call__

    def beginning(staging, wanted):
        events.append(("begin", list(wanted)))
        begin(staging, wanted)

    def stepping(owner, state):
        events.append(("step", dict(owner.bits)))
        steps(owner, state)

    monkeypatch.setattr(hosted.Staging, "begin", beginning)
    monkeypatch.setattr(type(engine.steps), "__call__", stepping)
    *_, log = outcome(engine)
    expected, bits = [], dict.fromkeys(engine.weights, 16)
    for kind, what in events:
        if kind == "begin":
            expected.append(what)
        else:
            changed = [(layer, width) for layer, width in what.items() if bits[layer] != width]
            if changed:
                assert sorted(changed) == sorted(expected[-2])  # of the moves before: those after are under way
            bits = what
    assert events[0][0] == "begin" and expected[-1] == []
    assert [(switch.layer, switch.bits) for switch in log] == list(chain.from_iterable(expected))
    assert (engine.steps.staging.prefetched, engine.steps.staging.late) == (len(log), 0)


class Later:
    """In place of a thread: what it was given is done when it is waited for, and `working` meanwhile."""

    def __init__(self):
        self.working = False

    def submit(self, work):
        def result():
            self.working = True
            work()
            self.working = False

        return SimpleNamespace(result=result)

    def begin(self, *arguments):
        """No step is captured on a CPU."""

    def wait(self, *arguments):
        """No step is captured on a CPU."""

    def rest(self):
        """There is no thread."""


def test_the_thread_that_decodes_makes_no_views_of_what_a_switch_moves(every_width, monkeypatch):
    """Another brings the weights and finds their places; the switch waits for it and copies."""
    wanted = outcome(make(every_width, copies="host", **QUICK))
    engine, busy = make(every_width, copies="host", **QUICK), []
    engine.steps.recorder = later = Later()
    for owner, name in ((hosted.HostCopies, "_changed"), (hosted.HostCopies, "source"), (hosted.Staging, "begin")):
        method = getattr(owner, name)

        def noted(*arguments, method=method):
            busy.append(later.working)
            return method(*arguments)

        monkeypatch.setattr(owner, name, noted)
    assert outcome(engine) == wanted and len(busy) > 28 and all(busy)
    assert (engine.steps.staging.prefetched, engine.steps.staging.late) == (len(wanted[2]), 0)


def test_on_the_device_are_one_width_and_the_buffer(every_width):
    """Whatever a state computes with lies in the memory of its product, which is as large as the first width."""
    engine = make(every_width, copies="host", share=0.1, **QUICK)
    first, there = 0, 0
    for block in engine.model.blocks:
        for each in copies_of(block):
            first += sum(tensor.nbytes for tensor in each.at[16].buffers())
            there += each.memory.nbytes
            low, high = each.memory.data_ptr(), each.memory.data_ptr() + each.memory.nbytes
            for bits in (8, 4):
                for mixed in ([bits] * len(each.names), [bits] + [16] * (len(each.names) - 1)):
                    for tensor in each.product(mixed).buffers():
                        assert low <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= high
    assert first <= there <= 1.001 * first
    assert there + engine.steps.staging.room <= 1.1 * first
    assert engine.model.stored_bytes == make(every_width, **QUICK).model.stored_bytes


@pytest.mark.parametrize("shape", ["Llama-3-8B", "Llama-2-7B"])
def test_at_the_papers_shapes_a_tenth_beyond_16_bits_holds_16_moves(shape):
    """By arithmetic on packed weights without memory, and what a switch moves within a product counted too."""
    hosts, rows, moved = [], [], 0
    made = {}
    for bits, recipe in {16: "fp16", 8: "rtn-w8-g128", 4: "rtn-w4-g128"}.items():
        target = Target(scales.load(name="pocket"), f"shape/{shape}", recipe, 0)
        config = configuration(target)
        made[bits] = random_decoder(target.recipe, config, 64, torch.device("meta"), torch.bfloat16)
    sizes = layer_sizes(config)
    hosted_bytes = 0
    for number in range(len(made[16].blocks)):
        for product in LAYERS:
            host = {bits: getattr(decoder.blocks[number], product) for bits, decoder in made.items()}
            hosts.append(host)
            rows.append(hosted.layer_rows(sizes[product][0]))
            hosted_bytes += hosted.layer_starts(host, rows[-1])[1]
            moved = max(moved, sum(tensor.nbytes for tensor in host[8].buffers()))
    first = 0
    for host in hosts:
        first += sum(tensor.nbytes for tensor in host[16].buffers())
    assert hosted_bytes == first
    room = hosted.staging_bytes(hosts, rows, 16, hosted.SHARE)
    down = sum(tensor.nbytes for tensor in made[8].blocks[0].down.buffers())
    assert 16 * down <= room and hosted_bytes + room + moved <= 1.1 * first


def test_what_does_not_go_together_is_a_sentence(every_width):
    with pytest.raises(UserError, match="copies=host has no memory for them"):
        Config(copies="host", prefill="w8a8")
    engine = make(every_width, copies="host")
    with pytest.raises(UserError, match="copies=host decodes one prompt at a time"):
        list(engine.generate([PROMPT, PROMPT], 3))
    with pytest.raises(UserError, match="copies=host decodes one prompt at a time"):
        engine.forced([PROMPT, PROMPT], [[1], [2]], engine.model)
    assert switching_engine.SHARE == hosted.SHARE
