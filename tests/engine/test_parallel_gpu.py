"""Tensor parallelism on several GPUs: every way gives the logits of one GPU, captured and launched, again and again.

The token that ranks choose together is the first of the largest among these logits.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from repro.engine import parallel, ranks, sharding
from repro.engine.parallel import Group, ParallelSteps
from repro.engine.prefill import together
from repro.engine.random_shape import random_decoder
from repro.engine.shapes import SHAPES
from repro.engine.step import Cache, run_of, step
from repro.kernels import argmax
from repro.recipes.recipe import parse

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")]
RECIPE = "rtn-w4-pc + spear(placement=random, k_share=0.6, rank=24)"
WAYS = ("separate", "joined", "peers")
PROMPT, NEW, REPLAYS = 20, 6, 300


def decoder(shape, recipe, device):
    """Two blocks of a shape, the same on every rank."""
    config = AutoConfig.for_model(**SHAPES[shape] | {"num_hidden_layers": 2})
    torch.manual_seed(0)
    return random_decoder(parse(recipe), config, 64, device, torch.bfloat16)


@torch.inference_mode()
def logits(model, captured):
    """float32 of the tokens behind a prompt, one at a time; of a captured step, too, how far its replays are apart.

    Last, the tokens that are chosen greedily.
    """
    ids = torch.randint(32000, (PROMPT + NEW,), generator=torch.Generator().manual_seed(1)).to(model.device)
    cache = Cache(model, 1)
    together(model, cache, [ids[:PROMPT].tolist()])
    tokens = run_of(ids[PROMPT : PROMPT + 1], 0, PROMPT)
    if not captured:
        states = [step(model, cache, run_of(ids[i : i + 1], 0, i)) for i in range(PROMPT, PROMPT + NEW)]
        made = torch.cat([model.head(one).float() for one in states])
        return made, 0.0, torch.cat([chosen(model, one) for one in states])
    fixed = [tokens.ids, tokens.rows, tokens.positions, tokens.lengths]
    fixed = [one.clone() for one in fixed]
    tokens = type(tokens)(fixed[0], fixed[1], fixed[2], fixed[2], fixed[3])
    for _ in range(2):
        hidden = step(model, cache, tokens)
        model.head(hidden), chosen(model, hidden)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **ParallelSteps.CAPTURE):
        hidden = step(model, cache, tokens)
        made, greedy = model.head(hidden), chosen(model, hidden)
    by_token, best = [], []
    for i in range(PROMPT, PROMPT + NEW):
        fixed[0].copy_(ids[i : i + 1])
        fixed[2].fill_(i)
        fixed[3].fill_(i + 1)
        graph.replay()
        by_token.append(made.float().clone())
        best.append(greedy.clone())
    for _ in range(REPLAYS):
        graph.replay()
    return torch.cat(by_token), (made.float() - by_token[-1]).abs().max().item(), torch.cat(best)


def chosen(model, hidden):
    """By the ranks' exchange, or among all logits of one GPU."""
    return model.head.greedy(hidden) if hasattr(model.head, "greedy") else argmax.argmax(model.head(hidden))


def error(output, reference):
    return float((output - reference).norm() / reference.norm())


def compared(facts, device):
    """By way: the error against one GPU, how far ranks are apart, and replays."""
    link, results = Group(dist.group.WORLD), {}
    for shape, recipe, ways in facts["cases"]:
        model = decoder(shape, recipe, device)
        want, _, _ = logits(model, False)
        own = sharding.shard(model, link.rank, link.ranks)
        if "spear" in recipe:
            parallel.compile_on_ranks(parallel.loads(own, link.ranks, device, torch.bfloat16))
        for way in ways:
            part = parallel.parallel(own, link, way)
            for captured in (False, True):
                logits_here, again, best = logits(part, captured)
                others = [torch.empty_like(logits_here) for _ in range(link.ranks)]
                dist.all_gather(others, logits_here)
                apart = max(float((other - logits_here).abs().max()) for other in others)
                wrong = int((best != argmax.reference(logits_here)).sum())
                results[f"{shape} {way} {captured}"] = [error(logits_here, want), apart, again, wrong]
        if "spear" in recipe:
            plain, _, _ = logits(parallel.parallel(own, link, "plain"), False)
            results[f"{shape} without"] = [error(plain, want), 0.0, 0.0, 0]
    return results


@pytest.mark.parametrize("count", [2, 3, 4])
def test_ranks_give_the_logits_of_one_gpu(count, monkeypatch):
    if count > GPUS:
        pytest.skip(f"needs {count} CUDA devices")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    cases = [["Llama-2-7B", "fp16", ["plain"]], ["Llama-2-7B", RECIPE, WAYS], ["Llama-2-70B", RECIPE, WAYS]]
    results = ranks.run(compared, {"cases": cases}, count, "cuda")
    for name, (off, apart, again, wrong) in results.items():
        summary = f"error {off:.2e}, ranks {apart:.1e} apart, replays {again:.1e} apart, {wrong} tokens wrong"
        print(f"{count} ranks, {name}: {summary}")
    assert len(results) == 2 + 2 * 6 + 2
    for name, (off, apart, again, wrong) in results.items():
        shape, _, way = name.partition(" ")
        if way == "without":
            continue
        most = 0.02 if "plain" in way else 0.5 * results[f"{shape} without"][0]  # what leaving compensators out changes
        assert off < most and apart == 0 and again == 0 and wrong == 0, name
