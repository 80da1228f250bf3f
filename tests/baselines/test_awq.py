"""AWQ: known answers of the authors' code, a slow AWQ in plain loops, and scales that change nothing by themselves."""

from itertools import product

import pytest
import tiny
import torch
from known import W, X, errors
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from repro.baselines import awq, grid, rtn
from repro.baselines.awq import Config
from repro.core.errors import UserError
from repro.models import bits
from repro.models.lowbit import LowBitModel, block_inputs, block_linears
from repro.recipes import recipe

CLOSE = 1e-5
HEADS = tiny.SHAPE | {"num_key_value_heads": 2}  # as many value heads as query heads: o is scaled, too
MODELS = {
    "llama-mha": lambda: LlamaForCausalLM(LlamaConfig(**HEADS, attention_bias=True, mlp_bias=True)),
    "qwen2-mha": lambda: Qwen2ForCausalLM(Qwen2Config(**HEADS)),
    "phi-mha": lambda: tiny.PhiForCausalLM(tiny.PhiConfig(**HEADS)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**tiny.SHAPE, head_dim=32)),
}
LAYOUTS = sorted({*MODELS, *tiny.MODELS} - {"gemma"})


@pytest.fixture(autouse=True)
def more_models(monkeypatch):
    for name, make in MODELS.items():
        monkeypatch.setitem(tiny.MODELS, name, make)


def with_outliers(name: str):
    """A tiny model in which a few channels are large wherever a linear reads a norm."""
    made = tiny.model(name)
    for key, parameter in made.named_parameters():
        if "layernorm.weight" in key:
            parameter.data[::9] *= 12
    return made


def quantized(made, module=awq, **options) -> LowBitModel:
    lm = LowBitModel(made)
    module.apply(lm, tiny.tokens(), module.Config(**options))
    return lm


def test_known_answer_of_clipping():
    config = Config(group=64, scale_dtype="float32")
    m = awq.search_clip(W, X, config)
    assert m.sum().item() == pytest.approx(23.006433, rel=CLOSE)
    clipped = grid.split(W, config).clamp(-m, m).flatten(1)
    assert errors(grid.rtn(clipped, config).dequantize())[1] == pytest.approx(0.0035874658, rel=CLOSE)


class Nearest(Config):
    """AWQ with the nearest scales, as before they were rounded down."""

    SCALE_ROUNDS_DOWN = False


def cut(weight: torch.Tensor, config: Config) -> torch.Tensor:
    """`weight` with each group cut at both ends, to 0.7 of its largest |w| or less; groups `[N, G, group]`."""
    groups = grid.split(weight, config)
    m = 0.7 * torch.minimum(groups.amax(-1, keepdim=True), -groups.amin(-1, keepdim=True))
    return groups.clamp(-m, m)


def ends_used(groups: torch.Tensor, config: Config) -> torch.Tensor:
    """Whether a group's codes reach both 0 and 2^bits - 1, `[N, G]`."""
    codes = grid.split(grid.rtn(groups.flatten(1), config).codes, config)
    return (codes.amin(-1) == 0) & (codes.amax(-1) == 2**config.bits - 1)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_groups_cut_at_both_ends_use_both_end_codes(bits, group, symmetric):
    options = {"bits": bits, "group": group, "symmetric": symmetric}
    groups = cut(W, Config(**options))
    assert ends_used(groups, Config(**options)).all()
    assert 0.1 < ends_used(groups, Nearest(**options)).float().mean() < 0.9, "the nearest scale would have done"


@pytest.mark.parametrize("options", [{"bits": 2}, {"bits": 3, "group": 64}, {"group": 64}, {}], ids=str)
def test_scales_rounded_down_lower_the_output_error(options):
    result = []
    for kind in (Config, Nearest):
        config = kind(**options)
        m = awq.search_clip(W, X, config)
        result.append(errors(grid.rtn(grid.split(W, config).clamp(-m, m).flatten(1), config).dequantize())[1])
    assert result[0] < result[1]


def test_a_scale_is_the_largest_half_that_does_not_exceed_the_range():
    config = Config(group=64)
    groups = grid.split(W, config)
    down, nearest = (grid.fit(groups, kind)[0] for kind in (config, Nearest(group=64)))
    exact = (groups.amax(-1, keepdim=True).clamp(min=0) - groups.amin(-1, keepdim=True).clamp(max=0)).double() / 15
    up = nearest.double() > exact
    assert up.any() and torch.equal(down[~up], nearest[~up])
    above = (down.half().view(torch.int16) + 1).view(torch.float16).double()
    assert (down.double() <= exact).all() and (above > exact).all()
    single = [grid.fit(groups, kind(group=64, scale_dtype="float32"))[0] for kind in (Config, Nearest)]
    assert torch.equal(*single), "float32 scales are the authors'"
    with pytest.raises(UserError, match="too large for float16"):
        grid.rtn(torch.tensor([[-1e6, 1e6]]), Config())


def single(weight: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(*reversed(weight.shape), bias=False)
    linear.weight.data = weight.clone()
    return linear


def test_known_answer_of_scaling():
    config = Config(group=64, scale_dtype="float32")
    s, alpha = awq.search_scale(single(W), ["weight"], [((X,), {})], X.abs().mean(0), config)
    assert alpha == 0.25
    assert errors(grid.rtn(W * s, config).dequantize() / s)[1] == pytest.approx(0.0036098600, rel=CLOSE)


def slow_round(w: torch.Tensor, config: Config) -> torch.Tensor:
    """Round to nearest, float64."""
    parts, levels = w.reshape(-1, config.group or w.shape[1]), 2**config.bits - 1
    low, high = parts.amin(1, keepdim=True).clamp(max=0), parts.amax(1, keepdim=True).clamp(min=0)
    step = (high - low) / levels
    zero = (-low / step).round()
    return (((parts / step).round() + zero).clamp(0, levels).sub(zero) * step).view_as(w)


def slow_scale(run, linears: list, x: torch.Tensor, config: Config) -> torch.Tensor:
    """Equation 5: `run` gives the inspected output with the weights that `linears` have at that moment."""
    kept, want, losses = [linear.weight.data.clone() for linear in linears], run(), []
    mean = x.flatten(0, -2).abs().mean(0)
    scales = [mean.pow(i / 20).clamp(min=1e-4) for i in range(20)]
    scales = [s / (s.max() * s.min()).sqrt() for s in scales]
    for s in scales:
        for linear, w in zip(linears, kept):
            linear.weight.data = slow_round(w * s, config) / s
        losses.append((run() - want).square().mean().item())
        for linear, w in zip(linears, kept):
            linear.weight.data = w
    return scales[losses.index(min(losses))]


def slow_clip(w: torch.Tensor, x: torch.Tensor, config: Config) -> torch.Tensor:
    """The clipped weight: every group on its own partial products."""
    w, group = w.clone(), config.group or w.shape[1]
    x = x.flatten(0, -2)[:: max(1, x[..., 0].numel() // config.clip_tokens)]
    for row in w:
        for i in range(0, len(row), group):
            part, columns = row[i : i + group], x[:, i : i + group]
            tries = []
            for step in range(10):
                m = part.abs().max().item() * (1 - step / 20)
                rounded = slow_round(part.clamp(-m, m)[None], config)[0]
                tries.append(((columns @ (rounded - part)).square().mean().item(), step, m))
            m = min(tries)[2]
            part.clamp_(-m, m)
    return w


def slow_block(block, h: torch.Tensor, kwargs: dict, config: Config) -> torch.Tensor:
    """AWQ on one Llama block in float64: what is rounded is written into it; returns what it gave before."""
    attention, mlp, heads = block.self_attn, block.mlp, []
    a = block.input_layernorm(h)
    hook = attention.o_proj.register_forward_pre_hook(lambda _, args: heads.append(args[0]))
    after = h + attention(a, **kwargs)[0]
    hook.remove()
    o, f = heads[0], block.post_attention_layernorm(after)
    u = mlp.act_fn(mlp.gate_proj(f)) * mlp.up_proj(f)
    following = after + mlp(f)

    qkv, gated = [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]
    s_qkv = slow_scale(lambda: attention(a, **kwargs)[0], qkv, a, config)
    s_gated = slow_scale(lambda: mlp(f), gated, f, config)
    s_down = slow_scale(lambda: mlp.down_proj(u), [mlp.down_proj], u, config)
    grouped = attention.v_proj.weight.shape != attention.o_proj.weight.shape
    s_o = torch.ones(1) if grouped else slow_scale(lambda: attention.o_proj(o), [attention.o_proj], o, config)

    for linears, s in ((qkv, s_qkv), ([attention.o_proj], s_o), (gated, s_gated), ([mlp.down_proj], s_down)):
        for linear in linears:
            linear.weight.data *= s
    block.input_layernorm.weight.data /= s_qkv
    block.post_attention_layernorm.weight.data /= s_gated
    attention.v_proj.weight.data /= s_o[:, None]
    if attention.v_proj.bias is not None:
        attention.v_proj.bias.data /= s_o
    mlp.up_proj.weight.data /= s_down[:, None]
    inputs = [a / s_qkv] * 3 + [o / s_o] + [f / s_gated] * 2 + [u / s_down]
    for linear, x in zip([*qkv, attention.o_proj, *gated, mlp.down_proj], inputs):
        w = linear.weight.data
        linear.weight.data = slow_round(w if linear in qkv[:2] else slow_clip(w, x, config), config)
    return following


@torch.no_grad()
@pytest.mark.parametrize(
    "layout, options",
    [
        ("llama", {"bits": 4, "group": 64}),
        ("mistral", {"bits": 3, "clip_tokens": 50}),
        ("qwen2-mha", {"bits": 3, "group": 64}),
    ],
)
def test_agrees_with_plain_loops(layout, options):
    config = Config(**options, scale_dtype="float32")
    fast, slow = (with_outliers(layout).double() for _ in range(2))
    for made in (fast, slow):  # a range cut at both ends has its zero at 3.5 or 7.5 steps, a tie: mostly cut one end
        for linear in block_linears(made).values():
            linear.weight.data = torch.where(linear.weight < 0, 0.15 * linear.weight, linear.weight)
    lm = LowBitModel(fast)
    awq.apply(lm, tiny.tokens(), config)
    hidden, kwargs = block_inputs(slow, tiny.tokens())
    h = torch.cat(hidden)
    for block, kw in zip(slow.model.layers, kwargs):
        h = slow_block(block, h, kw, config)
    for name, want in slow.named_parameters():
        off = (fast.get_parameter(name) - want).abs() > 1e-5 * want.abs().max()
        if name.removesuffix(".weight") in lm.weights:
            assert off.flatten(1).any(1).float().mean() <= 0.02, f"{name}: more rows than such ties"
        else:
            assert not off.any(), name


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_change_nothing_in_full_precision(layout):
    made, ids = tiny.model(layout), tiny.tokens(3)
    want, random = made(ids).logits, torch.Generator().manual_seed(0)
    folded = 0
    for block in made.model.layers:
        for fold in awq.FOLDS[made.config.model_type]:
            if fold.fits(block):
                columns = block.get_submodule(fold.linears[0]).in_features
                fold.apply(block, torch.randn(columns, generator=random).exp())
                folded += 1
    assert folded == 2 * ({"phi": 1}.get(made.config.model_type, 3) + ("mha" in layout))
    assert torch.allclose(made(ids).logits, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group", [0, 64])
def test_scaling_is_never_worse_than_rtn_and_better_with_outliers(bits, group):
    config = Config(bits=bits, group=group)
    for x, share in ((X, 0.95), (X / X.abs().mean(0), 1.0001)):
        s, _ = awq.search_scale(single(W), ["weight"], [((x,), {})], x.abs().mean(0), config)
        plain, scaled = grid.rtn(W, config).dequantize(), grid.rtn(W * s, config).dequantize() / s
        assert ((scaled - W) @ x.T).norm() <= share * ((plain - W) @ x.T).norm()


@torch.no_grad()
@pytest.mark.parametrize("layout", ["llama", "mistral", "phi", "qwen2", "qwen2-mha"])
def test_is_better_than_rtn_end_to_end_with_outliers(layout):
    ids = tiny.tokens()
    want = with_outliers(layout)(ids).logits
    ours, plain = (quantized(with_outliers(layout), module, bits=3).model(ids).logits for module in (awq, rtn))
    assert (ours - want).norm() < 0.9 * (plain - want).norm()


@pytest.mark.parametrize("options", [{"bits": 2}, {"bits": 3, "group": 32}], ids=str)
def test_thresholds_stay_above_half_and_clipping_lowers_its_own_loss(options):
    config = Config(**options)
    m, w, x = awq.search_clip(W, X, config), grid.split(W, config), grid.split(X, config)
    largest = w.abs().amax(-1, keepdim=True)
    assert (m <= largest).all() and (m >= 0.549 * largest).all() and (m < largest).any()

    def loss(clipped):
        d = grid.split(grid.rtn(clipped.flatten(1), config).dequantize(), config) - w
        return torch.einsum("tgi,ngi->tng", x, d).square().mean(0)

    assert (loss(w.clamp(-m, m)) <= loss(w) * (1 + 1e-5)).all()


def test_query_and_key_are_not_clipped():
    clipped, plain = (quantized(tiny.model("llama"), bits=3, search_clip=flag) for flag in (True, False))
    for name, weight in plain.weights.items():
        assert torch.equal(weight.codes, clipped.weights[name].codes) == name.endswith(("q_proj", "k_proj")), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_stored_beside_the_weights(layout):
    lm = quantized(with_outliers(layout), group=32)
    norms = ["input_layernorm.weight"]
    norms += ["input_layernorm.bias"] if "phi" in layout else ["post_attention_layernorm.weight"]
    biases = {
        "llama-mha": ["self_attn.v_proj.bias", "mlp.up_proj.bias"],
        "qwen2-mha": ["self_attn.v_proj.bias"],
        "phi-mha": ["self_attn.v_proj.bias"],
    }
    names = [*norms, *biases.get(layout, [])]
    assert set(lm.dense) == {f"model.layers.{i}.{name}" for i, name in product(range(2), names)}
    before = dict(with_outliers(layout).named_parameters())
    changed = {name for name, p in lm.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {f"{name}.weight" for name in block_linears(lm.model)} | set(lm.dense)


def test_two_runs_give_the_same_weights():
    first, second = (quantized(with_outliers("llama"), bits=3, group=32) for _ in range(2))
    for (name, a), b in zip(first.model.named_parameters(), second.model.parameters()):
        assert torch.equal(a, b), name


def test_a_changed_norm_in_the_file_is_noticed(tmp_path):
    lm, path = quantized(tiny.model("llama"), group=32), tmp_path / "model.safetensors"
    lm.save(path, {})
    content = path.read_bytes()
    norm = lm.dense["model.layers.0.input_layernorm.weight"].numpy().tobytes()
    assert content.count(norm) == 1
    path.write_bytes(content.replace(norm, norm[:-1] + bytes([norm[-1] ^ 1])))
    with pytest.raises(UserError, match="SHA-256"):
        LowBitModel(tiny.model("llama")).load(path)


def test_bits_by_hand():
    """73,728 block weights; the scales live in norms that are counted anyway, once, at their own width."""
    report = bits.report(quantized(tiny.model("llama"), group=32), float_bits=16)
    assert report["block"] == {
        "codes": 73728 * 4,
        "scales": 73728 // 32 * 16,
        "zeros": 73728 // 32 * 4,
        "indices": 0,
        "unquantized": 0,
    }
    assert report["other"] == (96 * 64 + 5 * 64) * 16
    assert report == bits.report(quantized(tiny.model("llama"), rtn, group=32), float_bits=16)


def test_a_recipe_names_its_fields():
    step = recipe.parse("awq-w3-g128-search_clip=false-n_grid=10").steps[0]
    assert step.module is awq and step.config == Config(bits=3, group=128, search_clip=False, n_grid=10)


@pytest.mark.parametrize("calibration", [None, torch.empty(0, 16, dtype=torch.int64)])
def test_without_calibration_it_is_refused(calibration):
    with pytest.raises(UserError, match="awq needs calibration"):
        awq.apply(LowBitModel(tiny.model("llama")), calibration, Config())


def test_an_architecture_without_a_folding_map():
    with pytest.raises(UserError, match=r"architecture for awq.* 'gemma'.*llama, mistral, phi, qwen2"):
        quantized(tiny.model("gemma"))
    with pytest.raises(UserError, match="'Linear'"):
        awq.apply(LowBitModel(torch.nn.Linear(4, 4)), tiny.tokens(), Config())


def test_activations_that_are_not_finite():
    made = tiny.model("llama")
    made.model.layers[1].post_attention_layernorm.weight.data[3] = torch.nan
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp: its inputs hold NaN or Inf"):
        quantized(made)
    linear = single(torch.full((4, 8), 1e30))
    with pytest.raises(UserError, match="its outputs hold NaN or Inf"):
        x = torch.full((2, 8), 1e10)
        awq.search_scale(linear, ["weight"], [((x,), {})], x.mean(0), Config(scale_dtype="float32"))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"n_grid": 0}, "n_grid is 0"),
        ({"n_clip": 0}, "n_clip is 0"),
        ({"clip_tokens": 0}, "clip_tokens is 0"),
        ({"max_shrink": 0.0}, "max_shrink is 0"),
        ({"max_shrink": 1.5}, "max_shrink is 1.5"),
        ({"bits": 1}, "bits is 1"),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Config(**options)


def test_a_dense_parameter_is_checked():
    lm, name = LowBitModel(tiny.model("llama").half()), "model.norm.weight"
    with pytest.raises(UserError, match=r"model\.norm\.weight: \[3\] values for a parameter of \[64\]"):
        lm.set_dense(name, torch.ones(3))
    with pytest.raises(UserError, match=r"model\.norm\.weight: .*not finite in torch\.float16"):
        lm.set_dense(name, torch.full((64,), 1e5))
    assert not lm.dense
    lm.set_dense(name, torch.arange(64.0))
    assert lm.dense[name].dtype == torch.float16 and torch.equal(lm.model.model.norm.weight, lm.dense[name])
