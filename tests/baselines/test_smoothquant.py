"""SmoothQuant: the function stays, s by its formula and by llmcompressor, symmetric rounding of weights and inputs."""

import importlib
import math
from itertools import product

import pytest
import tiny
import torch
from known import W, X, errors

from repro import models
from repro.baselines import rtn, smoothquant
from repro.baselines.smoothquant import Config, fake_quantize, rounded, scale
from repro.core.errors import UserError
from repro.data import corpora
from repro.engine import weights
from repro.models import perplexity
from repro.models.attachments import Attachment
from repro.models.lowbit import LowBitModel, block_linears
from repro.recipes import recipe

IDS = tiny.tokens()
PLAIN = {"act_bits": 16, "bits": 8, "scale_dtype": "float32"}


def in_float64(model: torch.nn.Module) -> torch.nn.Module:
    """Transformers' RMSNorm computes in float32 whatever the model's dtype is."""
    for norm in (m for m in model.double().modules() if type(m).__name__.endswith("RMSNorm")):
        norm.forward = lambda x, norm=norm: (
            norm.weight * x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
        )
    return model


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.85, 1.0])
@pytest.mark.parametrize("layout", sorted(tiny.MODELS))
def test_smoothing_does_not_change_the_function(layout, alpha):
    lm = LowBitModel(in_float64(tiny.model(layout)))
    want, before = tiny.logits(lm.model, IDS), {name: p.clone() for name, p in lm.model.named_parameters()}
    smoothquant.smooth(lm, IDS, alpha)
    torch.testing.assert_close(tiny.logits(lm.model, IDS), want, rtol=0, atol=1e-10)
    changed = {name for name, p in lm.model.named_parameters() if not torch.equal(p, before[name])}
    phi = layout == "phi"  # attention and MLP in parallel read one norm, which has a bias
    sources = {"input_layernorm": ["weight", "bias"]} if phi else dict.fromkeys(NORMS, ["weight"])
    stored = set()
    for norm, parameters in sources.items():
        stored |= {f"model.layers.{i}.{norm}.{parameter}" for i, parameter in product((0, 1), parameters)}
    readers = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    readers += ["mlp.fc1"] if phi else ["mlp.gate_proj", "mlp.up_proj"]
    assert changed == stored | {f"model.layers.{i}.{name}.weight" for i, name in product((0, 1), readers)}
    assert set(lm.dense) == stored


NORMS = ("input_layernorm", "post_attention_layernorm")


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.85])
def test_s_is_the_ratio_of_maxima_over_all_that_read_the_norm(alpha):
    """After smoothing max|x_j| is max|x_j|^(1-α) max|w_j|^(1-α), and max|w_j| of all readers max|x_j|^α max|w_j|^α."""
    lm, name = LowBitModel(tiny.model("llama")), "model.layers.1.post_attention_layernorm"
    readers = ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"]

    def maxima():
        seen = []
        hook = lm.model.get_submodule(name).register_forward_hook(lambda _, args, y: seen.append(y))
        tiny.logits(lm.model, IDS)
        hook.remove()
        columns = torch.cat([lm.model.get_submodule(r).weight.data for r in readers])
        return seen[0].abs().amax((0, 1)), columns.abs().amax(0)

    x, w = maxima()
    smoothquant.smooth(lm, IDS, alpha)
    got_x, got_w = maxima()
    torch.testing.assert_close(got_x, (x * w) ** (1 - alpha), rtol=1e-4, atol=0)
    torch.testing.assert_close(got_w, (x * w) ** alpha, rtol=1e-4, atol=0)


def test_both_bounds_of_the_authors_code():
    x, w = torch.tensor([4.0, 4.0, 0.0]), torch.tensor([[0.25, 0.0, 1.0], [-1.0, 1e-9, 0.5]])
    scales = scale(x, [w[:1], w[1:]], 0.5)
    assert scales.tolist() == pytest.approx([2.0, 2 / 1e-5**0.5, 1e-5])


def test_s_is_llmcompressors():
    """It takes max - min for max|x|, and twice max|w|: on symmetric channels 2^(2α - 1) times the formula."""
    for module in ("llmcompressor.modifiers.transform.smoothquant", "llmcompressor.modifiers.smoothquant"):
        try:
            modifier = importlib.import_module(module).SmoothQuantModifier
            break
        except ImportError:
            continue
    else:
        pytest.skip("llmcompressor is not installed (it pins what our environment does not need)")
    x = X.abs().amax(0)
    for alpha in (0.5, 0.85):
        layers = [torch.nn.Linear(256, 32, bias=False) for _ in range(2)]
        for layer, part in zip(layers, W.split(32)):
            layer.weight.data = part
        theirs = modifier(smoothing_strength=alpha, mappings=[])._calculate_smoothing_scales(layers, 2 * x)
        torch.testing.assert_close(theirs, 2 ** (2 * alpha - 1) * scale(x, list(W.split(32)), alpha))


@pytest.mark.parametrize("bits, group", [(8, 0), (4, 0), (4, 32), (2, 32)])
def test_rounding_by_the_formula(bits, group):
    """Scale max|·| / (2^(b-1) - 1) of each row and group, half to even, for weights and for inputs."""
    levels, want = 2 ** (bits - 1) - 1, torch.empty(64, 256)
    for row in range(64):
        for start in range(0, 256, group or 256):
            part = W[row, start : start + (group or 256)]
            s = part.abs().max() / levels
            want[row, start : start + len(part)] = torch.round(part / s) * s
    quantized = rounded(W, Config(bits=bits, group=group, scale_dtype="float32"))
    torch.testing.assert_close(quantized.dequantize(), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(fake_quantize(W[None], bits, group)[0], want, rtol=1e-6, atol=0)
    assert quantized.zero_bits == 0
    assert (quantized.codes.min(), quantized.codes.max()) == (1, 2**bits - 1)  # -levels … levels
    half = rounded(W, Config(bits=bits, group=group))
    assert torch.equal(half.codes.float().sub(2 ** (bits - 1)).abs().amax(), torch.tensor(float(levels)))


def test_known_error_of_a_symmetric_row():
    """127 levels each side at 8 bits: the error of steps m/127, uniform within half a step."""
    weight, _ = errors(rounded(W, Config()).dequantize())
    assert weight == pytest.approx((W.abs().amax(1) / 127).square().mean().item() / 12, rel=0.03)


def test_tokens_are_quantized_one_by_one_and_zeros_stay():
    x = torch.stack([torch.zeros(8), torch.arange(8.0), 1e4 * torch.arange(8.0)])
    quantized = fake_quantize(x, 4, 0)
    assert quantized.tolist()[0] == [0.0] * 8
    torch.testing.assert_close(quantized[2], 1e4 * quantized[1])
    assert torch.equal(fake_quantize(x.bfloat16(), 8, 4), fake_quantize(x.bfloat16().float(), 8, 4).bfloat16())


@pytest.mark.parametrize("layout", sorted(tiny.MODELS))
def test_saved_and_loaded_it_gives_the_same_bits(tmp_path, layout):
    lm, path = LowBitModel(tiny.model(layout)), tmp_path / "model.safetensors"
    smoothquant.apply(lm, IDS, Config(act_bits=4, group=32))
    assert set(lm.attachments) == set(lm.weights) == set(block_linears(tiny.model(layout)))
    lm.save(path, {})
    again = LowBitModel(tiny.model(layout))
    again.load(path)
    assert torch.equal(tiny.logits(again.model, IDS), tiny.logits(lm.model, IDS)) and again.extra_bits == lm.extra_bits
    plain = LowBitModel(tiny.model(layout))
    smoothquant.apply(plain, IDS, Config(act_bits=16, group=32))
    for name, weight in plain.weights.items():
        assert torch.equal(weight.codes, lm.weights[name].codes)
    assert not plain.attachments and not torch.equal(tiny.logits(plain.model, IDS), tiny.logits(lm.model, IDS))


def test_inputs_of_every_layer_are_quantized():
    """The model with attachments is the model whose layers read what `fake_quantize` gives."""
    lm = LowBitModel(tiny.model("llama"))
    smoothquant.apply(lm, IDS, Config(act_bits=4))
    quantized, plain = tiny.logits(lm.model, IDS), LowBitModel(tiny.model("llama"))
    smoothquant.apply(plain, IDS, Config(act_bits=16))
    for linear in block_linears(plain.model).values():
        linear.register_forward_pre_hook(lambda _, args: (fake_quantize(args[0], 4, 0),))
    assert torch.equal(tiny.logits(plain.model, IDS), quantized)


def test_a_layer_of_another_model_and_the_engine_are_refused():
    lm, name = LowBitModel(tiny.model("llama")), "model.layers.0.mlp.up_proj"
    numbers = {"bits": 8, "group": 0, "columns": 32}
    with pytest.raises(UserError, match=f"{name}: quantized inputs of a layer with 32 inputs, and this one has 64"):
        lm.attach(name, Attachment("smoothquant", {}, numbers))
    lm.attach(name, Attachment("smoothquant", {}, numbers | {"columns": 64}))
    with pytest.raises(UserError, match="the engine does not run layers on quantized inputs; leave act_bits at 16"):
        weights.product(lm, [name], torch.device("cpu"), torch.float32)


def unsmoothed(lm: LowBitModel, config: Config) -> None:
    """The same rounding of weights and inputs."""
    for name, linear in block_linears(lm.model).items():
        lm.set_weight(name, rounded(linear.weight.data, config))
        numbers = {"bits": config.act_bits, "group": config.group, "columns": linear.in_features}
        lm.attach(name, Attachment("smoothquant", {}, numbers))


def test_below_plain_rounding_on_a_pocket_model():
    """Perplexity at w4a4 per row and token; measured 65.5 against 88.9 without smoothing."""
    ids = torch.from_numpy(corpora.token_ids("tiny-held-out", models.tokenizer("pocket-3m"))[:4096]).long()
    smoothed, plain = LowBitModel(models.load("pocket-3m")), LowBitModel(models.load("pocket-3m"))
    config = Config(bits=4, act_bits=4)
    smoothquant.apply(smoothed, ids[:2048].view(8, 256), config)
    unsmoothed(plain, config)
    result = [math.exp(perplexity.score(lm.model, ids[2048:].view(4, 512))["nll"].mean()) for lm in (smoothed, plain)]
    assert result[0] < 0.87 * result[1], result  # 0.74 of it


def test_outlier_channels_cost_little_once_smoothed():
    """One channel of each norm is 100 times the others, and its weights as much smaller: its range leaves no levels."""
    off = []
    for module in (smoothquant.apply, lambda lm, _, config: unsmoothed(lm, config)):
        lm = LowBitModel(tiny.model("llama"))
        for norm in (f"model.layers.{i}.{norm}" for i, norm in product((0, 1), NORMS)):
            lm.model.get_submodule(norm).weight.data[5] *= 100
        for name, linear in block_linears(lm.model).items():
            if not name.endswith(("o_proj", "down_proj")):
                linear.weight.data[:, 5] /= 100
        want = tiny.logits(lm.model, IDS)
        module(lm, IDS, Config())
        off.append((tiny.logits(lm.model, IDS) - want).norm().item())
    assert off[0] < 0.2 * off[1], off


def test_options_that_mean_nothing_are_refused():
    for text, message in {
        "smoothquant-asym": "takes no asym or clip",
        "smoothquant-clip=mse": "takes no asym or clip",
        "smoothquant-alpha=1.5": "alpha is 1.5; it must be 0 to 1",
        "smoothquant-a9": "act_bits is 9; it must be 16, or 2 to 8",
        "smoothquant-a1": "act_bits is 1; it must be 16, or 2 to 8",
    }.items():
        with pytest.raises(UserError, match=message):
            recipe.parse(text)
    lm = LowBitModel(tiny.model("llama"))
    for nothing in (None, IDS[:0]):
        with pytest.raises(UserError, match="smoothquant needs calibration tokens, there are none"):
            smoothquant.apply(lm, nothing, Config())
    with pytest.raises(UserError, match="q_proj: .*groups of 48"):
        smoothquant.apply(lm, IDS, Config(group=48))
    lm.model.config.model_type = "gpt2"
    with pytest.raises(UserError, match="unknown architecture for smoothquant, .* 'gpt2'; choose from: llama"):
        smoothquant.apply(lm, IDS, Config())
    rtn.apply(lm, None, rtn.Config())  # what failed has changed nothing
    assert not lm.dense
