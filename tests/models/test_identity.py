"""Fingerprints of models and keys of tokenizers: everything that decides a number or a token id is in them."""

import json
import re
from pathlib import Path

import pytest
import small_models
import transformers
from transformers import AutoTokenizer

from repro import models
from repro.data import corpora
from repro.jobs import tokens
from repro.jobs.target import Target
from repro.models import identity as identities
from repro.specs import scale
from repro.store.job import built_under
from repro.workflow import runner

TEXT = "tiny-wikitext"


@pytest.fixture(autouse=True)
def forget():
    """Fingerprints are remembered by name; a test edits its folder."""
    models.fingerprint.cache_clear()


@pytest.fixture
def folder(tmp_path):
    """A whole model with the pocket tokenizer."""
    small_models.llama().save_pretrained(tmp_path / "model")
    return small_models.write_tokenizer(tmp_path / "model")


def identity(folder):
    """Fingerprint and tokenizer key of a folder as it is now."""
    models.fingerprint.cache_clear()
    return models.fingerprint(str(folder)), models.tokenizer_key(str(folder))


def test_a_tokenizers_files_are_read_again_only_where_one_has_changed(folder, monkeypatch):
    read, true = [], identities.sha256
    monkeypatch.setattr(identities, "sha256", lambda path: read.append(path.name) or true(path))
    first = models.tokenizer_key(str(folder))
    assert "tokenizer.json" in read
    read.clear()
    assert models.tokenizer_key(str(folder)) == first and read == []
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("a", "b", 1))  # as long as before
    changed = models.tokenizer_key(str(folder))
    assert changed != first and "tokenizer.json" in read
    (folder / identities.TEMPLATES).mkdir()
    (folder / identities.TEMPLATES / "one.jinja").write_text("x")
    assert models.tokenizer_key(str(folder)) != changed


def ids_by_jobs(folder):
    """The token ids that a `tokens` job of today's build gives for a model."""
    job = tokens.job(Target(scale.load({}, "pocket"), str(folder), "fp16"), TEXT)
    if not runner.done(job):
        runner.run(job)
    return corpora.load_tokens(job.folder / tokens.OUTPUTS[0])[0].tolist()


def ids_by_transformers(folder):
    return AutoTokenizer.from_pretrained(folder)(corpora.text(TEXT), verbose=False)["input_ids"]


def test_a_class_without_bos_gets_its_own_ids_whatever_was_built_before(tmp_path):
    """Two models share tokenizer.json; tokenizer_config.json of one names another class."""
    for name, facts in {"base": {}, "nobos": {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}}.items():
        folder = small_models.write_tokenizer(tmp_path / name, **facts)
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert (tmp_path / "base/tokenizer.json").read_bytes() == (tmp_path / "nobos/tokenizer.json").read_bytes()
    wanted = {name: ids_by_transformers(tmp_path / name) for name in ("base", "nobos")}
    assert wanted["base"] != wanted["nobos"]
    for order in (["base", "nobos"], ["nobos", "base"]):
        with built_under(tmp_path / f"build-{order[0]}"):
            assert {name: ids_by_jobs(tmp_path / name) for name in order} == wanted


def test_a_permuted_vocabulary_gets_its_own_ids(tmp_path):
    """A folder with vocab.json and merges.txt, and no tokenizer.json, keeps its name and changes its vocabulary."""
    folder = small_models.write_vocabulary(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with built_under(tmp_path / "build"):
        before = ids_by_jobs(folder)
        assert before == ids_by_transformers(folder)
        small_models.permute_vocabulary(folder)
        after = ids_by_jobs(folder)
        assert after == ids_by_transformers(folder)
    assert len(after) == len(before) and after != before


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model", "tokenizer.model.v3",
        "vocab.txt", "spiece.model", "tekken.json", "special_tokens_map.json", "added_tokens.json",
        "chat_template.jinja", "qwen.tiktoken", "bpe.codes", "prophetnet.tokenizer",
    ],
)  # fmt: skip
def test_every_file_of_a_tokenizer_is_in_key_and_fingerprint(folder, name):
    path = folder / name
    seen = [identity(folder)]
    for text in ("{}", '{"a": 1}'):
        path.write_text(text)
        seen.append(identity(folder))
    assert len({fingerprint for fingerprint, _ in seen}) == len({key for _, key in seen}) == 3


def test_every_vocabulary_that_transformers_reads_is_among_the_deciding_files(tmp_path):
    """The names that its tokenizers look for, from its sources: importing all of them takes long."""
    sources = (Path(transformers.__file__).parent / "models").glob("*/tokenization_*.py")
    names = set()
    for source in sources:
        for mapping in re.findall(r"VOCAB_FILES_NAMES = \{([^}]*)\}", source.read_text(encoding="utf-8")):
            names.update(re.findall(r': "([^"]+)"', mapping))
    assert {"bpe.codes", "spiece.model", "vocab.json", "merges.txt"} < names
    for name in names:
        (tmp_path / name).write_text("x")
    assert {path.name for path in identities.deciding_files(tmp_path)} == names


def test_a_chat_template_in_its_folder_counts(folder):
    before = identity(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    after = identity(folder)
    assert before[0] != after[0] and before[1] != after[1]


def test_settings_of_generation_are_the_models_alone(folder):
    before = identity(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    after = identity(folder)
    assert before[0] != after[0] and before[1] == after[1]


def test_what_chooses_a_tokenizers_class_in_config_json_counts(folder):
    """Another norm is another model with the same tokenizer; another type may have another tokenizer."""
    before = identity(folder)
    small_models.write_config(folder, rms_norm_eps=1e-4)
    norm = identity(folder)
    small_models.write_config(folder, model_type="mistral")
    kind = identity(folder)
    assert len({before[0], norm[0], kind[0]}) == 3
    assert before[1] == norm[1] != kind[1]


@pytest.mark.parametrize("name", ["README.md", "LICENSE.txt", "training-log.json", "trainer_state.json", "photo.png"])
def test_what_no_loader_reads_changes_nothing(folder, name):
    before = identity(folder)
    (folder / name).write_text("words")
    assert identity(folder) == before


def test_an_index_that_chooses_among_the_weights_counts(folder):
    """Transformers loads the shards that the index lists, so another list of the same files is another model."""
    before = identity(folder)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model-2.safetensors").write_bytes((folder / "model-1.safetensors").read_bytes())
    index = folder / "model.safetensors.index.json"
    seen = {before[0]}
    for shards in ([1], [2], [1, 2]):
        index.write_text(json.dumps({"weight_map": {f"weight{n}": f"model-{n}.safetensors" for n in shards}}))
        seen.add(identity(folder)[0])
    assert len(seen) == 4


def test_the_pocket_models_keep_the_identity_that_stored_results_declare():
    result = {name: models.fingerprint(name) for name in ("pocket-3m", "pocket-5m", "pocket-10m")}
    assert result == {"pocket-3m": "f4dd8ddb", "pocket-5m": "8523b7e2", "pocket-10m": "9c809bce"}
