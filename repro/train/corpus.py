"""The pocket models' corpus: its shards, the documents as they are trained on, the tokenizer, the token ids.

Every `wikitext_every`-th document of a Wikipedia shard is written in WikiText-2's layout (`wikitext_layout`), so that
the yardstick's line breaks and spaced punctuation are no surprise. This module does not import torch: the worker
processes start in a fraction of the time.

    python -m repro.train.corpus $REPRO_DATA/corpus build/pretrain     # tokenize once, for all models
"""

import lzma
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from itertools import product
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm

from repro.core.errors import UserError
from repro.core.files import ROOT, atomic, regular, sha256, short_hash
from repro.train import wikitext_layout
from repro.train.pocket_config import TokenizerArgs, load_config

TOKENIZER = ROOT / "repro" / "pocket" / "tokenizer" / "tokenizer.json"
BOS, EOS = "<s>", "</s>"
PARTS = 8  # jobs per shard: 80 in all keep 32 processes busy; the order of the ids depends on it
_WORD = re.compile(r"[^\W_]+")


def shards(corpus: Path) -> list[Path]:
    """The training shards, in name order.

    Raises:
        UserError: the folder holds no `train-*.txt.xz`.
    """
    files = sorted(corpus.glob("train-*.txt.xz"))
    if not files:
        raise UserError(f"{corpus}: no train-*.txt.xz there; --corpus names the folder of the training shards")
    return files


def documents(path: Path) -> list[str]:
    """The documents of one shard: blocks of lines between blank lines.

    Raises:
        UserError: no regular file, not xz, cut short, or not UTF-8.
    """
    opened = lzma.open if path.suffix == ".xz" else open
    try:
        with opened(regular(path), "rt", encoding="utf-8") as file:
            text = file.read()
    except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a shard of UTF-8 text in xz ({error}); copy it again") from None
    return [d.strip("\n") for d in text.split("\n\n") if d.strip()]


def prepared(path: Path, wikitext_every: int, part: int = 0, parts: int = 1) -> Iterator[str]:
    """The documents of one shard as they are trained on.

    Args:
        wikitext_every: documents 0, n, 2n, … of a shard `train-wiki-*` are written in WikiText's layout; 0: none is.
        part, parts: only documents `part`, `part + parts`, …

    Raises:
        UserError: a layout is asked for and sacremoses is not installed.
    """
    every = wikitext_every if path.name.startswith("train-wiki-") else 0
    texts = documents(path)
    for index in range(part, len(texts), parts):
        yield wikitext_layout.write(texts[index]) if every and index % every == 0 else texts[index]


def train_tokenizer(corpus: Path, args: TokenizerArgs) -> Tokenizer:
    """Train the byte-level BPE of all pocket models on an even sample of the shards; digits are split."""
    paths = shards(corpus)
    share = args.sample_bytes // len(paths)

    def sample():
        for path in paths:
            characters = 0
            for document in documents(path):
                if characters > share:
                    break
                characters += len(document)
                yield document

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=args.vocab, special_tokens=[BOS, EOS], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(sample(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def _encode(job: tuple[Path, Path, int, int, int]) -> np.ndarray:
    definition, shard, wikitext_every, part, parts = job
    tokenizer = Tokenizer.from_file(str(definition))
    eos = tokenizer.token_to_id(EOS)
    ids: list[int] = []
    for document in prepared(shard, wikitext_every, part, parts):
        ids += tokenizer.encode(document).ids + [eos]
    return np.asarray(ids, dtype=np.uint16)


def encode(tokenizer: Path, files: list[Path], wikitext_every: int, processes: int) -> np.ndarray:
    """Token ids (uint16) of all documents of `files`, each as `<s> … </s>`, in an order that is fixed by the files."""
    jobs = [(tokenizer, file, wikitext_every, part, PARTS) for file, part in product(files, range(PARTS))]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return np.concatenate(list(tqdm(pool.imap(_encode, jobs), total=len(jobs), desc="tokenize", mininterval=5)))


def cache_key(files: list[Path], wikitext_every: int) -> str:
    """Eight hex digits of all that decides the ids: tokenizer, shards, order, and the layout with its library.

    Raises:
        UserError: a layout is asked for and sacremoses is not installed.
    """
    facts = [sha256(f) for f in [TOKENIZER, *files]] + [str(PARTS), str(wikitext_every)]
    if wikitext_every:
        wikitext_layout.tokenizer()
        facts += [sha256(Path(wikitext_layout.__file__)), version("sacremoses")]
    return short_hash("".join(facts))


def cached_ids(corpus: Path, out: Path, wikitext_every: int, processes: int | None = None) -> np.ndarray:
    """All token ids of the corpus, int32 `[T]`; tokenized once into `out`, keyed by all that decides them.

    Raises:
        UserError: the folder holds no shards, or a layout is asked for and sacremoses is not installed.
    """
    files = shards(corpus)
    cache = out / f"tokens-{cache_key(files, wikitext_every)}.npy"
    if not cache.is_file():
        with atomic(cache) as temporary:
            ids = encode(TOKENIZER, files, wikitext_every, processes or os.cpu_count() or 1)
            np.save(temporary, ids)
    return np.load(cache).astype(np.int32)


def words(text: str) -> list[str]:
    """The text's words, lower case, without punctuation: the same for a plain text and its WikiText layout."""
    return _WORD.findall(text.lower())


def _hashes(words: list[str], n: int) -> np.ndarray:
    """One uint64 per n-gram of the words `[W]`, `[max(W - n + 1, 0)]`; the same within one process."""
    word_hashes = np.fromiter(map(hash, words), dtype=np.int64, count=len(words)).view(np.uint64)
    out = np.zeros(max(len(words) - n + 1, 0), dtype=np.uint64)
    for offset in range(n):
        out = out * np.uint64(0x9E3779B97F4A7C15) + word_hashes[offset : offset + len(out)]
    return out


def shared_ngrams(corpus: Path, texts: list[str], wikitext_every: int, n: int = 13) -> list[str]:
    """The n-grams of words that the corpus, as it is trained on, has in common with `texts`; layout set aside.

    One shard is in memory at a time, and 8 bytes per n-gram of `texts`.

    Raises:
        UserError: the folder holds no shards, or a layout is asked for and sacremoses is not installed.
    """
    of_texts = np.unique(np.concatenate([_hashes(words(text), n) for text in texts]))
    if not len(of_texts):
        return []
    shared = set()
    for path in tqdm(shards(corpus), desc="n-grams", mininterval=5):
        for document in prepared(path, wikitext_every):
            spoken = words(document)
            hashes = _hashes(spoken, n)
            nearest = of_texts[np.searchsorted(of_texts[:-1], hashes)]
            for index in np.flatnonzero(nearest == hashes):
                shared.add(" ".join(spoken[index : index + n]))
    return sorted(shared)


def main(arguments: list[str]) -> int:
    """Tokenize the corpus once: `python -m repro.train.corpus CORPUS OUT`."""
    if len(arguments) != 2:
        print("usage: python -m repro.train.corpus CORPUS OUT", file=sys.stderr)
        return 2
    try:
        config = load_config()
        for every in sorted({config.of(name).training.wikitext_every for name in config.models}):
            ids = cached_ids(Path(arguments[0]), Path(arguments[1]), every)
            print(f"{len(ids):,} tokens, every {every}th Wikipedia document in WikiText's layout")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
