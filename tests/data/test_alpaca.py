"""Alpaca's records as a text: known by hash, read where the mirror is, and a sentence wherever it is not readable."""

import json

import pytest

from repro import models
from repro.core.errors import UserError
from repro.data import alpaca, corpora
from repro.specs import scale as scales

NAME, SOURCE = "alpaca-part", "alpaca/alpaca_data_1807.json"
RECORDS = [
    {"instruction": "Add. ", "input": "1, 2", "output": "3"},
    {"instruction": "Greet.", "input": "", "output": "Hello\n\nyou\n"},
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A mirror with a file of two records."""
    (tmp_path / "alpaca").mkdir()
    (tmp_path / SOURCE).write_text(json.dumps(RECORDS))
    monkeypatch.setenv("REPRO_DATA", str(tmp_path))
    return tmp_path


def test_records_are_their_fields_under_one_another(folder, monkeypatch):
    corpus = corpora.CORPORA[NAME]
    assert alpaca.documents(corpus) == ["Add.\n1, 2\n3", "Greet.\nHello\n\nyou"] and corpus.joining == "\n\n"
    with pytest.raises(UserError, match="corpus 'alpaca-part': .* is not the text that this name stands for"):
        corpora.text(NAME)


@pytest.mark.parametrize(
    "content", ["[1]", "{", '[{"instruction": "a"}]', '[{"instruction": 1, "input": "", "output": ""}]']
)
def test_a_damaged_file_is_a_sentence(folder, content):
    (folder / SOURCE).write_text(content)
    with pytest.raises(UserError, match="not readable as corpus 'alpaca-part' .*; copy it again"):
        corpora.text(NAME)


def test_without_the_mirror_it_is_a_sentence(folder, monkeypatch):
    (folder / SOURCE).unlink()
    message = f"no such file {SOURCE}: .* not in REPRO_DATA={folder}; set REPRO_DATA .* or name another"
    with pytest.raises(UserError, match=message):
        corpora.text(NAME)
    monkeypatch.delenv("REPRO_DATA")
    with pytest.raises(UserError, match="REPRO_DATA is not set"):
        corpora.text(NAME, hub=True)


def test_the_mirror_holds_it(mirror):
    assert corpora.identity(NAME)["corpus_sha256"] == corpora.CORPORA[NAME].sha256
    ids = corpora.token_ids(NAME, models.tokenizer("pocket-3m"))
    assert len(ids) == 185_643, "enough for every scale"


def test_the_default_scale_calibrates_on_it():
    assert scales.load(name="pocket").calibrated_on("alpaca").calibration.corpus == NAME
