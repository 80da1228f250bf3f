"""Mixed iterations of the engine: the tokens that each request has alone, whatever is computed beside it."""

import random

import engines
import pytest
import torch
from engines import FEW, TINY
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("triton")

from repro.baselines import rtn  # noqa: E402
from repro.core.errors import NotMeasurable  # noqa: E402
from repro.engine import corrected, overlapped, serving, weights  # noqa: E402
from repro.engine.corrected import Compensated, Corrected  # noqa: E402
from repro.engine.random_shape import random_decoder  # noqa: E402
from repro.engine.scheduling import (  # noqa: E402
    LatencyTable,
    LatencyTarget,
    Request,
    Scheduler,
    StaticBudget,
    serve,
)
from repro.engine.serving import Iterations, MixedSteps, latency_table  # noqa: E402
from repro.engine.step import Cache, run_of, step  # noqa: E402
from repro.generation import Engine  # noqa: E402
from repro.kernels import compensated_gemv  # noqa: E402
from repro.methods import spear  # noqa: E402
from repro.models.lowbit import LowBitModel  # noqa: E402
from repro.recipes.recipe import parse  # noqa: E402

CPU = torch.device("cpu")
WIDE = TINY | dict(hidden_size=512, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=4)
TABLE = LatencyTable({4: 2.0, 16: 3.0, 32: 5.0})


class Ticking:
    """A clock on which an iteration takes ten milliseconds."""

    def __init__(self, iterations):
        self.iterations, self.seconds, self.sizes = iterations, 0.0, []

    def now(self):
        return self.seconds

    def skip_to(self, seconds):
        self.seconds = seconds

    def __call__(self, batch):
        self.iterations(batch)
        self.sizes.append((len(batch.decodes), batch.tokens))
        self.seconds += 0.01


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A tiny decoder in float32 with grouped heads."""
    name = engines.save("llama", tmp_path_factory.mktemp("tiny"))
    return Engine.load(name, context=64, dtype="float32", device="cpu").model


@pytest.fixture(scope="module")
def compensated():
    """A tiny model, rounded, with trained compensators."""
    torch.manual_seed(0)
    lm = LowBitModel(LlamaForCausalLM(LlamaConfig(**TINY)).eval())
    rtn.apply(lm, None, rtn.Config(bits=4, group=0))
    spear.apply(lm, None, spear.Config(**FEW, budget=0.2, alpha=2.0))
    return lm


def workload(model, count=12):
    rng = random.Random(0)
    requests, prompts, at = [], {}, 0.0
    for number in range(count):
        at += rng.expovariate(60)
        requests.append(Request(number, at, rng.randint(1, 40), rng.randint(1, 12)))
        prompts[number] = [rng.randrange(model.config.vocab_size) for _ in range(requests[-1].prompt_tokens)]
    return requests, prompts


@torch.inference_mode()
def alone(model, prompt, new):
    """Greedy tokens of one sequence, token by token."""
    cache, ids, made = Cache(model, 1), torch.tensor(prompt), []
    for _ in range(new):
        start = len(prompt) + len(made) - len(ids)
        logits = model.head(step(model, cache, run_of(ids, 0, start)))[-1:]
        made.append(int(logits.argmax()))
        ids = torch.tensor(made[-1:])
    return made


def check(model, policy, rows=5):
    requests, prompts = workload(model)
    steps = MixedSteps(model, Cache(model, rows), sizes=[8, 64])
    machine = Ticking(Iterations(steps, prompts))
    serve(requests, Scheduler(policy, rows), machine, machine)
    assert any(decodes and tokens > decodes for decodes, tokens in machine.sizes), "none of the batches is mixed"
    for request in requests:
        want = alone(model, prompts[request.number], request.new_tokens)
        assert machine.iterations.tokens[request.number] == want


@pytest.mark.parametrize(
    "policy",
    [StaticBudget(6), StaticBudget(64), LatencyTarget(TABLE, 5.5, least=2, most=32)],
    ids=["budget of 6", "budget of 64", "target of 5.5 ms"],
)
def test_tokens_are_those_of_each_request_alone(plain, policy):
    check(plain, policy)


def test_the_same_with_compensators(compensated):
    model = weights.decoder(compensated, 64, CPU, torch.float32)
    assert any(isinstance(block.qkv, Corrected) for block in model.blocks)
    check(model, StaticBudget(16))


def test_more_tokens_than_an_iteration_has_are_refused(plain):
    steps = MixedSteps(plain, Cache(plain, 2), sizes=[4])
    with pytest.raises(NotMeasurable, match="5 tokens of an iteration; at most 4"):
        steps([1] * 5, [0] * 5, range(5), [4])


def test_padding_writes_nothing(plain, monkeypatch):
    """As on a GPU, where an iteration is padded to a captured size."""
    cache, bare = Cache(plain, 3), Cache(plain, 3)
    steps = MixedSteps(plain, cache, sizes=[4, 8])
    want = MixedSteps(plain, bare, sizes=[8])([5, 6, 7], [1, 1, 1], [0, 1, 2], [2])
    steps([9] * 8, [0] * 8, range(8), [7])  # what a former iteration left is not computed again
    cache.keys.zero_()
    cache.values.zero_()
    seen = []
    real = serving.step
    monkeypatch.setattr(serving, "step", lambda model, cache, tokens: seen.append(tokens) or real(model, cache, tokens))

    class Graph:
        def replay(self):
            steps._compute(4)

    steps.graphed, steps.graphs = True, {4: Graph()}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"synchronize": lambda self: None})())
    assert steps([5, 6, 7], [1, 1, 1], [0, 1, 2], [2]) == want
    assert seen[0].rows.tolist() == [1, 1, 1, -1]
    for mine, theirs in ((cache.keys, bare.keys), (cache.values, bare.values)):
        assert not mine[:, [0, 2]].any() and not mine[:, 1, :, 3:].any()
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


# --- SPEAR's compensators by phase ------------------------------------------------------------------------------------


def test_compensators_are_dispatched_by_phase(compensated, monkeypatch):
    """One token by the fused kernel, more beside the product; both are the decoder's own results."""
    used, reference = [], compensated_gemv.reference
    monkeypatch.setattr(corrected, "runs_kernel", lambda device: True)
    monkeypatch.setattr(
        weights, "packed_product", lambda packed, bias, dtype, order=None: weights.Packed(packed, bias, order)
    )
    monkeypatch.setattr(weights.kernel, "wna16", lambda x, packed: x @ weights.packing.dequantize(packed).T)
    monkeypatch.setattr(compensated_gemv, "compensated_gemv", lambda *args: used.append(1) or reference(*args))
    model = weights.decoder(compensated, 64, CPU, torch.float32)
    by_phase = overlapped.dispatched(model)
    counts = [serving.compensators(product) for product in engines.products(by_phase)]
    with_some = [isinstance(product, Compensated) for product in engines.products(model)]
    assert [count > 0 for count in counts] == with_some and any(with_some)
    beside, real = [], overlapped.compensate.latent
    monkeypatch.setattr(overlapped.compensate, "latent", lambda x, made: beside.append(len(x)) or real(x, made))
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    first = next(i for i, block in enumerate(model.blocks) if isinstance(block.qkv, Compensated))
    mine, theirs = by_phase.blocks[first].qkv, model.blocks[first].qkv
    torch.testing.assert_close(mine(x), theirs(x), rtol=1e-4, atol=1e-5)
    assert not used and beside == [5], "several tokens do not go through the fused product"
    torch.testing.assert_close(mine(x[:1]), theirs(x[:1]), rtol=1e-4, atol=1e-5)
    assert len(used) == 2 and beside == [5]
    check(by_phase, StaticBudget(16))


def test_a_table_adds_what_a_placement_costs():
    """Two blocks: one product with two compensators, one with one; the backbone's iteration is measured as a whole."""

    class Product(torch.nn.Module):
        def __init__(self, compensators):
            super().__init__()
            self.compensators = compensators

    bare, one, two = torch.nn.Identity(), Product(1), Product(2)
    blocks = [dict(qkv=two, out=bare, gate_up=bare, down=one), dict(qkv=bare, out=bare, gate_up=bare, down=one)]
    model = type("Model", (), {"blocks": [type("Block", (), block) for block in blocks]})
    products = {(name, 0): {8: 1.0, 64: 2.0} for name in weights.LAYERS}
    products |= {("qkv", 2): {8: 1.5, 64: 2.75}, ("down", 1): {8: 1.125, 64: 1.5}}
    table = latency_table(model, {8: 4.0, 64: 6.0}, products)
    assert table(8) == 4.0 + 0.5 + 2 * 0.125
    assert table(64) == 6.0 + 0.75, "a product that is faster with compensators is noise"


def test_products_and_iterations_are_measured_by_number_of_tokens(plain):
    times_of = serving.measured_products([plain], [1, 4], repeats=2)
    assert set(times_of) == {(name, 0) for name in weights.LAYERS}
    assert all(set(times) == {1, 4} and min(times.values()) > 0 for times in times_of.values())
    steps = MixedSteps(plain, Cache(plain, 4), sizes=[8])
    times = serving.measured_iterations(steps, [2, 8], decodes=3, context=20, repeats=2)
    assert set(times) == {2, 8} and min(times.values()) > 0


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_iteration_is_the_launched_one():
    """A shape of packed weights with compensators: overlapped in a graph, and one launch after another."""
    device = torch.device("cuda")
    config = LlamaConfig(**{name: value for name, value in WIDE.items() if name != "model_type"})
    recipe = parse("rtn-w4-pc + spear(placement=random, k_share=0.6, rank=24)")
    model = random_decoder(recipe, config, 64, device, torch.bfloat16)
    by_phase = overlapped.dispatched(model)
    assert sum(map(serving.compensators, engines.products(by_phase))) > 4
    captured, launched = (MixedSteps(by_phase, Cache(by_phase, 4), sizes=[1, 8, 48]) for _ in range(2))
    captured.capture()
    launched.graphed = False
    launched.answer = torch.zeros(4, dtype=torch.int64)
    batches = [
        (list(range(3, 40)), [0] * 20 + [2] * 17, [*range(20), *range(17)], [19, 36]),
        ([7, 8, 9, 10, 11], [0, 2, 3, 3, 3], [20, 17, 0, 1, 2], [0, 1, 4]),
        ([5], [0], [21], [0]),
    ]
    for batch in batches:
        captured(*batch)
        launched(*batch)
        torch.cuda.synchronize()
        for mine, theirs in (
            (captured.cache.keys, launched.cache.keys),
            (captured.cache.values, launched.cache.values),
        ):
            torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05)
