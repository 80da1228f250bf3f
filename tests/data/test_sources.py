"""Data files of the repository: what the manifest lists is there, is used first, and changes no identity."""

import bz2
import dataclasses
import hashlib
import json

import numpy as np
import pytest
import torch

from repro import models
from repro.baselines import rtn
from repro.core.errors import UserError
from repro.core.files import HOME, read_text
from repro.data import corpora, sources, tasks
from repro.jobs import compress, requests, tokens
from repro.jobs.target import Target
from repro.models.lowbit import LowBitModel
from repro.recipes import recipe
from repro.specs import scale as scales
from repro.train.blocks import training_ids

NAMES = sorted(sources.EMBEDDED)
LIMIT, LIMIT_OF_ALL = 1_000_000, 5_000_000  # bytes
TEXTS = [name for name, corpus in corpora.CORPORA.items() if corpus.source in sources.EMBEDDED]


@pytest.fixture
def without_mirror(monkeypatch):
    monkeypatch.delenv("REPRO_DATA", raising=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_listed_file_is_there_as_the_manifest_says(without_mirror, name):
    entry = sources.EMBEDDED[name]
    content = sources.read(name, "a test")
    assert len(content) == entry.bytes and hashlib.sha256(content).hexdigest() == entry.sha256
    assert entry.path.stat().st_size < LIMIT and entry.source and entry.licence


def test_nothing_else_lies_there_and_all_is_small():
    listed = {entry.path for entry in sources.EMBEDDED.values()} | {sources.MANIFEST}
    there = {path for path in sources.TEXTS.rglob("*") if path.is_file()}
    assert there == listed
    assert sum(path.stat().st_size for path in there) <= LIMIT_OF_ALL


def test_what_may_not_be_spread_is_not_carried():
    """DialogSum, IWSLT and Alpaca are for non-commercial use or may not be changed."""
    for name in NAMES:
        licence = sources.EMBEDDED[name].licence
        assert not {"dialogsum", "iwslt17", "alpaca"} & set(name.split("/"))
        assert "NC" not in licence and "ND" not in licence


def test_the_copy_of_the_repository_is_the_mirrors_file(mirror):
    for name, entry in sources.EMBEDDED.items():
        path = mirror / name
        if path.is_file():
            assert hashlib.sha256(path.read_bytes()).hexdigest() == entry.sha256, name


@pytest.mark.parametrize("name", TEXTS)
def test_a_carried_text_needs_no_folder(without_mirror, name):
    assert corpora.identity(name)["corpus_sha256"] == corpora.CORPORA[name].sha256


@pytest.mark.parametrize("name", [name for name in tasks.TASKS if not name.startswith("mmlu")])
def test_the_records_of_a_carried_task_need_no_folder(without_mirror, name):
    count = 0
    for splits in tasks.items(tasks.TASKS[name]).values():
        count += sum(map(len, splits.values()))
    assert count > 900


def test_a_task_that_is_not_carried_says_where_its_file_would_be_found(without_mirror):
    message = "task mmlu: no such file zeroshot/raw/mmlu.tar.xz: .* REPRO_DATA is not set; set REPRO_DATA to a folder"
    with pytest.raises(UserError, match=message):
        tasks.items(tasks.TASKS["mmlu"])


def test_a_damaged_copy_is_named(tmp_path, monkeypatch):
    name = "c4/c4_sample_200.jsonl"
    whole = sources.EMBEDDED[name].path.read_bytes()
    monkeypatch.setattr(sources, "TEXTS", tmp_path)
    path = tmp_path / f"{name}.bz2"
    with pytest.raises(UserError, match=f"{path}: this file of the repository is missing; check it out again"):
        sources.read(name, "a test")
    path.parent.mkdir()
    path.write_bytes(whole[:-100])
    with pytest.raises(UserError, match=f"{path}: an incomplete or damaged file in bz2; check it out again"):
        sources.read(name, "a test")
    path.write_bytes(bz2.compress(b"another text"))
    with pytest.raises(UserError, match=f"{path}: not the file that manifest.yaml lists"):
        sources.read(name, "a test")


def test_a_file_of_another_hash_is_not_taken_from_the_repository(tmp_path, monkeypatch):
    name = "zeroshot/boolq.jsonl"
    (tmp_path / "zeroshot").mkdir()
    (tmp_path / name).write_bytes(b"mine")
    assert sources.read(name, "a test", sha256="0" * 64, folder=tmp_path) == b"mine"
    known = sources.EMBEDDED[name].sha256
    assert len(sources.read(name, "a test", sha256=known, folder=tmp_path)) == sources.EMBEDDED[name].bytes


def declared(folder: str | None, monkeypatch) -> list[str]:
    """The ids of every job that reads a text or a task of `pocket`, with or without the folder."""
    corpora._known_identifier.cache_clear()
    if folder is None:
        monkeypatch.delenv("REPRO_DATA", raising=False)
    else:
        monkeypatch.setenv("REPRO_DATA", folder)
    scale = scales.load(name="pocket")
    target = Target(scale, "pocket-3m", "gptq-w4-g128")
    drawn = [text if isinstance(text, str) else text.corpus for text in scale.calibration_texts.values()]
    names = [*scale.corpora.values(), scale.calibration.corpus, *drawn]
    result = [tokens.job(target, name).id for name in names]
    result += [requests.job(target, name, None).id for name in scale.protocols["zeroshot"].tasks]
    return result


def test_what_a_job_declares_does_not_depend_on_where_its_text_comes_from(mirror, monkeypatch):
    assert declared(None, monkeypatch) == declared(str(mirror), monkeypatch)


def test_token_ids_are_the_same_from_both_places(mirror, monkeypatch):
    tokenizer = models.tokenizer("pocket-3m")
    monkeypatch.setattr(sources, "EMBEDDED", {})
    from_folder = corpora.token_ids("c4-local", tokenizer)
    monkeypatch.undo()
    monkeypatch.delenv("REPRO_DATA", raising=False)
    assert (corpora.token_ids("c4-local", tokenizer) == from_folder).all()


def test_stored_results_on_carried_texts_name_the_texts_that_the_repository_has(without_mirror):
    """Stored rows declare the first 16 digits of their text's hash: every one is a text of today."""
    known = {corpora.CORPORA[name].sha256[:16] for name in corpora.CORPORA if corpora.CORPORA[name].sha256}
    carried = {corpora.CORPORA[name].sha256[:16] for name in TEXTS}
    stored = json.loads(read_text(HOME / "results" / "nvidia-h200" / "inputs.json.xz"))
    named = set()
    for facts in _mappings(stored):
        if isinstance(facts.get("text"), str):
            named.add(facts["text"])
    assert carried & named and len(named & carried) >= 4
    assert named <= known


def _mappings(value):
    """Every mapping in a JSON value."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _mappings(inner)
    if isinstance(value, list):
        for inner in value:
            yield from _mappings(inner)


# --- the excerpt of the training pool ---------------------------------------------------------------------------------

SIXTY_FOURTH = "bitbybit(w2a16, tokens=131072)"
POOL, FIRST_DRAW = "corpus/train-wiki-00.pool-64.ids", "corpus/train-wiki-00.draw-128.ids"


def trained(recipe: str, seed: int = 0) -> Target:
    """A target that is trained on the pool."""
    return Target(scales.load(name="pocket").calibrated_on("redpajama", seed), "pocket-3m", recipe, seed)


def calibration_job(target: Target):
    return dict(compress.job(target).needs)["calibration"]


@pytest.mark.parametrize("seed", [0, 2])
def test_a_sixty_fourth_of_the_tokens_is_in_the_repository(without_mirror, tmp_path, seed):
    target = trained(SIXTY_FOURTH, seed)
    job = calibration_job(target)
    tokens.run(job, {}, tmp_path, {})
    crops = compress.job(target).parsed_options()["calibration"]
    data = compress.calibration_sequences(tmp_path, crops)
    assert data.shape == (64, 2048) and data.dtype == torch.int64
    assert len(training_ids(data, 131072, "a test")) == 64
    words = models.tokenizer("pocket-3m").decode(data[0][:400])
    assert words.count(" the ") > 5, "it is English text"


def test_the_job_that_trains_is_the_same_with_and_without_the_folder(without_mirror, mirror, monkeypatch):
    with_folder = compress.job(trained(SIXTY_FOURTH))
    assert "excerpt" not in calibration_job(trained(SIXTY_FOURTH)).parsed_inputs()
    monkeypatch.delenv("REPRO_DATA")
    without = compress.job(trained(SIXTY_FOURTH))
    assert without.id == with_folder.id and without.parsed_inputs() == with_folder.parsed_inputs()
    assert "excerpt" in calibration_job(trained(SIXTY_FOURTH)).parsed_inputs()


def test_the_first_draw_of_128_sequences_is_in_the_repository(without_mirror, tmp_path):
    """What GPTQ reads of it with seed 0; another seed draws others, and fewer sequences are the first ones."""
    at = scales.load(name="pocket")
    target = Target(at.calibrated_on("redpajama-128", 0), "pocket-3m", "gptq-w2-g32", 0)
    job = calibration_job(target)
    tokens.run(job, {}, tmp_path, {})
    crops = compress.job(target).parsed_options()["calibration"]
    data = compress.calibration_sequences(tmp_path, crops)
    assert data.shape == (128, 2048) and crops["seed"] == 0
    few = compress.calibration_sequences(tmp_path, crops | {"sequences": 100})
    assert torch.equal(few, data[:100])
    other = Target(at.calibrated_on("redpajama-128", 1), "pocket-3m", "gptq-w2-g32", 1)
    assert "excerpt" not in calibration_job(other).parsed_inputs()


@pytest.mark.parametrize(
    "recipe",
    ["bitbybit(w2a16, tokens=133120)", "bitbybit(w2a16)", "bitdistiller(g=32, tokens=133120)", "gptq-w4-g128"],
)
def test_what_reads_more_than_the_excerpt_needs_the_whole_text(without_mirror, tmp_path, recipe):
    """One sequence more; the paper's budget; and steps that read other parts of the text, too."""
    job = calibration_job(trained(recipe))
    assert "excerpt" not in job.parsed_inputs()
    with pytest.raises(UserError, match="no such file corpus/train-wiki-00.txt.xz: .* set REPRO_DATA to a folder"):
        tokens.run(job, {}, tmp_path, {})


def test_the_excerpt_is_of_one_tokenizer(without_mirror, monkeypatch):
    monkeypatch.setattr(corpora, "tokenizer_sha256", lambda tokenizer: "0" * 64)
    with pytest.raises(UserError, match="no such file corpus/train-wiki-00.txt.xz"):
        corpora.excerpt_ids("training-wiki-part", models.tokenizer("pocket-3m"), POOL)


@pytest.mark.slow
def test_the_excerpt_is_the_beginning_of_the_pool(mirror):
    """67 seconds: the whole text is tokenized."""
    tokenizer = models.tokenizer("pocket-3m")
    ids = corpora.token_ids("training-wiki-part", tokenizer)
    whole = corpora.calibration(ids, 4096, 2048, scales.POOLS)
    assert np.array_equal(whole[:64].numpy(), corpora.excerpt_ids("training-wiki-part", tokenizer, POOL))
    assert not np.array_equal(whole[1:65].numpy(), corpora.excerpt_ids("training-wiki-part", tokenizer, POOL))
    first = corpora.calibration(ids, 128, 2048, 0)
    assert np.array_equal(first.numpy(), corpora.excerpt_ids("training-wiki-part", tokenizer, FIRST_DRAW))


class Unread:
    """Calibration text that only `training_ids` may read."""

    def __getattr__(self, name):
        raise AssertionError(f"the step read the calibration text itself ({name})")


@pytest.mark.parametrize(
    "step", ["bitbybit", "paretoq", "efficientqat", "staged_ap", "e2e_qp", "matquant", "group_qat"]
)
def test_steps_that_say_so_read_their_first_tokens_alone(step, monkeypatch, tiny_llama):
    module = recipe.STEPS[step]
    text = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    requested = []

    def first_tokens(calibration, tokens, who):
        assert isinstance(calibration, Unread)
        requested.append(tokens)
        return text

    reader = recipe.STEPS["efficientqat"] if step == "staged_ap" else module
    monkeypatch.setattr(reader, "training_ids", first_tokens)
    small = {"tokens": 64, "batch": 1, "epochs": 1}
    known = {field.name for field in dataclasses.fields(module.Config)}
    config = dataclasses.replace(module.Config(), **{key: value for key, value in small.items() if key in known})
    lm = LowBitModel(tiny_llama)
    if step == "e2e_qp":
        rtn.apply(lm, None, rtn.Config(bits=4, group=32))
    module.apply(lm, Unread(), config)
    assert module.READS_FIRST_TOKENS and requested == [64]
