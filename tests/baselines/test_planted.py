"""Planted outliers: the function stays exactly the same, the statistics do not; what is stored; bad input."""

from itertools import product

import pytest
import tiny
import torch
from tiny_results import refusal
from transformers import LlamaConfig, LlamaForCausalLM

from repro.baselines import planted, rtn
from repro.baselines.awq import FOLDS
from repro.core.errors import UserError
from repro.jobs import compress
from repro.models.lowbit import LowBitModel, block_linears
from repro.recipes import recipe
from repro.store import observations

IDS = tiny.tokens(3, 20, seed=5)
LAYOUTS = ("llama", "qwen2", "mistral", "phi")


def made(layout="llama", dtype=torch.float32, ids=None, **options) -> LowBitModel:
    lm = LowBitModel(tiny.model(layout).to(dtype))
    planted.apply(lm, ids, planted.Config(**options))
    return lm


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", ["weights", "inputs"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_function_is_exactly_the_same(layout, side, dtype):
    lm = made(layout, dtype, side=side, share=0.1)
    assert torch.equal(tiny.logits(lm.model, IDS), tiny.logits(tiny.model(layout).to(dtype), IDS))
    before = tiny.model(layout).to(dtype)
    changed = {name for name, linear in block_linears(lm.model).items()
               if not torch.equal(linear.weight, before.get_submodule(name).weight)}  # fmt: skip
    assert changed == set(block_linears(before)) - {n for n in block_linears(before) if n.endswith("fc2")}


@torch.no_grad()
@pytest.mark.parametrize("side", ["weights", "inputs"])
def test_several_groups_of_heads(side):
    """Value rows of each group go to all of its query heads, and to no other's."""
    torch.manual_seed(0)
    shape = tiny.SHAPE | {"num_attention_heads": 8, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape)).double().eval()
    want, lm = tiny.logits(model, IDS), LowBitModel(model)
    planted.apply(lm, None, planted.Config(share=0.3, side=side))
    assert torch.equal(tiny.logits(model, IDS), want)


@pytest.mark.parametrize("kind", FOLDS)
def test_every_layout_is_there(kind):
    assert kind in LAYOUTS


@pytest.mark.parametrize(("side", "up", "down"), [("weights", 16, 1 / 16), ("inputs", 1 / 16, 16)])
def test_whole_channels_are_rescaled_on_both_sides(side, up, down):
    """2 of 32 value rows of one group, read by both query heads; 7 of 64 of a norm, the same in every block."""
    lm, before = made(side=side, share=0.1), tiny.model("llama")
    picked = []
    for new, old in zip(lm.model.model.layers, before.model.layers, strict=True):
        norm = new.input_layernorm.weight / old.input_layernorm.weight
        assert (norm == down).sum() == 7 and (norm == 1).sum() == 57
        picked.append((norm == down).nonzero().flatten().tolist())
        for name in ("q_proj", "k_proj"):
            ratio = getattr(new.self_attn, name).weight / getattr(old.self_attn, name).weight
            assert torch.equal(ratio, torch.where(norm == down, up, 1.0).expand_as(ratio))
        value = new.self_attn.v_proj.weight / old.self_attn.v_proj.weight
        rows = value[:, norm == 1][:, 0]
        assert (rows == down).sum() == 4 and (rows == 1).sum() == 28
        out = new.self_attn.o_proj.weight / old.self_attn.o_proj.weight
        assert torch.equal(out[0] == up, (rows == down).repeat(2)), "both heads of the group"
        down_columns = (new.mlp.down_proj.weight / old.mlp.down_proj.weight)[0]
        assert (down_columns == up).sum() == 13
    assert picked[0] == picked[1]
    other = made(side=side, share=0.1, draw=1).model.model.layers[0].input_layernorm.weight
    assert not torch.equal(other, lm.model.model.layers[0].input_layernorm.weight)


def test_outlier_statistics_before_and_after():
    lm, before = made(ids=IDS, share=0.02), tiny.model("llama")
    name, number = "model.layers.1.mlp.down_proj", list(block_linears(before)).index("model.layers.1.mlp.down_proj")
    for when, model in (("before", before), ("after", lm.model)):
        w = model.get_submodule(name).weight.double()
        kurtosis = ((w - w.mean()) ** 4).mean() / w.var(correction=0) ** 2
        largest = w.abs().amax(0)
        assert lm.facts[f"layers/weight_kurtosis/{when}"][number] == pytest.approx(kurtosis.item(), rel=1e-6)
        assert lm.facts[f"layers/weight_ratio/{when}"][number] == pytest.approx(
            (largest.max() / largest.median()).item()
        )
        caught = []
        handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args, to=caught: to.append(args[0]))
        tiny.logits(model, IDS)
        handle.remove()
        x = caught[0].double().flatten(0, 1)
        kurtosis = ((x - x.mean()) ** 4).mean() / x.var(correction=0) ** 2
        largest = x.abs().amax(0)
        assert lm.facts[f"layers/input_kurtosis/{when}"][number] == pytest.approx(kurtosis.item(), rel=1e-3)
        assert lm.facts[f"layers/input_ratio/{when}"][number] == pytest.approx(
            (largest.max() / largest.median()).item(), rel=1e-3
        )
    grown = [b / a for a, b in zip(lm.facts["layers/weight_ratio/before"], lm.facts["layers/weight_ratio/after"])]
    assert min(grown) > 8 and max(lm.facts["layers/weight_kurtosis/before"]) < 6
    assert min(lm.facts["layers/weight_kurtosis/after"]) > 20
    inputs = made(ids=IDS, share=0.02, side="inputs").facts
    assert inputs["layers/input_ratio/after"][0] > 4 * inputs["layers/input_ratio/before"][0]
    assert set(made().facts) == {
        f"layers/weight_{kind}/{when}" for kind, when in product(("kurtosis", "ratio"), ("before", "after"))
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantizer_after_it_stores_the_whole_model(layout, tmp_path):
    lm = made(layout, share=0.1)
    rtn.apply(lm, None, rtn.Config(bits=8, group=32))
    lm.save(tmp_path / "model.safetensors", {})
    again = LowBitModel(tiny.model(layout))
    again.load(tmp_path / "model.safetensors")
    stored = tiny.logits(again.model, IDS)
    assert torch.equal(stored, tiny.logits(lm.model, IDS))
    plain = tiny.logits(tiny.model(layout), IDS)
    assert 0 < (stored - plain).abs().max() < 0.4  # 0.08 to 0.17
    teacher = LowBitModel(lm.full_precision()).model  # of a step that comes after
    assert torch.equal(tiny.logits(teacher, IDS), plain)


def test_a_compressed_model_keeps_the_statistics(tmp_path):
    """As a job of a table: pocket-3m with planted outliers."""
    options = {
        "recipe": "planted-share=0.02 + rtn-w8-g32",
        "model": "pocket-3m",
        "device": "cpu",
        "dtype": "float32",
        "hub": False,
    }
    compress.run(type("Made", (), {"parsed_options": lambda self: options})(), {}, tmp_path, {})
    kept = observations.load(tmp_path / compress.OUTPUTS[1])
    before, after = (kept.series[f"layers/weight_kurtosis/{when}"].values for when in ("before", "after"))
    assert len(after) == 14 and before.max() < 10 < after.min()


BAD = {
    "planted": "planted stores no weights; put a quantizer after it: planted + rtn-w4-g128",
    "rtn-w4-g32 + planted": "planted stores no weights",
    "planted + spqt": "planted stores no weights",
    "planted + lqer": "planted stores no weights",
    "planted-factor=3 + rtn": "factor is 3; a power of two from 2 on leaves the function exact",
    "planted-factor=1 + rtn": "factor is 1",
    "planted-share=0.0 + rtn": "share is 0.0; a share of the channels above 0 and below 1",
    "planted-share=1.0 + rtn": "share is 1.0",
    "planted-draw=-1 + rtn": "draw is -1",
    "planted-side=both + rtn": "side",
}


@pytest.mark.parametrize("text", BAD)
def test_recipes_that_mean_nothing_are_refused(text):
    assert BAD[text] in refusal(recipe.parse, text)


def test_recipes_with_planted_outliers_are_parsed():
    parsed = recipe.parse("planted-factor=8 + bitbybit-w2-g32")
    assert recipe.parse(parsed.name) == parsed and parsed.before == ""
    assert recipe.with_seed(parsed, 3).steps[0] == parsed.steps[0], "seeds of training share the variant"
    assert [step.name for step in recipe.parse("planted + planted-side=inputs + rtn-w4-pc + lqer").steps][:2] == [
        "planted"
    ] * 2


def test_what_it_refuses():
    lm = LowBitModel(tiny.model("llama"))
    rtn.apply(lm, None, rtn.Config())
    with pytest.raises(UserError, match="planted rescales full-precision weights; put it first: planted"):
        planted.apply(lm, None, planted.Config())
    other = LowBitModel(tiny.model("llama"))
    other.model.config.model_type = "gpt2"
    with pytest.raises(UserError, match="unknown architecture for planted, .* 'gpt2'"):
        planted.apply(other, None, planted.Config())
