"""Corpora: the text under a name is the text, token ids are one call's, nothing falls back, nothing opens a socket."""

import base64
import dataclasses
import hashlib
import json
import lzma
import random
import socket
import struct
from itertools import product

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from repro import models as pocket
from repro.core.errors import UserError
from repro.data import corpora, sources
from repro.data.corpora import (
    CORPORA,
    calibration,
    identity,
    load_tokens,
    save_tokens,
    text,
    token_ids,
    tokenizer_sha256,
)
from repro.jobs.target import Target
from repro.methods import spear
from repro.metrics import perplexity
from repro.models.perplexity import windows
from repro.specs import scale as scales
from repro.specs import tables

MIRRORED = [name for name, corpus in CORPORA.items() if corpus.reader == "mirror"]
ON_HUB = [name for name, corpus in CORPORA.items() if corpus.reader == "hub"]
BOS = "<s>"


@pytest.fixture(autouse=True)
def no_socket(monkeypatch):
    """Any attempt to reach the network fails the test."""

    def refuse(*args, **kwargs):
        raise AssertionError("a corpus opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)


@pytest.fixture
def small_mirror(tmp_path, monkeypatch):
    """A data folder with a few rows in each file, whose hashes are made known; the repository carries none of them."""
    monkeypatch.setattr(sources, "EMBEDDED", {})
    rows = {
        "jsonl": [{"text": ""}, {"text": " = Title = \n"}, {"text": " Words\u2028and more. \n"}],
        "prefix": [{"prefix": "half of a wo", "gold_completion": "rd"}, {"prefix": "b", "gold_completion": ""}],
    }
    for name in MIRRORED:
        path = tmp_path / CORPORA[name].source
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".jsonl":
            chosen = rows["prefix" if name == "c4-prefix" else "jsonl"]
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen), encoding="utf-8")
        else:
            content = f"The text of {name}.\r\n\n".encode()
            path.write_bytes(lzma.compress(content) if path.suffix == ".xz" else content)
    monkeypatch.setenv("REPRO_DATA", str(tmp_path))
    for name in MIRRORED:
        joined = CORPORA[name].joining.join(corpora._mirrored(CORPORA[name]))
        known = dataclasses.replace(CORPORA[name], sha256=hashlib.sha256(joined.encode()).hexdigest())
        monkeypatch.setitem(CORPORA, name, known)
    return tmp_path


def fast(tokenizer, bos=BOS):
    """A Hugging Face tokenizer that adds one BOS in front of each text, or nothing."""
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos)


def byte_tokenizer(bos=BOS):
    """One id per UTF-8 byte."""
    vocab = {BOS: 0} | {c: i + 1 for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return fast(tokenizer, bos)


def splits(pieces):
    """Every pair of pieces that makes another piece."""
    for piece in pieces:
        for i in range(1, len(piece)):
            if piece[:i] in pieces and piece[i:] in pieces:
                yield piece[:i], piece[i:]


def fields(message):
    """Number and value of the fields of a protobuf message."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
        else:
            size = varint() if wire == 2 else {1: 8, 5: 4}[wire]
            at += size
            yield number, message[at - size : at]


def llama2_tokenizer(folder):
    """The SentencePiece BPE of Llama-2: pairs merge in the order of the merged piece's score, the rest are bytes."""
    pieces = {}
    for number, message in fields((folder / "tokenizers/llama2/tokenizer.model").read_bytes()):
        if number == 1:
            piece = dict(fields(message))
            pieces[piece[1].decode()] = struct.unpack("<f", piece[2])[0]
    merges = sorted(splits(pieces), key=lambda pair: -pieces[pair[0] + pair[1]])
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return fast(tokenizer)


def llama3_tokenizer(folder):
    """The tiktoken BPE of Llama-3: a pair merges in the order of the merged token's rank."""
    ranks = {}
    for line in (folder / "tokenizers/llama3/tokenizer.model").read_text().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    printable = [b for b in range(256) if chr(b).isprintable() and b not in (32, 173)]
    others = (b for b in range(256) if b not in printable)
    shown = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    vocab = {}
    for token, rank in ranks.items():
        vocab["".join(shown[byte] for byte in token)] = rank
    merges = sorted(splits(vocab), key=lambda pair: vocab[pair[0] + pair[1]])
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<|begin_of_text|>", special=True)])
    return fast(tokenizer, "<|begin_of_text|>")


# --- texts ------------------------------------------------------------------------------------------------------------


def test_corpora_are_listed_by_name_with_their_hashes():
    assert all(name == corpus.name for name, corpus in CORPORA.items())
    assert all(corpus.on_hub in ["", *ON_HUB] for corpus in CORPORA.values())
    assert all(len(CORPORA[name].sha256) == 64 for name in MIRRORED)
    assert "c4" not in CORPORA


def test_small_mirror_is_joined(small_mirror):
    assert text("wikitext2") == "\n\n = Title = \n\n\n Words\u2028and more. \n"
    assert text("c4-local") == "  = Title = \n  Words\u2028and more. \n"
    assert text("c4-prefix") == "half of a word b"
    assert text("wikitext2-raw") == " \n = Title = \n Words\u2028and more. \n"
    assert text("held-out") == "The text of held-out.\r\n\n"
    assert text("wikitext2-train-part") == "The text of wikitext2-train-part.\r\n\n"


@pytest.mark.slow
def test_no_sequence_of_table_17_shares_a_passage_with_an_evaluated_text(mirror):
    """32 tokens in a row. Four documents of `c4-prefix` share some with `c4-local`, so that not every seed will do."""
    full = scales.load(None, "pocket")
    tokenizer = pocket.tokenizer("pocket-3m")
    pools = {text.corpus for text in full.calibration_texts.values() if not isinstance(text, str)}
    texts = [text for text in full.calibration_texts.values() if isinstance(text, str) and text not in pools]
    ids = {name: token_ids(name, tokenizer) for name in (*texts, *full.corpora.values())}
    evaluated = np.concatenate([passages(ids[name][None]) for name in full.corpora.values()])

    def shared(draws: list[tuple[str, int]]) -> int:
        result = []
        for name, seed in draws:
            crops = calibration(ids[name], full.calibration.sequences, full.calibration.length, seed)
            drawn = crops.reshape(-1, spear.Config.tokens)[: spear.Config.samples]  # as methods/spear takes them
            result.append(passages(drawn.numpy()))
        return len(np.intersect1d(np.concatenate(result), evaluated))

    seeds = tables.table("spear", "17").seeds
    assert seeds and shared(list(product(texts, seeds))) == 0
    assert shared([("c4-prefix", 0)]) > 100, "the seed of the other tables draws a document that is evaluated"


def passages(rows: np.ndarray, length: int = 32) -> np.ndarray:
    """A hash of every `length` tokens in a row of `rows`."""
    factors = np.random.default_rng(0).integers(1, 2**63, length, dtype=np.uint64) | np.uint64(1)
    count = rows.shape[1] - length + 1
    return sum(rows[:, i : i + count].astype(np.uint64) * factors[i] for i in range(length)).ravel()


@pytest.mark.parametrize("name", MIRRORED)
def test_mirrored_text_that_was_changed(small_mirror, name):
    path = small_mirror / CORPORA[name].source
    content = path.read_bytes()
    changed = lzma.decompress(content) if path.suffix == ".xz" else content
    changed = changed.replace(b"T", b"t", 1).replace(b"half", b"Half")
    path.write_bytes(lzma.compress(changed) if path.suffix == ".xz" else changed)
    with pytest.raises(UserError, match=f"corpus '{name}': .* is not the text that this name stands for"):
        text(name)
    path.write_bytes(content[:-5])
    with pytest.raises(UserError, match=f"{name}"):
        text(name)


@pytest.mark.parametrize("name", MIRRORED)
def test_missing_corpus_says_what_would_be_right(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sources, "EMBEDDED", {})
    monkeypatch.delenv("REPRO_DATA", raising=False)
    for folder in (None, tmp_path):
        if folder:
            monkeypatch.setenv("REPRO_DATA", str(folder))
        for hub in (False, True):  # a hub that may be asked is no fallback
            with pytest.raises(UserError) as caught:
                text(name, hub)
            message = str(caught.value)
            assert f"no such file {CORPORA[name].source}" in message and "set REPRO_DATA" in message
            assert ("hub: true" in message and CORPORA[name].on_hub in message) == bool(CORPORA[name].on_hub)
            assert (f"REPRO_DATA={folder}" if folder else "REPRO_DATA is not set") in message


@pytest.mark.parametrize("name", ON_HUB)
def test_hub_is_asked_for_by_the_scale(name):
    with pytest.raises(UserError, match="hub: true"):
        text(name)


@pytest.mark.parametrize("name", ON_HUB)
def test_hub_is_read_at_a_pinned_revision(monkeypatch, name):
    calls = []

    def load_dataset(*args, **kwargs):
        import datasets

        calls.append((args, kwargs))
        return datasets.Dataset.from_dict({"text": [f"{i}" for i in range(1200)]})

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    content = text(name, hub=True)
    ((args, kwargs),) = calls
    assert len(kwargs["revision"]) == 40 and "trust_remote_code" not in kwargs
    if name == "c4-hub":
        assert args == ("allenai/c4",) and content == " ".join(map(str, range(1100)))
        assert kwargs["data_files"] == {"validation": "en/c4-validation.00000-of-00008.json.gz"}
        monkeypatch.setitem(CORPORA, name, dataclasses.replace(CORPORA[name], max_tokens=100))
        assert len(token_ids(name, byte_tokenizer(), hub=True)) == 100
    elif name == "c4-train-hub":
        assert args == ("allenai/c4",) and content == " ".join(map(str, range(1200)))
        assert kwargs["data_files"] == {"train": "en/c4-train.00000-of-01024.json.gz"}
    else:
        assert args == ("Salesforce/wikitext",) and content == "\n\n".join(map(str, range(1200)))
        assert kwargs["name"] == "wikitext-2-raw-v1" and kwargs["split"] == CORPORA[name].split


def test_hub_that_does_not_answer(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(UserError, match="Salesforce/wikitext at b08601e0 cannot be fetched .no route"):
        text("wikitext2-hub", hub=True)


def test_an_unknown_corpus_is_refused():
    with pytest.raises(UserError, match="unknown corpus 'wikitext-2'; did you mean 'wikitext2'"):
        text("wikitext-2")
    with pytest.raises(UserError, match="unknown corpus 'c4'"):
        token_ids("c4", byte_tokenizer())


# --- token ids --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bos", [BOS, None])
def test_one_call_adds_one_bos_or_none(bos):
    calls = []
    tokenizer = byte_tokenizer(bos)

    def counting(*args, **kwargs):
        calls.append(args)
        return tokenizer(*args, **kwargs)

    ids = token_ids("tiny-wikitext", counting)
    whole = text("tiny-wikitext")
    assert calls == [(whole,)]
    assert ids.dtype == np.int32 and len(ids) == len(whole.encode()) + bool(bos)
    assert tokenizer.decode(ids[bool(bos) :]) == whole
    assert [i for i, row in enumerate(windows(ids, 8)) if 0 in row] == ([0] if bos else [])
    if bos:
        assert windows(ids, 8)[0].tolist().index(0) == 0


def test_tokens_survive_the_disk(tmp_path):
    tokenizer = byte_tokenizer()
    ids, path = token_ids("tiny-wikitext", tokenizer), tmp_path / "cache" / "ids.safetensors"
    meta = identity("tiny-wikitext") | {"tokenizer_sha256": tokenizer_sha256(tokenizer)}
    save_tokens(path, ids, meta)
    loaded, facts = load_tokens(path)
    assert loaded.dtype == np.int32 and np.array_equal(loaded, ids)
    assert facts.items() > meta.items()
    assert facts["count"] == str(len(ids)) and json.loads(facts["first_ids"]) == ids[:8].tolist()


def test_tokens_that_are_not_those_saved(tmp_path):
    path = tmp_path / "ids.safetensors"
    with pytest.raises(UserError, match="ids.safetensors: an incomplete or damaged file of token ids"):
        load_tokens(path)
    save_tokens(path, np.arange(100, dtype=np.int32), {"corpus": "made up"})
    whole = path.read_bytes()
    for size in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match="an incomplete or damaged file"):
            load_tokens(path)
    path.write_bytes(whole[:-1] + b"\x01")
    with pytest.raises(UserError, match="not those that it was saved with"):
        load_tokens(path)
    save_file({"ids": np.arange(3, dtype=np.int32)}, path)
    with pytest.raises(UserError, match="not those that it was saved with"):
        load_tokens(path)


def test_tokenizer_hash_is_of_the_definition():
    tokenizer = byte_tokenizer()
    before = tokenizer_sha256(tokenizer)
    tokenizer(["a", "bb"], truncation=True, max_length=1)
    tokenizer.pad_token = BOS
    tokenizer(["a", "bb"], padding=True)
    assert tokenizer_sha256(tokenizer) == before == tokenizer_sha256(byte_tokenizer())
    assert tokenizer_sha256(byte_tokenizer(None)) != before


# --- calibration ------------------------------------------------------------------------------------------------------


def test_calibration_draws_as_gptq_does():
    ids = np.arange(1000, dtype=np.int32)
    random.seed(3)
    starts = [random.randint(0, 1000 - 64 - 1) for _ in range(5)]
    crops = calibration(ids, 5, 64, seed=3)
    assert crops.dtype == torch.int64 and crops.tolist() == [list(range(s, s + 64)) for s in starts]
    assert torch.equal(crops, calibration(ids, 5, 64, seed=3))
    assert not torch.equal(crops, calibration(ids, 5, 64, seed=4))
    assert calibration(ids[:65], 4, 64, seed=0)[:, 0].tolist() == [0] * 4


def test_calibration_needs_a_longer_corpus():
    with pytest.raises(UserError, match="64 tokens are too few"):
        calibration(np.arange(64), 4, 64, seed=0)
    with pytest.raises(UserError, match="at least one sequence"):
        calibration(np.arange(64), 0, 8, seed=0)


def scored(calibrated, evaluated, recipe="gptq-w4-pc"):
    """The jobs that score a model calibrated on one corpus on another."""
    facts = {"name": "mine", "about": "a test", "models": {}, "corpora": {"wikitext2": "held-out", "c4": evaluated}}
    settings = {"calibration": {"corpus": calibrated, "sequences": 2, "length": 8}}
    target = Target(scales.load(facts | settings), "pocket-3m", recipe)
    return perplexity.Perplexity("wikitext2").jobs(target)


@pytest.mark.parametrize(
    ("calibrated", "evaluated"),
    [
        ("tiny-wikitext", "tiny-wikitext"),
        ("wikitext2", "wikitext2"),
        ("wikitext2", "wikitext2-hub"),
        ("wikitext2-hub", "wikitext2"),
        ("c4-hub", "c4-local"),
        ("mine", "tiny-held-out"),
    ],
)
def test_text_that_is_evaluated_is_not_calibrated_on(monkeypatch, calibrated, evaluated):
    copied = dataclasses.replace(CORPORA["tiny-held-out"], name="mine")  # the same text under another name
    monkeypatch.setitem(CORPORA, "mine", copied)
    with pytest.raises(UserError) as caught:
        scored(calibrated, evaluated)
    assert f"gptq-w4-pc is calibrated on {calibrated}, and perplexity is measured on {evaluated}" in str(caught.value)
    assert str(caught.value).startswith("scale mine: ") and "\n" not in str(caught.value)
    assert scored(calibrated, evaluated, "rtn-w4-pc").keys() == {"scores"}, "nothing is calibrated"


def test_the_parts_of_a_data_set_are_other_texts():
    for calibrated in ("wikitext2-train-part", "wikitext2-valid", "wikitext2-train-hub"):
        assert scored(calibrated, "wikitext2").keys() == {"scores"}


@pytest.mark.parametrize("name", scales.names())
def test_no_scale_calibrates_on_what_it_evaluates(name):
    at = scales.load(name=name)
    assert perplexity.Perplexity("wikitext2").jobs(Target(at, "pocket-3m", "gptq-w4-pc"))


# --- the data mirror --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIRRORED)
def test_mirror_holds_the_text(mirror, monkeypatch, name):
    monkeypatch.setattr(sources, "EMBEDDED", {})
    assert identity(name)["corpus_sha256"] == CORPORA[name].sha256


@pytest.mark.parametrize(
    "tokenizer, bos, count, at_2048",
    [(llama2_tokenizer, 1, 341_468, 166), (llama3_tokenizer, 128_000, 289_076, 141)],
)
def test_wikitext2_has_the_known_tokens(mirror, tokenizer, bos, count, at_2048):
    """Known from the literature, without BOS: a check of text, joining and tokenizer that needs no weights."""
    ids = token_ids("wikitext2", tokenizer(mirror))
    assert len(ids) == count + 1
    cut = windows(ids, 2048)
    assert len(cut) == at_2048
    assert (cut == bos).nonzero().tolist() == [[0, 0]]
