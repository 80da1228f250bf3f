"""Next-token loss on groups: known value at rate 0, one loss of all blocks, its inputs' widths, what is stored."""

import pytest
import tiny
import torch
from test_qat import IDS, SCORED, rounded, same
from tiny_results import refusal
from torch.nn import functional as F

from repro.baselines import group_qat, qat
from repro.core.errors import UserError
from repro.methods import bitbybit
from repro.models.groups.quantizer import GroupGrid, fake_quantize
from repro.models.groups.weight import GroupWeight
from repro.models.lowbit import LowBitModel, block_linears
from repro.recipes import recipe
from repro.train.blocks import batch_rows

pytestmark = pytest.mark.usefixtures("own_build_folder")  # where checkpoints lie
SMALL = {"compute": "float32", "tokens": 128, "batch": 2, "epochs": 4, "lr": 3e-3, "group": 16}


def made(layout="llama", **options):
    lm = LowBitModel(tiny.model(layout))
    group_qat.apply(lm, IDS, group_qat.Config(**SMALL | options))
    return lm


def test_training_lowers_the_loss_of_all_blocks_at_once():
    lm = made(epochs=16)
    losses = lm.facts["training/loss"]
    assert lm.facts["training/tokens"] == [16 * 8 * 16] and len(losses) == 16 * 8 // 2
    assert sum(losses[-16:]) < 0.9 * sum(losses[:16])
    assert same(made(), made()) and not same(made(), made(seed=1))


def test_at_rate_0_it_is_bit_by_bits_rounding():
    lm, other = made(lr=0.0, epochs=1), LowBitModel(tiny.model("llama"))
    bitbybit.apply(other, IDS, bitbybit.Config(schedule=["w2a16"], split="none", epochs=0, tokens=128, group=16))
    assert same(lm, other)
    rows, grid = IDS[batch_rows(0, 8, group_qat.Config(**SMALL))], GroupGrid(2, 16, scale="e4m3")
    model = rounded(tiny.model("llama"), lambda _, w: fake_quantize(w, grid))
    want = F.cross_entropy(tiny.logits(model, rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item()
    assert lm.facts["training/loss"][0] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("layout", ["llama", "qwen2"])
@pytest.mark.parametrize("act_bits", [16, 4])
def test_what_is_stored_is_what_was_trained(monkeypatch, tmp_path, layout, act_bits):
    seen, true_train, true_logits = [], group_qat.train, qat.logits

    def train(loss, *rest):
        losses = true_train(loss, *rest)
        with torch.no_grad():
            loss(SCORED)
        return losses

    monkeypatch.setattr(group_qat, "train", train)
    monkeypatch.setattr(qat, "logits", lambda *args: seen.append(true_logits(*args)) or seen[-1])
    lm = made(layout, act_bits=act_bits)
    assert torch.equal(tiny.logits(lm.model, SCORED), seen[-1])
    lm.save(tmp_path / "model.safetensors", {"of": "a test"})
    again = LowBitModel(tiny.model(layout))
    again.load(tmp_path / "model.safetensors")
    assert torch.equal(tiny.logits(again.model, SCORED), seen[-1])
    assert all(type(weight) is GroupWeight and weight.bits == 2 for weight in again.weights.values())


def test_heavy_inputs_of_down_projections_get_more_bits():
    """Where kurtosis is above its bound, as in Bit-by-Bit; its weights' ranges include 0, too."""
    for bound, bits in ((0.0, 4), (1e9, 2)):
        lm = made(act_bits=2, epochs=1, kurtosis=bound)
        other = LowBitModel(tiny.model("llama"))
        options = {"act_bits": 2, "schedule": ["w2a2"], "split": "none", "epochs": 0, "kurtosis": bound}
        bitbybit.apply(other, IDS, bitbybit.Config(tokens=128, group=16, **options))
        for name in block_linears(tiny.model("llama")):
            want = bits if name.endswith("down_proj") else 2
            (mine,), (theirs,) = lm.attachments[name], other.attachments[name]
            assert mine.numbers == theirs.numbers and mine.numbers["bits"] == want, name
            assert lm.weights[name].zeros.max() <= 3 and lm.weights[name].zeros.dtype == torch.uint8
        assert lm.facts["layers/kurtosis"] == other.facts["layers/kurtosis"]


@pytest.mark.parametrize(("text", "message"), [
    ("group_qat-w1", "group_qat: bits is 1 and group 32"),
    ("group_qat-g0", "group 0; bits are 2 to 8, a group is above 0"),
    ("group_qat-a12", "group_qat: act_bits is 12"),
    ("group_qat-lr=-1.0", "group_qat: lr is -1.0; it must be 0 or more"),
    ("group_qat-lr_final=2.0", "lr_final is a share from 0 to 1"),
    ("group_qat-tokens=0", "group_qat: tokens is 0"),
])  # fmt: skip
def test_bad_settings_are_a_sentence(text, message):
    assert message in refusal(recipe.parse, text)


def test_its_defaults_are_the_block_wise_rows():
    """Tables 3 and 6 change the loss alone: settings of one name are equal, and so are the tokens."""
    mine, theirs = group_qat.Config(), bitbybit.Config()
    for name in ("bits", "act_bits", "group", "scale", "levels", "include_zero", "kurtosis", "outlier_bits", "lr",
                 "lr_final", "tokens", "batch", "compute"):  # fmt: skip
        assert getattr(mine, name) == getattr(theirs, name), name
    assert mine.epochs == len(theirs.stages) * theirs.epochs
    with pytest.raises(UserError, match="do not divide|does not divide"):
        made(group=24)
