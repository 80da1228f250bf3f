"""Scores of texts: known answers, and the packages' own corpus scores."""

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.core.errors import UserError
from repro.data import text_scores

WORDS = st.lists(st.sampled_from("the cat dog sat ran on a mat . , field".split()), min_size=1, max_size=12)


def longest(one, other):
    """The length of the longest common subsequence, slowly."""
    if not one or not other:
        return 0
    if one[0] == other[0]:
        return 1 + longest(one[1:], other[1:])
    return max(longest(one[1:], other), longest(one, other[1:]))


@given(st.lists(st.sampled_from("abc"), max_size=7), st.lists(st.sampled_from("abc"), max_size=7))
@settings(deadline=None, max_examples=60)
def test_rouge_l_is_the_f1_of_the_longest_common_subsequence(one, other):
    common = longest(one, other)
    wanted = 200 * common / (len(one) + len(other)) if common else 0.0
    assert text_scores.rouge_l(" ".join(one), [" ".join(other)]) == pytest.approx(wanted)


def test_rouge_l_takes_the_best_reference_and_reads_words_alone():
    assert text_scores.rouge_l("The cat, sat!", ["a dog ran", "the cat sat"]) == 100
    assert text_scores.rouge_l("", ["the cat"]) == 0


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=5))
@settings(deadline=None, max_examples=60)
def test_bleu_of_mean_counts_is_sacrebleus_corpus_bleu(pairs):
    texts, references = [" ".join(a) for a, _ in pairs], [" ".join(b) for _, b in pairs]
    counts = [text_scores.bleu_counts(text, [reference]) for text, reference in zip(texts, references)]
    means = {}
    for name in counts[0]:
        means[name] = np.mean([of_text[name] for of_text in counts])
    wanted = sacrebleu.corpus_bleu(texts, [references], smooth_method="none").score
    assert text_scores.bleu(means) == pytest.approx(wanted, abs=1e-6)
    both = {name: np.asarray([value, 2 * value]) for name, value in means.items()}
    assert text_scores.bleu(both) == pytest.approx([wanted, wanted], abs=1e-6)


def test_greedy_matching_by_cosine_is_bertscores_f1():
    """By hand: each token's nearest one, whatever the lengths of the vectors."""
    one, other = np.asarray([[2.0, 0.0], [0.0, 1.0]]), np.asarray([[3.0, 0.0], [1.0, 1.0], [-1.0, 0.0]])
    half = 0.5**0.5
    precision, recall = (1 + half) / 2, (1 + half + 0) / 3
    assert text_scores.matched_f1(one, other) == pytest.approx(100 * 2 * precision * recall / (precision + recall))
    assert text_scores.matched_f1(other, one) == pytest.approx(text_scores.matched_f1(one, other))
    assert text_scores.matched_f1(one, one) == pytest.approx(100)
    assert text_scores.matched_f1(one, other[:0]) == 0 and text_scores.matched_f1(one[:1], -one[:1]) == 0


def test_the_score_of_an_empty_answer_is_a_float():
    """An int would leave the score out of what a job keeps of its prompts."""
    for text in ("", "...", "a"):
        assert type(text_scores.rouge_l(text, ["a"])) is float


def test_a_common_prefix_ends_at_the_first_difference():
    assert text_scores.common_prefix([1, 2, 3], [1, 2, 4, 3]) == 2
    assert text_scores.common_prefix([1, 2], [1, 2, 3]) == 2 and text_scores.common_prefix([], [1]) == 0


def test_a_package_that_is_missing_is_a_sentence(monkeypatch):
    monkeypatch.setattr(text_scores.importlib.util, "find_spec", lambda name: None)
    assert "bleu needs the package sacrebleu" in text_scores.lacking("bleu") and not text_scores.lacking("bits")
    with pytest.raises(UserError, match="bleu needs the package sacrebleu"):
        text_scores.bleu_counts("a", ["a"])
