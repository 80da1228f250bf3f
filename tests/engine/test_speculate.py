"""Draft trees and their verification without a model: the toy of the authors' code, and exact distributions."""

import itertools
from itertools import product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from known import uniform

from repro.engine.speculate import Tree, accepted

CPU = torch.device("cpu")
DRAFT = torch.from_numpy(8 * uniform(32, 32, 7)).float()  # next-token logits of 32 tokens
TARGET = DRAFT + torch.from_numpy(3 * uniform(32, 32, 8)).float()
SHARP = (
    [3, 21, 27, 28, 22, 5, 6, 17, 28, 29, 22, 16, 30, 4, 15, 28, 3, 9, 15, 30, 0],
    [0, 0, 0, 0, 0, 2, 1, 1, 1, 5, 6, 7, 8, 10, 9, 12, 11, 14, 13, 15, 13],
)


def grown(logits, top_k=4, depth=5, temperature=0.2, root=3, start=0):
    """A tree over a table of next-token logits."""
    tree = Tree(top_k, depth, temperature, CPU)
    tree.plant(root, start)
    tree.grow_root(lambda tokens: logits[tokens.ids])
    for _ in range(depth - 1):
        tree.grow(lambda tokens: logits[tokens.ids])
    return tree


def greedy_choices(tree, logits):
    """Greedy tokens after every node."""
    return logits[tree.ids].argmax(1).tolist()


def emitted(tree, logits):
    """What one iteration adds to the text."""
    path, bonus = accepted(tree.ids.tolist(), tree.parents.tolist(), greedy_choices(tree, logits))
    return [*tree.ids[path[1:]].tolist(), bonus]


def test_the_toy_tree_is_that_of_the_authors_code_node_for_node():
    tree = grown(DRAFT)
    assert (tree.ids.tolist(), tree.parents.tolist()) == SHARP
    assert tree.scores.exp().sum().item() == pytest.approx(4.0379997, rel=1e-6)
    assert emitted(tree, TARGET) == [28, 30]


def test_without_sharpening_the_toy_accepts_one_more():
    tree = grown(DRAFT, temperature=1.0)
    assert tree.scores.exp().sum().item() == pytest.approx(1.7599686, rel=1e-6)
    assert emitted(tree, TARGET) == [28, 30, 17]


def test_a_tree_knows_paths_depths_and_slots():
    tree = grown(DRAFT, start=100)
    tokens = tree.tokens()
    for node, parent in enumerate(tree.parents.tolist()):
        path = {node}
        while node:
            node = tree.parents[node].item()
            path.add(node)
        at = max(path)
        assert tree.mask[at].nonzero()[:, 0].tolist() == sorted(path)
        assert tokens.positions[at] == 100 + len(path) - 1 and tokens.slots[at] == 100 + at
        assert parent < at or at == 0
    assert tokens.lengths.tolist() == [121] * 21 and tokens.start.tolist() == [100] * 21


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 4))
@example(38345, 4, 4)  # a tie above the last level
def test_a_level_is_the_best_of_all_children(seed, top_k, depth):
    logits = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
    tree = grown(logits, top_k, depth, 1.0)
    chances, level = logits.log_softmax(1), [((3,), 0.0)]
    for d in range(depth):
        every = [((*path, t), score + chances[path[-1], t].item()) for (path, score), t in product(level, range(8))]
        level = sorted(every, key=lambda one: -one[1])[:top_k]
        nodes = range(1 + d * top_k, 1 + (d + 1) * top_k)
        assert tree.scores[list(nodes)].tolist() == pytest.approx([score for _, score in level], abs=1e-5)
        ours = {tuple(tree.ids[tree.mask[node]].tolist()) for node in nodes}
        scored = dict(every)
        assert len(ours) == top_k
        assert all(scored[path] >= level[-1][1] - 1e-5 for path in ours), "paths of the same steps in another order tie"
        level = [(path, scored[path]) for path in ours]  # whose children are next, whichever of a tie they are


def emissions(tree, chances):
    """Exact probability of every text that one iteration can add, over all that the target can say after each node."""
    ids, parents = tree.ids.tolist(), tree.parents.tolist()
    probability = {}
    for words in itertools.product(range(chances.shape[1]), repeat=len(ids)):
        weight = 1.0
        for node, word in enumerate(words):
            weight *= chances[ids[node], word].item()
        path, bonus = accepted(ids, parents, words)
        text = (*(ids[node] for node in path[1:]), bonus)
        probability[text] = probability.get(text, 0.0) + weight
    return probability


def shares(probability, prefix):
    """Share of each next token among the texts that go on from a prefix."""
    following = {}
    for text, weight in probability.items():
        if text[: len(prefix)] == prefix and len(text) > len(prefix):
            following[text[len(prefix)]] = following.get(text[len(prefix)], 0.0) + weight
    total = sum(following.values())
    return [following.get(token, 0.0) / total for token in range(3)]


@pytest.mark.parametrize("seed", range(3))
def test_sampling_says_exactly_what_the_target_would(seed):
    generator = torch.Generator().manual_seed(seed)
    draft, target = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64).mul(2).unbind()
    tree = grown(draft, top_k=2, depth=2, temperature=1.0, root=0)
    chances = target.softmax(1)
    probability = emissions(tree, chances)
    assert sum(probability.values()) == pytest.approx(1)
    assert shares(probability, ()) == pytest.approx(chances[0].tolist(), abs=1e-12)
    for first in set(tree.ids[1:3].tolist()):
        assert shares(probability, (first,)) == pytest.approx(chances[first].tolist(), abs=1e-12)
    wrong = emissions(tree, (target / 0.6).softmax(1))  # planted: a temperature of the draft on the target's side
    assert shares(wrong, ()) != pytest.approx(chances[0].tolist(), abs=1e-3)


def test_a_dropped_bonus_changes_the_distribution():
    tree = grown(DRAFT[:3, :3], top_k=2, depth=1, temperature=1.0, root=0)
    chances = TARGET[:3, :3].softmax(1)
    whole = emissions(tree, chances)
    dropped = {}
    for text, weight in whole.items():
        dropped[text[:-1]] = dropped.get(text[:-1], 0.0) + weight  # planted
    del dropped[()]
    assert shares(dropped, ()) != pytest.approx(chances[0].tolist(), abs=1e-3)
