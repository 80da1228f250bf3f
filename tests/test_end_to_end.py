"""The end-to-end trainer and E2E-QP: AdamW by hand, resuming, divergence, and that the scales alone change."""

import math

import pytest
import tiny
import torch
from torch.nn import functional as F

from repro.baselines import e2e_qp, q4_k, rtn
from repro.errors import Refused, UserError
from repro.jobs import job
from repro.models.lowbit import LowBitModel
from repro.spec import recipe
from repro.train import end_to_end
from repro.train.blocks import batch_rows
from repro.train.end_to_end import EndToEndSettings, train

IDS = tiny.tokens(8, 16)
SETTINGS = EndToEndSettings(1e-2, 3, 2, warmup=0.25, final=0.1, clip=0.5, weight_decay=0.1, seed=5)


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """Checkpoints of these tests lie in a folder of their own."""
    monkeypatch.setattr(job, "BUILD", tmp_path / "build")


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
    found, norms = [], []
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
        found.append(value.item())
    assert max(norms) > 0.5 and losses == pytest.approx(found, rel=1e-5)
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

    with pytest.raises(Refused, match="test: the loss is not finite at step 7; lower its learning rate") as found:
        train(loss, tensors, IDS, SETTINGS, tmp_path, "test")
    assert found.value.status == "diverged"


# --- E2E-QP -----------------------------------------------------------------------------------------------------------


def made(**options) -> tuple[LowBitModel, LowBitModel]:
    """A tiny model under RTN, and under RTN and E2E-QP."""
    found = []
    for more in (False, True):
        lm = LowBitModel(tiny.model("llama"))
        rtn.apply(lm, None, rtn.Config(bits=2, group=16))
        if more:
            e2e_qp.apply(lm, IDS, e2e_qp.Config(**{"tokens": 128, "batch": 2, "epochs": 4, "lr": 3e-3} | options))
        found.append(lm)
    return found[0], found[1]


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


def test_official_settings_are_the_defaults():
    config = recipe.parse("efficientqat-w2-g64 + e2e_qp").steps[1].config
    assert config == e2e_qp.Config(2e-5, 1, 32, 4096 * 4096, 0.03, 0.3)


def test_bad_input():
    for text, said in {
        "e2e_qp(lr=-1.0)": "0 or more",
        "e2e_qp(batch=0)": "1 or more",
        "e2e_qp(warmup=1.0)": "warmup",
    }.items():
        with pytest.raises(UserError, match=said):
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
