"""The end-to-end trainer and E2E-QP: AdamW by hand, parts, validation, resuming, divergence, only scales change."""

import math
from dataclasses import replace

import pytest
import tiny
import torch
from torch.nn import functional as F

from repro.baselines import e2e_qp, q4_k, rtn
from repro.core.errors import NotMeasurable, UserError
from repro.models.lowbit import LowBitModel
from repro.recipes import recipe
from repro.train import end_to_end
from repro.train.blocks import batch_rows
from repro.train.end_to_end import EndToEndSettings, Validation, fitting, train

pytestmark = pytest.mark.usefixtures("own_build_folder")  # where checkpoints lie
IDS = tiny.tokens(8, 16)
SETTINGS = EndToEndSettings(1e-2, 3, 2, warmup=0.25, final=0.1, clip=0.5, weight_decay=0.1, seed=5)


def embedding() -> dict[str, torch.Tensor]:
    """The tensors of a tiny model: token by token, the logits of the next."""
    random = torch.Generator().manual_seed(0)
    return {"a": torch.randn(96, 8, generator=random), "b": torch.randn(8, 96, generator=random)}


def loss_of(tensors):
    """Next-token loss of that model."""
    return lambda rows: F.cross_entropy(
        (tensors["a"][rows[:, :-1]] @ tensors["b"]).flatten(0, 1), rows[:, 1:].flatten()
    )


def test_training_is_adamw_by_hand(tmp_path):
    """Warm-up in 3 of 12 steps, then half a cosine to a tenth; the gradient's norm is at most 1/2."""
    tensors, want = embedding(), embedding()
    losses = train(loss_of(tensors), tensors, IDS, SETTINGS, tmp_path / "x", "test")
    optimizer = torch.optim.AdamW([w.requires_grad_() for w in want.values()], weight_decay=0.1)
    result, norms = [], []
    for step in range(12):
        done = (step - 3) / 9
        rate = 1e-2 * ((step + 1) / 3 if step < 3 else 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        value = loss_of(want)(IDS[batch_rows(step, 8, SETTINGS)])
        value.backward()
        norm = torch.cat([w.grad.flatten() for w in want.values()]).norm()
        norms.append(norm.item())
        for w in want.values():
            w.grad *= min(1.0, 0.5 / norm.item())
        optimizer.step()
        result.append(value.item())
    assert max(norms) > 0.5 and losses == pytest.approx(result, rel=1e-5)
    for name in want:
        torch.testing.assert_close(tensors[name], want[name].detach(), rtol=1e-4, atol=1e-5)
        assert not tensors[name].requires_grad and tensors[name].grad is None


@pytest.mark.parametrize("killed_at", [1, 5, 11])
def test_a_killed_run_goes_on_with_the_same_bits(tmp_path, monkeypatch, killed_at):
    monkeypatch.setattr(end_to_end, "SAVE_EVERY", 0.0)
    want = embedding()
    losses = train(loss_of(want), want, IDS, SETTINGS, tmp_path / "whole", "test")
    calls = []

    def counted(tensors, killed):
        def loss(rows):
            calls.append(None)
            if killed and len(calls) == killed_at + 1:
                raise KeyboardInterrupt
            return loss_of(tensors)(rows)

        return loss

    tensors = embedding()
    with pytest.raises(KeyboardInterrupt):
        train(counted(tensors, True), tensors, IDS, SETTINGS, tmp_path / "killed", "test")
    assert len(list((tmp_path / "killed").glob("*.safetensors"))) == 1
    tensors = embedding()
    assert train(counted(tensors, False), tensors, IDS, SETTINGS, tmp_path / "killed", "test") == losses
    assert len(calls) == 13, "no step is run again"
    assert all(torch.equal(tensors[name], want[name]) for name in want)
    assert not (tmp_path / "killed").exists()


def test_a_loss_that_is_not_finite_is_refused_with_its_step(tmp_path):
    tensors, calls = embedding(), []

    def loss(rows):
        calls.append(None)
        return loss_of(tensors)(rows) * (math.inf if len(calls) == 7 else 1)

    with pytest.raises(
        NotMeasurable, match="test: the loss is not finite at step 7; lower its learning rate"
    ) as raised:
        train(loss, tensors, IDS, SETTINGS, tmp_path, "test")
    assert raised.value.status == "diverged"


def test_a_tensor_that_is_not_finite_at_the_end_is_refused(tmp_path):
    """The last step's loss is that of the tensors before it."""
    tensors = embedding()
    tensors["b"].requires_grad_().register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(NotMeasurable, match="test: b is not finite after the last step; lower its learning rate"):
        train(loss_of(tensors), tensors, IDS[:2], EndToEndSettings(1e-2, 1, 2), tmp_path, "test")


@pytest.mark.parametrize("together", [1, 2, 3])
def test_parts_of_a_batch_add_up_to_it(tmp_path, together):
    settings = EndToEndSettings(1e-2, 3, 4, clip=0.5, seed=1)
    tensors, want, sizes = embedding(), embedding(), []

    def loss(rows):
        sizes.append(len(rows))
        return loss_of(tensors)(rows)

    losses = train(loss_of(want), want, IDS, settings, tmp_path / "whole", "test")
    parted = train(loss, tensors, IDS, replace(settings, together=together), tmp_path / "parts", "test")
    assert sizes == 6 * {1: [1, 1, 1, 1], 2: [2, 2], 3: [3, 1]}[together]
    assert parted == pytest.approx(losses, rel=1e-5)
    for name in want:
        torch.testing.assert_close(tensors[name], want[name], rtol=1e-4, atol=1e-5)


def walking(best: float):
    """One number that every step lowers by the rate, and a loss of validation that is least at `best`."""
    x = {"x": torch.zeros(1)}

    def loss(rows):
        return (x["x"] - best).square().sum() if len(rows) == 3 else -x["x"].sum() * (rows[0, 0] * 0 + 1)

    return x, loss


@pytest.mark.parametrize(("best", "kept"), [(0.0, 2), (0.55, 6), (0.85, 8), (9.0, 11)])
def test_the_best_look_is_kept(tmp_path, best, kept):
    """Adam's steps on a constant slope are the rate; looks after every second step and the last, of eleven."""
    x, loss = walking(best)
    validation = Validation(IDS[:3], 2)
    train(loss, x, IDS[:1].repeat(11, 1), EndToEndSettings(0.1, 1, 1), tmp_path, "test", validation)
    assert x["x"].item() == pytest.approx(0.1 * kept, rel=1e-3)
    looks = [(0.1 * step - best) ** 2 for step in (2, 4, 6, 8, 10, 11)]
    assert validation.losses == pytest.approx(looks, rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("killed_at", [1, 5, 9])
def test_a_killed_run_keeps_its_best_look(tmp_path, monkeypatch, killed_at):
    monkeypatch.setattr(end_to_end, "SAVE_EVERY", 0.0)
    settings, ids, calls = EndToEndSettings(0.1, 1, 1), IDS[:1].repeat(11, 1), []
    want, loss = walking(0.3)
    whole = Validation(IDS[:3], 2)
    losses = train(loss, want, ids, settings, tmp_path / "whole", "test", whole)
    x, plain = walking(0.3)

    def killed(rows):
        calls.append(len(rows))
        if calls.count(1) == killed_at + 1:
            raise KeyboardInterrupt
        return plain(rows)

    with pytest.raises(KeyboardInterrupt):
        train(killed, x, ids, settings, tmp_path / "killed", "test", Validation(IDS[:3], 2))
    x, plain = walking(0.3)
    again = Validation(IDS[:3], 2)
    assert train(plain, x, ids, settings, tmp_path / "killed", "test", again) == losses
    assert again.losses == whole.losses and torch.equal(x["x"], want["x"])


def test_a_validation_that_is_not_finite_is_refused(tmp_path):
    x, loss = walking(math.nan)
    with pytest.raises(NotMeasurable, match="test: the validation loss is not finite at step 2"):
        train(loss, x, IDS[:1].repeat(4, 1), EndToEndSettings(0.1, 1, 1), tmp_path, "test", Validation(IDS[:3], 2))


def test_logits_that_fit():
    model = tiny.model("llama")
    assert fitting(model, 2**12) == 2**26 // (2**12 * 96) and fitting(model, 2**26) == 1


# --- E2E-QP -----------------------------------------------------------------------------------------------------------


def made(**options) -> tuple[LowBitModel, LowBitModel]:
    """A tiny model under RTN, and under RTN and E2E-QP."""
    result = []
    for more in (False, True):
        lm = LowBitModel(tiny.model("llama"))
        rtn.apply(lm, None, rtn.Config(bits=2, group=16))
        if more:
            small = {"compute": "float32", "tokens": 128, "batch": 2, "epochs": 4, "lr": 3e-3}
            e2e_qp.apply(lm, IDS, e2e_qp.Config(**small | options))
        result.append(lm)
    return result[0], result[1]


def test_the_scales_alone_change_and_the_loss_falls():
    plain, trained = made()
    for name, weight in trained.weights.items():
        before = plain.weights[name]
        assert torch.equal(weight.codes, before.codes) and torch.equal(weight.zeros, before.zeros)
        assert weight.scales.dtype == before.scales.dtype and not torch.equal(weight.scales, before.scales)
        assert weight.stored_bits() == before.stored_bits()
        assert torch.equal(trained.model.get_submodule(name).weight.data, weight.dequantize())
    losses = trained.facts["training/end-to-end loss"]
    assert len(losses) == 16 and sum(losses[-4:]) < 0.95 * sum(losses[:4])


def test_rate_0_changes_nothing_and_the_first_loss_is_the_models():
    plain, trained = made(lr=0.0)
    for name, weight in trained.weights.items():
        assert torch.equal(weight.scales, plain.weights[name].scales)
    rows = IDS[batch_rows(0, 8, EndToEndSettings(0.0, 1, 2))]
    with torch.no_grad():
        logits = plain.model(input_ids=rows, use_cache=False).logits
    want = F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item()
    assert trained.facts["training/end-to-end loss"][0] == pytest.approx(want, rel=1e-5)


def test_options_that_mean_nothing_are_refused():
    for text, message in {
        "e2e_qp(lr=-1.0)": "0 or more",
        "e2e_qp(batch=0)": "1 or more",
        "e2e_qp(warmup=1.0)": "warmup",
    }.items():
        with pytest.raises(UserError, match=message):
            recipe.parse(text)
    lm = LowBitModel(tiny.model("llama"))
    with pytest.raises(UserError, match="put one before it: efficientqat"):
        e2e_qp.apply(lm, IDS, e2e_qp.Config())
    rtn.apply(lm, None, rtn.Config())
    with pytest.raises(UserError, match="e2e_qp trains on 16,777,216 tokens an epoch, the calibration text has 128"):
        e2e_qp.apply(lm, IDS, e2e_qp.Config())
    lm.weights["model.layers.0.mlp.up_proj"] = q4_k.Config()
    with pytest.raises(UserError, match="e2e_qp trains the scales of a uniform grid"):
        e2e_qp.apply(lm, IDS, e2e_qp.Config())
