"""Lists of a shape made of what a trained model keeps: shares, runs, kinds of matrix, and what its products read."""

import copy

import pytest
import torch
from engines import products
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("triton")

from repro.baselines import q4_k as quantizer  # noqa: E402
from repro.engine import q4_k, shape_lists, weights  # noqa: E402
from repro.generation import engine as engines  # noqa: E402
from repro.methods.spqt import sparse_inputs  # noqa: E402
from repro.metrics import shape_decode  # noqa: E402
from repro.metrics.shape_decode import AS_TRAINED  # noqa: E402
from repro.metrics.sparsity import zeros  # noqa: E402
from repro.models.lowbit import LowBitModel  # noqa: E402

TINY = dict(
    model_type="llama", hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=300, max_position_embeddings=128,
)  # fmt: skip
LARGER = TINY | {"hidden_size": 512, "intermediate_size": 1280, "num_hidden_layers": 4, "num_attention_heads": 8}


@pytest.fixture(scope="module")
def windows():
    return torch.randint(300, (2, 64), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def lm(windows):
    """Under thresholds of TEAL, which differ by block and kind."""
    torch.manual_seed(0)
    lm = LowBitModel(LlamaForCausalLM(LlamaConfig(**TINY, initializer_range=0.08)).eval())
    quantizer.apply(lm, None, quantizer.Config(layout="zigzag"))
    config = sparse_inputs.Config(sparsity=0.4, thresholds="teal", tokens=128, search=64, step=0.25)
    sparse_inputs.apply(lm, windows, config)
    return lm


def test_masks_are_those_of_the_layers_inputs(lm, windows):
    masks, counted = shape_lists.masks_of(lm, windows), zeros(copy.deepcopy(lm), windows)
    for kind, (layer, *_) in weights.LAYERS.items():
        shares = [counted[f"model.layers.{number}.{layer}"] for number in range(2)]
        assert [len(part) for part in masks[kind].kept] == [128, 128]
        for part, share in zip(masks[kind].kept, shares):
            assert 1 - part.float().mean().item() == pytest.approx(share, abs=1e-6)
        assert 1 - masks[kind].share == pytest.approx(sum(shares) / 2, abs=1e-6)
    assert masks["down"].kept[0].shape[1] == 768 and masks["qkv"].share != masks["down"].share


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_list_is_tokens_one_behind_another_but_for_what_the_share_asks(share):
    """Runs of sixteen stay runs, and as many single inputs change as the share takes, all in one direction."""
    kept = torch.zeros(40, 64, dtype=torch.bool)
    for token in range(40):
        kept[token, 16 * (token % 4) :][:32] = True
    active = shape_lists.list_of(kept, share, 300, torch.Generator().manual_seed(3))
    tokens = torch.randperm(40, generator=torch.Generator().manual_seed(3))[:5]
    before = kept[tokens].flatten()[:300]
    after = torch.zeros(300, dtype=torch.bool)
    after[active[1 : 1 + int(active[0])].long()] = True
    assert active.shape == (301,) and int(active[0]) == round(share * 300) == after.sum()
    assert (before != after).sum() == abs(int(before.sum()) - round(share * 300))


def test_products_of_a_shape_read_the_lists_of_the_model(lm, windows, monkeypatch):
    """Of the block at the same depth; the lists of their own inputs are made and left."""
    monkeypatch.setitem(engines.SHAPES, "larger", LARGER)
    monkeypatch.setattr(weights, "runs_q4_k", lambda device, dtype: True)
    masks = shape_lists.masks_of(lm, windows)
    lower = (torch.arange(256) < 128).expand(128, 256)
    masks["out"] = shape_lists.Masks([lower, ~lower], 0.5)
    core = shape_decode.loaded("larger", *AS_TRAINED["teal40"], 9, torch.device("cpu"), masks)
    read, real = [], q4_k.zigzag_sparse
    monkeypatch.setattr(q4_k, "zigzag_sparse", lambda *args: read.append(args[-1]) or real(*args))
    assert core.time(3, 2).new_tokens == 2
    kinds = ("qkv", "out", "gate_up", "down")
    lists = [product.active for product in products(core.model, kinds)]
    assert len(read) % 16 == 0 and all(one is other for one, other in zip(read, lists))
    for block in core.model.blocks:
        for kind in kinds:
            product = getattr(block, kind)
            inputs = shape_lists.inputs_of(block, kind)
            assert int(product.active[0]) == round(masks[kind].share * inputs) and len(product.active) == inputs + 1
    halves = [set((block.out.active[1:257] % 256 // 128).tolist()) for block in core.model.blocks]
    assert halves == [{0}, {0}, {1}, {1}]
