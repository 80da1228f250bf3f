"""Quantizing one layer at a time: damage and loss against slow references, what is kept by sequence, what is shown."""

from itertools import product

import numpy as np
import pytest
import tiny
import torch

from repro.core.errors import UserError
from repro.jobs.target import Target
from repro.methods.spear import selection
from repro.metrics import sensitivity
from repro.metrics.sensitivity import Protocol, Sensitivity, each_alone, last_hidden
from repro.models.lowbit import LowBitModel, block_linears
from repro.recipes.recipe import parse
from repro.render import figure_files, plot
from repro.specs import scale
from repro.store.observations import Observations, Series


def damages_of(X, Y):
    X, Y = map(sensitivity.centred, (X, Y))
    return sensitivity.damages(X, sensitivity.product(X, X), Y)


def weighted_cka(X, Y, w):
    """Equation 6 with a weight for each sequence of `[S, T, d]` and the centering matrix of weighted tokens."""
    each = w.repeat_interleave(X.shape[1])
    X, Y = X.flatten(0, 1), Y.flatten(0, 1)
    C = torch.diag(each) - torch.outer(each, each) / each.sum()
    xy, xx, yy = ((P.T @ C @ Q).square().sum() for P, Q in ((X, Y), (X, X), (Y, Y)))
    return xy / (xx * yy).sqrt()


@pytest.mark.parametrize("scale", [1e-3, 0.3, 3.0])
def test_what_is_kept_is_the_damage_and_its_derivative_by_sequence(scale):
    X, noise = torch.randn(2, 5, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    Y, w = X + scale * noise, torch.ones(5, dtype=torch.float64, requires_grad=True)
    cka = weighted_cka(X, Y, w)
    (slope,) = torch.autograd.grad(cka, w)
    result = damages_of(X, Y)
    assert result == pytest.approx((1 - cka - 5 * slope).detach().numpy(), abs=1e-12)
    assert result.mean() == pytest.approx(1 - selection.cka(X.flatten(0, 1), Y.flatten(0, 1)), abs=1e-12)
    weights = torch.tensor([2.0, 0, 1, 1, 1], dtype=torch.float64)  # a resample of the sequences
    again = 1 - weighted_cka(X, Y, weights).item()
    if scale < 1:
        assert weights.numpy() @ result / 5 == pytest.approx(again, rel=0.2)


def test_constant_states_are_all_or_nothing():
    X = torch.ones(3, 4, 2)
    assert damages_of(X, 2 * X).tolist() == [0, 0, 0]
    assert damages_of(X, torch.randn(3, 4, 2)).tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", ["llama", "phi"])
def test_one_layer_at_a_time_against_whole_forward_passes(name):
    full, (sampled, text) = tiny.model(name), tiny.tokens(40, 12).split(20)
    before = {key: tensor.clone() for key, tensor in full.state_dict().items()}
    rounded = {key: (linear.weight.data * 4).round() / 4 for key, linear in block_linears(full).items()}
    damage, loss = each_alone(full, rounded, sampled, text)
    assert damage.shape == loss.shape == (len(rounded), 20)
    assert all(torch.equal(tensor, before[key]) for key, tensor in full.state_dict().items()), "restored"

    def states_and_loss():
        with torch.no_grad():
            hidden = full.base_model(sampled).last_hidden_state.flatten(0, 1)
            return hidden, [full(one[None], labels=one[None]).loss.item() for one in text]

    whole, plain = states_and_loss()
    for i, (key, weight) in enumerate(rounded.items()):
        linear = full.get_submodule(key)
        kept, linear.weight.data = linear.weight.data, weight
        hidden, more = states_and_loss()
        linear.weight.data = kept
        assert damage[i].mean() == pytest.approx(1 - selection.cka(whole, hidden), abs=1e-7), key
        assert loss[i] == pytest.approx(np.subtract(more, plain), abs=1e-5), key
    assert damage.mean(1).min() > 1e-6 and np.abs(loss).max() > 1e-3


def test_blocks_before_the_quantized_layer_do_not_run():
    model, ids, ran = tiny.model("llama"), tiny.tokens(20, 8), []
    for name in ("layers.0.mlp", "layers.1.mlp"):
        model.base_model.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
    result = last_hidden(model, ids, 1, torch.zeros(20, 8, 64))
    assert ran == ["layers.1.mlp"] * 2 and result.shape == (20, 8, 64)
    ran.clear()
    model(ids)
    assert ran == ["layers.0.mlp", "layers.1.mlp"], "the model runs whole again"


# --- jobs -------------------------------------------------------------------------------------------------------------


def target(recipe, **changes):
    return Target(scale.load(changes, "pocket"), "pocket-3m", recipe)


def test_a_quantizer_that_rescales_is_applied_anew_and_full_precision_needs_nothing():
    (plain,), (rescaling,) = (Sensitivity("damage").jobs(target(text)).values() for text in ("gptq-w4-pc", "awq-w4-pc"))
    assert [role for role, _ in plain.needs] == ["text", "weights"] and not Sensitivity("damage").jobs(target("fp16"))
    assert [role for role, _ in rescaling.needs] == ["text", "calibration"]
    assert rescaling.parsed_inputs()["calibration"] == plain.parsed_inputs()["calibration"] is not None
    (smaller,) = Sensitivity("damage").jobs(target("gptq-w4-pc", sensitivity={"sequences": 2})).values()
    assert smaller.id != plain.id and smaller.parsed_options()["sequences"] == 2
    with pytest.raises(UserError, match="calibrated on wikitext2-train-part, and perplexity is measured on"):
        Sensitivity("damage", corpus="wikitext2-train-part").jobs(target("gptq-w4-pc"))
    with pytest.raises(UserError, match="spear attaches a compensator; name a quantizer alone"):
        Sensitivity("damage").jobs(target("rtn-w4-pc + spear"))
    with pytest.raises(UserError, match="tokens is 1; it must be 2 or more"):
        Protocol(tokens=1)


def job_options(recipe):
    crops = {"sequences": 4, "length": 24, "seed": 0}
    options = {"model": "tiny", "device": "cpu", "dtype": "float32", "hub": False, "sequences": 6, "tokens": 16}
    return options | {"recipe": recipe, "calibration": crops}


@pytest.fixture
def small(monkeypatch):
    """Jobs see a tiny model and a corpus of 400 tokens."""
    monkeypatch.setattr(sensitivity.models, "load", lambda *_: tiny.model("llama"))
    ids = np.arange(400) * 7 % 96
    monkeypatch.setattr(sensitivity.corpora, "load_tokens", lambda _: (ids, {"label": "counting"}))


def test_full_precision_of_a_rescaling_quantizer_is_the_models_own_function(small, tmp_path):
    lm = sensitivity._quantized(job_options("awq-w4-g64"), {"calibration": tmp_path})
    own, ids = tiny.model("llama"), tiny.tokens(2, 12)
    assert not torch.equal(
        lm.model.base_model.layers[0].input_layernorm.weight, own.base_model.layers[0].input_layernorm.weight
    )
    with torch.no_grad():
        assert torch.allclose(lm.full_precision()(ids).logits, own(ids).logits, atol=1e-4)


def test_every_layer_by_sequence_and_by_passage(small, monkeypatch, tmp_path):
    kept, words = {}, job_options("rtn-w3-pc")
    rounded = LowBitModel(tiny.model("llama"))
    parse("rtn-w3-pc").steps[0].module.apply(rounded, None, parse("rtn-w3-pc").steps[0].config)
    monkeypatch.setattr(sensitivity.compress, "load", lambda *_, keep_full: rounded)
    monkeypatch.setattr(sensitivity.observations, "save", lambda path, series, origin: kept.update(series))
    job = type("job", (), {"parsed_options": lambda self: words})()
    sensitivity.Sensitivity.run(job, {"text": tmp_path, "weights": tmp_path}, tmp_path, {})
    layers = len(rounded.weights)
    assert list(kept) == [f"{name} {i}" for name, i in product(("damage", "loss"), range(layers))]
    assert {(one.axis, len(one.values)) for one in kept.values()} == {("sequences", 6)}
    assert kept["damage 3"].group == "6 sampled sequences of 16 tokens"
    assert kept["loss 3"].group == "6 passages of 16 tokens of counting"
    assert kept["damage 0"].values.mean() > 0
    words["tokens"] = 60
    with pytest.raises(UserError, match="counting has 400 tokens, too few for 6 passages of 60"):
        sensitivity.Sensitivity.run(job, {"text": tmp_path, "weights": tmp_path}, tmp_path, {})
    words["tokens"] = 65
    with pytest.raises(UserError, match="windows of 65 tokens are longer than the context"):
        sensitivity.Sensitivity.run(job, {"text": tmp_path, "weights": tmp_path}, tmp_path, {})


# --- what is shown ----------------------------------------------------------------------------------------------------

DAMAGE, LOSS = [0.4, 0.1, 0.3, 0.2, 0.1], [2.0, -0.5, 3.0, 0.25, 0.25]


def series_of_layers():
    both = {"damage": DAMAGE, "loss": LOSS}
    series = {}
    for name, values in both.items():
        for i, x in enumerate(values):
            series[f"{name} {i}"] = Series(np.array([x - 0.01, x + 0.01]), "sequences", name)
    return series


@pytest.mark.parametrize(
    ("show", "expected"),
    [
        ("damage", 0.22),
        ("loss", 1.0),
        ("rho", np.corrcoef([5, 1.5, 4, 3, 1.5], [4, 1, 5, 2.5, 2.5])[0, 1]),
        ("tail", 100.0),  # 30 % of five layers, rounded, is two of them: 2 + 3 of 5
    ],
)
def test_what_is_shown_of_known_layers(show, expected):
    result = Sensitivity(show).series({"layers": Observations(series_of_layers(), {})}, None)
    assert float(Sensitivity(show).value({k: one.values.mean() for k, one in result.items()})) == pytest.approx(
        expected
    )
    if show in ("damage", "loss"):
        (only,) = result.values()
        assert only.axis == "layers" and only.values == pytest.approx(DAMAGE if show == "damage" else LOSS)
    assert Sensitivity(show).series({}, None) == {}, "full precision"


def test_numbers_are_of_arrays_too():
    means = {k: np.array([one.values.mean(), -one.values.mean()]) for k, one in series_of_layers().items()}
    rho = Sensitivity("rho").value(means)
    assert rho.shape == (2,) and rho[0] == pytest.approx(rho[1])


def test_its_figure_has_logarithmic_axes_with_room_for_a_layer_that_helps(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(plot, "save", lambda figure, path: drawn.extend(figure.axes))
    plot.loglog({"m": {"RTN": [(1e-4, -0.01, None, None), (1e-2, 0.2, None, None)]}}, "t", "x", "y", tmp_path / "f.svg")
    (axis,) = drawn
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "symlog")
    assert axis.get_ylim()[0] < -0.01 and figure_files.PLOTS["loglog"] is plot.loglog
