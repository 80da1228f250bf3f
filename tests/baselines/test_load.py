"""`load`: what was stored is read again, at fewer bits too; the trained master of this repository is such a file."""

import shutil

import pytest
import torch

from repro import models
from repro.baselines import load, rtn
from repro.core.errors import UserError
from repro.core.files import ROOT, sha256
from repro.data import corpora
from repro.methods.bitbybit import sliced
from repro.models import perplexity
from repro.models.lowbit import LowBitModel
from repro.recipes import recipe

MASTER = "masters/pocket-3m.safetensors"


def read(**words):
    lm = LowBitModel(models.load("pocket-3m"))
    load.apply(lm, None, load.Config(**words))
    return lm


@pytest.mark.parametrize("width", [8, 4, 2])
def test_the_master_of_this_repository_is_read_at_every_width_without_training(width):
    assert sum(path.stat().st_size for path in models.POCKET.glob("**/*.safetensors")) < 40e6
    digest = sha256(models.POCKET / MASTER)
    assert f"{digest}  {MASTER}" in (models.POCKET / "SHA256SUMS").read_text()
    text = f'load(file="{MASTER}", digest="{digest[: load.DIGITS]}")'
    for kind, name in (("tables", "master"), ("figures", "master-weights")):
        assert (ROOT / kind / "bitbybit" / f"{name}.yaml").read_text().count(text) == 3
    lm = LowBitModel(models.load("pocket-3m"))
    for step in recipe.parse(text if width == 8 else f"{text} + sliced-w{width}").steps:
        step.module.apply(lm, None, step.config)
    assert {weight.bits for weight in lm.weights.values()} == {width}
    ids = corpora.token_ids("tiny-held-out", models.tokenizer("pocket-3m"))[:1024]
    windows = torch.from_numpy(ids).long().view(2, 512)
    scored = perplexity.perplexity(perplexity.score(lm.model, windows))
    full = perplexity.perplexity(perplexity.score(models.load("pocket-3m"), windows))
    assert scored < {8: 1.25, 4: 1.4, 2: 4.0}[width] * full  # a master that is trained for 2 bits pays at 8


def test_narrower_codes_are_the_masters_first_bits():
    wide, narrow = read(file=MASTER), read(file=MASTER)
    sliced.apply(narrow, None, sliced.Config(4))
    for name, weight in narrow.weights.items():
        assert torch.equal(weight.codes.long(), wide.weights[name].codes.long() >> 4)


def test_weights_of_full_precision_are_at_hand_where_they_are_asked_for():
    assert not read(file=MASTER).full
    assert read(file=MASTER, full=True).full.keys() == read(file=MASTER).weights.keys()


def test_another_file_than_was_meant_is_a_sentence(tmp_path, monkeypatch):
    for file in ("", "nothing.safetensors", str(tmp_path)):
        with pytest.raises(UserError, match="not a file; name one that compress wrote"):
            read(file=file)
    with pytest.raises(UserError, match="another file than the one of digest 00000000"):
        read(file=MASTER, digest="00000000")
    copy = tmp_path / "copy.safetensors"
    shutil.copyfile(models.POCKET / MASTER, copy)
    content = copy.read_bytes()
    copy.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match="copy.safetensors: not a compressed model"):
        read(file=str(copy))


def test_weights_of_another_model_are_refused(tmp_path):
    lm = LowBitModel(models.load("pocket-3m"))
    rtn.apply(lm, None, rtn.Config(bits=4, group=64))
    lm.save(tmp_path / "made.safetensors", {"recipe": "rtn-w4-g64", "fingerprint": "00000000"})
    with pytest.raises(UserError, match="made from another model than today's"):
        read(file=str(tmp_path / "made.safetensors"))
