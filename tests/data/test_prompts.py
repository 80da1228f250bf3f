"""Prompt sets: hashes, readers, the shuffle, and one sentence for everything that can be wrong."""

import bz2
import hashlib
import os
from dataclasses import replace

import numpy as np
import pytest

from repro.core.errors import UserError
from repro.data import prompts

STORED = sorted(name for name, entry in prompts.SETS.items() if entry.stored)
OTHERS = sorted(name for name, entry in prompts.SETS.items() if not entry.stored)
MIRROR = os.environ.get("REPRO_DATA", "")


@pytest.fixture(autouse=True)
def fresh_rows():
    prompts.rows.cache_clear()
    yield
    prompts.rows.cache_clear()


def test_the_sets_whose_licence_allows_it_are_in_the_repository(monkeypatch):
    monkeypatch.delenv("REPRO_DATA", raising=False)
    assert set(STORED) >= {"mt-bench", "humaneval", "gsm8k", "aime24", "math500", "longwriter"}
    for name in STORED:
        result = prompts.load(name)
        assert len(result) == prompts.SETS[name].prompts
        assert len({prompt.id for prompt in result}) == len(result)
        assert all(prompt.turns[0] in prompt.text and prompt.turns[0] for prompt in result)


def test_known_prompts_are_where_they_belong():
    mt_bench = prompts.load("mt-bench")
    assert mt_bench[0].id == "81" and mt_bench[0].text.startswith("Compose an engaging travel blog post")
    assert mt_bench[0].turns[1] == "Rewrite your previous response. Start every sentence with the letter A."
    assert prompts.load("humaneval")[0].text.startswith("from typing import List\n\n\ndef has_close_elements(")
    ducks = prompts.load("gsm8k")[0]
    assert ducks.text.startswith("Question: Janet") and ducks.text.endswith("\nAnswer:")
    assert ducks.references[0].endswith("#### 18")
    assert prompts.load("aime24")[0].references == ("204",)
    assert prompts.load("longwriter")[0].words == 100


def test_a_shuffle_is_the_one_of_the_datasets_library():
    whole = prompts.load("mt-bench")
    order = np.random.default_rng(0).permutation(80)
    assert [prompt.id for prompt in prompts.load("mt-bench", 20)] == [whole[i].id for i in order[:20]]
    assert prompts.load("mt-bench", 5) == prompts.load("mt-bench", 20)[:5]
    assert prompts.load("mt-bench", 20, seed=1) != prompts.load("mt-bench", 20)


def test_the_shuffle_by_the_library_itself():
    datasets = pytest.importorskip("datasets")
    shuffled = datasets.Dataset.from_dict({"i": list(range(80))}).shuffle(seed=0)["i"][:20]
    whole = prompts.load("mt-bench")
    assert [prompt.id for prompt in prompts.load("mt-bench", 20)] == [whole[i].id for i in shuffled]


@pytest.mark.parametrize("name", OTHERS)
def test_a_set_of_the_mirror_without_its_folder(name, monkeypatch):
    monkeypatch.delenv("REPRO_DATA", raising=False)
    with pytest.raises(UserError, match=f"{name}.*REPRO_DATA, which is not set"):
        prompts.load(name)


def test_a_file_that_is_another_one(tmp_path, monkeypatch):
    monkeypatch.setenv("REPRO_DATA", str(tmp_path))
    path = tmp_path / prompts.SETS["alpaca"].source
    path.parent.mkdir(parents=True)
    path.write_text('{"question_id": 1, "turns": ["Hello"]}\n')
    with pytest.raises(UserError, match="not the file that prompt set 'alpaca' is made from"):
        prompts.load("alpaca")


def test_damaged_stored_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "FOLDER", tmp_path)
    with pytest.raises(UserError, match="aime24.jsonl.bz2: this file of the repository is missing"):
        prompts.load("aime24")
    (tmp_path / "aime24.jsonl.bz2").write_bytes(b"no bz2")
    with pytest.raises(UserError, match="an incomplete or damaged file in bz2"):
        prompts.load("aime24")
    (tmp_path / "aime24.jsonl.bz2").write_bytes(bz2.compress(b"{}\n"))
    with pytest.raises(UserError, match="not the rows that prompts.yaml lists"):
        prompts.load("aime24")


@pytest.mark.parametrize("count", [0, 31, -1])
def test_more_prompts_than_there_are(count):
    with pytest.raises(UserError, match=f"{count} prompts of 'aime24': the set has 30; take 1 to 30"):
        prompts.load("aime24", count)


def test_unknown_names_get_a_suggestion():
    with pytest.raises(UserError, match="did you mean 'mt-bench'"):
        prompts.load("mtbench")
    with pytest.raises(UserError, match="unknown prompt set"):
        prompts.identifier("mtbench")


def test_the_identifier_follows_rows_and_template(monkeypatch):
    before = prompts.identifier("gsm8k")
    entry = prompts.SETS["gsm8k"]
    for changed in (replace(entry, template="{text}"), replace(entry, rows_sha256="0" * 64)):
        monkeypatch.setitem(prompts.SETS, "gsm8k", changed)
        assert prompts.identifier("gsm8k") != before


@pytest.mark.skipif(not MIRROR, reason="the sources lie in the folder in REPRO_DATA, which is not set")
@pytest.mark.parametrize("name", sorted(prompts.SETS))
def test_rows_follow_from_the_source(name):
    entry = prompts.SETS[name]
    content = prompts._lines(prompts._source_rows(entry))
    assert hashlib.sha256(content).hexdigest() == entry.rows_sha256
    assert content.count(b"\n") == entry.prompts


@pytest.mark.skipif(not MIRROR, reason="the sources lie in the folder in REPRO_DATA, which is not set")
def test_references_of_the_mirrored_sets():
    assert len(prompts.load("dialogsum")[0].references) == 3
    pair = prompts.load("iwslt")[0]
    assert pair.text.startswith("French: C'est une histoire") and pair.references[0].startswith("So, this is a story")
    article = prompts.load("cnn-dm")[0]
    assert article.text.startswith("(CNN)The Palestinian Authority") and article.text.endswith("\n\nSummary:")
