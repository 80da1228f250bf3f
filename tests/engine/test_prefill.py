"""Prompts of a batch into the cache: together what each is alone, each weight dequantized once, attention causal."""

import dataclasses
import inspect

import engines
import pytest
import torch
from torch.nn import functional as F

from repro.engine import core, corrected, prefill, weights
from repro.engine.prefill import Span, spans, together
from repro.engine.step import Cache
from repro.generation import Engine
from repro.kernels import packing

PROMPTS = [[5, 6, 7], [8, 9, 10], list(range(20, 60)), [11]]
GROUPS = spans([3, 3, 40, 1], 1)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(request, tmp_path_factory):
    """A tiny decoder in float32 with grouped heads."""
    name = engines.save(request.param, tmp_path_factory.mktemp("tiny"))
    return Engine.load(name, context=64, dtype="float32", device="cpu").model


def test_neighbours_of_one_length_are_one_span():
    assert spans([3, 3, 40, 3, 1, 1], 2) == [Span(2, 2, 3), Span(4, 1, 40), Span(5, 1, 3), Span(6, 2, 1)]


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_a_batch_is_its_prompts_one_by_one(model, chunk):
    cache = Cache(model, 6)
    states = together(model, cache, PROMPTS, chunk, first=1)
    assert cache.lengths.tolist() == [0, 3, 3, 40, 1, 0]
    for row, (ids, hidden) in enumerate(zip(PROMPTS, states, strict=True), start=1):
        alone = Cache(model, 1)
        (want,) = together(model, alone, [ids])
        torch.testing.assert_close(hidden, want, rtol=1e-4, atol=1e-5)
        for mine, theirs in ((cache.keys, alone.keys), (cache.values, alone.values)):
            torch.testing.assert_close(mine[:, row, :, : len(ids)], theirs[:, 0, :, : len(ids)], rtol=1e-4, atol=1e-5)
            assert not mine[:, row, :, len(ids) :].any() and not mine[:, [0, 5]].any()


def test_what_a_graph_captures_is_the_prefill(model):
    """States and keys, from tokens that were put on the device before."""
    cache, alone = Cache(model, 6), Cache(model, 6)
    states = prefill.forward(model, cache, prefill.packed(PROMPTS, 1, model.device), GROUPS, 7)
    assert torch.equal(states, torch.cat(together(model, alone, PROMPTS, 7, first=1)))
    assert torch.equal(cache.keys, alone.keys) and torch.equal(cache.values, alone.values)
    assert not cache.lengths.any()


def test_attention_skips_what_a_mask_would_hide(model, monkeypatch):
    """Without a mask the library's kernel leaves out the tiles above the diagonal; rows of one length are one call."""
    real, launched = F.scaled_dot_product_attention, []

    def noted(q, k, v, attn_mask=None, **more):
        launched.append((len(q), q.shape[2], k.shape[2], attn_mask, more["is_causal"]))
        return real(q, k, v, attn_mask, **more)

    monkeypatch.setattr(prefill.F, "scaled_dot_product_attention", noted)
    together(model, Cache(model, 4), PROMPTS, 7)
    calls = [(2, 3, 3, None, True), (1, 40, 40, None, True), (1, 1, 1, None, True)]
    assert launched == calls * len(model.blocks)


def test_a_prompt_of_2048_tokens_is_one_chunk():
    """An 8B block of so many tokens takes an H200 1.5 ms, more than the host needs to launch it."""
    assert inspect.signature(prefill.together).parameters["chunk"].default == prefill.CHUNK >= 2048
    assert inspect.signature(prefill.forward).parameters["chunk"].default == prefill.CHUNK
    assert core.CHUNK is prefill.CHUNK


def test_a_block_comes_once_a_prefill_however_many_chunks(model):
    class Streamed(type(model)):
        def in_turn(self):
            for block in self.blocks:
                taken.append(block)
                yield block

    taken = []
    together(Streamed(**vars(model)), Cache(model, 4), PROMPTS, 5)
    assert taken == list(model.blocks)


# --- packed weights ---------------------------------------------------------------------------------------------------


def packed_product(rows, columns, bias=False, order=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    scales = torch.rand(rows, columns // 32, generator=generator) * 0.01 + 0.005
    zeros = torch.randint(0, 16, scales.shape, generator=generator)
    bias_values = torch.randn(rows, generator=generator).half() if bias else None
    permuted = torch.randperm(columns, generator=generator) if order else None
    return weights.Packed(packing.pack(codes, scales, zeros, 4, 32), bias_values, permuted)


def products():
    plain, biased = packed_product(48, 64), packed_product(32, 64, bias=True, order=True, seed=1)
    added = torch.nn.Linear(64, 16).half()
    return {
        "packed": plain,
        "bias and order": biased,
        "joined": weights.Joined([plain, biased]),
        "corrected": corrected.Corrected(plain, [(16, added)]),
    }


@pytest.mark.parametrize("name", products())
def test_an_expanded_product_is_the_same_product(name):
    x, product = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).half(), products()[name]
    dense = corrected.expanded(product, 4096, torch.float16)
    assert "Packed" not in repr(dense)
    torch.testing.assert_close(dense(x), product(x), rtol=4e-3, atol=4e-3)


def test_few_tokens_go_on_with_packed_weights_and_other_products_stay():
    product = packed_product(48, 64)
    assert product.expanded(8, torch.float16) is product
    dense = weights.Dense(torch.randn(3, 4))
    assert corrected.expanded(dense, 4096, torch.float16) is dense


def test_a_weight_is_dequantized_once_a_prefill(model):
    """And not at all of its own where one chunk holds all tokens, whose product does it."""

    class Counted(torch.nn.Module):
        def __init__(self, product):
            super().__init__()
            self.product = product

        def forward(self, x):
            calls.append("product")
            return self.product(x)

        def expanded(self, tokens, dtype):
            calls.append(f"expanded for {tokens} in {dtype}")
            return self.product

    calls, names = [], ("qkv", "out", "gate_up", "down")
    blocks = []
    for block in model.blocks:
        blocks.append(dataclasses.replace(block, **{name: Counted(getattr(block, name)) for name in names}))
    counted = dataclasses.replace(model, blocks=tuple(blocks))
    (whole,) = together(counted, Cache(model, 1), [PROMPTS[2]])
    assert calls == ["product"] * 4 * len(blocks)
    calls.clear()
    (parts,) = together(counted, Cache(model, 1), [PROMPTS[2]], 7)
    assert calls == ["expanded for 7 in torch.float32"] * 4 * len(blocks)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)
