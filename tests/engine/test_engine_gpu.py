"""The engine on a GPU: graphs are the plain step, half precision is no worse than Transformers', packed weights score
what the harness scores. Needs a CUDA device; the same step runs on a CPU in test_engine.py."""

import gc
import math

import engines
import pytest
import torch

from repro import models
from repro.data import corpora
from repro.engine import decoding
from repro.generation import Engine
from repro.jobs import compress
from repro.jobs.target import Target
from repro.models import perplexity
from repro.specs import scale as scales

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
RECIPES = ["rtn-w8-pc", "rtn-w4-g128", "rtn-w3-g128", "rtn-w2-g128", "rtn-w4-g128 + qera(rank=4)"]
PROMPTS = [[5, 6, 7], list(range(20, 320)), [9], [11] * 40]  # a power of two: captured steps are padded to one


def text(model="pocket-3m"):
    """Token ids of a short text."""
    return torch.as_tensor(corpora.token_ids("tiny-wikitext", models.tokenizer(model)))


def texts(engine, **how):
    """Tokens and log probabilities of a ragged batch."""
    return [(t.tokens, t.logprobs) for t in engine.generate(PROMPTS, 48, eos=False, logprobs=True, **how)]


@pytest.mark.parametrize("recipe, dtype", [("fp16", "float32"), ("fp16", "bfloat16"), ("rtn-w4-g128", "float16")])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.8, "top_k": 50, "top_p": 0.9}], ids=["greedy", "drawn"])
def test_graphs_and_plain_steps_give_the_same_bits_and_so_do_two_runs(recipe, dtype, how):
    engine = Engine.load("pocket-3m", recipe, dtype=dtype, device="cuda")
    first, again = texts(engine, **how), texts(engine, **how)
    assert len(engine.steps.graphs) == 1
    engine.steps = decoding.Steps(engine.model, len(PROMPTS))
    engine.steps.graphed = False
    plain = texts(engine, **how)
    assert not engine.steps.graphs
    assert first == again and first == plain


@pytest.mark.parametrize("recipe", ["fp16", "rtn-w4-g128"])
def test_captured_steps_outlive_the_engine_that_made_them(recipe):
    """Weights of a captured step are not freed with the engine: other tensors would take their memory."""
    engine = Engine.load("pocket-3m", recipe, dtype="float16", device="cuda")
    wanted, steps = texts(engine), engine.steps
    engine.replace(0, down=lambda x: torch.zeros_like(x[:, :256]))
    assert texts(engine) != wanted
    for name in list(vars(engine)):
        delattr(engine, name)
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    dirt = [torch.full((2**20,), math.nan, device="cuda") for _ in range(64)]
    batch = decoding.Decoding(PROMPTS, [48] * len(PROMPTS), decoding.Sampling(), [0] * len(PROMPTS), True)
    tokens_of = [[] for _ in PROMPTS]
    for step in batch.run(steps, 256):
        for i, token, _ in step:
            tokens_of[i].append(token)
    assert tokens_of == [tokens for tokens, _ in wanted] and len(dirt) == 64


def errors(logits, exact):
    """Relative norm of the difference of logits."""
    return ((logits.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", [*models.pocket_names(), *engines.LAYOUTS])
def test_half_precision_is_no_farther_from_float32_than_transformers(name, dtype, tmp_path):
    """At most 1.5 times its error, in a prefill and in the attention kernel of a step."""
    name = name if name.startswith("pocket") else engines.save(name, tmp_path)
    ids, kind = text()[:600].cuda(), getattr(torch, dtype)
    with torch.no_grad():
        model = models.load(name, "cuda", "float32")
        exact = model(ids[None], use_cache=False).logits[0].double()
        theirs = model.to(kind)(ids[None], use_cache=False).logits[0]
    engine = Engine.load(name, dtype=dtype, device="cuda")
    assert errors(engine.logits(ids), exact) <= 1.5 * errors(theirs, exact)
    engine.logits(ids[:568])
    decoded = engine.tree(0, 568, ids[568:], list(range(-1, 31)))  # a chain: each node's parent is the one before
    assert errors(decoded, exact[568:]) <= 1.5 * errors(theirs[568:], exact[568:])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", models.pocket_names())
def test_packed_weights_score_what_the_harness_scores(name, recipe):
    """Perplexity within 0.1 %: packed weights in the engine's half precision, dequantized ones in float32."""
    engine = Engine.load(name, recipe, dtype="float16", device="cuda")
    target = Target(scales.load().here(), name, recipe, 0)
    lm = compress.load(target.options() | {"device": "cuda", "dtype": "float32"}, compress.job(target).folder)
    windows = perplexity.windows(text().numpy(), 1024, 8)
    theirs = perplexity.perplexity(perplexity.score(lm.model, windows))
    ours = math.exp(-torch.cat([engine.score(window) for window in windows]).double().mean().item())
    assert ours == pytest.approx(theirs, rel=1e-3)


def test_a_thousand_tokens_take_no_more_memory_of_the_gpu():
    engine = Engine.load("pocket-3m", "rtn-w4-g128", dtype="float16", device="cuda")
    sizes = {}
    for count, _ in enumerate(engine._run(engine._decoding([[3, 4, 5]], 1000, decoding.Sampling(), 0)), start=1):
        sizes[count] = torch.cuda.memory_allocated()
    assert len(sizes) == 1000 and sizes[1000] <= sizes[100]
