"""Token for token the engine decodes what Transformers does; every way to get a step wrong is seen."""

import csv
import dataclasses
import os
from itertools import chain, product

import engines
import pytest
import torch

from repro import models
from repro.core.files import ROOT
from repro.engine.step import tree_of
from repro.generation import Engine
from repro.store import provenance

LENGTHS = (1, 17, 300, 1900)


def prompts(count, seed=0, lengths=LENGTHS):
    """Random token ids of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 4096, (lengths[i % len(lengths)],), generator=generator).tolist() for i in range(count)]


@pytest.fixture(scope="module", params=["pocket-3m", *engines.LAYOUTS])
def both(request, tmp_path_factory):
    """An engine in float32 and the model of Transformers."""
    name = request.param
    name = name if name.startswith("pocket") else engines.save(name, tmp_path_factory.mktemp(name))
    return Engine.load(name, dtype="float32", device="cpu"), engines.Transformers(name)


def test_tokens_are_those_of_transformers(both):
    engine, transformers = both
    some = prompts(4)
    engine.chunk = 256
    for ids in some:
        assert transformers.disagreements(engine, [ids], 32) == []
    engine.chunk = 7
    assert transformers.disagreements(engine, some[1:], 32) == []


@pytest.mark.engine_full
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layout", [*models.pocket_names(), *engines.LAYOUTS])
def test_tokens_of_the_whole_matrix(layout, device, tmp_path):
    """20 prompts, 128 tokens, chunks of 1, 7 and 256, batches of 1 and 5; a line of it goes to the file $MATRIX."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    name = layout if layout.startswith("pocket") else engines.save(layout, tmp_path)
    engine, transformers = Engine.load(name, dtype="float32", device=device), engines.Transformers(name, device)
    some, compared = prompts(20, seed=1), 0
    for engine.chunk in (1, 7, 256):
        for batch in (1, 5):
            for start in range(0, len(some), batch):
                assert transformers.disagreements(engine, some[start : start + batch], 128) == []
                compared += 128 * batch
    if "MATRIX" in os.environ:
        on = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        line = (layout, on, weights_of(layout), compared, transformers.ties, torch.__version__, provenance.commit())
        with open(os.environ["MATRIX"], "a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(line)


def weights_of(layout):
    """What a line of the matrix was measured on: a pocket model's fingerprint; the random ones come from a seed."""
    return models.fingerprint(layout) if layout.startswith("pocket") else "seed 0"


def test_the_accepted_matrix_has_every_model_on_both_devices():
    """The last whole run, in results/: all tokens alike, with today's weights, on a CPU and a GPU."""
    with open(ROOT / "results" / "engine-equal.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = {(name, gpu) for name, gpu in product((*models.pocket_names(), *engines.LAYOUTS), (False, True))}
    assert {(row["model"], row["device"] != "cpu") for row in rows} == wanted and len(rows) == len(wanted)
    assert all(row["weights"] == weights_of(row["model"]) and row["ties"] == "0" for row in rows)
    assert all(int(row["tokens"]) == 6 * 20 * 128 for row in rows)


# --- every way to get a step wrong turns these red -------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny Llama with grouped heads, in float32, by name and in Transformers."""
    name = engines.save("llama", tmp_path_factory.mktemp("wrong"))
    return name, engines.Transformers(name)


def shifted(rope):
    """Positions of decoded tokens are one too far."""
    return lambda qkv, cos, sin, positions, *where: rope(qkv, cos, sin, positions + (len(qkv) < 4), *where)


def stale(attention):
    """A decoded token sees one slot beyond its length, where a longer sequence was before."""
    return lambda q, k, v, rows, lengths, *more: attention(q, k, v, rows, lengths + 1, *more)


def interleaved(attention):
    """Query heads are dealt to key heads one by one instead of in groups."""

    def attend(q, keys, *more):
        groups = q.shape[1] // keys.shape[1]
        order = torch.arange(q.shape[1]).view(groups, -1).T.flatten()
        return attention(q[:, order].contiguous(), keys, *more)[:, order.argsort()].contiguous()

    return attend


def twice(norm):
    """The residual is added twice."""
    return lambda x, weight, eps, residual: norm(x if residual is None else x + residual, weight, eps, residual)


def neighbour(attention):
    """A sequence reads the cache of the next one."""
    return lambda q, k, v, rows, *more: attention(q, k, v, rows.roll(1), *more)


WRONG = {"rope": (shifted,), "attention": (stale, interleaved, neighbour), "norm": (twice,)}


@pytest.mark.parametrize("wrong", [None, *chain.from_iterable(WRONG.values())])
def test_a_wrong_step_is_seen(llama, wrong):
    name, transformers = llama
    engine, some = Engine.load(name, dtype="float32", device="cpu"), prompts(3, lengths=(40, 17, 25))
    if wrong is not None:
        (operator,) = (key for key, each in WRONG.items() if wrong in each)
        for block in range(2):
            engine.replace(block, **{operator: wrong(getattr(engine.model.blocks[block], operator))})
    list(engine.generate([[7] * 100] * 3, 1))  # leaves 100 slots in every row
    assert bool(transformers.disagreements(engine, some, 12)) == (wrong is not None)


def siblings(attention):
    """A node of a tree sees all nodes before it."""

    def attend(q, k, v, rows, lengths, scale, mask, start):
        return attention(q, k, v, rows, lengths, scale, torch.ones_like(mask).tril(), start)

    return attend


PARENTS = [-1, 0, 0, 1, -1, 2, 5, 1]  # two roots; nodes 1 and 2 are siblings


@pytest.mark.parametrize("wrong", [False, True])
def test_nodes_of_a_tree_see_their_ancestors_alone(llama, wrong):
    """The logits of a node are those behind its path, and an accepted path goes on as if it had been decoded."""
    engine = Engine.load(llama[0], dtype="float32", device="cpu")
    before, nodes = prompts(1, lengths=(20,))[0], prompts(1, seed=3, lengths=(len(PARENTS),))[0]
    paths = [[node] for node in range(len(PARENTS))]
    for path in paths:
        while PARENTS[path[0]] >= 0:
            path.insert(0, PARENTS[path[0]])
    wanted = []
    for path in paths:
        tokens = [nodes[node] for node in path]
        wanted.append(engine.logits(before + tokens)[-1])
    wanted = torch.stack(wanted)
    engine.logits(before)
    if wrong:
        old = engine.cache
        for block in range(2):
            engine.replace(block, attention=siblings(engine.model.blocks[block].attention))
        for name in ("keys", "values", "lengths"):
            getattr(engine.cache, name).copy_(getattr(old, name))
    logits = engine.tree(0, len(before), torch.tensor(nodes), PARENTS)
    assert torch.allclose(logits, wanted, atol=1e-4) != wrong
    if not wrong:
        path = paths[6]
        engine.cache.gather(0, len(before), torch.tensor([len(before) + node for node in path]))
        assert engine.cache.lengths.tolist() == [len(before) + len(path)]
        after = engine.tree(0, len(before) + len(path), torch.tensor([9]), [-1])
        assert torch.allclose(after[0], engine.logits([*before, *(nodes[i] for i in path), 9])[-1], atol=1e-4)


def test_positions_of_a_tree_are_depths():
    tokens = tree_of(torch.arange(8), PARENTS, row=2, start=10)
    assert tokens.positions.tolist() == [10, 11, 11, 12, 10, 12, 13, 12]
    assert tokens.slots.tolist() == list(range(10, 18)) and set(tokens.rows.tolist()) == {2}
    assert tokens.mask[6].nonzero()[:, 0].tolist() == [0, 2, 5, 6]


def test_steps_own_what_they_read(llama):
    """A captured step reads fixed addresses: its weights live as long as it does, and other operators mean another."""
    engine = Engine.load(llama[0], dtype="float32", device="cpu")
    steps, down = engine.steps, engine.model.blocks[0].down
    with pytest.raises(dataclasses.FrozenInstanceError):
        engine.model.blocks[0].down = None
    engine.replace(0, down=torch.nn.Identity())
    assert engine.steps is not steps and steps.model.blocks[0].down is down
    assert isinstance(engine.model.blocks[0].down, torch.nn.Identity)
