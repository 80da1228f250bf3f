"""Engines under a memory limit: what lies where, lossless texts, streamed weights, and faults that must show."""

import gc
import json
import math
import re
from itertools import chain
from types import SimpleNamespace

import engines
import pytest
import torch

from repro.__main__ import main
from repro.core.errors import Crowded, NotMeasurable, UserError
from repro.core.files import ROOT
from repro.data import prompts
from repro.engine import budget, decoding, drafted, limits, offload, speculate, step, substitute
from repro.generation import Engine, Limited, fit
from repro.generation import engine as engines_by_name
from repro.jobs.target import Target
from repro.kernels import packing
from repro.methods import subspec
from repro.specs import scale
from repro.store import kernel_rows, row_list

PROMPT = "The history of the city"
HERE = {"context": 256, "dtype": "float32", "device": "cpu"}
TREE = subspec.Config(top_k=4, depth=10)


def holding(model, resident, draft, context=256):
    """The budget that keeps so many blocks of a model."""
    config = engines_by_name.configuration(Target(scale.load(name="pocket"), model, "fp16"))
    return sum(budget.EngineMemory(config, context, torch.float32, draft).parts(resident).values())


BUDGET = holding("pocket-3m", 0, TREE)  # all blocks stream


@pytest.fixture(scope="module")
def plain():
    """pocket-3m without a limit."""
    return Engine.load("pocket-3m", **HERE)


@pytest.fixture(scope="module")
def drafting():
    """pocket-3m with a small tree."""
    return Limited.load("pocket-3m", BUDGET, draft=TREE, **HERE)


@pytest.fixture(scope="module")
def mixed():
    """pocket-5m of whose five blocks two are resident."""
    return Limited.load("pocket-5m", holding("pocket-5m", 2, TREE), draft=TREE, **HERE)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder for each of three random layouts."""
    return {layout: engines.save(layout, tmp_path_factory.mktemp(layout)) for layout in engines.LAYOUTS}


def whole(engine, prompt=PROMPT, count=24, **options):
    """The whole text of one prompt."""
    return next(engine.generate([prompt], count, **options))


def ten():
    """Two prompts of each of five sets."""
    texts = []
    for name in ("mt-bench", "humaneval", "gsm8k", "aime24", "math500"):
        texts += [prompt.text for prompt in prompts.load(name, 2)]
    return texts


# --- lossless ---------------------------------------------------------------------------------------------------------


def test_ten_prompts_give_the_targets_own_text_with_the_papers_tree():
    here = HERE | {"context": 512}
    drafting = Limited.load("pocket-3m", holding("pocket-3m", 0, subspec.Config(), 512), draft="subspec", **here)
    assert drafting.plan.resident == () and len(drafting._drafters[0.2].tree.ids) == 289
    plain = Engine.load("pocket-3m", **here)
    for prompt in ten():
        ours, own = whole(drafting, prompt, 16), whole(plain, prompt, 16)
        assert ours.tokens == own.tokens and ours == own and ours.ended == own.ended
        assert drafting.stats.acceptance_length > 2  # the draft is of use


def test_resident_blocks_are_shared_and_the_text_is_the_targets(mixed):
    assert mixed.plan.resident == (1, 3)
    assert whole(mixed).tokens == whole(Engine.load("pocket-5m", **HERE)).tokens


@pytest.mark.parametrize("temperature, top_k, top_p", [(0.6, 0, 1.0), (1.0, 20, 0.9)])
def test_drawn_texts_are_the_targets_own_draws(plain, drafting, temperature, top_k, top_p):
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    for seed in range(2):
        ours, own = whole(drafting, count=12, seed=seed, **how), whole(plain, count=12, seed=seed, **how)
        assert ours.tokens == own.tokens


@pytest.mark.parametrize("layout", engines.LAYOUTS)
def test_every_layout_is_lossless_and_streams(tiny, layout):
    engine = Limited.load(tiny[layout], holding(tiny[layout], 0, TREE), draft=TREE, **HERE)
    assert engine.plan.resident == ()
    own = Engine.load(tiny[layout], **HERE)
    for prompt in ([5, 6, 7], list(range(40, 90))):
        assert whole(engine, prompt, 40, eos=False).tokens == whole(own, prompt, 40, eos=False).tokens


def sibling_visible(monkeypatch):
    """A node sees the one before it."""
    real = speculate.Tree.tokens

    def tokens(self, nodes=None):
        result = real(self, nodes)
        if nodes is None:
            result.mask[2:] |= self.own[1:-1]
        return result

    monkeypatch.setattr(speculate.Tree, "tokens", tokens)


def bonus_dropped(monkeypatch):
    """The last token of an iteration is not said."""
    real = drafted.Drafted.run

    def run(self, steps, chunk):
        for count, result in enumerate(real(self, steps, chunk), start=1):
            if count == 1 or count < sum(self.lengths):
                yield result

    monkeypatch.setattr(drafted.Drafted, "run", run)


def accepted_by_draft(monkeypatch):
    """The first child is accepted whatever the target says."""
    real = drafted.accepted

    def accept(ids, parents, chosen):
        path, bonus = real(ids, parents, chosen)
        return speculate.Accepted(path if len(path) > 1 else [0, 1], bonus)

    monkeypatch.setattr(drafted, "accepted", accept)


def slots_kept(monkeypatch):
    """Accepted keys and values stay in the slots of the tree."""
    real = drafted.Cache.gather
    monkeypatch.setattr(
        drafted.Cache, "gather", lambda self, row, n, slots: real(self, row, n, n + torch.arange(len(slots)))
    )


def sharpened_target(monkeypatch):
    """The draft's temperature on the target's side."""
    real = drafted.DecodingState.choose

    def choose(self, logits, lengths):
        real(self, logits / 0.2 if len(logits) > 1 else logits, lengths)

    monkeypatch.setattr(drafted.DecodingState, "choose", choose)


def drawn_text(engine):
    """Tokens of a drawn text, and their log probabilities."""
    pieces = list(engine.generate(PROMPT, 16, temperature=0.8, seed=1, logprobs=True))
    tokens = list(chain.from_iterable(piece.tokens for piece in pieces))
    return tokens, list(chain.from_iterable(piece.logprobs for piece in pieces))


@pytest.mark.parametrize("fault", [sibling_visible, bonus_dropped, accepted_by_draft, slots_kept, sharpened_target])
def test_a_planted_fault_shows(plain, drafting, monkeypatch, fault):
    tokens, chances = drawn_text(plain)
    assert drawn_text(drafting) == (tokens, pytest.approx(chances, abs=1e-4))
    fault(monkeypatch)
    assert drawn_text(drafting) != (tokens, pytest.approx(chances, abs=1e-4))


# --- drafts -----------------------------------------------------------------------------------------------------------


def test_a_draft_that_is_the_target_is_accepted_whole():
    own = subspec.Config(top_k=2, depth=8, temperature=0.01)
    engine = Limited.load("pocket-3m", "1GiB", draft=own, **HERE)  # every block stays
    assert engine.plan.streamed_bytes == 0
    whole(engine, count=46)
    assert engine.stats.iterations == 6 and engine.stats.acceptance_length == 46 / 6  # 1 + 5 times 9


def test_fewer_bits_are_accepted_less(plain):
    lengths = {}
    for bits in (2, 4):
        engine = Limited.load("pocket-3m", BUDGET, draft=f"subspec(bits={bits}, depth=10, top_k=4)", **HERE)
        assert whole(engine).tokens == whole(plain).tokens
        lengths[bits] = engine.stats.acceptance_length
    assert lengths[2] < lengths[4]


def test_substitutes_are_those_of_hqq_for_streamed_blocks_alone(mixed):
    target, draft = mixed.model, mixed._drafting
    for number, (own, drafts) in enumerate(zip(target.blocks, draft.blocks)):
        assert (own is drafts) == (number in mixed.plan.resident)
        assert own.input_norm is drafts.input_norm
        if own is not drafts:
            stored = own.down.weight
            error = (drafts.down.weight - stored).square().mean() / stored.square().mean()
            assert 0.001 < error < 0.02  # of 4 bits
    assert draft.head is target.head and draft.embedding is target.embedding


# --- streamed weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [True, False])
def test_streamed_blocks_compute_what_resident_ones_do(plain, prefetch):
    engine = Limited.load("pocket-3m", holding("pocket-3m", 0, None), prefetch=prefetch, **HERE)
    assert engine.plan.resident == ()
    ids = list(range(10, 220))
    for engine.chunk in (256, 64):  # at once, and in chunks that share a block's weights
        assert torch.allclose(engine.logits(ids), plain.logits(ids), atol=1e-4)
    assert whole(engine).tokens == whole(plain).tokens
    batch = [PROMPT, "In the year"]
    assert [t.tokens for t in engine.generate(batch, 8)] == [t.tokens for t in plain.generate(batch, 8)]
    buffers = {}
    for block in engine.model.blocks:
        for product in (block.qkv, block.out, block.gate_up, block.down):
            buffers[id(product.lane.buffer)] = product.lane.buffer.nbytes
    assert sum(buffers.values()) == engine.plan.block_bytes == engine.plan.parts["buffers"]


def test_a_prefill_in_chunks_copies_every_weight_once(monkeypatch):
    engine = Limited.load("pocket-3m", holding("pocket-3m", 0, None), **HERE)
    copied = []
    real = offload.Lane._load

    def load(self, index):
        copied.append(index)
        real(self, index)

    monkeypatch.setattr(offload.Lane, "_load", load)
    engine.chunk = 32
    engine.logits(list(range(10, 110)))
    assert sorted(copied) == [0] * 4 + [1] * 4  # two blocks of four products


def test_the_next_weight_is_copied_once_the_last_was_used():
    lane = offload.Lane(offload.HostMemory(torch.device("cpu")), None, prefetch=True)
    for value in range(3):
        lane.add(torch.full((2, 2), float(value)))
    order = []
    for index in (0, 1, 2, 0, 1):
        order.append((lane.loaded, lane.take(index)[0, 0].item()))
        lane.give_back(index)
    assert order == [(-1, 0.0), (1, 1.0), (2, 2.0), (0, 0.0), (1, 1.0)]  # the first comes again behind the last
    lane.prefetch = False
    lane.take(0)
    lane.give_back(0)
    assert lane.loaded == 0


def test_host_memory_is_what_the_weights_take(mixed):
    streamed = [b for n, b in enumerate(mixed.model.blocks) if n not in mixed.plan.resident]
    total = sum(block.qkv.weight.nbytes + block.out.weight.nbytes for block in streamed)
    total += sum(block.gate_up.weight.nbytes + block.down.weight.nbytes for block in streamed)
    assert total == mixed.plan.streamed_bytes == mixed.plan.parts["buffers"] * 3
    lane = streamed[0].down.lane
    assert lane.host.release.alive and lane.host.bytes == total  # pinned as long as a product is there
    host = offload.HostMemory(torch.device("cpu"))
    copy = host.copy(weight := torch.randn(3, 5))
    assert torch.equal(copy, weight) and copy.data_ptr() % 4096 == 0 and host.bytes == 60


def test_a_streamed_weight_of_8_bits_is_dequantized_where_it_is_used():
    torch.manual_seed(0)
    made, wanted, x = [], [], torch.randn(3, 256)
    streams = offload.Offload(torch.device("cpu"))
    for _ in range(2):
        codes = torch.randint(256, (24, 256), dtype=torch.uint8)
        scales, zeros = torch.rand(24, 2), torch.randint(256, (24, 2)).float()
        weight = (codes.view(24, 2, 128) - zeros[..., None]) * scales[..., None]
        wanted.append(x @ weight.view(24, 256).T)
        made.append(streams.streamed("out", offload.Codes(codes, scales, zeros), None))
    for product, y in [*zip(made, wanted), *zip(made, wanted)]:
        assert torch.allclose(product(x), y, rtol=1e-4, atol=1e-2)
        assert torch.allclose(product.expanded(3, torch.float32)(x), y, rtol=1e-4, atol=1e-2)
    assert streams.host.bytes == 2 * (24 * 256 + 2 * 24 * 2 * 4)


def test_an_interrupt_frees_the_pinned_memory(monkeypatch):
    """As on a GPU, whose driver is told of every page that is not needed any more."""
    pinned, freed = [], []

    def pinning(host, weight, copy=offload.HostMemory.copy):
        made = copy(host, weight)
        host._pinned.append(made.data_ptr())
        pinned.append(made.data_ptr())
        return made

    def stopped(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(offload.HostMemory, "copy", pinning)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostUnregister=freed.append))
    monkeypatch.setattr(drafted.Drafted, "_iterate", stopped)
    words = ["generate", "--model", "pocket-3m", "--memory", str(BUDGET), "--draft", "subspec(top_k=4, depth=10)"]
    assert main([*words, "--context", "256", "--dtype", "float32", "--device", "cpu", PROMPT]) == 130
    gc.collect()
    assert pinned and sorted(freed) == sorted(pinned)


def test_the_launchers_take_what_a_tree_gives_them(plain, monkeypatch):
    """What a GPU runs: each operator with its check of types, shapes and layouts in front, here on its reference."""
    wanted = whole(plain, count=12, temperature=0.7).tokens
    trees = []

    def launcher(device, kernel):
        name = kernel.__name__.rpartition(".")[2]

        def launch(*arguments):
            if name == "attention" and arguments[6] is not None:
                trees.append(all(tensor.is_contiguous() for tensor in arguments if isinstance(tensor, torch.Tensor)))
            return getattr(kernel, name)(*arguments)

        return launch

    for module in (step, decoding):
        monkeypatch.setattr(module, "on", launcher)
    engine = Limited.load("pocket-3m", BUDGET, draft=TREE, **HERE)
    assert whole(engine, count=12, temperature=0.7).tokens == wanted
    assert trees and all(trees)


def test_the_allocator_is_bound_by_number_and_share(monkeypatch):
    bound = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *how: bound.append(how))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (79 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2**29)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    limits.limit(torch.device("cuda"), 8 * 2**30)  # half a GiB of context and others, a quarter for kernels
    assert bound == [(7.25 / 80, 0)]
    limits.bound(2.0, torch.device("cuda:1"))
    assert bound[1] == (1.0, 1)


def test_what_other_programs_use_is_no_part_of_the_budget(monkeypatch):
    """Of 80 GiB, half a GiB in the allocator and three quarters beside it, with others or without."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2**29)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    at, own = torch.device("cuda"), 3 * 2**28
    for others in (0, 30 * 2**30):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, n=others: (2**36 - 2**29 - own - n, 2**36))
        most = 2**30 if others else own
        assert limits.reserved(at) == most + limits.MARGIN and limits.own_bytes(at) == 2**29 + most


# --- the budget -------------------------------------------------------------------------------------------------------


def llama():
    """Llama-3.1-8B's configuration."""
    return engines_by_name.configuration(Target(scale.load(name="pocket"), "shape/Llama-3.1-8B", "fp16"))


def test_the_least_budget_works_and_less_does_not():
    with pytest.raises(NotMeasurable) as caught:
        budget.plan("it", llama(), 1024, torch.bfloat16, 2**30, subspec.Config())
    least = budget.parse_bytes(re.search(r"at least (\S+) with its draft", str(caught.value))[1])
    assert budget.plan("it", llama(), 1024, torch.bfloat16, least, subspec.Config()).resident == ()
    with pytest.raises(NotMeasurable):
        budget.plan("it", llama(), 1024, torch.bfloat16, least - 2**25, subspec.Config())
    with pytest.raises(NotMeasurable, match="needs at least .* with its draft"):
        budget.plan("it", llama(), 1024, torch.bfloat16, 2**30, None, own_draft=2**30)


def test_a_larger_budget_keeps_more_blocks_until_all_stay():
    kept = []
    for size in range(7, 24):
        plan = budget.plan("it", llama(), 1024, torch.bfloat16, size * 2**30, subspec.Config(), reserve=2**29)
        kept.append(len(plan.resident))
        assert plan.used <= plan.budget and plan.parts["device context"] == 2**29
        assert plan.streamed_bytes == (32 - len(plan.resident)) * plan.block_bytes
    assert kept == sorted(kept) and kept[0] < 6 and kept[-1] == 32
    assert plan.parts["buffers"] == plan.parts["draft"] == 0


def test_parts_are_the_bytes_of_the_tensors(mixed):
    parts, model = mixed.plan.parts, mixed.model
    assert parts["cache"] == mixed.cache.keys.nbytes + mixed.cache.values.nbytes
    assert model.cos.shape[0] == 256 + 41 and mixed.context == 256
    tables = {id(t): t.nbytes for t in (model.embedding, model.head.weight)}
    assert parts["embedding and head"] == sum(tables.values())
    assert parts["resident blocks"] == len(mixed.plan.resident) * mixed.plan.block_bytes


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_packed_substitute_takes_the_planned_bytes(bits):
    config = llama()
    config.hidden_size, config.intermediate_size, config.num_attention_heads = 256, 512, 2
    config.num_key_value_heads = 1
    total = 0
    for rows, columns in budget.products(config).values():
        codes, scales = torch.zeros(rows, columns, dtype=torch.uint8), torch.ones(rows, columns // 64)
        packed = packing.pack(codes, scales, scales, 4 if bits == 3 else bits, 64)
        total += packed.codes.nbytes + packed.scale_zero.nbytes
    assert budget.substitute_bytes(config, subspec.Config(bits=bits)) == total


def mib(*sizes):
    """Bytes of so many MiB each."""
    return [int(size * 2**20) for size in sizes]


@pytest.mark.parametrize(
    "sizes, taken",
    [
        (mib(0.5, 0.5, 0.5), 2),  # small ones share 2 MiB
        (mib(1.5, 8, 8), 20),  # and those below 10 MiB segments of 20
        (mib(8, 8, 8, 4), 40),  # the fourth into the room that the first two left
        (mib(10, 11, 30.5), 10 + 12 + 32),  # a larger one has its own
        (mib(1, 9.9, 100.1), 2 + 20 + 102),
    ],
)
def test_segments_of_the_allocator(sizes, taken):
    assert budget.segment_bytes(sizes) == taken * 2**20


def test_segments_hold_the_tensors_and_waste_less_than_they_hold():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        sizes = (torch.rand(40, generator=generator) * 2**25).int().tolist()
        taken = budget.segment_bytes(sizes)
        assert sum(sizes) <= taken <= 2 * sum(sizes) + 22 * 2**20


def test_lasting_sizes_are_those_of_the_engines_tensors(mixed):
    """Of a draft in float32, whose substitutes are dense."""
    config = mixed.model.config
    sizes = budget.EngineMemory(config, 256, torch.float32, TREE, packed=False).lasting_sizes(2)
    tensors = [mixed.model.embedding, mixed.cache.keys, mixed.cache.values]
    for block in mixed._drafting.blocks:
        tensors += [getattr(block, kind).weight for kind in ("qkv", "out", "gate_up", "down")]
    tensors += [lane.buffer for lane in lanes(mixed)]
    assert sum(sizes) == sum(tensor.nbytes for tensor in tensors)
    assert len(sizes) == len(tensors) - 1  # keys and values are one


def lanes(engine):
    """The four lanes of an engine."""
    block = next(b for n, b in enumerate(engine.model.blocks) if n not in engine.plan.resident)
    return [block.qkv.lane, block.out.lane, block.gate_up.lane, block.down.lane]


def test_a_plan_for_a_gpu_leaves_what_its_allocator_takes_beyond_the_tensors():
    """Qwen2.5-7B with a draft at 8 GiB: what was short by 20 MiB when nothing was planned for the allocator."""
    config = engines_by_name.configuration(Target(scale.load(name="pocket"), "shape/Qwen2.5-7B", "fp16"))
    how = config, 1024, torch.bfloat16
    plan = budget.plan("it", *how, 2**33, subspec.Config(), 2**29 + 2**28, segments=True)
    overhead = plan.parts["allocator"]
    memory = budget.EngineMemory(*how, subspec.Config())
    assert overhead == memory.overhead(len(plan.resident)) > 64 * 2**20
    sizes = memory.lasting_sizes(len(plan.resident))
    logits = 6 * config.vocab_size * 14
    assert overhead - (budget.segment_bytes(sizes) - sum(sizes)) >= 40 * 2**20 + logits
    assert plan.used <= plan.budget and "allocator" not in budget.plan("it", *how, 2**33, None).parts
    with pytest.raises(NotMeasurable, match="at least") as caught:
        budget.plan("it", *how, 2**30, subspec.Config(), segments=True)
    least = budget.parse_bytes(re.search(r"at least (\S+) with", str(caught.value))[1])
    assert budget.plan("it", *how, least, subspec.Config(), segments=True).used <= least


def test_a_gpu_gets_its_memory_back_after_every_streamed_product(monkeypatch, tiny):
    """Else what a large temporary weight leaves is split for tensors that stay."""
    released = []
    monkeypatch.setattr(substitute, "release", released.append)
    engine = Limited.load(tiny["llama"], holding(tiny["llama"], 0, TREE), draft=TREE, **HERE)
    assert len(released) == 5 * engine.plan.blocks  # four products of a block, and its substitutes


@pytest.mark.parametrize("count, blocks, chosen", [(0, 5, ()), (1, 5, (2,)), (2, 8, (2, 6)), (5, 5, (0, 1, 2, 3, 4))])
def test_blocks_that_stay_are_spread(count, blocks, chosen):
    assert budget.spread(count, blocks) == chosen


@pytest.mark.parametrize(
    "text, count", [("8GiB", 8 * 2**30), ("1.5 GB", 1_500_000_000), ("800mib", 800 * 2**20), ("7", 7)]
)
def test_amounts_of_memory(text, count):
    assert budget.parse_bytes(text) == count


# --- generation -------------------------------------------------------------------------------------------------------


def test_stats_count_iterations_by_the_papers_rule(drafting):
    pieces = list(drafting.generate(PROMPT, 40))
    assert sum(len(piece.tokens) for piece in pieces) == drafting.stats.new_tokens == 40
    stats = drafting.stats
    assert stats.iterations >= 2 and stats.acceptance_length * stats.iterations >= 40
    assert 0 < stats.tokens_per_s < math.inf and f"acceptance length {stats.acceptance_length:.2f}" in str(stats)


def test_an_end_inside_an_accepted_run_ends_the_text(plain, drafting, monkeypatch):
    tokens = whole(plain, count=24).tokens
    end = tokens[13]
    for engine in (plain, drafting):
        monkeypatch.setattr(engine, "ends", frozenset([end]))
    ours, own = whole(drafting, count=48), whole(plain, count=48)
    assert ours.tokens == own.tokens == tokens[: tokens.index(end) + 1] and ours.ended == "eos"


def test_several_prompts_are_decoded_one_after_another(plain, drafting):
    texts = ["In the year", "def add(a, b):", PROMPT]
    ours = [t.tokens for t in drafting.generate(texts, 12, temperature=0.7, seed=5)]
    assert ours == [t.tokens for t in plain.generate(texts, 12, temperature=0.7, seed=5)]


def test_a_text_goes_on_to_the_end_of_the_context(plain, drafting):
    prompt = [7] * 214
    assert whole(drafting, prompt, None, eos=False).tokens == whole(plain, prompt, None, eos=False).tokens
    assert drafting.stats.new_tokens == 42


# --- bad input and the command ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, message",
    [
        (["--memory", "8 cats"], "write an amount such as 8GiB"),
        (["--memory", "1MiB"], "pocket-3m needs at least"),
        (["--memory", "1GiB", "--draft", "eagle"], "unknown draft 'eagle'"),
        (["--memory", "1GiB", "--draft", "subspec(depth=0)"], "depth is 0; it must be 1 or more"),
        (["--memory", "1GiB", "--draft", "subspec(speed=3)"], "speed"),
        (["--memory", "1GiB", "--draft", "subspec(depth=2048)"], "a context of 2,048 has room for fewer tokens"),
        (["--memory", "9000GiB", "--draft", "subspec(top_k=5000)"], "draft top_k is 5,000; pocket-3m has "),
        (["--draft", "subspec"], "go with --memory"),
        (["--no-prefetch"], "go with --memory"),
    ],
)
def test_bad_words_are_one_sentence(capsys, words, message):
    assert main(["generate", "--model", "pocket-3m", "--device", "cpu", *words, PROMPT]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_too_little_host_memory_names_both_amounts(monkeypatch):
    """What no program would leave is a result; what other programs use now is none, and is tried again."""
    for total, kind in ((2**20, NotMeasurable), (2**40, Crowded)):
        memory = SimpleNamespace(available=2**20, total=total)
        monkeypatch.setattr(limits.psutil, "virtual_memory", lambda memory=memory: memory)
        with pytest.raises(kind, match=r"streams .* MiB from host memory, of which 1.00 MiB are free"):
            Limited.load("pocket-3m", BUDGET, **HERE)


def test_a_quantized_target_is_not_offloaded():
    with pytest.raises(UserError, match="only a target in full precision is offloaded"):
        Limited.load("pocket-3m", BUDGET, recipe="rtn-w4-g128", **HERE)


def test_the_command_streams_a_text_under_a_limit(plain, capsys):
    words = ["generate", "--model", "pocket-3m", "--memory", str(BUDGET), "--draft", "subspec(top_k=4, depth=10)"]
    where = ["--context", "256", "--dtype", "float32", "--device", "cpu", "--max-new-tokens", "16"]
    assert main([*words, *where, PROMPT]) == 0
    out = capsys.readouterr().out
    assert out.startswith(whole(plain, count=16))
    for part in ("acceptance length", "0 of 2 blocks resident", "streamed a pass", "tokens/s"):
        assert part in out


@pytest.mark.parametrize("temperature, warned", [("0.7", True), ("0", False)])
def test_a_draft_that_is_sharpened_where_tokens_are_drawn_is_allowed_and_warned_of(capsys, temperature, warned):
    draft = "subspec(top_k=2, depth=2, sampled_temperature=0.2)"
    words = ["generate", "--model", "pocket-3m", "--memory", str(BUDGET), "--draft", draft]
    where = ["--temperature", temperature, "--context", "256", "--dtype", "float32", "--device", "cpu"]
    assert main([*words, *where, "--max-new-tokens", "2", PROMPT]) == 0
    assert ("a sharpened draft guesses worse" in capsys.readouterr().err) == warned


@pytest.mark.parametrize("shape", ["llama8b", "qwen7b"])
def test_fit_predicts_the_times_measured_on_an_h200_within_a_tenth(shape):
    """From the bus of that run and the read rate among the stored kernel times."""
    folder = ROOT / "results" / "nvidia-h200"
    rows = [
        row for row in row_list.read(folder / kernel_rows.STORED, kernel_rows.KernelRow) if row.kernel == "read_floor"
    ]
    fastest = min(row.us / row.bytes for row in rows if row.bytes == fit.READ)
    for name, measured, depth in (("prefetch", "step_s", 0), ("speculate", "iteration_s", 48)):
        run = json.loads((folder / "offload" / f"{shape}-{name}.json").read_text())
        resident, streaming = tuple(run["resident"]), run["blocks"] - len(run["resident"])
        plan = budget.MemoryPlan(
            run["budget_bytes"], run["parts"], resident, run["blocks"], run["streamed_bytes"] // streaming
        )
        draft_bytes = run["parts"].get("draft", 0) + run["parts"]["resident blocks"]
        draft_bytes += run["parts"]["embedding and head"] // 2  # a pass reads the head
        predicted = fit.Fit(plan, plan, run["bus_bytes_per_s"], fit.STEP_SHARE * 1e6 / fastest, draft_bytes, depth, 1.0)
        expected = predicted.iteration_s if depth else predicted.step_s
        assert expected == pytest.approx(run[measured], rel=0.1), name


def test_fit_says_what_a_budget_gives_before_anything_is_loaded(capsys):
    words = ["fit", "--model", "shape/Llama-3.1-8B", "--memory", "8GiB", "--context", "1024"]
    assert main([*words, "--device", "cpu", "--dtype", "float32", "--draft", "none"]) == 0
    assert "no GPU here" in capsys.readouterr().out
    assert main([*words, "--bus", "50", "--read", "2000"]) == 0
    out = capsys.readouterr().out
    one = fit.of("shape/Llama-3.1-8B", "8GiB", subspec.Config(), 1024, bus=50e9, read=2e12)
    assert f"{len(one.plan.resident)} of 32 blocks resident" in out
    plain = fit.of("shape/Llama-3.1-8B", "8GiB", None, 1024, bus=50e9, read=2e12)
    seconds = {}
    for name, plan in {"draft": one.plan, "plain": plain.plan}.items():
        here = plan.parts["resident blocks"] + plan.parts["embedding and head"]
        seconds[name] = plan.streamed_bytes / 50e9 + here / 2e12
    more = len(plain.plan.resident) - len(one.plan.resident)
    assert more > 0
    message = f"{1 / seconds['plain']:.2f} tokens/s without speculation and its draft, with {more} more resident"
    assert message in out
    iteration_s = seconds["draft"] + 48 * one.draft_bytes / 2e12
    assert f"{25 / iteration_s:.2f} tokens/s at an acceptance length of 25" in out


def test_fit_says_that_a_model_that_fits_whole_needs_no_draft(capsys):
    words = ["fit", "--model", "shape/Llama-3.1-8B", "--memory", "40GiB", "--bus", "50", "--read", "2000"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "it fits whole" in out and "acceptance length" not in out
