"""Stored bits against arithmetic by hand, on a tied Llama: 2 layers, 64 wide, FFN 128, k and v 32, vocabulary 96."""

import dataclasses
from collections import Counter
from itertools import chain, product

import numpy as np
import pytest
import tiny
import torch
from bit_streams import numbers, stream

from repro.baselines import gptq, low_rank, rtn
from repro.core.errors import UserError
from repro.metrics import storage
from repro.models import bits
from repro.models.lowbit import LowBitModel
from repro.recipes import recipe
from repro.specs import scale, tables

# One layer: q and o 64x64, k and v 32x64, gate and up 128x64, down 64x128; 64+32+32+64+128+128+64 = 512 rows.
BLOCK_WEIGHTS = 2 * (2 * 4096 + 2 * 2048 + 3 * 8192)
OTHER_WEIGHTS = 96 * 64 + 5 * 64  # embedding, of which the head is the same, and five norms


def quantized(module, config) -> LowBitModel:
    lm = LowBitModel(tiny.model("llama").half() if module is rtn else tiny.model("llama"))
    module.apply(lm, tiny.tokens(), config)
    return lm


def test_a_plain_model():
    report = bits.report(LowBitModel(tiny.model("llama").half()))
    assert report["block_weights"] == BLOCK_WEIGHTS == 73728
    assert report["block"] == {"codes": 0, "scales": 0, "zeros": 0, "indices": 0, "unquantized": 73728 * 16}
    assert report["bpw"] == 16
    assert report["other"] == OTHER_WEIGHTS * 16 == 103424
    assert report["bytes"] == (73728 + 6464) * 2 and report["bits"] == 8 * report["bytes"]


def test_a_plain_model_computed_in_float32_but_stored_in_16_bits():
    plain = LowBitModel(tiny.model("llama"))
    assert bits.report(plain)["bpw"] == 32
    assert bits.report(plain, float_bits=16) == bits.report(LowBitModel(tiny.model("llama").bfloat16()))


def test_rtn_in_groups_of_32():
    report = bits.report(quantized(rtn, rtn.Config(group=32)))
    groups = 73728 // 32
    assert report["block"] == {
        "codes": 73728 * 4,
        "scales": groups * 16,
        "zeros": groups * 4,
        "indices": 0,
        "unquantized": 0,
    }
    assert report["bpw"] == 4 + 20 / 32
    assert report["bytes"] == (294912 + 36864 + 9216 + 103424) // 8 == 55552


def test_rtn_symmetric_3_bits_per_channel():
    report = bits.report(quantized(rtn, rtn.Config(bits=3, symmetric=True, scale_dtype="float32")))
    assert report["block"] == {"codes": 73728 * 3, "scales": 1024 * 32, "zeros": 0, "indices": 0, "unquantized": 0}
    assert report["bpw"] == 3 + 32 * 1024 / 73728


def test_act_order_pays_for_its_index():
    report = bits.report(quantized(gptq, gptq.Config(group=32, act_order=True)))
    assert report["block"]["indices"] == 2 * (6 * 64 + 128) * 32
    static = bits.report(quantized(gptq, gptq.Config(group=32, act_order=True, static_groups=True)))
    assert report["bits"] - static["bits"] == 32768


def test_a_layer_left_alone_a_bias_and_what_a_step_reports():
    lm = LowBitModel(tiny.model("qwen2").half())
    rtn.apply(lm, None, rtn.Config(group=32))
    del lm.weights["model.layers.1.mlp.down_proj"]
    lm.extra_bits = {"compensators": 1000, "scales": 24}
    report = bits.report(lm)
    rest = 73728 - 8192
    assert report["block"] == {
        "codes": rest * 4,
        "scales": rest // 2 + 24,
        "zeros": rest // 8,
        "indices": 0,
        "unquantized": 8192 * 16,
        "compensators": 1000,
    }
    assert report["bpw"] == sum(report["block"].values()) / 73728
    norms_and_biases = 5 * 64 + 2 * 128  # biases of q, k and v
    assert report["other"] == (2 * 96 * 64 + norms_and_biases) * 16  # embedding and head apart


def test_a_quantized_head_tied_to_the_embedding_counts_once():
    lm = LowBitModel(tiny.model("llama").half())
    head = lm.model.lm_head.weight
    lm.set_weight("lm_head", rtn.grid.rtn(head.data, rtn.Config(group=64)))
    report = bits.report(lm)
    assert lm.model.model.embed_tokens.weight is head
    assert report["other"] == 96 * (64 * 4 + 16 + 4) + 5 * 64 * 16
    assert report["bpw"] == 16


def test_a_model_without_memory():
    with torch.device("meta"):
        assert bits.report(LowBitModel(tiny.MODELS["llama"]().half()))["bytes"] == (73728 + 6464) * 2


def test_a_model_without_blocks():
    with pytest.raises(UserError, match="Linear has no linear layers in transformer blocks"):
        bits.report(LowBitModel(torch.nn.Linear(4, 4)))


# --- a packed file ----------------------------------------------------------------------------------------------------

SHORT = "rank=2, samples=4, cka_samples=4, tokens=16"  # nothing is trained: what is stored is the same
METHODS = {
    **{f"rtn-w{w}-{g}": f"rtn-w{w}-{g}" for w, g in product((2, 3, 4, 8), ("pc", "g32-sym"))},
    **{step: f"{step}-w3-g32" for step in ("gptq-act_order", "awq")},
    "omniquant": "omniquant(w=3, g=32, epochs=1)",
    "e2e_qp": "rtn-w3-g32 + e2e_qp(epochs=0, batch=1, tokens=192)",
    "staged_ap": "staged_ap(w=3, g=32, epochs=0, tokens=192)",
    "efficientqat": "efficientqat(w=3, g=32, epochs=0, tokens=192)",
    "smoothquant": "smoothquant(w=3, a=4, g=32)",
    "spinquant": "spinquant(w=3, a=4, g=32, tokens=192)",
    "paretoq": "paretoq(w=3, epochs=0, tokens=192)",
    "bitdistiller": "bitdistiller(w=3, g=32, epochs=0, batch=1, tokens=192)",
    **{step: f"rtn-w3-pc + {step}(rank=2)" for step in ("lqer", "qera", "eora", "aser", "loftq")},
    **{f"{step} int8": f"rtn-w3-pc + {step}(rank=2, factor_bits=8)" for step in ("lqer", "loftq")},
    "uniform": f"rtn-w3-pc + uniform({SHORT}, epochs=0)",
    "spear": f"rtn-w3-pc + spear({SHORT}, epochs1=0, epochs2=0, placement=full)",
    "spear gate=false": f"rtn-w3-pc + spear({SHORT}, epochs1=0, placement=full, gate=false)",
    "spqt": "rtn-w4-g32 + spqt(tokens=192, search=48)",
}
WIDTHS = {"A": 16, "B": 16, "W1": 16, "b1": 16, "W2": 16, "b2": 16, "A_scale": 32, "B_scale": 32, "threshold": 32}


def test_every_method_is_packed():
    steps = set()
    for text in METHODS.values():
        steps |= {step.name for step in recipe.parse(text).steps}
    others = {"q4_k", "bitbybit", "sliced", "matquant", "group_qat", "planted", "load", "hqq", "dns"}
    assert steps == set(recipe.STEPS) - others, (
        "formats of their own: test_q4_k, test_bitbybit, test_qat and test_baselines hold them"
    )


@pytest.mark.parametrize("name", METHODS)
def test_one_layer_packed_has_the_bytes_that_are_counted_and_gives_the_same_weight(name):
    """Codes, zeros, scales, indices, factors and gates at their stated widths; nothing else is needed to compute."""
    lm, layer = LowBitModel(tiny.model("llama")), "model.layers.1.self_attn.k_proj"
    for step in recipe.parse(METHODS[name]).steps:
        step.module.apply(lm, tiny.tokens(8, 24), step.config)
    weight = lm.weights[layer]
    parts = {"codes": stream(weight.codes, weight.bits), "scales": weight.scales.numpy().tobytes()}
    parts["zeros"] = stream(weight.zeros, weight.zero_bits) if weight.zero_bits else b""
    parts["indices"] = b"" if weight.group_index is None else weight.group_index.numpy().tobytes()
    assert weight.group_index is None or weight.group_index.dtype == torch.int32
    counted = weight.stored_bits()
    assert {kind: (bits + 7) // 8 for kind, bits in counted.items()} == {kind: len(b) for kind, b in parts.items()}

    codes = numbers(parts["codes"], weight.bits, weight.codes.shape)
    zeros = torch.full_like(weight.zeros, 2 ** (weight.bits - 1))
    if weight.zero_bits:
        zeros = numbers(parts["zeros"], weight.zero_bits, weight.zeros.shape)
    scales = torch.from_numpy(np.frombuffer(parts["scales"], weight.scales.numpy().dtype).copy())
    read = dataclasses.replace(weight, codes=codes, zeros=zeros, scales=scales.reshape(weight.scales.shape))
    assert torch.equal(read.dequantize(), weight.dequantize())

    for attachment in lm.attachments.get(layer, ()):
        eight = "A_scale" in attachment.tensors
        for key, tensor in attachment.tensors.items():
            assert 8 * tensor.dtype.itemsize == (8 if eight and key in ("A", "B") else WIDTHS[key]), key
        assert attachment.stored_bits() == 8 * sum(len(t.numpy().tobytes()) for t in attachment.tensors.values())
    of_model = Counter({"unquantized": 0} | dict.fromkeys(counted, 0))
    for weight in lm.weights.values():
        of_model.update(weight.stored_bits())
    for attachment in chain.from_iterable(lm.attachments.values()):
        of_model[attachment.step] += attachment.stored_bits()
    assert bits.report(lm)["block"] == of_model


# --- memory by arithmetic ---------------------------------------------------------------------------------------------

TINY = scale.PublicShape(layers=2, hidden=64, ffn=128, kv=32, vocab=96, tied=True)


@pytest.mark.parametrize("count", ["bpw", "megabytes", "compensation", "share"])
@pytest.mark.parametrize(
    "text",
    [
        "fp16", "rtn-w4-g32", "rtn-w3-pc-sym-scale_dtype=float32", "gptq-w2-pc", "rtn-w4-pc + loftq(rank=3)",
        "rtn-w3-g32 + lqer(rank=2, factor_bits=8)", "smoothquant-w4-a4-g32",
    ],
)  # fmt: skip
def test_arithmetic_on_a_shape_is_what_a_model_of_that_shape_stores(text, count):
    lm = LowBitModel(tiny.model("llama").half() if text == "fp16" else tiny.model("llama"))
    for step in recipe.parse(text).steps:
        step.module.apply(lm, tiny.tokens(), step.config)
    report = bits.report(lm, float_bits=16)
    totals = {key: report[key] for key in ("bpw", "bytes", "block_weights")}
    mean = {f"bits/{kind}": n for kind, n in (report["block"] | totals).items()}
    params = storage.Storage(count)
    if count in ("compensation", "share") and " + " not in text:
        assert params.exact(recipe.parse(text).steps, TINY) is None  # nothing compensates
        return
    assert params.exact(recipe.parse(text).steps, TINY) == pytest.approx(params.value(mean), rel=1e-12)


@pytest.mark.parametrize(
    "text", ["rtn-w4-pc + spear", "rtn-w4-pc + lqer(budget=0.02)", "gptq-w4-g32-act_order", "spinquant"]
)
def test_what_a_recipe_alone_does_not_fix_is_not_computed(text):
    assert storage.Storage().exact(recipe.parse(text).steps, TINY) is None


def test_public_shapes_give_the_printed_megabytes_of_rank_16_and_the_weights_that_the_headline_counts():
    printed = {"Llama-3.2-1B": "22.5", "Llama-3.2-3B": "48.6", "Llama-2-7B": "80.0", "Llama-2-13B": "125"}
    steps, params = recipe.parse("rtn-w4-pc + loftq(rank=16)").steps, storage.Storage("compensation", "MB")
    for model, digits in (printed | {"Llama-2-70B": "414"}).items():
        decimals = len(digits.partition(".")[2])
        assert f"{params.exact(steps, scale.shape(model)):.{decimals}f}" == digits
    (claim,) = [claim for claim in tables.headline().claims if claim.claim == "spear C002"]
    for case in claim.cases:
        shape = scale.shape(case["model"])
        weights = sum(n * k for n, k in shape.linears) / 1e6
        vectors = (2 * shape.layers + 1) * shape.hidden
        assert (round(weights, 2), round((shape.others - vectors) / 1e6, 2)) == (case["blocks"], case["embeddings"])
    (claim,) = [claim for claim in tables.table("spear", "2").claims if claim.claim == "spear C110"]
    for case in claim.cases:
        eight = sum(low_rank.stored_bytes(8, layer, 16) for layer in scale.shape(case["model"]).linears)
        assert round(eight / 1e6, 2) == case["eight"]
