"""OmniQuant: the authors' code at its start, its training by hand in float64, and what the learned grid stores."""

import math
from itertools import product

import pytest
import tiny
import torch
from known import W, X, errors

from repro.baselines import grid, omniquant, rtn
from repro.baselines.omniquant import Clipping, Config
from repro.core.errors import UserError
from repro.models import bits
from repro.models.lowbit import LowBitModel, block_inputs, block_linears, blocks
from repro.recipes import recipe

CLOSE = 1e-5


def quantized(layout="llama", module=omniquant, ids=None, dtype=torch.float32, **options) -> LowBitModel:
    lm = LowBitModel(tiny.model(layout).to(dtype))
    module.apply(lm, tiny.tokens() if ids is None else ids, module.Config(**options))
    return lm


def test_known_answer_at_the_start():
    measured = errors(Clipping(W, Config(group=64, scale_dtype="float32")).quantize().dequantize())
    assert measured == pytest.approx((1.2760194e-05, 0.0051844841), rel=CLOSE)


def slow_lwc(w, x, config: Config, passes: int) -> list[list[float]]:
    """γ's and β's logits of a single linear after AdamW by hand, float64: the gradient of every weight written out.

    With q = clamp(round(w/h) + z): dŴ/dh = q - z - w/h inside the range (straight through), q - z outside, and
    dh/dγ = max(W)/levels, dh/dβ = -min(W)/levels.
    """
    w, x, group, levels = w.double(), x.double(), config.group or w.shape[1], 2**config.bits - 1
    cells = [(row, i) for row, i in product(range(len(w)), range(0, w.shape[1], group))]
    logits = [[4.0, 4.0] for _ in cells]
    moments = [[[0.0, 0.0], [0.0, 0.0]] for _ in cells]
    t = 0
    for _ in range(passes):
        for sequence in x:
            t += 1
            rounded, slopes, ends = w.clone(), w.clone(), []
            for (row, i), pair in zip(cells, logits):
                part = w[row, i : i + group]
                gamma, beta = (1 / (1 + math.exp(-v)) for v in pair)
                low, high = min(part.min().item(), 0.0), max(part.max().item(), 0.0)
                h = (gamma * high - beta * low) / levels
                z = round(-beta * low / h)
                for j in range(i, i + group):
                    v = w[row, j].item() / h
                    q = min(max(round(v) + z, 0), levels)
                    rounded[row, j] = (q - z) * h
                    slopes[row, j] = q - z - (v if 0 <= round(v) + z <= levels else 0)
                ends.append((gamma * (1 - gamma) * high / levels, -beta * (1 - beta) * low / levels))
            error = sequence @ (rounded - w).T
            gradient = 2 / error.numel() * error.T @ sequence * slopes
            for (row, i), pair, pair_moments, pair_ends in zip(cells, logits, moments, ends):
                dh = gradient[row, i : i + group].sum().item()
                for k in range(2):
                    g = dh * pair_ends[k]
                    m = pair_moments[k]
                    m[0], m[1] = 0.9 * m[0] + 0.1 * g, 0.999 * m[1] + 0.001 * g * g
                    pair[k] -= config.lwc_lr * (m[0] / (1 - 0.9**t)) / (math.sqrt(m[1] / (1 - 0.999**t)) + 1e-8)
    return logits


@pytest.mark.parametrize("options", [{"bits": 3, "group": 16}, {"bits": 2}, {"bits": 4, "lwc_lr": 0.1}], ids=str)
def test_training_agrees_with_the_gradient_written_out(options):
    config = Config(**options, epochs=4, scale_dtype="float32")
    w, x = W[:6, :32], X[:24, :32].view(3, 8, 32)
    block = torch.nn.Sequential(torch.nn.Linear(32, 6, bias=False))
    block[0].weight.data = w.clone()
    clipping = Clipping(w, config)
    inputs = [sequence[None] for sequence in x]
    omniquant.learn(block, {("0",): clipping}, inputs, [(block(s).detach(),) for s in inputs], {}, config)
    want = torch.tensor(slow_lwc(w, x, config, 4)).T.view_as(clipping.logits)
    assert (want - 4).abs().max() > 5 * config.lwc_lr
    off = (clipping.logits.detach() - want).abs() > 1e-3 * config.lwc_lr
    assert off.float().mean() <= 0.05, "a near tie in a rounding may lead one group elsewhere"
    assert torch.equal(block[0].weight.data, w)


def heavy_tailed():
    """A tiny Llama whose weights have long tails, so that there is something to clip."""
    made, random = tiny.model("llama"), torch.Generator().manual_seed(0)
    for linear in block_linears(made).values():
        linear.weight.data *= (0.8 * torch.randn(linear.weight.shape, generator=random)).exp()
    return made


@torch.no_grad()
def block_errors(lm: LowBitModel, ids: torch.Tensor) -> list[float]:
    """Equation 1 of every block: quantized block on quantized inputs against full on full, mean squared."""
    made = heavy_tailed()
    of_full, kwargs = block_inputs(made, ids)
    of_quantized, result = of_full, []
    for ours, block, kw in zip(blocks(lm.model).values(), blocks(made).values(), kwargs, strict=True):
        of_full, of_quantized = [block(h, **kw) for h in of_full], [ours(h, **kw) for h in of_quantized]
        result.append(sum((a - b).square().mean().item() for a, b in zip(of_quantized, of_full)))
    return result


@pytest.mark.parametrize("options", [{"bits": 3}, {"bits": 3, "group": 32}, {"bits": 2, "group": 32}], ids=str)
def test_beats_rtn_and_its_own_start_in_every_block(options):
    ids, result = tiny.tokens(8, 32), []
    for module, more in ((omniquant, {"epochs": 8, "lwc_lr": 0.05}), (omniquant, {"epochs": 0}), (rtn, {})):
        lm = LowBitModel(heavy_tailed())
        module.apply(lm, ids, module.Config(**options, **more))
        result.append(block_errors(lm, ids))
    learned, start, plain = result
    assert all(a < 0.88 * min(b, c) for a, b, c in zip(learned, start, plain, strict=True)), result


def test_the_loss_falls_and_the_block_is_left_alone():
    made = heavy_tailed()
    hidden, kwargs = block_inputs(made, tiny.tokens(8, 32))
    block, config = made.model.layers[0], Config(bits=3, epochs=8, lwc_lr=0.05)
    names = [name for name, module in block.named_modules() if isinstance(module, torch.nn.Linear)]
    clippings = {(name,): Clipping(block.get_submodule(name).weight.data, config) for name in names}
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    with torch.no_grad():
        wants = [(block(h, **kwargs[0]),) for h in hidden]
    losses = omniquant.learn(block, clippings, hidden, wants, kwargs[0], config)
    assert len(losses) == 8 and losses[-1] < 0.9 * losses[0] and min(losses) in losses[-2:]
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items())
    assert all(parameter.grad is None for parameter in block.parameters())


def test_epochs_and_targets_of_the_paper():
    assert [Config(bits=b).passes for b in (2, 3, 4)] == [40, 20, 20]
    assert [Config(bits=b).two_targets for b in (2, 3, 4)] == [True, False, False]
    assert Config(bits=2, epochs=3).passes == 3 and Config(aug_loss=True).two_targets
    step = recipe.parse("omniquant-w3-pc-epochs=2-aug_loss").steps[0]
    assert step.module is omniquant and step.config == Config(bits=3, epochs=2, aug_loss=True)


@torch.no_grad()
@pytest.mark.parametrize("bits", [2, 3])
def test_targets_and_inputs_of_each_block(monkeypatch, bits):
    """Equation 1: full on full; at 2 bits full on quantized as well; inputs come from quantized blocks."""
    made, calls = tiny.model("llama"), []
    monkeypatch.setattr(omniquant, "learn", lambda *args: calls.append(args))
    lm = quantized(bits=bits)
    hidden, kwargs = block_inputs(made, tiny.tokens())
    first, second = made.model.layers
    middle = [first(h, **kwargs[0]) for h in hidden]
    rounded = [lm.model.model.layers[0](h, **kwargs[0]) for h in hidden]
    wants = [[(h,) for h in middle], [(second(h, **kwargs[1]),) for h in middle]]
    if bits == 2:
        again = [[first(h, **kwargs[0]) for h in hidden], [second(h, **kwargs[1]) for h in rounded]]
        for block, on_quantized in enumerate(again):
            wants[block] = [(*targets, h) for targets, h in zip(wants[block], on_quantized)]
    for (_, _, inputs, targets, _, _), of_block, want in zip(calls, (hidden, rounded), wants, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(inputs, of_block, strict=True))
        for a, b in zip(targets, want, strict=True):
            assert len(a) == len(b) and all(torch.allclose(x, y, atol=1e-6) for x, y in zip(a, b))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("scale_dtype", ["float16", "float32"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_what_is_stored_is_what_was_trained(bits, scale_dtype, symmetric):
    config = Config(bits=bits, group=16, symmetric=symmetric, scale_dtype=scale_dtype)
    wild = torch.stack([W[0], W[1].abs(), -W[2].abs(), torch.ones(256), torch.zeros(256), 1e-7 * W[3]])
    wild = torch.cat([wild, (1e6 if scale_dtype == "float32" else 1e4) * W[4:5]])
    clipping = Clipping(wild, config)
    random = torch.Generator().manual_seed(0)
    clipping.logits.data += 3 * torch.randn(clipping.logits.shape, generator=random)
    q = clipping.quantize()
    assert torch.equal(q.dequantize(), clipping.fake_quantize().detach())
    assert q.zeros.min() >= 0 and q.zeros.max().item() < 2**bits and torch.equal(q.zeros, q.zeros.round())
    assert q.zero_bits == (0 if symmetric else bits)
    assert (q.dequantize()[4] == 0).all() and (q.scales > 0).all()
    if not symmetric:
        assert (q.dequantize()[1] >= 0).all() and (q.dequantize()[2] <= 0).all()


def test_a_scale_too_large_for_its_dtype_is_refused_and_not_cut():
    with pytest.raises(UserError, match="a scale of a 1x256 weight is too large for float16; scale_dtype=float32 in"):
        Clipping(1e8 * W[:1], Config(group=32))
    config = Config(group=32, scale_dtype="float32")
    assert errors(Clipping(1e8 * W, config).quantize().dequantize() / 1e8) == pytest.approx(
        errors(Clipping(W, config).quantize().dequantize()), rel=1e-3
    )


def test_wide_open_is_round_to_nearest():
    config = Config(group=32)
    clipping = Clipping(W, config)
    clipping.logits.data.fill_(50)
    assert torch.equal(clipping.quantize().dequantize(), grid.rtn(W, config).dequantize())


def test_two_runs_give_the_same_weights():
    first, second = (quantized(bits=3, epochs=3) for _ in range(2))
    for name, weight in first.weights.items():
        assert torch.equal(weight.codes, second.weights[name].codes)
        assert torch.equal(weight.scales, second.weights[name].scales)


def test_bits_by_hand():
    """73,728 block weights in groups of 32: codes of 3 bits, scales of 16, zeros of 3."""
    report = bits.report(quantized(bits=3, group=32, epochs=1), float_bits=16)
    groups = 73728 // 32
    assert report["block"] == {
        "codes": 73728 * 3,
        "scales": groups * 16,
        "zeros": groups * 3,
        "indices": 0,
        "unquantized": 0,
    }
    assert report["bpw"] == 3 + 19 / 32 and report["other"] == (96 * 64 + 5 * 64) * 16


@pytest.mark.parametrize("calibration", [None, torch.empty(0, 16, dtype=torch.int64)])
def test_without_calibration_it_is_refused(calibration):
    with pytest.raises(UserError, match="omniquant needs calibration"):
        omniquant.apply(LowBitModel(tiny.model("llama")), calibration, Config())


def test_activations_that_are_not_finite():
    lm = LowBitModel(tiny.model("llama"))
    lm.model.model.layers[1].input_layernorm.weight.data[3] = torch.nan
    with pytest.raises(UserError, match=r"model\.layers\.1\.self_attn\.q_proj.*diverged"):
        omniquant.apply(lm, tiny.tokens(), Config(epochs=1))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"clip": "mse"}, "learns its clipping"),
        ({"lwc_lr": 0.0}, "lwc_lr is 0"),
        ({"epochs": -1}, "epochs is -1"),
        ({"bits": 9}, "bits is 9"),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Config(**options)
