"""A run's master becomes a committed file, which is read at 8, 4 and 2 bits without training."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from repro import models
from repro.baselines import master
from repro.core.errors import UserError
from repro.core.files import ROOT, sha256
from repro.data import corpora
from repro.methods import bitbybit
from repro.methods.bitbybit import sliced
from repro.models import masters, perplexity
from repro.models.lowbit import LowBitModel
from repro.recipes import recipe
from repro.specs import figures, names, scale, tables
from repro.store import job
from repro.workflow.workflow import Workflow

TEXT = "bitbybit(any_precision=true, epochs=0, tokens=1024)"
COMMITTED = models.POCKET / masters.FOLDER / "pocket-3m.safetensors"


def windows():
    ids = corpora.token_ids("tiny-held-out", models.tokenizer("pocket-3m"))[:1024]
    return torch.from_numpy(ids).long().view(2, 512)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """What the job leaves, of a master that was rounded and not trained."""
    folder = tmp_path_factory.mktemp("artifact")
    lm = LowBitModel(models.load("pocket-3m"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "BUILD", folder / "build")
        bitbybit.apply(lm, windows(), recipe.parse(TEXT).steps[0].config)
    meta = {"model": "pocket-3m", "fingerprint": models.fingerprint("pocket-3m"), "recipe": recipe.parse(TEXT).name}
    lm.save(folder / masters.FILE, meta)
    return folder, lm, meta


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A house with pocket-3m and no master."""
    pocket = tmp_path / "pocket"
    shutil.copytree(models.POCKET / "pocket-3m", pocket / "pocket-3m")
    lines = (models.POCKET / "SHA256SUMS").read_text().splitlines()
    (pocket / "SHA256SUMS").write_text("\n".join(line for line in lines if masters.FOLDER not in line) + "\n")
    monkeypatch.setattr(models, "POCKET", pocket)
    monkeypatch.setattr(masters, "HOME", tmp_path)
    return tmp_path


def read(digest, width=8):
    lm = LowBitModel(models.load("pocket-3m"))
    master.apply(lm, None, master.Config(digest))
    if width < 8:
        sliced.apply(lm, None, sliced.Config(width))
    return lm


def test_a_runs_master_is_committed_and_read_at_every_width(house, artifact):
    folder, lm, _ = artifact
    written = masters.commit(folder)
    assert [str(p.relative_to(house)) for p in written] == [
        "pocket/masters/pocket-3m.safetensors", "pocket/SHA256SUMS", "tables/bitbybit/master.yaml",
        "figures/bitbybit/master-weights.yaml",
    ]  # fmt: skip
    digest = sha256(written[0])
    assert f"{digest}  masters/pocket-3m.safetensors\n" in written[1].read_text() and written[0].stat().st_size < 2.5e6
    before = [path.read_bytes() for path in written]
    masters.commit(folder)
    assert [path.read_bytes() for path in written] == before, "once more changes nothing"
    scores = []
    for width in (8, 4, 2):
        again = read(digest[:16], width)
        for name, weight in again.weights.items():
            stored = lm.weights[name]
            assert torch.equal(weight.codes.long(), stored.codes.long() >> (8 - width)) and weight.bits == width
            assert torch.equal(weight.dequantize(), stored.at(width).dequantize())
        scores.append(perplexity.perplexity(perplexity.score(again.model, windows())))
    assert scores[0] < scores[1] < scores[2]


def test_its_specs_train_nothing(house, artifact, monkeypatch):
    masters.commit(artifact[0])
    for where in (tables, figures, names):
        monkeypatch.setattr(where, "HOME", house)
    tables.table.cache_clear()
    flow = Workflow(scale.load(name="pocket"), stored=False)
    for kind, name in (("table", "master"), ("figure", "master-weights")):
        cells = flow.cells("bitbybit", name, kind)
        steps = set()
        for one in flow.every_job(cells):
            if one.kind == "compress":
                steps |= set(one.steps)
        assert steps == {"master", "sliced"} and {c.stand_in for c in cells} == {"pocket-3m"}
        assert all(flow.is_measured_here(c) for c in cells)
    tables.table.cache_clear()


def test_other_files_are_refused(house, artifact, tmp_path):
    folder, lm, meta = artifact
    other = tmp_path / "other.safetensors"

    def refused(said, changed=None, **facts):
        (changed or lm).save(other, meta | facts)
        with pytest.raises(UserError, match=said) as found:
            masters.commit(other)
        assert "\n" not in str(found.value) and not masters.path("pocket-3m").exists()

    refused("made by rtn-w4-pc; a master is of", recipe="rtn-w4-pc")
    refused("is not a pocket model", model="my-qwen2")
    refused("made from another model", fingerprint="00000000")
    narrow = LowBitModel(models.load("pocket-3m"))
    narrow.load(folder / masters.FILE)
    sliced.apply(narrow, None, sliced.Config(4))
    refused("q_proj has no codes of 8 bits", narrow)
    dense = LowBitModel(models.load("pocket-3m"))
    dense.load(folder / masters.FILE)
    dense.set_dense("model.norm.weight", dense.model.model.norm.weight.detach().clone())
    refused("it holds model.norm.weight; a master is block codes", dense)
    with pytest.raises(UserError, match="not a compressed model"):
        masters.commit(tmp_path / "nothing")


def test_a_spec_of_somebody_else_stays(house, artifact):
    masters.commit(artifact[0])
    spec = house / "figures" / "bitbybit" / "master-weights.yaml"
    spec.write_text("title: my own\n")
    masters.path("pocket-3m").unlink()
    with pytest.raises(UserError, match="master-weights.yaml: exists, and this command did not write it"):
        masters.commit(artifact[0])
    assert spec.read_text() == "title: my own\n" and not masters.path("pocket-3m").exists()


@pytest.mark.parametrize(("words", "said"), [([], "give the folder"), (["nowhere"], "not a compressed model")])
def test_its_command_ends_bad_input_with_a_sentence(words, said):
    done = subprocess.run(
        [sys.executable, "-m", "repro.models.masters", *words], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("error: ") and said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_master_of_another_model_or_digest_is_a_sentence(house, artifact):
    with pytest.raises(UserError, match="no master of pocket-3m is committed; choose from: none"):
        read("0" * 16)
    masters.commit(artifact[0])
    for digest in ("", "0" * 16):
        with pytest.raises(UserError, match="pocket-3m.safetensors has the digest"):
            read(digest)
    with pytest.raises(UserError, match="8 or more hex digits"):
        recipe.parse("master(digest=xyz)")
    shutil.copyfile(masters.path("pocket-3m"), masters.path("pocket-5m"))
    lm = LowBitModel(models.load("pocket-3m"))
    lm.model.config.name_or_path = "pocket-5m"
    with pytest.raises(UserError):
        master.apply(lm, None, master.Config(sha256(masters.path("pocket-5m"))[:16]))


@pytest.mark.skipif(
    not COMMITTED.is_file(), reason="no master is committed yet: python -m repro.models.masters writes it"
)
@pytest.mark.parametrize("width", [8, 4, 2])
def test_the_committed_master_is_read_and_scored_without_training(width):
    assert sum(path.stat().st_size for path in models.POCKET.glob("**/*.safetensors")) < 40e6
    masters.check(COMMITTED)
    digest = sha256(COMMITTED)
    spec = (ROOT / "tables" / "bitbybit" / "master.yaml").read_text()
    assert digest[: masters.DIGITS] in spec and f"{digest}  masters/" in (models.POCKET / "SHA256SUMS").read_text()
    scored = perplexity.perplexity(perplexity.score(read(digest, width).model, windows()))
    full = perplexity.perplexity(perplexity.score(models.load("pocket-3m"), windows()))
    assert scored < {8: 1.25, 4: 1.4, 2: 4.0}[width] * full  # a master that is trained for 2 bits pays at 8
