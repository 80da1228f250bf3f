"""Tensor parallelism: ranks give the logits of one rank, in every way to add their partial sums up."""

import itertools
import threading
import time

import pytest
import torch
from engines import products
from transformers import LlamaConfig

pytest.importorskip("triton")

from repro.core.errors import UserError  # noqa: E402
from repro.engine import corrected, parallel, sharding, weights  # noqa: E402
from repro.engine.core import Core  # noqa: E402
from repro.engine.corrected import Compensated, Corrected  # noqa: E402
from repro.engine.decoding import Sampling  # noqa: E402
from repro.engine.parallel import (  # noqa: E402
    FusedRowParallel,
    ParallelCore,
    PartialSums,
    RowParallel,
    SeparateRowParallel,
    Side,
)
from repro.engine.prefill import together  # noqa: E402
from repro.engine.random_shape import random_decoder  # noqa: E402
from repro.engine.step import Cache, run_of, step  # noqa: E402
from repro.kernels import compensated_gemv, row_parallel, vocabulary_argmax  # noqa: E402
from repro.recipes.recipe import parse  # noqa: E402

CPU = torch.device("cpu")
SHAPES = {
    "divides": dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=4, intermediate_size=192),
    "grouped": dict(hidden_size=640, num_attention_heads=10, num_key_value_heads=5, intermediate_size=176),
    "five": dict(hidden_size=320, num_attention_heads=5, num_key_value_heads=5, intermediate_size=200),
}
ALL = "rtn-w4-pc + spear(placement=full, rank=5)"
SOME = "rtn-w4-pc + spear(placement=random, k_share=0.5, rank=5, seed=3)"
TURNS = 2  # decoded tokens behind a prompt


class Room:
    """What the ranks of a test share: sums, and memories that all of them write to."""

    def __init__(self, ranks):
        self.ranks, self.meeting = ranks, threading.Barrier(ranks, timeout=60)
        self.given, self.memories, self.added, self.words, self.gathers = {}, {}, [], 0, 0

    def memory_is_zero(self):
        return not any(memory.any() for memory in itertools.chain.from_iterable(self.memories.values()))


class Thread:
    """A rank that is a thread of the test."""

    def __init__(self, room, rank):
        self.room, self.rank, self.ranks = room, rank, room.ranks

    def of_all(self, x):
        self.room.given[self.rank] = x.clone()
        self.room.meeting.wait()
        tensors = [self.room.given[rank] for rank in range(self.ranks)]
        self.room.meeting.wait()
        return tensors

    def add(self, x):
        x.copy_(sum(self.of_all(x)))
        if self.rank == 0:
            self.room.added.append((x.shape, x.dtype))
        return x

    def largest(self, words):
        words.copy_(torch.stack(self.of_all(words)).amax(0))
        self.room.words += self.rank == 0
        return words

    def gathered(self, x):
        self.room.gathers += self.rank == 0
        return torch.cat(self.of_all(x), 1)

    def sides(self, values, device):
        own = self.room.memories.setdefault(self.rank, [])
        own.append(torch.zeros(2, self.ranks, values, dtype=torch.int64))
        self.room.meeting.wait()
        of_ranks = [self.room.memories[rank][len(own) - 1] for rank in range(self.ranks)]
        sides = []
        for side in range(2):
            places_here = [memory[side, self.rank] for memory in of_ranks]
            sides.append(Side(of_ranks[self.rank][side], places_here))
        return sides


def on_ranks(ranks, work):
    """What `work(link)` gives on each rank, and the room."""
    room, results, errors = Room(ranks), {}, []

    def run(rank):
        try:
            with torch.inference_mode():
                results[rank] = work(Thread(room, rank))
        except BaseException as error:  # noqa: BLE001  shown by the test
            errors.append(error)
            room.meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [results[rank] for rank in range(ranks)], room


def config(shape):
    return LlamaConfig(num_hidden_layers=2, vocab_size=300, max_position_embeddings=64, head_dim=64, **SHAPES[shape])


@pytest.fixture
def packed(monkeypatch):
    """Products are packed as on a GPU, with the references of their kernels."""
    monkeypatch.setattr(corrected, "runs_kernel", lambda device: True)
    monkeypatch.setattr(
        weights, "packed_product", lambda packed, bias, dtype, order=None: weights.Packed(packed, bias, order)
    )
    monkeypatch.setattr(weights.kernel, "wna16", lambda x, packed: x @ weights.packing.dequantize(packed).T)
    monkeypatch.setattr(compensated_gemv, "compensated_gemv", compensated_gemv.reference)


def decoder(shape, recipe):
    torch.manual_seed(0)
    return random_decoder(parse(recipe), config(shape), 32, CPU, torch.float32)


@torch.inference_mode()
def logits(model):
    """Of a prompt's tokens together, then of some behind it, one at a time."""
    ids = torch.randint(300, (9 + TURNS,), generator=torch.Generator().manual_seed(1))
    cache = Cache(model, 1)
    by_turn = [model.head(together(model, cache, [ids[:9].tolist()])[0])]
    by_turn += [model.head(step(model, cache, run_of(ids[i : i + 1], 0, i))) for i in range(9, 9 + TURNS)]
    return torch.cat(by_turn)


def kinds(model):
    return [type(product) for product in products(model, ("out", "down"))]


@pytest.mark.parametrize("shape, ranks", [("divides", 1), ("divides", 2), ("divides", 4), ("grouped", 3), ("five", 3)])
def test_ranks_give_the_logits_of_one_rank(shape, ranks):
    """In 16 bits' layout, which here is float32: heads and hidden units that the ranks divide and that they do not."""
    model = decoder(shape, "fp16")
    want = logits(model)
    work = lambda link: logits(parallel.parallel(sharding.shard(model, link.rank, ranks), link, "plain"))  # noqa: E731
    results, room = on_ranks(ranks, work)
    for of_rank in results:
        assert torch.allclose(of_rank, want, atol=2e-4 * want.abs().max())
        assert torch.equal(of_rank, results[0])
    assert len(room.added) == 2 * 2 * (1 + TURNS), "two all-reduces a block, of the prompt and of each token"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way, kind", [("separate", SeparateRowParallel), ("joined", FusedRowParallel),
                                       ("peers", FusedRowParallel)])  # fmt: skip
def test_compensated_ranks_give_the_logits_of_one_rank(packed, way, kind, ranks):
    model = decoder("five", ALL)
    assert all(isinstance(product, Compensated) for product in products(model))
    want = logits(model)

    def work(link):
        part = parallel.parallel(sharding.shard(model, link.rank, ranks), link, way)
        assert set(kinds(part)) == {kind}
        own = Corrected if way == "separate" else Compensated
        assert all(type(block.qkv) is own and type(block.gate_up) is own for block in part.blocks)
        return logits(part)

    results, room = on_ranks(ranks, work)
    for of_rank in results:
        assert torch.allclose(of_rank, want, atol=1e-3 * want.abs().max())
        assert torch.equal(of_rank, results[0])
    single = [shape for shape, _ in room.added if len(shape) == 1 or shape[0] == 1]
    assert len(single) == {"separate": 8, "joined": 4, "peers": 0}[way] * TURNS
    if way == "joined":
        assert set(single) == {(320 + 16,)}, "outputs and z in one"
    if way == "peers":
        assert room.memory_is_zero(), "every mark is taken away"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", ["plain", "separate", "joined", "peers"])
def test_greedy_steps_exchange_a_word_a_token(packed, way, ranks):
    """By peers' memory or by one collective a step; logits stay on their ranks. Tokens are those of one rank."""
    model = decoder("five", "rtn-w4-pc" if way == "plain" else ALL)
    new = 5

    def tokens(engine):
        batch = engine._decoding([list(range(9))], new, Sampling(), 0)
        of_batch = []
        for step_of_batch in engine._run(batch):
            of_batch += [token for _, token, _ in step_of_batch]
        return of_batch

    want = tokens(Core("tiny", model))
    assert len(set(want)) > 2

    def work(link):
        part = parallel.parallel(sharding.shard(model, link.rank, ranks), link, way)
        return tokens(ParallelCore("tiny", part))

    results, room = on_ranks(ranks, work)
    assert all(of_rank == want for of_rank in results)
    assert room.gathers == 0 and room.words == (0 if way == "peers" else new)
    if way == "peers":
        assert room.memory_is_zero(), "every word is taken away"


def test_a_rank_that_is_late_finds_what_it_was_given(packed, monkeypatch):
    """The other one is then a product ahead, whose sums have to go to another memory."""
    model = decoder("divides", ALL)
    want, real = logits(model), row_parallel.take_reference

    def late(memory, *arguments):
        if memory.untyped_storage().data_ptr() == room_of[0].memories[1][0].untyped_storage().data_ptr():
            time.sleep(0.05)
        return real(memory, *arguments)

    room_of = []
    kept = Room.__init__
    monkeypatch.setattr(Room, "__init__", lambda self, ranks: (kept(self, ranks), room_of.append(self))[0])
    monkeypatch.setattr(row_parallel, "take_reference", late)
    monkeypatch.setattr(row_parallel, "PATIENCE", 5.0)
    results, _ = on_ranks(2, lambda link: logits(parallel.parallel(sharding.shard(model, link.rank, 2), link, "peers")))
    for of_rank in results:
        assert torch.allclose(of_rank, want, atol=1e-3 * want.abs().max())


def test_a_rank_that_is_late_finds_the_words_of_each_choice(monkeypatch):
    """The other one has then given those of its next choice, with no step between the two."""
    whole = torch.randn(3, 1, 32, generator=torch.Generator().manual_seed(0))
    here, given_twice, given = threading.local(), threading.Event(), []
    give, take = vocabulary_argmax.give_reference, vocabulary_argmax.take_reference

    def counted(*arguments):
        give(*arguments)
        if here.rank == 0:
            given.append(here.rank)
            if len(given) == 2:
                given_twice.set()

    def late(memory, rows):
        if here.rank == 1:
            assert given_twice.wait(20)
        return take(memory, rows)

    monkeypatch.setattr(vocabulary_argmax, "give_reference", counted)
    monkeypatch.setattr(vocabulary_argmax, "take_reference", late)
    monkeypatch.setattr(vocabulary_argmax, "PATIENCE", 5.0)

    def work(link):
        here.rank = link.rank
        sides = link.sides(vocabulary_argmax.MOST_ROWS, CPU)
        head = parallel.VocabularyParallel(torch.nn.Identity(), 32, link, sides)
        own = slice(16 * link.rank, 16 * link.rank + 16)
        return [head.greedy(logits[:, own]).item() for logits in whole]

    results, room = on_ranks(2, work)
    assert results == [whole[:, 0].argmax(1).tolist()] * 2
    assert room.memory_is_zero()


def test_products_without_a_compensator_are_joined_with_others(packed):
    """Under `joined` by a plain all-reduce, under `peers` by the kernel."""
    model = decoder("divides", SOME)
    both = {(isinstance(b.out, Compensated), isinstance(b.down, Compensated)) for b in model.blocks}
    assert both not in ({(True, True)}, {(False, False)})
    want = logits(model)
    for way in ("joined", "peers"):
        results, room = on_ranks(
            2, lambda link, way=way: logits(parallel.parallel(sharding.shard(model, link.rank, 2), link, way))
        )
        assert torch.allclose(results[0], want, atol=1e-3 * want.abs().max()) and torch.equal(results[0], results[1])
        assert {dtype for _, dtype in room.added} == {torch.float32}
        assert (way == "peers") == (not any(len(shape) == 1 or shape[0] == 1 for shape, _ in room.added))


def test_plain_leaves_compensators_out(packed):
    model = decoder("divides", ALL)
    bare = decoder("divides", ALL)
    for block in bare.blocks:
        for name in weights.LAYERS:
            object.__setattr__(block, name, getattr(block, name).product)
    results, _ = on_ranks(2, lambda link: logits(parallel.parallel(sharding.shard(model, link.rank, 2), link, "plain")))
    want = logits(bare)
    assert torch.allclose(results[0], want, atol=1e-3 * want.abs().max())
    assert not torch.allclose(results[0], logits(model), atol=1e-2 * want.abs().max())


def test_a_gate_on_a_rank_s_own_part_gives_other_logits(packed, monkeypatch):
    """The left half of the paper's Figure 7."""
    model = decoder("divides", ALL)
    want = logits(model)
    real = Thread.add

    def own_z(self, x):
        return x if x.shape[-1] == 16 else real(self, x)

    monkeypatch.setattr(Thread, "add", own_z)
    work = lambda link: logits(parallel.parallel(sharding.shard(model, link.rank, 2), link, "separate"))  # noqa: E731
    results, _ = on_ranks(2, work)
    assert not torch.allclose(results[0], want, atol=1e-2 * want.abs().max())


def test_a_rank_holds_its_part():
    """Heads with their groups, hidden units in 16s; what is left over is padded with zeros on the last rank."""
    local = sharding.local_config(config("five"), 3)
    assert (local.num_key_value_heads, local.num_attention_heads, local.intermediate_size) == (2, 2, 80)
    local = sharding.local_config(config("grouped"), 2)
    assert (local.num_key_value_heads, local.num_attention_heads, local.intermediate_size) == (3, 6, 96)
    model = decoder("five", "fp16")
    last = sharding.shard(model, 2, 3).blocks[0]
    whole = model.blocks[0]
    assert torch.equal(last.qkv.weight[:64], whole.qkv.weight[256:320]) and not last.qkv.weight[64:128].any()
    assert torch.equal(last.qkv.weight[128:192], whole.qkv.weight[576:640]) and not last.qkv.weight[192:256].any()
    assert torch.equal(last.out.weight[:, :64], whole.out.weight[:, 256:320]) and not last.out.weight[:, 64:].any()
    assert torch.equal(last.down.weight[:, :40], whole.down.weight[:, 160:200]) and not last.down.weight[:, 40:].any()
    assert torch.equal(last.gate_up.weight[80:120], whole.gate_up.weight[360:400])


@pytest.mark.parametrize(
    "ranks, message",
    [(0, "over 0 ranks; give 1 or more"), (6, "the last rank would have none"), (4, "5 key-value heads, and the last")],
)
def test_ranks_that_do_not_fit_the_heads_are_refused(ranks, message):
    with pytest.raises(UserError, match=message):
        sharding.local_config(config("five"), ranks)


def test_what_no_kernel_takes_is_refused(packed):
    model = decoder("divides", "fp16")
    with pytest.raises(UserError, match="tensor parallelism, peers: a product of Dense; take one of 4 bits"):
        parallel.of_all(model.blocks[0].out, Thread(Room(1), 0), "peers", None)
    grouped = decoder("divides", "rtn-w4-g32")
    with pytest.raises(UserError, match="take 16 bits, or 4 bits with one group a row"):
        sharding.shard(grouped, 0, 2)
    with pytest.raises(UserError, match="has a bias, which every rank would add"):
        sharding.of_inputs(weights.Dense(torch.ones(4, 4), torch.ones(4)), torch.arange(2))
    with pytest.raises(UserError, match="peers: the ranks need GPUs"):
        parallel.Group.sides(object(), 4, CPU)


def test_partial_sums_are_added_up_by_the_norm_behind_them(packed):
    sums = torch.randn(8)
    made = PartialSums(sums, None, None, None)
    residual, weight = torch.randn(1, 8), torch.randn(8)
    plain = lambda *arguments: "plain"  # noqa: E731
    norm = parallel.norm_of_sums(plain)
    y, total = norm(made, weight, 1e-5, residual)
    assert torch.allclose(total, sums + residual) and norm(sums, weight, 1e-5, residual) == "plain"
    want = row_parallel.rms_norm.reference(sums[None], weight, 1e-5, residual)[0]
    assert torch.allclose(y, want)
    assert RowParallel(torch.nn.Identity(), Thread(Room(1), 0))(residual) is residual
