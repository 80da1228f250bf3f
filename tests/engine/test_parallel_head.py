"""The head split over ranks by tokens: tokens, log probabilities and logits are those of one rank."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig

pytest.importorskip("triton")

from repro.core.errors import UserError  # noqa: E402
from repro.engine import parallel, ranks, sharding  # noqa: E402
from repro.engine.core import Core  # noqa: E402
from repro.engine.decoding import Sampling  # noqa: E402
from repro.engine.parallel import Group, ParallelCore, VocabularyParallel  # noqa: E402
from repro.engine.random_shape import random_decoder  # noqa: E402
from repro.kernels import argmax, vocabulary_argmax  # noqa: E402
from repro.recipes.recipe import parse  # noqa: E402

CPU = torch.device("cpu")
NEW = 6
PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 6], [5, 3, 5]]


def decoder(heads, vocabulary):
    """A small decoder with random weights, the same wherever it is made."""
    torch.manual_seed(0)
    size = dict(hidden_size=64 * heads, num_attention_heads=heads, num_key_value_heads=heads, head_dim=64)
    config = LlamaConfig(
        num_hidden_layers=2, vocab_size=vocabulary, max_position_embeddings=64, intermediate_size=176, **size
    )
    return random_decoder(parse("fp16"), config, 32, CPU, torch.float32)


def decoded(engine, sampling=None, scored=False):
    """(tokens, log probabilities) of a batch, step by step."""
    batch = engine._decoding(PROMPTS, NEW, sampling or Sampling(), 7, scored)
    tokens, logprobs = [], []
    for step in engine._run(batch):
        tokens.append([token for _, token, _ in step])
        logprobs.append([value for _, _, value in step])
    return tokens, logprobs


def compared(given, device):
    """Of each decoder, facts of one rank and of all ranks together, as numbers that JSON holds."""
    return [facts_of(heads, vocabulary) for heads, vocabulary in given["decoders"]]


def facts_of(heads, vocabulary):
    """Tokens, log probabilities and logits of one rank and of all, and whether all ranks have the same."""
    link = Group(dist.group.WORLD)
    model = decoder(heads, vocabulary)
    part = parallel.parallel(sharding.shard(model, link.rank, link.ranks), link, "plain")
    facts = {}
    for name, engine in (("one", Core("tiny", model)), ("ranks", ParallelCore("tiny", part))):
        greedy, _ = decoded(engine)
        scored, logprobs = decoded(engine, scored=True)
        drawn, _ = decoded(engine, Sampling(temperature=0.8, top_k=9))
        logits = engine.logits(PROMPTS[0])
        facts[name] = [greedy, scored, drawn, logprobs, logits.tolist()]
    of_all = [None] * link.ranks
    dist.all_gather_object(of_all, facts["ranks"])
    facts["alike"] = all(one == of_all[0] for one in of_all)
    return facts


@pytest.mark.parametrize("count, decoders", [(2, [(4, 300)]), (3, [(5, 300)]), (4, [(4, 300), (4, 20)])])
def test_ranks_give_the_tokens_of_one_rank(count, decoders, monkeypatch):
    """Vocabularies that the ranks do not divide, and one of which the last ranks have no token."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    of_decoders = ranks.run(compared, {"decoders": decoders}, count, "cpu")
    for (_, vocabulary), facts in zip(decoders, of_decoders, strict=True):
        of_one, of_ranks = facts["one"], facts["ranks"]
        assert facts["alike"]
        assert of_ranks[:3] == of_one[:3] and of_ranks[0] == of_ranks[1], "greedy, with log probabilities, and drawn"
        assert len(set(itertools.chain.from_iterable(of_ranks[0]))) > 3
        for logits, want in zip(of_ranks[3:], of_one[3:]):
            assert torch.allclose(torch.tensor(logits), torch.tensor(want), atol=1e-4)
        assert len(of_ranks[4][0]) == vocabulary


class Given(nn.Module):
    """A product that gives logits which are known."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, x):
        return self.logits


class Alone:
    """What a rank would be told by the others."""

    def __init__(self, rank, parts):
        self.rank, self.ranks, self.parts, self.gathers = rank, len(parts), parts, 0

    def largest(self, words):
        others = [vocabulary_argmax.words_of(*part) for part in self.parts]
        assert torch.equal(words, others[self.rank])
        return torch.stack(others).amax(0)

    def gathered(self, x):
        self.gathers += 1
        return torch.cat([logits for logits, _, _ in self.parts], 1)


def heads_of(whole, count):
    """The heads of all ranks, whose padding has larger logits than any token."""
    parts = []
    for rank in range(count):
        first, own = vocabulary_argmax.tokens_of_a_rank(whole.shape[1], rank, count)
        logits = torch.full((len(whole), vocabulary_argmax.rows_of_a_rank(whole.shape[1], count)), 1e3)
        logits[:, :own] = whole[:, first : first + own]
        parts.append((logits, own, first))
    return [VocabularyParallel(Given(parts[r][0]), whole.shape[1], Alone(r, parts), []) for r in range(count)]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_ties_go_to_the_lowest_token_and_padding_is_never_chosen(count):
    whole = torch.randn(4, 100, generator=torch.Generator().manual_seed(count))
    whole[0, [7, 60, 99]] = 9.0
    whole[1] = 0.5
    whole[2, 99] = 8.0
    whole[3, 51] = float("nan")
    want = argmax.reference(whole)
    assert want.tolist() == [7, 0, 99, -1]
    hidden = torch.zeros(4, 8)
    for head in heads_of(whole, count):
        assert torch.equal(head.greedy(hidden), want)
        assert head.link.gathers == 0, "logits stay where they are"
        assert torch.equal(head(hidden).nan_to_num(), whole.nan_to_num()) and head.link.gathers == 1


def test_logits_that_are_not_finite_end_a_generation(monkeypatch):
    model = decoder(4, 300)
    parts = [sharding.shard(model, 0, 1)]
    link = Alone(0, [(None, 300, 0)])
    link.add, link.largest = lambda x: x, lambda words: words
    engine = ParallelCore("tiny", parallel.parallel(parts[0], link, "plain"))
    engine.model.head.product.weight[2, 5] = float("nan")
    with pytest.raises(UserError, match="the logits are not finite"):
        decoded(engine)


def test_a_rank_holds_the_rows_of_its_tokens():
    """In 16s, zeros behind the last token; embedding and norm stay whole."""
    model = decoder(4, 300)
    for rank, (first, count) in enumerate([(0, 80), (80, 80), (160, 80), (240, 60)]):
        part = sharding.shard(model, rank, 4)
        weight = part.head.weight
        assert weight.shape == (80, 256)
        assert torch.equal(weight[:count], model.head.weight[first : first + count]) and not weight[count:].any()
        assert part.embedding is model.embedding and part.config.vocab_size == 300
    assert not sharding.head_of(decoder(4, 20), 3, 4).weight.any()


def test_more_rows_than_words_have_memory_for_go_through_a_collective(monkeypatch):
    """Under `peers`, whose memory has a word for each of 64 sequences."""
    whole = torch.randn(vocabulary_argmax.MOST_ROWS + 1, 100, generator=torch.Generator().manual_seed(0))
    (head, _) = heads_of(whole, 2)
    head.sides = [parallel.Side(torch.zeros(2, vocabulary_argmax.MOST_ROWS, dtype=torch.int64), [])]
    assert torch.equal(head.greedy(torch.zeros(len(whole), 8)), argmax.reference(whole))
