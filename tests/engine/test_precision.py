"""Decoding that switches layers to fewer bits: the same tokens as models built at each state from scratch."""

import gc
import itertools
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import disk_errors
import engines
import pytest
import torch
from torch import nn

from repro import models
from repro.__main__ import main
from repro.baselines import rtn
from repro.core.errors import UserError
from repro.engine import copies, core, decoding, precision, weights
from repro.engine.core import Core
from repro.engine.decoding import Steps, prefill
from repro.engine.precision import SignalState, SwitchingCore
from repro.engine.step import Tokens, step
from repro.generation import SwitchingEngine, switching_engine
from repro.kernels import w8a8
from repro.methods.flexquant import schedule
from repro.methods.flexquant.config import Config
from repro.methods.flexquant.pple import pple
from repro.models.lowbit import LowBitModel
from repro.recipes import precision_schedules as named

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPE = {"cpu": torch.float32, "cuda": torch.float16}
PROMPT = list(range(40, 70))
QUICK = {"window": 3, "layers": 3, "threshold": 1e30, "prompt_tokens": 4}


@pytest.fixture(scope="module")
def name(tmp_path_factory):
    """A random Llama of two blocks by name, whose key-value heads are shared."""
    return engines.save("llama", tmp_path_factory.mktemp("precision"))


def at_width(name, bits):
    """The model with all layers rounded to a width, on the CPU."""
    lm = LowBitModel(models.load(name))
    if bits < 16:
        rtn.apply(lm, None, rtn.Config(bits=bits, group=64))
    return lm


def make(name, device, rule=None, **how):
    """A switching engine of the model."""
    config = Config(**how)
    every = {bits: at_width(name, bits) for bits in config.path}
    return SwitchingCore.of(name, every, config, 256, torch.device(device), DTYPE[device], rule)


def scratch(name, device, bits):
    """A decoder with every layer at its own width, made by the loader of mixed models."""
    lm = LowBitModel(models.load(name))
    for layer, width in bits.items():
        if width < 16:
            linear = lm.model.get_submodule(f"model.layers.{layer}")
            lm.set_weight(f"model.layers.{layer}", rtn.grid.rtn(linear.weight.data, rtn.Config(bits=width, group=64)))
    return weights.decoder(lm, 256, torch.device(device), DTYPE[device])


def tokens_of(engine, count, prompts=(PROMPT,), **how):
    """Tokens and log probabilities of each prompt."""
    return [(t.tokens, t.logprobs) for t in engine.generate(list(prompts), count, eos=False, logprobs=True, **how)]


@torch.inference_mode()
def replayed(name, device, log, high, count):
    """Greedy tokens and log probabilities by models built from scratch at every state of a log, over one cache."""
    bits = dict.fromkeys((move for move in copies_names(name)), high)
    decoder = scratch(name, device, bits)
    steps = Steps(decoder, 1)
    *_, hidden = prefill(steps, torch.tensor(PROMPT, device=device), 0, 256)
    logits, tokens, scores = decoder.head(hidden[-1:]), [], []
    for token in range(count):
        if token:
            due = {switch.layer: switch.bits for switch in log if switch.step == token}
            if due:
                bits |= due
                decoder = scratch(name, device, bits)
            at = torch.tensor([len(PROMPT) + token - 1], dtype=torch.int32, device=device)
            last = torch.tensor([tokens[-1]], device=device)
            row = torch.zeros(1, dtype=torch.int32, device=device)
            logits = decoder.head(step(decoder, steps.cache, Tokens(last, row, at, at, at + 1)))
        tokens.append(int(logits[0].argmax()))
        scores.append(float(logits.float().log_softmax(1)[0, tokens[-1]]))
    return tokens, scores


def copies_names(name):
    """The layers of a model as schedules name them."""
    layers_of_block = list(itertools.chain.from_iterable(weights.LAYERS.values()))
    names = []
    for block in range(models.load(name).config.num_hidden_layers):
        names += [f"{block}.{layer}" for layer in layers_of_block]
    return names


@pytest.mark.parametrize("device", DEVICES)
def test_every_token_is_that_of_a_model_built_from_scratch_at_its_state(name, device):
    """Logits bit for bit: their log probabilities are equal, not near."""
    engine = make(name, device, **QUICK)
    tokens = tokens_of(engine, 50)[0]
    (log,) = engine.switching.logs
    assert len({switch.step for switch in log}) == 10 and {switch.bits for switch in log} == {8, 4}
    assert tokens == replayed(name, device, log, 16, 50)


@pytest.mark.parametrize("device", DEVICES)
def test_a_threshold_of_1_is_the_high_precision_token_for_token(name, device):
    engine = make(name, device, threshold=1.0, window=1)
    static = Core(name, scratch(name, device, dict.fromkeys(copies_names(name), 16)))
    assert tokens_of(engine, 60) == tokens_of(static, 60)
    assert engine.switching.logs == [[]] and engine.switching.bits == [16]


@pytest.mark.parametrize("device", DEVICES)
def test_an_infinite_threshold_at_once_is_the_low_precision_after_the_first_token(name, device):
    engine = make(name, device, threshold=1e30, window=0, layers=1000)
    assert tokens_of(engine, 40)[0] == replayed(name, device, engine.switching.logs[0], 16, 40)
    assert {switch.step for switch in engine.switching.logs[0]} == {1} and engine.switching.bits == [4]
    assert engine.switching.bits_with_prefill == pytest.approx([(39 * 4 + 16) / 40])


def test_mean_bits_are_those_of_the_log(name):
    engine = make(name, "cpu", **QUICK)
    tokens_of(engine, 50)
    sizes = {layer: 0 for layer in copies_names(name)}
    for layer in sizes:
        sizes[layer] = models.load(name).get_submodule(f"model.layers.{layer}").weight.numel()
    by_hand = []
    for at in range(1, 50):
        bits = dict.fromkeys(sizes, 16)
        bits |= {switch.layer: switch.bits for switch in engine.switching.logs[0] if switch.step <= at}
        by_hand.append(sum(sizes[layer] * bits[layer] for layer in sizes) / sum(sizes.values()))
    assert engine.switching.bits[0] == pytest.approx(sum(by_hand) / 49)
    assert "bits a weight | " in str(engine.switching)


@pytest.mark.parametrize("device", DEVICES)
def test_the_signal_and_the_threshold_are_those_of_the_logits(name, device):
    engine = make(name, device, window=3, multiple=1.5, prompt_tokens=5)
    tokens, _ = tokens_of(engine, 12)[0]
    static = Core(name, scratch(name, device, dict.fromkeys(copies_names(name), 16)))
    expected = pple(static.logits(PROMPT + tokens)).tolist()
    assert engine.switching.thresholds[0] == pytest.approx(1.5 * sum(expected[25:30]) / 5, rel=1e-2)
    first = min((switch.step for switch in engine.switching.logs[0]), default=12)
    assert engine.switching.signal[0][:first] == pytest.approx(expected[29 : 29 + first], rel=1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_in_a_batch_each_sequence_has_a_state_of_its_own(name, device):
    """Prompts with other thresholds switch at other tokens; each is what it is alone."""
    prompts = [PROMPT, [9], list(range(500, 560)), [7, 7, 7]]
    engine = make(name, device, window=4, layers=2, multiple=1.1)
    together, record = tokens_of(engine, 40, prompts), engine.switching
    assert len({len(log) for log in record.logs}) > 1
    if device == "cuda":
        return  # half precision in another order of sums: the tokens may differ
    for number, prompt in enumerate(prompts):
        (alone,) = tokens_of(engine, 40, [prompt])
        assert engine.switching.logs[0] == record.logs[number]
        assert alone[0] == together[number][0] and alone[1] == pytest.approx(together[number][1], abs=1e-3)


def test_the_same_generation_twice_and_piece_by_piece_has_the_same_log(name):
    engine = make(name, "cpu", **QUICK)
    whole, log = tokens_of(engine, 30), engine.switching.logs
    pieces = list(engine.generate("Once upon a time", 30, eos=False))
    assert tokens_of(engine, 30) == whole and engine.switching.logs == log
    assert sum(len(piece.tokens) for piece in pieces) == 30
    assert tokens_of(engine, 20)[0][0] == whole[0][0][:20]
    assert engine.switching.logs[0] == [switch for switch in log[0] if switch.step < 20]


def test_held_widths_stay_and_a_rule_of_ones_own_decides(name):
    engine = make(name, "cpu", **QUICK)
    engine.hold(8)
    at_once = [schedule.Switch(1, layer, 8) for layer in copies_names(name)]
    assert tokens_of(engine, 20)[0] == replayed(name, "cpu", at_once, 16, 20)
    assert engine.switching.logs == [[]] and engine.switching.bits == [8]
    engine.hold(None)
    engine.rule = lambda signal, token, state: [state.ahead[-1].layer] if token == 5 else []
    tokens_of(engine, 20)
    last = engine.ahead[-1].layer
    assert engine.switching.logs == [[schedule.Switch(7, last, 8)]]


def test_a_w8a8_prefill_has_8_bit_weights_and_activations(name):
    engine = make(name, "cpu", prefill="w8a8", threshold=1.0, window=5)
    lm = LowBitModel(models.load(name))

    class Wanted(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.weight = w8a8.quantize_weight(linear.weight.data)

        def forward(self, x):
            return w8a8.on_cpu(x.flatten(0, -2), *self.weight).unflatten(0, x.shape[:-1])

    for path in copies_names(name):
        lm.model.set_submodule(f"model.layers.{path}", Wanted(lm.model.get_submodule(f"model.layers.{path}")))
    with torch.no_grad():
        wanted = lm.model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    assert torch.allclose(engine.logits(PROMPT), wanted, atol=2e-3)
    tokens_of(engine, 10)
    assert engine.switching.bits == [16] and engine.switching.bits_with_prefill == pytest.approx([(9 * 16 + 8) / 10])


def test_copies_count_what_is_stored_and_what_a_step_reads(name):
    engine = make(name, "cpu", threshold=1e30, window=0, layers=1000)
    before = engine.model.read_bytes
    tokens_of(engine, 3)
    assert engine.model.read_bytes == before  # on a CPU every copy is dequantized
    assert isinstance(engine.model.blocks[0].qkv, copies.Copies)


@pytest.mark.parametrize("device", DEVICES)
def test_along_given_outputs_the_divergence_is_that_of_the_states_of_the_log(name, device):
    """With outputs of other lengths; each state's logits come from a model built from scratch."""
    prompts, outputs = [PROMPT, [9, 8]], [list(range(100, 120)), list(range(300, 312))]
    engine = make(name, device, **QUICK)
    full = scratch(name, device, dict.fromkeys(copies_names(name), 16))
    along = engine.forced(prompts, outputs, full)
    kl, record = along.kl, along.switching
    assert [len(each) for each in kl] == [20, 12] and [len(each) for each in record.signal] == [20, 12]
    assert max(switch.step for switch in record.logs[1]) < 12 <= max(switch.step for switch in record.logs[0])
    for prompt, output, divergences, log in zip(prompts, outputs, kl, record.logs):
        assert divergences[:4] == pytest.approx([0.0] * 4, abs=1e-5) and min(divergences[6:]) > 1e-5
        logits = states_along(name, device, prompt, output, log)
        exact = Core(name, full).logits(prompt + output)[len(prompt) - 1 : -1]
        p, q = exact.log_softmax(-1), logits.log_softmax(-1)
        first, second = logits.softmax(-1).topk(2).values.unbind(-1)
        assert along.gap[prompts.index(prompt)] == pytest.approx((first - second).tolist(), abs=2e-3)
        wanted, near = (p.exp() * (p - q)).sum(-1).tolist(), {"cpu": 1e-5, "cuda": 2e-3}[device]
        assert divergences == pytest.approx(wanted, rel=2e-2, abs=near)


@torch.inference_mode()
def states_along(name, device, prompt, output, log):
    """Logits float32 `[T, V]` of an output's tokens by models from scratch at the states of a log."""
    bits = dict.fromkeys(copies_names(name), 16)
    decoder = scratch(name, device, bits)
    steps = Steps(decoder, 1)
    *_, hidden = prefill(steps, torch.tensor(prompt, device=device), 0, 256)
    logits = [decoder.head(hidden[-1:])]
    for token in range(1, len(output)):
        if due := {switch.layer: switch.bits for switch in log if switch.step == token}:
            bits |= due
            decoder = scratch(name, device, bits)
        at = torch.tensor([len(prompt) + token - 1], dtype=torch.int32, device=device)
        row, ids = torch.zeros(1, dtype=torch.int32, device=device), torch.tensor([output[token - 1]], device=device)
        logits.append(decoder.head(step(decoder, steps.cache, Tokens(ids, row, at, at, at + 1))))
    return torch.cat(logits).float()


@torch.inference_mode()
def test_an_oracle_orders_moves_by_what_each_does_alone_to_the_predictions(name):
    """Against models built from scratch with one layer at a width, over every position of the outputs."""
    prompts, outputs = [PROMPT, [9, 8]], [list(range(100, 110)), list(range(300, 304))]
    engine = make(name, "cpu", order="oracle", **QUICK)
    full = scratch(name, "cpu", dict.fromkeys(copies_names(name), 16))
    engine.foresee(prompts, outputs, full)
    wanted = {}
    for bits in (8, 4):
        for layer in copies_names(name)[::5]:
            alone, nats = Core(name, scratch(name, "cpu", {layer: bits})), []
            for prompt, output in zip(prompts, outputs):
                p, q = (Core(name, full).logits(prompt + output), alone.logits(prompt + output))
                p, q = (logits[len(prompt) - 1 : -1].log_softmax(-1) for logits in (p, q))
                nats.append((p.exp() * (p - q)).sum(-1).mean())
            wanted[layer, bits] = float(sum(nats) / 2)
    measured = precision.output_divergences(engine.model, prompts, outputs, full, [16, 8, 4])
    for (layer, bits), value in wanted.items():
        assert measured[bits][layer] == pytest.approx(value, rel=5e-2, abs=1e-6)
    for bits in (8, 4):
        layers = [move.layer for move in engine.ahead if move.bits == bits]
        assert layers == sorted(copies_names(name), key=lambda layer: measured[bits][layer])
    assert [move.bits for move in engine.ahead] == [8] * 14 + [4] * 14
    with pytest.raises(UserError, match="it is a control of tables alone"):
        SwitchingEngine.load("pocket-3m", precision="flexquant(order=oracle)")


# --- captured steps, emulated -----------------------------------------------------------------------------------------


class Emulated:
    """Streams and graphs on a CPU: what is captured runs at each replay; `threads` are those that captured."""

    def __init__(self, monkeypatch):
        self.threads, self.capturing, run = [], threading.local(), precision.advance
        fake = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
        for name in ("Stream", "default_stream", "current_stream", "graph_pool_handle"):
            monkeypatch.setattr(torch.cuda, name, lambda: fake)
        for name in ("set_device", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda *arguments: None)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(self, run))

        def advance(*arguments):
            graph = getattr(self.capturing, "graph", None)
            run(*arguments) if graph is None else graph.calls.append(arguments)

        monkeypatch.setattr(precision, "advance", advance)


class Graph:
    """A captured step: the calls of `advance`."""

    def __init__(self, owner, run):
        self.owner, self.run, self.calls = owner, run, []

    def capture_begin(self, **how):
        assert how["capture_error_mode"] == "thread_local"
        assert not gc.isenabled()  # a collection in this thread may free an older graph, which ends the capture
        self.owner.threads.append(threading.current_thread().name)
        self.owner.capturing.graph = self

    def capture_end(self):
        self.owner.capturing.graph = None

    def replay(self):
        for call in self.calls:
            self.run(*call)


@pytest.mark.parametrize("ahead", [True, False])
def test_steps_of_all_states_are_captured_in_a_thread_that_makes_their_products(name, monkeypatch, ahead):
    """Each state once; the thread that decodes makes no product, so that a switch takes it the same at any state."""
    wanted = tokens_of(make(name, "cpu", **QUICK), 50)
    emulated, makers, rows_of, static = Emulated(monkeypatch), [], copies.rows_of, copies.static

    def rows(*arguments):
        makers.append(threading.current_thread().name)
        return rows_of(*arguments)

    def late(*arguments):
        time.sleep(0.05)  # longer than the steps up to the switch
        return static(*arguments)

    monkeypatch.setattr(copies, "rows_of", rows)
    monkeypatch.setattr(copies, "static", late)
    engine = make(name, "cpu", **QUICK)
    engine.steps.graphed, engine.steps.ahead = True, ahead
    assert tokens_of(engine, 50) == wanted
    states = 1 + len({switch.step for switch in engine.switching.logs[0]})
    recorder = engine.steps.recorder
    assert len(emulated.threads) == len(recorder.captured) == states
    assert all(thread.startswith("capture") for thread in emulated.threads)
    assert len(recorder.waited) == (states - 1 if ahead else 0)
    assert not ahead or all(thread.startswith("capture") for thread in makers)
    assert tokens_of(engine, 50) == wanted  # the first state's graph is kept
    assert gc.isenabled()


def test_a_generation_ends_when_nothing_is_captured(name, monkeypatch):
    """Its stats measure the device, on which a GPU allows no random numbers while another thread captures."""
    emulated, left = Emulated(monkeypatch), []
    engine, begun, measured, static = make(name, "cpu", **QUICK), [], core.measured, copies.static

    def slow(*arguments):
        begun.append(arguments)
        time.sleep(0.02)
        return static(*arguments)

    def seen(*arguments, **counted):
        left.append(len(begun) - len(engine.steps.recorder.captured))
        return measured(*arguments, **counted)

    monkeypatch.setattr(copies, "static", slow)
    monkeypatch.setattr(core, "measured", seen)
    engine.steps.graphed = True
    for tokens in range(4, 8):
        tokens_of(engine, tokens)
    assert left == [0] * 4 and len(emulated.threads) == len(begun) > 1


def test_the_interpreters_lock_is_handed_over_often_while_a_step_is_captured(name, monkeypatch):
    Emulated(monkeypatch)
    engine, seen, static = make(name, "cpu", **QUICK), [], copies.static

    def seen_static(*arguments):
        seen.append(sys.getswitchinterval())
        return static(*arguments)

    monkeypatch.setattr(copies, "static", seen_static)
    engine.steps.graphed, before = True, sys.getswitchinterval()
    tokens_of(engine, 10)
    assert seen and max(seen) <= 2 * precision.TURN < before == sys.getswitchinterval()


def test_one_tokens_products_of_several_widths_write_side_by_side():
    """As branches: each begins after what the main stream had launched, and the main stream waits for all of them."""
    torch.manual_seed(0)
    parts = [weights.Dense(torch.randn(48, 64)), weights.Dense(torch.randn(16, 64), torch.randn(16)),
             weights.Dense(torch.randn(32, 64))]  # fmt: skip
    x, apart = torch.randn(1, 64), weights.Joined(parts)
    assert torch.allclose(apart.side_by_side(x), apart(x), atol=1e-5)
    events = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            events.append((self.name, "waits for", other.name))

    now, sides = [Stream("main")], [Stream("a"), Stream("b")]

    @contextmanager
    def running(stream):
        now.append(stream)
        yield
        now.pop()

    into = weights.Dense.into

    def launched(product, x, y):
        events.append((now[-1].name, "writes", len(y[0])))
        into(product, x, y)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda: now[-1])
        patch.setattr(torch.cuda, "stream", running)
        patch.setattr(weights, "side_streams", lambda count: sides[:count])
        patch.setattr(weights, "captured", lambda tensor: True)
        patch.setattr(weights.Dense, "into", launched)
        apart.branches = True
        assert torch.allclose(apart.side_by_side(x), apart(x), atol=1e-5)
    fork = [("a", "waits for", "main"), ("a", "writes", 16), ("b", "waits for", "main"), ("b", "writes", 32)]
    assert events == [*fork, ("main", "writes", 48), ("main", "waits for", "a"), ("main", "waits for", "b")]


def test_neighbours_of_one_width_are_one_launch(name):
    engine = make(name, "cpu", **QUICK)
    qkv = engine.steps.copies[0]
    for bits, launches in {(8, 8, 16): 2, (8, 16, 8): 3, (4, 4, 4): 1}.items():
        product = qkv.product(bits)
        assert (len(product) if isinstance(product, weights.Joined) else 1) == launches
        assert product is qkv.product(bits)
    assert len(scratch(name, "cpu", {"0.self_attn.q_proj": 8, "0.self_attn.k_proj": 8}).blocks[0].qkv) == 2


# --- for users --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies_on", ["device", "host"])
def test_generate_streams_and_says_what_was_switched(capsys, copies_on):
    words = ["generate", "--model", "pocket-3m", "--recipe", "rtn-w4-g64", "--max-new-tokens", "30", "--device", "cpu"]
    options = f"flexquant-window=3-layers=20-threshold=1000-copies={copies_on}"
    assert main([*words, "--precision", options, "Once upon a time"]) == 0
    out = capsys.readouterr().out
    assert "bits a weight | " in out and "layers switched" in out and "tokens/s" in out
    assert "times static 16 bits" in out


@pytest.mark.parametrize(
    "text, message",
    [
        ("pmpd", "unknown precision 'pmpd'; choose from: flexquant"),
        ("flexquant(treshold=2)", "flexquant has no option 'treshold'; options: advance, "),
        ("flexquant(path=[4, 8])", "path is [4, 8]; it goes down only"),
        ("flexquant(threshold=0.5)", "PPLE is never below 1"),
        ("flexquant(threshold)", "needs a value"),
        ("flexquant(path=[16, 8)", "unbalanced"),
    ],
)
def test_a_schedule_that_means_nothing_is_a_sentence(text, message):
    with pytest.raises(UserError) as error:
        named.read(text)
    assert message in str(error.value)


def test_both_spellings_of_a_schedule_mean_the_same():
    assert named.read("flexquant") == Config()
    assert named.read("flexquant-threshold=2.0-path=[4, 3]") == named.read("flexquant(threshold=2, path=[4, 3])")
    assert named.recipe_at("gptq-w4-g128-sym", 8) == "gptq-w8-g128-sym" and named.recipe_at("rtn-w4-pc", 16) == "fp16"


@pytest.mark.parametrize("recipe", ["rtn-w4-g128 + qera(rank=4)", "spqt(sparsity=0.5)", "q4_k"])
def test_copies_need_one_quantizer(recipe):
    with pytest.raises(UserError, match="name one quantizer of weights for the copies"):
        SwitchingEngine.load("pocket-3m", recipe, device="cpu")


def test_shapes_have_no_order_by_divergence():
    with pytest.raises(UserError, match="has random weights, and so no order by divergence; say order=model or random"):
        SwitchingEngine.load("shape/Llama-2-7B", "rtn-w4-g128", 64, device="meta", precision="flexquant")


@pytest.mark.parametrize(
    "options, message",
    [
        (["--precision", "flexquant(path=[4, 8])"], "it goes down only"),
        (["--precision", "flexquant(threshold=0.9)"], "PPLE is never below 1"),
        (["--precision", "flexquant(window=20)", "--max-new-tokens", "20"], "longer than the generation of 20"),
        (["--precision", "flexquant(copies=disk)"], "device"),
        (["--precision", "flexquant", "--memory", "8GiB"], "--memory and --precision: give one of them"),
    ],
)
def test_what_generate_cannot_do_is_one_sentence_and_exit_code_2(capsys, options, message):
    words = ["generate", "--model", "pocket-3m", "--recipe", "rtn-w4-g64", "--device", "cpu", *options, "Once upon"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("order, count", [("model", 2), ("kl", 3)])
def test_full_precision_is_read_only_where_an_order_compares_with_it(monkeypatch, order, count):
    read = []

    def watched(*arguments, compressed=switching_engine.compressed):
        read.append(arguments)
        return compressed(*arguments)

    monkeypatch.setattr(switching_engine, "compressed", watched)
    precision = f"flexquant(path=[8, 4], order={order})"
    switching_engine.SwitchingEngine.load("pocket-3m", "rtn-w4-g64", 64, precision=precision, device="cpu")
    assert len(read) == count


def test_an_order_is_made_once_and_that_of_other_weights_or_histograms_is_one_sentence(tmp_path, monkeypatch, capsys):
    path = tmp_path / "order.json"

    def printed(*options, model="pocket-3m", recipe="rtn-w4-g64"):
        words = ["generate", "--model", model, "--recipe", recipe, "--device", "cpu", "--max-new-tokens", "24"]
        code = main([*words, "--order", str(path), "--precision", *(options or ["flexquant"]), "Once upon a time"])
        out, err = capsys.readouterr()
        assert code == 2 and err.count("\n") == 1 or code == 0
        return out.partition("\n")[0] if code == 0 else err

    text = printed("flexquant(threshold=1000, layers=20, window=3)")
    monkeypatch.setattr(switching_engine, "divergences", lambda *arguments: pytest.fail("it is kept"))
    assert printed("flexquant(threshold=1000, layers=20, window=3)") == text
    for message in (printed(model="pocket-5m"), printed(recipe="rtn-w4-g128"), printed("flexquant(path=[16, 4])")):
        assert "an order of pocket-3m, of other weights than pocket-" in message
    assert "an order of other histograms (bins is 2048 there and 64 here)" in printed("flexquant(bins=64)")
    assert "which order=random does not read" in printed("flexquant(order=random)")
    path.write_text('{"model": "pocket-3m"}')
    assert "no order of layers; name another --order" in printed()
    disk_errors.make_unreadable(path)
    assert f"{path}: {disk_errors.WHY}; name another --order" in printed()
    assert main(["generate", "--model", "pocket-3m", "--order", str(path), "x"]) == 2
    assert "--order goes with --precision" in capsys.readouterr().err


def test_bits_without_a_kernel_have_no_speed(capsys):
    with pytest.raises(UserError, match="3 bits have no kernel and lie in slots of 4"):
        SwitchingEngine.load("shape/Llama-2-7B", "rtn-w4-g128", 64, precision="flexquant(path=[4, 3], order=model)")
    options = "flexquant(path=[4, 3], window=3, layers=50, threshold=1000)"
    words = ["generate", "--model", "pocket-3m", "--recipe", "rtn-w4-g64", "--device", "cpu", "--max-new-tokens", "12"]
    assert main([*words, "--precision", options, "Once upon a time"]) == 0
    assert "no speed: 3 bits have no kernel" in capsys.readouterr().out


def test_a_generation_that_is_taken_up_again_has_the_same_schedule(name):
    """Along its own text, and after it was broken off."""
    engine = make(name, "cpu", **QUICK)
    tokens, log = tokens_of(engine, 40)[0][0], engine.switching.logs[0]
    full = scratch(name, "cpu", dict.fromkeys(copies_names(name), 16))
    assert engine.forced([PROMPT], [tokens], full).switching.logs == [log]
    pieces = engine.generate("Once upon a time", 40, eos=False)
    next(pieces)
    pieces.close()
    assert tokens_of(engine, 40)[0][0] == tokens and engine.switching.logs == [log]


def test_the_signal_and_the_greedy_choice_are_one_pass_over_the_logits(monkeypatch):
    """A step that listens asks for no other choice; a drawn one keeps the signal of what it draws from."""
    logits = torch.randn(3, 257, generator=torch.Generator().manual_seed(0)) * 3
    logits[2, 5] = float("nan")
    lengths = torch.tensor([4, 5, 6], dtype=torch.int32)
    drawn = SignalState(3, True, False, torch.device("cpu"))
    drawn.choose(logits, lengths)
    monkeypatch.setattr(decoding.argmax, "reference", lambda logits: pytest.fail("a second pass"))
    greedy = SignalState(3, False, False, torch.device("cpu"))
    greedy.choose(logits, lengths)
    assert greedy.ids.tolist() == [*logits[:2].argmax(1).tolist(), -1]
    for state in (greedy, drawn):
        assert torch.equal(state.pple[:2], pple(logits[:2])) and state.pple[2].isnan()
