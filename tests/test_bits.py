"""Stored bits against arithmetic by hand, on a tied Llama: 2 layers, 64 wide, FFN 128, k and v 32, vocabulary 96."""

import pytest
import tiny
import torch

from repro.baselines import gptq, rtn
from repro.errors import UserError
from repro.models import bits
from repro.models.lowbit import LowBitModel

# One layer: q and o 64x64, k and v 32x64, gate and up 128x64, down 64x128; 64+32+32+64+128+128+64 = 512 rows.
BLOCK_WEIGHTS = 2 * (2 * 4096 + 2 * 2048 + 3 * 8192)
OTHER_WEIGHTS = 96 * 64 + 5 * 64  # embedding, of which the head is the same, and five norms


def quantized(module, config) -> LowBitModel:
    lm = LowBitModel(tiny.model("llama").half() if module is rtn else tiny.model("llama"))
    module.apply(lm, tiny.tokens(), config)
    return lm


def test_a_plain_model():
    got = bits.report(LowBitModel(tiny.model("llama").half()))
    assert got["block_weights"] == BLOCK_WEIGHTS == 73728
    assert got["block"] == {"codes": 0, "scales": 0, "zeros": 0, "indices": 0, "unquantized": 73728 * 16}
    assert got["bpw"] == 16
    assert got["other"] == OTHER_WEIGHTS * 16 == 103424
    assert got["bytes"] == (73728 + 6464) * 2 and got["bits"] == 8 * got["bytes"]


def test_a_plain_model_computed_in_float32_but_stored_in_16_bits():
    plain = LowBitModel(tiny.model("llama"))
    assert bits.report(plain)["bpw"] == 32
    assert bits.report(plain, float_bits=16) == bits.report(LowBitModel(tiny.model("llama").bfloat16()))


def test_rtn_in_groups_of_32():
    got = bits.report(quantized(rtn, rtn.Config(group=32)))
    groups = 73728 // 32
    assert got["block"] == {
        "codes": 73728 * 4,
        "scales": groups * 16,
        "zeros": groups * 4,
        "indices": 0,
        "unquantized": 0,
    }
    assert got["bpw"] == 4 + 20 / 32
    assert got["bytes"] == (294912 + 36864 + 9216 + 103424) // 8 == 55552


def test_rtn_symmetric_3_bits_per_channel():
    got = bits.report(quantized(rtn, rtn.Config(bits=3, symmetric=True, scale_dtype="float32")))
    assert got["block"] == {"codes": 73728 * 3, "scales": 1024 * 32, "zeros": 0, "indices": 0, "unquantized": 0}
    assert got["bpw"] == 3 + 32 * 1024 / 73728


def test_act_order_pays_for_its_index():
    got = bits.report(quantized(gptq, gptq.Config(group=32, act_order=True)))
    assert got["block"]["indices"] == 2 * (6 * 64 + 128) * 32
    static = bits.report(quantized(gptq, gptq.Config(group=32, act_order=True, static_groups=True)))
    assert got["bits"] - static["bits"] == 32768


def test_a_layer_left_alone_a_bias_and_what_a_step_reports():
    lm = LowBitModel(tiny.model("qwen2").half())
    rtn.apply(lm, None, rtn.Config(group=32))
    del lm.weights["model.layers.1.mlp.down_proj"]
    lm.extra_bits = {"compensators": 1000, "scales": 24}
    got = bits.report(lm)
    rest = 73728 - 8192
    assert got["block"] == {
        "codes": rest * 4,
        "scales": rest // 2 + 24,
        "zeros": rest // 8,
        "indices": 0,
        "unquantized": 8192 * 16,
        "compensators": 1000,
    }
    assert got["bpw"] == sum(got["block"].values()) / 73728
    assert got["other"] == (2 * 96 * 64 + 5 * 64 + 2 * 128) * 16  # embedding and head apart, norms, q, k and v biases


def test_a_quantized_head_tied_to_the_embedding_counts_once():
    lm = LowBitModel(tiny.model("llama").half())
    head = lm.model.lm_head.weight
    lm.set_weight("lm_head", rtn.grid.rtn(head.data, rtn.Config(group=64)))
    got = bits.report(lm)
    assert lm.model.model.embed_tokens.weight is head
    assert got["other"] == 96 * (64 * 4 + 16 + 4) + 5 * 64 * 16
    assert got["bpw"] == 16


def test_a_model_without_memory():
    with torch.device("meta"):
        assert bits.report(LowBitModel(tiny.MODELS["llama"]().half()))["bytes"] == (73728 + 6464) * 2


def test_a_model_without_blocks():
    with pytest.raises(UserError, match="Linear has no linear layers in transformer blocks"):
        bits.report(LowBitModel(torch.nn.Linear(4, 4)))
