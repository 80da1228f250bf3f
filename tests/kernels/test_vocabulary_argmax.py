"""The greedy choice among logits that ranks have parts of: its sources on a CPU, ranks one after the other."""

import cuda_on_cpu
import nvcc
import pytest
import torch

pytest.importorskip("triton")

from repro.core.errors import UserError  # noqa: E402
from repro.kernels import argmax, nvrtc  # noqa: E402
from repro.kernels import vocabulary_argmax as kernel  # noqa: E402

GPU = torch.device("cuda")
SMALL = [case for case in kernel.CASES if case["V"] < 2000]
INFINITE = float("inf")


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load)
    plans = kernel._give_plan, kernel._take_plan
    for plan in plans:
        plan.cache_clear()
    yield
    for plan in plans:
        plan.cache_clear()


def parts_of(whole, ranks):
    """Whole logits by rank, the padding being larger than any of them."""
    vocabulary = whole.shape[1]
    parts = []
    for rank in range(ranks):
        first, count = kernel.tokens_of_a_rank(vocabulary, rank, ranks)
        logits = torch.full((len(whole), kernel.rows_of_a_rank(vocabulary, ranks)), 3e4, dtype=whole.dtype)
        logits[:, :count] = whole[:, first : first + count]
        parts.append((logits, count, first))
    return parts


def odd_rows():
    """Rows of 40 tokens, three ranks with 16, 16 and 8 of them, and the tokens that are to be chosen."""
    rows = torch.full((9, 40), -3.0, dtype=torch.bfloat16)
    rows[0, [5, 20, 39]] = 2.0  # the first of equal ones on three ranks
    rows[1, [17, 18]] = 2.0  # on one rank
    rows[2, 3], rows[2, 39] = float("nan"), 9.0  # a NaN on another rank
    rows[3, 33] = INFINITE
    rows[4] = -INFINITE
    rows[5, 2], rows[5, 21] = -0.0, 0.0  # equal numbers
    rows[6, 31] = -2.0  # the largest is negative
    rows[7, :39] = -INFINITE
    rows[8, 30] = -3.5  # all others are the largest
    return rows, [5, 17, -1, -1, -1, 2, 31, 39, 0]


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_sources_give_to_every_rank_and_take_on_the_cpu(case, emulated):
    inputs = kernel.make_inputs(case)
    chosen = kernel.launch(**inputs)
    want = kernel.reference(**inputs)
    assert len(chosen) == len(want) == (1 if case["collected"] else case["ranks"])
    for tokens, right in zip(chosen, want):
        assert tokens.dtype == torch.int64 and torch.equal(tokens, right)


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("collected", [False, True])
def test_sources_choose_in_odd_rows_as_one_gpu_does(emulated, collected):
    rows, want = odd_rows()
    assert argmax.reference(rows).tolist() == want
    for tokens in kernel.launch(parts_of(rows, 3), collected):
        assert tokens.tolist() == want


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("rows", [kernel.MOST_ROWS, kernel.MOST_ROWS + 1, 2 * kernel.MOST_ROWS + 5])
def test_collected_words_of_any_number_of_rows_are_taken(emulated, rows):
    """A launch has a thread a row; what it does not reach would be memory that nobody wrote."""
    whole = torch.randn(rows, 40, generator=torch.Generator().manual_seed(rows)).bfloat16()
    (tokens,) = kernel.launch(parts_of(whole, 3), collected=True)
    assert torch.equal(tokens, argmax.reference(whole))


@cuda_on_cpu.NEEDS_COMPILER
def test_sources_clear_what_they_take(emulated):
    """So that the next words are waited for; twice into the same memory, the second choice being another."""
    case = SMALL[1]
    memories = torch.zeros(3, 3, kernel.MOST_ROWS, dtype=torch.int64)
    for seed in (1, 2):
        whole = torch.randn(case["T"], case["V"], generator=torch.Generator().manual_seed(seed)).bfloat16()
        for rank, (logits, count, first) in enumerate(parts_of(whole, 3)):
            kernel.give(logits, count, first, list(memories[:, rank]), on_kernel=True)
        assert memories[:, :, : case["T"]].all()
        for memory in memories:
            assert torch.equal(kernel.take(memory, case["T"], on_kernel=True), argmax.reference(whole))
        assert not memories.any()


@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_the_reference_is_the_choice_of_one_gpu(case):
    inputs = kernel.make_inputs(case)
    want = kernel.reference(**inputs)[0]
    memories = torch.zeros(case["ranks"], case["ranks"], kernel.MOST_ROWS, dtype=torch.int64)
    for rank, (logits, count, first) in enumerate(inputs["parts"]):
        kernel.give(logits, count, first, list(memories[:, rank]))
    for memory in memories:
        assert torch.equal(kernel.take(memory, case["T"]), want)
        assert not memory.any()
    words = torch.stack([kernel.words_of(*part) for part in inputs["parts"]])
    assert torch.equal(kernel.take(words.amax(0), case["T"]), want)


def test_the_reference_chooses_in_odd_rows_as_one_gpu_does():
    rows, want = odd_rows()
    words = torch.stack([kernel.words_of(*part) for part in parts_of(rows, 3)])
    assert (words != 0).all() and kernel.tokens_of(words.amax(0)).tolist() == want


@pytest.mark.parametrize("vocabulary, ranks, counts", [
    (32000, 2, [16000, 16000]), (32000, 3, [10672, 10672, 10656]), (128256, 4, [32064] * 4),
    (40, 4, [16, 16, 8, 0]), (5, 3, [5, 0, 0]),
])  # fmt: skip
def test_every_token_is_of_one_rank(vocabulary, ranks, counts):
    firsts = []
    for rank, count in enumerate(counts):
        first, own = kernel.tokens_of_a_rank(vocabulary, rank, ranks)
        assert own == count <= kernel.rows_of_a_rank(vocabulary, ranks)
        firsts.append(first)
    assert firsts == [sum(counts[:rank]) for rank in range(ranks)] and sum(counts) == vocabulary


def test_a_rank_that_gives_nothing_is_waited_for_and_named(monkeypatch):
    monkeypatch.setattr(kernel, "PATIENCE", 0.01)
    memory = torch.zeros(2, kernel.MOST_ROWS, dtype=torch.int64)
    kernel.give(torch.randn(1, 16), 16, 0, [memory[0]])
    with pytest.raises(TimeoutError, match="a rank gave no token for 0 s"):
        kernel.take(memory, 1)


def test_more_ranks_than_a_launch_has_addresses_are_refused():
    with pytest.raises(UserError, match="5 ranks; the kernel gives words to at most 4"):
        kernel.give(torch.zeros(1, 16), 16, 0, [torch.zeros(1, dtype=torch.int64)] * 5)


def test_kernels_are_known_before_they_are_launched(monkeypatch, loaded_kernels):
    """What `loads` compiles is what `give` and `take` load, each by itself."""
    loaded = loaded_kernels
    for plan in (kernel._give_plan, kernel._take_plan):
        monkeypatch.setattr(kernel, plan.__name__, plan.__wrapped__)
    logits, memory = torch.zeros(1, 16, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
    for to, taken in (([memory[0]], memory[0]), ([memory[0]] * 2, memory)):
        kernel.give(logits, 16, 0, to, on_kernel=True)
        kernel.take(taken, 1, on_kernel=True)
    wanted, loaded[:] = list(loaded), []
    for call in kernel.loads((1, 2), torch.bfloat16, torch.device("cpu")):
        call()
    assert sorted(loaded) == sorted(wanted) and len(set(wanted)) == 4


@nvcc.NEEDS_NVCC
def test_sources_compile_for_a_gpu():
    for ranks in (1, 4):
        nvcc.compile_cubin(kernel.SOURCE, {"RANKS": ranks, "THREADS": 64, "BF16": 1})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_ranks_one_after_the_other_on_one_gpu(case):
    inputs = kernel.make_inputs(case, GPU)
    for tokens, right in zip(kernel.launch(**inputs), kernel.reference(**inputs), strict=True):
        assert torch.equal(tokens, right)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("collected", [False, True])
def test_odd_rows_on_one_gpu(collected):
    rows, want = odd_rows()
    parts = [(logits.to(GPU), count, first) for logits, count, first in parts_of(rows, 3)]
    for tokens in kernel.launch(parts, collected):
        assert tokens.tolist() == want
