"""Scores of a text against references: ROUGE-L by `rouge-score`, BLEU by `sacrebleu`, agreement of token lists."""

import importlib.util
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from repro.core.errors import UserError

PACKAGES = {"rougeL": "rouge_score", "bleu": "sacrebleu"}
ORDERS = 4  # of n-grams in BLEU


def lacking(score: str) -> str:
    """Why a score cannot be computed here; empty if it can."""
    package = PACKAGES.get(score)
    if package is None or importlib.util.find_spec(package):
        return ""
    return f"{score} needs the package {package}, which is not installed here; install requirements.lock"


def rouge_l(text: str, references: Sequence[str]) -> float:
    """ROUGE-L, the F1 of the longest common subsequence of words, times 100; of several references the best.

    Words are the package's own, lower-case letters and digits, without a stemmer.

    Raises:
        UserError: the package is not installed.
    """
    scorer = _scorer()
    return 100.0 * max(scorer.score(reference, text)["rougeL"].fmeasure for reference in references)


@cache
def _scorer() -> Any:
    if why := lacking("rougeL"):
        raise UserError(why)
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=False)


def bleu_counts(text: str, references: Sequence[str]) -> dict[str, float]:
    """The counts of one text that BLEU sums over a corpus: matching and all n-grams of each order, and both lengths.

    Raises:
        UserError: the package is not installed.
    """
    if why := lacking("bleu"):
        raise UserError(why)
    from sacrebleu.metrics import BLEU

    score = BLEU(effective_order=True).sentence_score(text, list(references))
    counts = {"length": score.sys_len, "reference length": score.ref_len}
    for n in range(ORDERS):
        counts |= {f"matches {n + 1}": score.counts[n], f"n-grams {n + 1}": score.totals[n]}
    return {name: float(count) for name, count in counts.items()}


def bleu(counts: Mapping[str, Any]) -> Any:
    """Corpus BLEU times 100 (Papineni et al. 2002, section 2.3) from the sums of `bleu_counts`, or from their means.

    Without smoothing: 0 where an order has no match. Counts may be arrays, of resampled corpora.
    """
    logs = 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        for n in range(1, ORDERS + 1):
            matches = np.asarray(counts[f"matches {n}"], float)
            grams = np.asarray(counts[f"n-grams {n}"], float)
            logs = logs + np.log(np.where(grams > 0, matches / grams, 0.0)) / ORDERS
        length = np.asarray(counts["length"], float)
        reference_length = np.asarray(counts["reference length"], float)
        brevity = np.where(length > 0, np.minimum(1 - reference_length / length, 0.0), -np.inf)
        return 100 * np.exp(brevity + logs)


def matched_f1(states: np.ndarray, reference_states: np.ndarray, frame: int = 0) -> float:
    """F1 of greedy matching by cosine, times 100: what BERTScore computes from token embeddings `[T, H]` of two texts.

    Precision is the mean over the tokens of the first text of the largest cosine with any of the second, recall the
    other way round (Zhang et al. 2020, section 3). 0 where a text has no token, or neither is positive.

    Args:
        states: of the text.
        reference_states: of its reference.
        frame: tokens at each end that an encoder adds: others may match them, but they do not count themselves.
    """
    if min(len(states), len(reference_states)) <= 2 * frame:
        return 0.0
    cosine = _unit(states) @ _unit(reference_states).T
    best_of_one, best_of_other = cosine.max(1), cosine.max(0)
    precision = float(best_of_one[frame : len(states) - frame].mean())
    recall = float(best_of_other[frame : len(reference_states) - frame].mean())
    return 100 * max(0.0, 2 * precision * recall / (precision + recall)) if precision + recall > 0 else 0.0


def _unit(vectors: np.ndarray) -> np.ndarray:
    vectors = vectors.astype(float)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two lists begin with alike."""
    for length, (a, b) in enumerate(zip(first, second)):
        if a != b:
            return length
    return min(len(first), len(second))
