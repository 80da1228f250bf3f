"""Drafts with a model of their own, and dynamic trees: toys of the authors' codes, lossless texts, faults."""

from itertools import product

import engines
import numpy as np
import pytest
import torch
from known import uniform

from repro import models
from repro.core.errors import UserError
from repro.engine import drafts
from repro.engine.ranked import RankedTree, ancestors, best_first, level_by_level
from repro.engine.speculate import accepted
from repro.engine.speculating import Speculating
from repro.engine.substitute import draft_of
from repro.engine.weights import decoder
from repro.generation import Engine
from repro.models.lowbit import LowBitModel

CPU = torch.device("cpu")
DRAFT = torch.from_numpy(8 * uniform(32, 32, 7)).float()  # next-token logits of 32 tokens
PROMPT = list(range(5, 30))
CONTEXT = 128


def grown(policy, size, children, decay=1.0):
    """A tree over the toy's table of logits, and all that was proposed."""
    tree = RankedTree(size, children, policy, 1.0, decay, CPU)
    tree.plant(3, 0)
    return tree, tree.grow(lambda tokens, numbers, parents: DRAFT[tokens.ids])


def test_the_toy_of_eagle_2_is_that_of_the_authors_code():
    tree, _ = grown(level_by_level(3, 4), 16, 4)
    assert tree.ids.tolist() == [3, 21, 27, 28, 22, 6, 17, 28, 5, 23, 24, 30, 5, 31, 4, 28]
    assert tree._depths.tolist() == [0] + [1] * 4 + [2] * 11
    leaves = set(range(16)) - set(tree.parents.tolist())
    assert len(leaves) == 11


def test_the_first_level_of_specexec_is_that_of_the_authors_code():
    _, proposals = grown(best_first(64, 128, 1), 65, 4, decay=0.95)
    assert proposals.tokens.tolist() == [3, 21, 27, 28, 22]
    assert proposals.scores[1:] == pytest.approx([-1.813985, -1.895479, -2.157107, -2.485628], abs=1e-6)


@pytest.mark.parametrize("budget", [5, 20, 60])
def test_best_first_finds_the_best_nodes_of_the_whole_tree(budget):
    """Against all paths of up to four tokens; nodes this good lie no deeper."""
    tree, proposals = grown(best_first(budget, 8, 64), budget + 1, 32)
    chances = DRAFT.double().log_softmax(1).numpy()
    every, level = [], [((3,), 0.0)]
    for _ in range(4):
        level = [((*path, t), score + chances[path[-1], t]) for (path, score), t in product(level, range(32))]
        level = sorted(level, key=lambda one: -one[1])[:2000]
        every += level
    wanted = sorted((score for _, score in every), reverse=True)[:budget]
    kept = proposals.best(budget)[1:]
    assert np.sort(proposals.scores[kept])[::-1] == pytest.approx(wanted, abs=1e-5)
    paths = {tuple(tree.ids[tree._mask[node]].tolist()) for node in range(1, budget + 1)}
    assert len(paths) == budget


def test_a_ranked_tree_is_closed_and_its_padding_is_never_reached():
    tree, proposals = grown(level_by_level(1, 2), 40, 3)  # 1 + 3 + 6 nodes were proposed
    parents = tree.parents.tolist()
    assert len(proposals) == 10 and parents[10:] == list(range(10, 40))
    assert all(parent < node for node, parent in enumerate(parents[1:10], start=1))
    assert (ancestors(parents) == tree._mask.numpy()).all()
    for token in range(32):
        path, _ = accepted(tree.ids.tolist(), parents, [token] * 40)
        assert max(path) < 10
    positions = tree.tokens().positions
    assert positions[:10].tolist() == tree._mask[:10].sum(1).sub(1).tolist()


# --- texts ------------------------------------------------------------------------------------------------------------


def made(name, slots):
    """A decoder of a model in float32."""
    return decoder(LowBitModel(models.load(name, "cpu")), CONTEXT + slots, CPU, torch.float32)


CONFIGS = {
    "small": drafts.Small(top_k=3, depth=5),
    "apart": drafts.Apart(top_k=3, depth=5),
    "specexec": drafts.SpecExec(budget=24, batch=8, children=4, rounds=8),
}


@pytest.fixture(scope="module")
def speculating():
    """pocket-5m with pocket-3m as its draft, a fixed tree and a best-first one, and with substitutes of its own."""
    by_name = {}
    for name, config in CONFIGS.items():
        target = made("pocket-5m", config.nodes)
        if name == "apart":
            draft = draft_of(LowBitModel(models.load("pocket-5m", "cpu")), target, config)
        else:
            draft = made("pocket-3m", config.slots)
        by_name[name] = Speculating("pocket-5m", target, draft, config)
    return by_name


@pytest.fixture(scope="module")
def plain():
    """pocket-5m."""
    return Engine.load("pocket-5m", context=CONTEXT, dtype="float32", device="cpu")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_texts_are_the_targets_own(speculating, plain, name, temperature):
    how = {"temperature": temperature, "seed": 3}
    engine = speculating[name]
    for prompt in (PROMPT, PROMPT[:12]):  # the second text begins with caches that hold the first
        text = next(engine.generate([prompt], 16, **how)).tokens
        assert text == next(plain.generate([prompt], 16, **how)).tokens
    assert engine.stats.iterations < 16 and engine.context == CONTEXT


@pytest.mark.parametrize("name", CONFIGS)
def test_the_drafts_cache_holds_the_text_and_nothing_else(speculating, name):
    """What it says after the text is what a fresh prefill of the same tokens says."""
    engine = speculating[name]
    text = next(engine.generate([PROMPT], 30)).tokens
    drafter = engine.batch.drafter
    assert drafter.cache is not engine.cache
    before = len(PROMPT) + sum(engine.batch.lengths) - 1  # tokens in the cache: all but the last bonus
    length = len(PROMPT) + 29
    assert before >= length
    keys = drafter.cache.keys[:, 0, :, :length].clone()
    drafter.begin([*PROMPT, *text[:29]], 4096, None)
    assert torch.allclose(keys, drafter.cache.keys[:, 0, :, :length], atol=1e-3)


@pytest.mark.parametrize("reads", [False, True])
def test_the_states_of_a_prompt_are_kept_for_a_drafter_that_reads_them(speculating, monkeypatch, reads):
    """Else memory would grow with the prompt for nothing."""
    received = []
    begin = drafts.OwnDrafter.begin
    monkeypatch.setattr(drafts.OwnDrafter, "READS_STATES", reads)
    monkeypatch.setattr(
        drafts.OwnDrafter,
        "begin",
        lambda self, prompt, chunk, states: received.append(states) or begin(self, prompt, chunk, states),
    )
    next(speculating["small"].generate([PROMPT], 2))
    (states,) = received
    assert (states is not None and states.shape[0] == len(PROMPT)) == reads


@pytest.mark.parametrize("name", ["small", "specexec"])
def test_a_model_as_its_own_draft_is_accepted_to_the_end(name):
    config = {
        "small": drafts.Small(top_k=2, depth=6, temperature=0.01),
        "specexec": drafts.SpecExec(budget=12, batch=4, children=2, rounds=6, temperature=0.01),
    }[name]
    engine = Speculating("pocket-3m", made("pocket-3m", config.nodes), made("pocket-3m", config.slots), config)
    next(engine.generate([PROMPT], 36, eos=False))
    assert engine.batch.lengths[1:] == [7] * 5  # six levels and the bonus


def test_a_draft_of_another_vocabulary_is_one_sentence(tmp_path):
    ours = models.tokenizer("pocket-3m")
    drafts.check_vocabulary(ours, models.tokenizer("pocket-10m"), ("a", "b"))
    other = type("Tokenizer", (), {"get_vocab": lambda self: {"a": 0}, "__len__": lambda self: 1})()
    with pytest.raises(UserError, match="draft tiny: its vocabulary is not that of pocket-3m"):
        drafts.check_vocabulary(ours, other, ("pocket-3m", "tiny"))
    assert engines.LAYOUTS


def test_a_budget_of_nothing_is_one_sentence():
    with pytest.raises(UserError, match="budget is 0; SpecExec verifies 1 node or more"):
        drafts.SpecExec(budget=0)
