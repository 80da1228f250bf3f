"""The pocket models' corpus: shards, documents in WikiText's layout, token ids, and what it shares with a text."""

import json
import lzma
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer

from repro.core.errors import UserError
from repro.train import corpus as room
from repro.train import wikitext_layout
from repro.train.pocket_config import TokenizerArgs

PLAIN = [f"Title {i}\nThe self-made man, no. {i}, had 1,000 things." for i in range(12)]


@pytest.fixture
def corpus(tmp_path):
    for name in ("train-books-00", "train-wiki-00"):
        (tmp_path / f"{name}.txt.xz").write_bytes(lzma.compress("\n\n".join(PLAIN).encode()))
    return tmp_path


def test_a_folder_without_shards_is_refused(tmp_path):
    (tmp_path / "valid.txt").write_text("never trained on")
    with pytest.raises(UserError, match=f"^{tmp_path}: no train-\\*.txt.xz there"):
        room.shards(tmp_path)


def test_only_training_shards_are_read(tmp_path):
    for name in ("train-01.txt.xz", "train-00.txt.xz", "valid.txt.xz", "train.txt"):
        (tmp_path / name).write_bytes(lzma.compress(b"a\nb\n\n\nc\n"))
    assert [p.name for p in room.shards(tmp_path)] == ["train-00.txt.xz", "train-01.txt.xz"]
    assert room.documents(tmp_path / "train-00.txt.xz") == ["a\nb", "c"]


def test_a_damaged_shard_is_a_sentence(tmp_path):
    path, whole = tmp_path / "train-00.txt.xz", lzma.compress(b"a\n\nb" * 1000)
    for content in (b"words", whole[:-20], lzma.compress(b"\xff\xfe")):
        path.write_bytes(content)
        with pytest.raises(UserError, match="train-00.txt.xz: not a shard of UTF-8 text in xz"):
            room.documents(path)
    path.write_bytes(whole)
    assert len(room.documents(path)) == 1001


def test_documents_are_packed_between_bos_and_eos(tmp_path):
    path = tmp_path / "train-00.txt.xz"
    path.write_bytes(lzma.compress(b"One text, 42.\n\nAnother.\n\nA third.\n"))
    parts = [room._encode((room.TOKENIZER, path, 5, part, 2)).tolist() for part in range(2)]
    ids = parts[0] + parts[1]
    assert ids.count(0) == ids.count(1) == 3 and ids[0] == 0 and ids[-1] == 1
    tokenizer = Tokenizer.from_file(str(room.TOKENIZER))
    assert [tokenizer.decode(part) for part in parts] == ["One text, 42.A third.", "Another."]


def test_the_tokenizer_is_trained_as_configured(tmp_path):
    (tmp_path / "train-00.txt.xz").write_bytes(lzma.compress(b"the cat and the hat and 1984 the cats\n\n" * 50))
    made = room.train_tokenizer(tmp_path, TokenizerArgs(vocab=280, sample_bytes=10_000))
    assert made.get_vocab_size() <= 280 and made.token_to_id("<s>") == 0 and made.token_to_id("</s>") == 1
    encoded = made.encode("the cat 1984 – é")
    assert encoded.ids[0] == 0 and made.decode(encoded.ids) == "the cat 1984 – é"
    assert {"1", "9", "8", "4"} <= set(encoded.tokens), "digits are split"
    assert "Ġthe" in encoded.tokens or "the" in encoded.tokens


def test_every_fifth_document_of_a_wikipedia_shard_has_the_layout(corpus):
    result = list(room.prepared(corpus / "train-wiki-00.txt.xz", 5))
    assert [i for i, (one, plain) in enumerate(zip(result, PLAIN)) if one != plain] == [0, 5, 10]
    assert result[5] == wikitext_layout.write(PLAIN[5]) and " self @-@ made " in result[5]
    assert list(room.prepared(corpus / "train-books-00.txt.xz", 5)) == PLAIN, "only Wikipedia"
    assert list(room.prepared(corpus / "train-wiki-00.txt.xz", 0)) == PLAIN


@pytest.mark.parametrize("parts", [2, 5, 8])
def test_the_parts_of_a_shard_are_the_shard(corpus, parts):
    path = corpus / "train-wiki-00.txt.xz"
    pieces = [list(room.prepared(path, 5, part, parts)) for part in range(parts)]
    whole = list(room.prepared(path, 5))
    assert [pieces[i % parts][i // parts] for i in range(len(whole))] == whole


def test_the_ids_are_tokenized_once_for_each_setting(corpus, tmp_path, monkeypatch):
    out = tmp_path / "out"
    layout = room.cached_ids(corpus, out, 5, processes=1)
    text = Tokenizer.from_file(str(room.TOKENIZER)).decode(layout.tolist())
    assert layout.dtype == np.int32 and text.count(" @-@ ") == 3 and len(list(out.glob("tokens-*.npy"))) == 1
    monkeypatch.setattr(room, "encode", lambda *_: np.zeros(3, np.uint16))
    assert room.cached_ids(corpus, out, 5).tolist() == layout.tolist()
    assert room.cached_ids(corpus, out, 0).tolist() == [0, 0, 0] and len(list(out.glob("tokens-*.npy"))) == 2


def test_the_key_holds_all_that_decides_the_ids(corpus, tmp_path, monkeypatch):
    files = room.shards(corpus)
    keys = [room.cache_key(files, every) for every in (0, 4, 5)] + [room.cache_key(files[:1], 5)]
    other = tmp_path / "layout.py"
    other.write_text("another layout")
    for target, name, value in (
        (room, "PARTS", 3), (room, "version", lambda _: "0.1"), (wikitext_layout, "__file__", str(other)),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            keys.append(room.cache_key(files, 5))
    assert len(set(keys)) == len(keys) and room.cache_key(files, 5) == keys[2]


def test_the_workers_do_not_import_torch():
    code = "import sys, repro.train.corpus; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- n-grams in common ------------------------------------------------------------------------------------------------

SENTENCE = "It's a self-made, 1,000.5 m tall tower that nobody has seen in the U.S. before"


def test_a_planted_13_gram_is_found_whatever_its_layout(corpus):
    words = room.words(SENTENCE)
    path = corpus / "train-books-01.txt.xz"
    path.write_bytes(lzma.compress(f"Title\nMore. {SENTENCE}. More.".encode()))
    text = wikitext_layout.write("Yardstick\n" + SENTENCE.upper() + " and after.")
    result = room.shared_ngrams(corpus, ["Nothing in common.", text], 5)
    assert result == sorted(" ".join(words[i : i + 13]) for i in range(len(words) - 12)) and len(result) > 3
    assert room.shared_ngrams(corpus, [" ".join(words[:12])], 5, n=13) == []
    assert room.shared_ngrams(corpus, [" ".join(words[:12])], 5, n=12) == [" ".join(words[:12])]


def test_a_shared_passage_is_found_in_a_document_that_has_the_layout(corpus):
    """Document 5 of the Wikipedia shard is trained on in WikiText's layout; its words are the plain ones."""
    (corpus / "train-books-00.txt.xz").unlink()
    assert room.shared_ngrams(corpus, ["5 the self made man no 5 had 1 000"], 5, n=10) == [
        "5 the self made man no 5 had 1 000"
    ]


def test_n_grams_do_not_cross_documents(corpus):
    assert room.shared_ngrams(corpus, ["000 things Title 1 The"], 0, n=5) == []


def test_layout_does_not_change_the_words():
    assert room.words(wikitext_layout.write(SENTENCE)) == room.words(SENTENCE)


def test_the_shipped_corpus_shares_no_13_gram_with_wikitext():
    facts = json.loads((room.TOKENIZER.parent.parent / "corpus.json").read_text())
    assert facts["13_grams_shared_with_wikitext2"] == 0 and facts["13_grams_of_wikitext2"] > 300_000
