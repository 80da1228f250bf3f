"""EfficientQAT's Block-AP: the authors' gradients, RTN at rate 0, what is trained and what is stored."""

import math

import pytest
import tiny
import torch
from known import W, X, errors

from repro import models
from repro.baselines import efficientqat, grid, rtn, staged_ap
from repro.baselines.efficientqat import Config, fake_quantize, steps
from repro.core.errors import NotMeasurable, UserError
from repro.data import corpora
from repro.models import perplexity
from repro.models.lowbit import LowBitModel
from repro.recipes import recipe
from repro.train import blocks as training

pytestmark = pytest.mark.usefixtures("own_build_folder")  # where checkpoints lie
IDS, SCORED = tiny.tokens(6, 16), tiny.tokens(3, 20, seed=5)
SMALL = {"tokens": 96, "compute": "float32", "streams": "float32", "epochs": 1, "group": 16}


def made(layout="llama", ids=IDS, **options) -> LowBitModel:
    lm = LowBitModel(tiny.model(layout))
    efficientqat.apply(lm, ids, Config(**SMALL | options))
    return lm


@pytest.mark.parametrize(
    ("bits", "error", "slope"),
    [
        (2, (3.2845695e-04, 0.12964341), 4.11961),
        (3, (6.171135e-05, 0.025933147), 1.92795),
        (4, (1.3058000e-05, 0.0052998594), 0.843857),
    ],
)
def test_known_answers_at_the_start(bits, error, slope):
    """Errors of the start, and d/ds and d/dz of mean((Q(W) Xᵀ - W Xᵀ)²), summed, from the authors' quantizer."""
    config = Config(bits=bits, group=64, scale_dtype="float32")
    s, z = (t.requires_grad_() for t in grid.fit(grid.split(W, config), config))
    made = fake_quantize(W, s, z, config)
    assert errors(made.detach()) == pytest.approx(error, rel=1e-5)
    loss = ((made - W) @ X.T).square().mean()
    ds, dz = torch.autograd.grad(loss, (s, z))
    assert ds.sum().item() == pytest.approx(slope, rel=2e-5) and dz.abs().max() <= 1e-9


def test_weights_have_no_gradient_where_their_code_clips():
    config = Config(bits=2, group=4, scale_dtype="float32")
    w = torch.tensor([[-1.0, 0.2, 3.0, 0.0]], requires_grad=True)
    s, z = torch.full((1, 1, 1), 0.5), torch.full((1, 1, 1), 1.0)
    (gradient,) = torch.autograd.grad(fake_quantize(w, s, z, config).sum(), w)
    assert gradient.tolist() == [[0.0, 1.0, 0.0, 1.0]]


def test_bounds_pass_gradients_straight_through():
    s, z = (torch.tensor([1e-6, 0.5, 1e6]).requires_grad_(), torch.tensor([-3.0, 1.4, 9.0]).requires_grad_())
    bounded, code = steps(s, z, Config(bits=2, group=4, scale_dtype="float32"))
    assert bounded.tolist() == pytest.approx([1e-4, 0.5, 1e4]) and code.tolist() == [0, 1, 3]
    for gradient in torch.autograd.grad((bounded + code).sum(), (s, z)):
        assert gradient.tolist() == [1, 1, 1]


@pytest.mark.parametrize("bits", [8, 2])
def test_at_rate_0_it_is_rtn(bits):
    """Perplexity of a pocket model to 1e-6, every code, scale and zero point."""
    ids = torch.from_numpy(corpora.token_ids("tiny-held-out", models.tokenizer("pocket-3m"))[:256]).long()
    wins, result = ids.view(2, 128), []
    options = {"bits": bits, "group": 32}
    trained = Config(**options, lr=0.0, quant_lr=0.0, tokens=256, epochs=1)
    for module, config in ((efficientqat, trained), (rtn, rtn.Config(**options))):
        lm = LowBitModel(models.load("pocket-3m"))
        module.apply(lm, wins, config)
        result.append((math.exp(perplexity.score(lm.model, wins)["nll"].mean()), lm.weights))
    assert result[0][0] == pytest.approx(result[1][0], rel=1e-6)
    for a, b in zip(result[0][1].values(), result[1][1].values(), strict=True):
        assert torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales) and torch.equal(a.zeros, b.zeros)
        assert a.stored_bits() == b.stored_bits()


def test_rates_of_weights_and_of_steps(monkeypatch):
    """Adam's first step is the rate times the gradient's sign: weights by `lr`, s and z by `quant_lr`."""
    starts = []
    true_start = efficientqat.start
    monkeypatch.setattr(efficientqat, "start", lambda *a: starts.append(true_start(*a)) or starts[-1])
    made(lr=1e-3, quant_lr=1e-4, batch=6, epochs=1)
    block = tiny.model("llama").model.layers[0]
    before = true_start(block, "", Config(**SMALL))
    moved = {key: (starts[0][key] - tensor).abs().max().item() for key, tensor in before.items()}
    assert len(moved) == 3 * 7
    for key, size in moved.items():
        if key.endswith("/z"):
            assert size in (0.0, pytest.approx(1e-4, rel=1e-2)), key  # no gradient until a code clips
        else:
            assert size == pytest.approx(1e-4 if key.endswith("/s") else 1e-3, rel=1e-2), key


@torch.no_grad()
@pytest.mark.parametrize("layout", ["llama", "qwen2", "mistral", "phi"])
def test_what_is_stored_is_what_was_trained(monkeypatch, layout, tmp_path):
    last = {}
    true_quantized = efficientqat.quantized

    def noted(block, tensors, config, kwargs):
        run = true_quantized(block, tensors, config, kwargs)
        return lambda x: last.update({id(tensors): (x.detach().clone(), kwargs, run)}) or run(x)

    monkeypatch.setattr(efficientqat, "quantized", noted)
    lm = made(layout, act_bits=4, lr=1e-3)
    assert not lm.dense
    for block, (x, kwargs, run) in zip(lm.model.base_model.layers, last.values(), strict=True):
        torch.testing.assert_close(block(x, **kwargs), run(x), rtol=1e-4, atol=1e-4)
    lm.save(tmp_path / "model.safetensors", {"of": "a test"})
    again = LowBitModel(tiny.model(layout))
    again.load(tmp_path / "model.safetensors")
    assert torch.equal(tiny.logits(again.model, SCORED), tiny.logits(lm.model, SCORED))


def test_training_beats_rounding():
    """On the text that it trains on."""
    ids, result = tiny.tokens(32, 24), {}
    full = tiny.logits(tiny.model("llama"), ids)
    for name, options in {"trained": {"lr": 3e-3, "quant_lr": 1e-3}, "rate 0": {"lr": 0.0, "quant_lr": 0.0}}.items():
        lm = made(ids=ids, tokens=768, epochs=8, **options)
        result[name] = (tiny.logits(lm.model, ids) - full).square().mean().item()
        assert lm.facts["training/tokens"] == [8 * 768]
    assert result["trained"] < 0.6 * result["rate 0"], result  # 0.2 of it


def test_options_that_mean_nothing_are_refused():
    for text, message in {
        "efficientqat-sym": "takes neither sym nor clip",
        "efficientqat-clip=mse": "takes neither sym nor clip",
        "efficientqat-lr=-1.0": "0 or more",
        "efficientqat-batch=0": "1 or more",
        "efficientqat-a9": "act_bits is 16, or 2 to 8",
        "efficientqat-pc-a2": "with a group above 0",
    }.items():
        with pytest.raises(UserError, match=message):
            recipe.parse(text)
    with pytest.raises(UserError, match="efficientqat trains on 97 tokens an epoch, the calibration text has 96"):
        made(tokens=97)
    with pytest.raises(UserError, match="layers.0.self_attn.q_proj: .* do not divide into groups of 48"):
        made(group=48)
    with pytest.raises(NotMeasurable, match="efficientqat: the loss is not finite at step .* lower its learning rate"):
        made(lr=1e37, epochs=8)


# --- in stages --------------------------------------------------------------------------------------------------------


def staged(**options) -> LowBitModel:
    lm = LowBitModel(tiny.model("llama"))
    staged_ap.apply(lm, IDS, staged_ap.Config(**SMALL | {"lr": 1e-3, "quant_lr": 1e-3} | options))
    return lm


def test_one_stage_is_block_ap_itself():
    alone, plain = staged(before=[], act_bits=4), made(lr=1e-3, quant_lr=1e-3, act_bits=4)
    assert torch.equal(tiny.logits(alone.model, SCORED), tiny.logits(plain.model, SCORED))
    assert alone.facts == plain.facts
    for attachments in alone.attachments.values():
        assert {attachment.step for attachment in attachments} == {"staged_ap"}


def test_a_stage_goes_on_from_the_weights_before_it_on_a_grid_of_their_own(monkeypatch):
    """At rate 0 of a stage its s and z are those that RTN gives its first weights; three passes see three epochs."""
    names, true_run, fitted, true_refit = [], training.BlockTrainer.run, [], efficientqat.refit

    def noted(tensors, config):
        before = {name: weight.clone() for name, (weight, *_) in efficientqat.linears(tensors).items()}
        true_refit(tensors, config)
        after = {name: (s.clone(), z.clone()) for name, (_, s, z) in efficientqat.linears(tensors).items()}
        fitted.append((config.bits, before, after))

    monkeypatch.setattr(efficientqat, "refit", noted)
    monkeypatch.setattr(
        training.BlockTrainer, "run", lambda self, name, *rest: names.append(name) or true_run(self, name, *rest)
    )
    lm = staged()
    assert names == ["Block-AP w8", "Block-AP w4", "Block-AP w2"]
    assert lm.facts["training/tokens"] == [3 * 96.0] and [bits for bits, *_ in fitted] == [4, 4, 2, 2]
    original = tiny.model("llama").model.layers[0]
    for bits, before, after in fitted:
        grid_of = Config(bits=bits, group=16)
        for name, (s, z) in after.items():
            want_s, want_z = grid.fit(grid.split(before[name], grid_of), grid_of)
            assert torch.equal(s, want_s) and torch.equal(z, want_z)
    moved = fitted[0][1]["mlp.up_proj"] - original.mlp.up_proj.weight
    assert moved.abs().max() > 0, "the second stage starts from what the first one trained"
    still = staged(lr=0.0, quant_lr=0.0)
    plain = LowBitModel(tiny.model("llama"))
    rtn.apply(plain, None, rtn.Config(bits=2, group=16))
    assert torch.equal(tiny.logits(still.model, SCORED), tiny.logits(plain.model, SCORED))


@pytest.mark.parametrize("words", ["before=[4, 8]", "before=[2]", "before=[16, 4]", "before=[8, 8]"])
def test_widths_of_stages_fall(words):
    with pytest.raises(UserError, match="the widths fall from at most 8 and end above 2"):
        recipe.parse(f"staged_ap(w=2, {words})")
