"""Activation statistics in one pass against the same taken from every input at once, and who uses them."""

import pytest
import tiny
import torch
from known import X

from repro.baselines import awq, gptq, rtn
from repro.core.errors import UserError
from repro.methods import spear
from repro.models import activations
from repro.models.activations import InputStatistics, statistics, watching
from repro.models.lowbit import LowBitModel, block_linears

EXTRAS = ["second_moment", "kurtosis", "quantiles"]


@torch.no_grad()
def inputs_of(model, names, ids) -> dict[str, torch.Tensor]:
    """Every input of the named layers, float64 `[S, L, K]`."""
    seen = {}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]}))
        for name in names
    ]
    model(ids)
    for hook in hooks:
        hook.remove()
    return {name: x.double() for name, x in seen.items()}


@pytest.mark.parametrize("layout", ["llama", "phi"])
def test_statistics_are_those_of_all_inputs(layout):
    model, ids = tiny.model(layout), tiny.tokens(6, 24)
    names = list(block_linears(model))
    weights = torch.tensor([1.0, 2, 3, 4, 5, 6])
    measured, want = statistics(model, names, ids, EXTRAS, weights), inputs_of(model, names, ids)
    for name in names:
        x, result = want[name], measured[name]
        torch.testing.assert_close(result.mean_abs, x.abs().mean(1), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(result.mean_square, x.square().mean(1), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(result.max_abs, x.abs().amax(1), rtol=1e-5, atol=1e-7)
        each = torch.stack([one.T @ one / len(one) for one in x])
        moment = (weights[:, None, None] * each).sum(0) / weights.sum()
        torch.testing.assert_close(result.second_moment, moment, rtol=1e-4, atol=1e-6)
        flat = x.flatten(0, 1)
        centred = flat - flat.mean(0)
        kurtosis = centred.pow(4).mean(0) / centred.square().mean(0).square() - 3
        torch.testing.assert_close(result.kurtosis(), kurtosis, rtol=1e-3, atol=1e-3)
        for share in (0.1, 0.5, 0.9):
            assert result.quantile(share) == pytest.approx(torch.quantile(flat.abs(), share).item(), rel=0.02)


def test_layers_that_read_one_tensor_share_their_statistics():
    model = tiny.model("llama")
    by_layer = statistics(model, list(block_linears(model)), tiny.tokens(9, 8))
    of = {name.removeprefix("model.layers.0."): result for name, result in by_layer.items() if ".0." in name}
    assert of["self_attn.q_proj"] is of["self_attn.k_proj"] is of["self_attn.v_proj"]
    assert of["mlp.gate_proj"] is of["mlp.up_proj"]
    assert len({id(result) for result in of.values()}) == 4 and of["self_attn.q_proj"].seen == 9


def test_any_batches_give_the_same():
    layer = torch.nn.Linear(256, 64, dtype=torch.float64)
    result = []
    for sizes in ([4], [1, 1, 1, 1], [3, 1]):
        with torch.no_grad(), watching({"x": layer}, 4, EXTRAS) as watched:
            for x in X.double().view(4, 128, 256).split(sizes):
                layer(x)
        result.append(watched["x"])
    for other in result[1:]:
        for key in ("mean_abs", "mean_square", "max_abs", "second_moment", "powers", "histogram"):
            one, another = getattr(result[0], key), getattr(other, key)
            torch.testing.assert_close(one, another, rtol=1e-12, atol=1e-14 * float(one.max()))
    assert not layer._forward_pre_hooks


def test_sizes_are_left_out_where_nobody_asks():
    layer = torch.nn.Linear(256, 64)
    result = []
    for sizes in (True, False):
        with torch.no_grad(), watching({"x": layer}, 4, EXTRAS, sizes=sizes) as watched:
            layer(X.view(4, 128, 256))
        result.append(watched["x"])
    whole, part = result
    assert part.mean_abs is part.mean_square is part.max_abs is None and whole.max_abs.shape == (4, 256)
    for key in ("second_moment", "powers", "histogram"):
        assert torch.equal(getattr(whole, key), getattr(part, key))


def test_a_second_question_is_not_measured_again(monkeypatch):
    model, ids, runs = tiny.model("llama"), tiny.tokens(), []
    names = list(block_linears(model))[:3]
    model.model.register_forward_hook(lambda *_: runs.append(1))
    first = statistics(model, names, ids)
    assert statistics(model, names, ids.clone()) is first
    assert statistics(tiny.model("llama"), names, ids) is first, "equal weights are the same model"
    count = len(runs)
    statistics(model, names, ids, ["kurtosis"])
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1e-3
    assert statistics(model, names, ids) is not first
    monkeypatch.setattr(activations, "LARGEST", 0)
    statistics(model, names, ids[:5])
    again = len(runs)
    statistics(model, names, ids[:5])
    assert again > count and len(runs) > again, "a result that is too large is not kept"


def test_a_layer_that_does_not_run_is_named():
    model = tiny.model("llama")
    model.spare = torch.nn.Linear(4, 4)
    with pytest.raises(UserError, match="no calibration token reached spare"):
        statistics(model, ["spare"], tiny.tokens())


def test_inputs_that_are_not_finite_are_named():
    model = tiny.model("llama")
    model.model.layers[1].post_attention_layernorm.weight.data[3] = torch.nan
    with pytest.raises(UserError, match=r"^model\.layers\.1\.mlp\.gate_proj: its inputs hold NaN or Inf"):
        statistics(model, list(block_linears(model)), tiny.tokens())


def test_equal_weights_round_no_input():
    """300 tokens: 1/300 has no exact root, so inputs that were multiplied by it would have been rounded."""
    layer, x = torch.nn.Identity(), X[:300]
    with watching({"x": layer}, 7, ["second_moment"]) as statistics:
        for _ in range(7):
            layer(x[None].clone())
    torch.testing.assert_close(statistics["x"].second_moment, (x.T @ x).double() / 300, rtol=1e-14, atol=0)


def gptq_codes() -> torch.Tensor:
    lm = LowBitModel(tiny.model("llama"))
    gptq.apply(lm, tiny.tokens(), gptq.Config(bits=3))
    return lm.weights["model.layers.0.mlp.down_proj"].codes


def awq_scales() -> torch.Tensor:
    lm = LowBitModel(tiny.model("llama"))
    awq.apply(lm, tiny.tokens(), awq.Config(bits=3))
    return lm.dense["model.layers.0.input_layernorm.weight"]


def spear_start() -> torch.Tensor:
    lm, name = LowBitModel(tiny.model("llama")), "model.layers.0.mlp.down_proj"
    rtn.apply(lm, None, rtn.Config())
    activations._kept.clear()
    return spear.start(lm, {name: 3}, tiny.tokens(), spear.Config(init="whitened"))[name].A


@pytest.mark.parametrize("of", [gptq_codes, awq_scales, spear_start])
def test_calibrated_methods_take_their_statistics_from_here(of, monkeypatch):
    """Where inputs are measured with some channels louder than they are, the method's result follows."""
    plain, real = of(), InputStatistics.add
    assert torch.equal(plain, of())
    monkeypatch.setattr(InputStatistics, "add", lambda self, x, w: real(self, x * torch.logspace(0, 2, x.shape[-1]), w))
    assert not torch.equal(plain, of())
