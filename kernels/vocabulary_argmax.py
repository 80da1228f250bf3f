"""Greedy decoding where the logits are split over ranks by tokens: each rank's best, then the best of all ranks.

    token[t] = the lowest i with logits[t, i] = max_i logits[t, i],    i over the tokens of all ranks

A row with a NaN, or whose largest logit is infinite, gives -1, as in `argmax.py`. Rank r has the tokens from first_r
on: logits_r float16 or bfloat16 `[T, stride]`, of which the first count_r are tokens and the rest is padding. A rank
may have none. Megatron-LM (arXiv 1909.08053, section 3) splits the head so; vLLM gathers whole logits and chooses then,
which moves 2 V bytes a row where this moves 8 a rank.

`give` makes one word of 8 bytes of a rank's best logit and its token, int64, whose order is that of the logits and, of
equal ones, the reverse of that of the tokens. It goes to memory of the rank's own, of which a collective takes the
largest over ranks, or straight to the memory of every rank, over NVLink (peers.cuh). `take` makes tokens of the largest
words (vocabulary_argmax.cu).

Memory of a rank that others write to is int64 `[ranks, rows]`, 0 where nothing was given; `take` clears it. Choices use
two such memories in turn, as products do (row_parallel.py): in one alone, a rank's next words would cover those that
another has not taken yet, which would then wait for them for ever. A captured step has the same one whenever it is
launched: the partial sums of the step, which need every rank, lie between.
"""

import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from repro.core.errors import UserError
from repro.kernels import argmax, nvrtc
from repro.kernels.launch_config import lacks
from repro.kernels.operators import FLOATS, VECTOR, Argument, checked_once, plain, tensor_check
from repro.kernels.packing import TILE
from repro.kernels.row_parallel import MOST_RANKS, Address

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 1024  # of a block of `give`
MOST_ROWS = 64  # rows that a launch of `take` chooses of, a thread each
LOW = (1 << 32) - 1  # the half of a word that has the token
MAGNITUDE = (1 << 31) - 1  # all bits of a float but its sign
EXPONENT = 0x7F800000  # bits of a float that are all set in what is not finite
PATIENCE = 60.0  # seconds that the reference waits for a word
CASES = [  # rows; tokens of all ranks; ranks; whether words are collected
    {"T": 1, "V": 1001, "ranks": 2, "dtype": "float16", "collected": False},
    {"T": 3, "V": 300, "ranks": 3, "dtype": "bfloat16", "collected": False},
    {"T": 2, "V": 40, "ranks": 4, "dtype": "bfloat16", "collected": False},
    {"T": 5, "V": 300, "ranks": 3, "dtype": "float16", "collected": True},
    {"T": 1, "V": 32000, "ranks": 3, "dtype": "bfloat16", "collected": False},
    {"T": 16, "V": 128256, "ranks": 4, "dtype": "bfloat16", "collected": False},
]
Part = tuple[Tensor, int, int]  # of a rank: its logits, how many of them are tokens, and the first token


def rows_of_a_rank(vocabulary: int, ranks: int) -> int:
    """Tokens of a rank with its padding: a multiple of 16, the same on every rank."""
    return -(-vocabulary // (ranks * TILE)) * TILE


def tokens_of_a_rank(vocabulary: int, rank: int, ranks: int) -> tuple[int, int]:
    """(first, count) of the tokens that a rank has; a count of 0 where the ranks before it have all of them."""
    rows = rows_of_a_rank(vocabulary, ranks)
    first = min(rank * rows, vocabulary)
    return first, min(rows, vocabulary - first)


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Arguments of `launch`: logits of `argmax`, the largest of the first row coming twice; padding is larger."""
    whole = argmax.make_inputs({"T": case["T"], "V": case["V"], "dtype": case["dtype"], "seed": case["V"]})["logits"]
    rows = rows_of_a_rank(case["V"], case["ranks"])
    parts: list[Part] = []
    for rank in range(case["ranks"]):
        first, count = tokens_of_a_rank(case["V"], rank, case["ranks"])
        logits = torch.full((case["T"], rows), 100.0, dtype=whole.dtype)
        logits[:, :count] = whole[:, first : first + count]
        parts.append((logits.to(device), count, first))
    return {"parts": parts, "collected": case["collected"]}


def unsupported(device: torch.device | str) -> str | None:
    """Why the kernels cannot run on `device`, or None if they can."""
    return lacks("vocabulary_argmax", device, (9, 0)) or nvrtc.unavailable()


def launch(parts: Sequence[Part], collected: bool = False) -> list[Tensor]:
    """Tokens int64 `[T]` of each rank by the kernels, all of them on one device, one after the other.

    `collected` words are compared by plain PyTorch, as by a collective, and only one rank takes them.
    """
    ranks, rows, device = len(parts), len(parts[0][0]), parts[0][0].device
    if collected:
        words = torch.zeros(ranks, rows, dtype=torch.int64, device=device)
        for own, (logits, count, first) in zip(words, parts):
            give(logits, count, first, [own], on_kernel=True)
        return [take(words.amax(0), rows, on_kernel=True)]
    memories = torch.zeros(ranks, ranks, MOST_ROWS, dtype=torch.int64, device=device)  # of a rank, from a rank
    for rank, (logits, count, first) in enumerate(parts):
        give(logits, count, first, list(memories[:, rank]), on_kernel=True)
    return [take(memory, rows, on_kernel=True) for memory in memories]


@cache
def _give_plan(dtype: torch.dtype, ranks: int, device: torch.device) -> nvrtc.Function:
    macros = {"RANKS": ranks, "THREADS": THREADS, "BF16": int(dtype == torch.bfloat16)}
    return nvrtc.load(SOURCE, "vocabulary_give", macros, device)


@cache
def _take_plan(ranks: int, device: torch.device) -> nvrtc.Function:
    macros = {"RANKS": ranks, "THREADS": MOST_ROWS, "BF16": 1}
    function = nvrtc.load(SOURCE, "vocabulary_take", macros, device)
    return function.beside if ranks > 1 else function


def give(logits: Tensor, count: int, first: int, to: Sequence[Address], on_kernel: bool | None = None) -> None:
    """Give a rank's best token of every row to every rank.

    Args:
        logits: float16 or bfloat16 `[T, stride]` on a GPU, of any type elsewhere; stride is a multiple of 8.
        count: how many of a row are logits of tokens; the others are padding.
        first: the token of the first one.
        to: where this rank's T words begin in the memory of each rank, in order; or one memory of its own.
        on_kernel: whether the kernel computes it; by default where logits are 16 bits on a GPU.

    Raises:
        UserError: more ranks than a launch has addresses for.
        ValueError: logits, numbers or memories that do not fit together.
    """
    if len(to) > MOST_RANKS:
        raise UserError(f"{len(to)} ranks; the kernel gives words to at most {MOST_RANKS}")
    by_default = logits.device.type == "cuda" and logits.dtype != torch.float32
    by_kernel = by_default if on_kernel is None else on_kernel
    own = [memory for memory in to if not isinstance(memory, int)]
    check_give((logits.shape, count, first, len(to), by_kernel), (logits, *own))
    if not by_kernel:
        return give_reference(logits, count, first, to)
    function = _give_plan(logits.dtype, len(to), logits.device)
    addresses = [*to, *[to[0]] * (MOST_RANKS - len(to))]
    function(len(logits), THREADS, logits, logits.shape[1], count, first, *addresses)
    return None


check_logits = tensor_check("vocabulary_argmax", {"logits": Argument(FLOATS, "T stride")})


@checked_once
def check_give(numbers: tuple, tensors: tuple) -> None:
    """Raise ValueError unless what `give` takes fits together.

    Args:
        numbers: sizes of the logits, `count`, `first`, how many memories there are, and whether the kernel computes.
        tensors: the logits, and the memories of this process.
    """
    _, count, first, memories, by_kernel = numbers
    logits, *own = tensors
    check_logits(logits)
    rows, stride = logits.shape
    sentence = "" if memories else "no memory to give words to"
    if not 0 <= count <= stride or not 0 <= first <= LOW - count:
        sentence = f"{count} tokens from {first} on are not among {stride} logits a row, or beyond 32 bits"
    elif by_kernel and (logits.dtype == torch.float32 or stride % 8 or logits.data_ptr() % VECTOR):
        want = f"float16 or bfloat16 with rows of a multiple of 8 at a multiple of {VECTOR} bytes"
        sentence = f"logits are {plain(logits.dtype)} {list(logits.shape)}; the kernel takes {want}"
    for memory in own:
        fits = memory.ndim == 1 and len(memory) >= rows and memory.is_contiguous() and memory.device == logits.device
        if not fits or memory.dtype != torch.int64:
            kind = f"a {plain(memory.dtype)} tensor {list(memory.shape)} on {memory.device}"
            sentence = f"memory must be a contiguous int64 tensor [{rows} or more] on {logits.device}, not {kind}"
    if sentence:
        raise ValueError(f"vocabulary_argmax: {sentence}")


def take(memory: Tensor, rows: int, on_kernel: bool | None = None) -> Tensor:
    """Tokens int64 `[T]` once every rank has given its words.

    Args:
        memory: int64 `[ranks, T or more]` of this rank, or `[T]`, the largest words over ranks.
        rows: T; of the memory that others write to at most `MOST_ROWS`.
        on_kernel: whether the kernel computes it; by default where the memory is on a GPU.

    Raises:
        ValueError: a memory that has no such words.
    """
    check_take((memory.shape, rows), (memory,))
    if not (memory.device.type == "cuda" if on_kernel is None else on_kernel):
        return take_reference(memory, rows)
    tokens = torch.empty(rows, dtype=torch.int64, device=memory.device)
    if memory.ndim == 2:
        _take_plan(len(memory), memory.device)(1, MOST_ROWS, memory, memory.shape[1], rows, tokens)
        return tokens
    chosen = _take_plan(1, memory.device)
    for words, own in zip(memory[:rows].split(MOST_ROWS), tokens.split(MOST_ROWS)):
        chosen(1, MOST_ROWS, words, len(words), len(words), own)
    return tokens


@checked_once
def check_take(numbers: tuple, tensors: tuple) -> None:
    """Raise ValueError unless a memory has words of so many rows; `numbers` are its sizes and these."""
    (_, rows), (memory,) = numbers, tensors
    sentence = ""
    if memory.dtype != torch.int64 or memory.ndim not in (1, 2) or not memory.is_contiguous():
        kind = f"{plain(memory.dtype)} {list(memory.shape)} with strides {memory.stride()}"
        sentence = f"memory is {kind}, expected contiguous int64 [ranks, rows] or [rows]"
    elif not 1 <= rows <= memory.shape[-1]:
        sentence = f"{rows} rows of a memory of {memory.shape[-1]}"
    elif memory.ndim == 2 and not (rows <= MOST_ROWS and 1 <= len(memory) <= MOST_RANKS):
        sentence = f"{rows} rows of {len(memory)} ranks; ranks write up to {MOST_ROWS} rows of up to {MOST_RANKS}"
    if sentence:
        raise ValueError(f"vocabulary_argmax: {sentence}")


def loads(ranks: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Callable[[], object]]:
    """Calls that compile what a choice launches, one kernel each (`nvrtc.jobs_of`).

    Args:
        ranks: numbers of ranks that words are given to; 1 is a memory of one's own.
        dtype, device: of the logits.
    """
    calls: list[Callable[[], object]] = []
    for count in ranks:
        calls.append(partial(_give_plan, dtype, count, device))
        calls.append(partial(_take_plan, count, device))
    return calls


# --- references -------------------------------------------------------------------------------------------------------


def reference(parts: Sequence[Part], collected: bool = False) -> list[Tensor]:
    """Tokens int64 `[T]` of each rank, which are the same, chosen among the logits of all ranks together."""
    whole = torch.cat([logits[:, :count] for logits, count, _ in parts], 1)
    return [argmax.reference(whole)] * (1 if collected else len(parts))


def words_of(logits: Tensor, count: int, first: int) -> Tensor:
    """int64 `[T]`: the word of each row's best token, `give`'s arguments."""
    if count == 0:
        nothing = logits.new_full((len(logits), 1), float("-inf"))
        return _words(nothing[:, 0], torch.full((len(logits),), LOW, device=logits.device))
    best, at = logits[:, :count].max(1)  # NaN wherever a row has one
    return _words(best, first + at)


def _words(best: Tensor, tokens: Tensor) -> Tensor:
    value = best.float() + 0.0  # -0 is 0
    bits = value.view(torch.int32).long()
    order = torch.where(value.isnan(), MAGNITUDE, bits ^ (bits >> 31 & MAGNITUDE))
    return order << 32 | LOW - tokens


def tokens_of(words: Tensor) -> Tensor:
    """int64: the tokens of words, -1 where the logit is not finite."""
    order = words >> 32
    bits = order ^ (order >> 31 & MAGNITUDE)
    return torch.where(bits & EXPONENT == EXPONENT, -1, LOW - (words & LOW))


def give_reference(logits: Tensor, count: int, first: int, to: Sequence[Tensor]) -> None:
    """What `give` does, into memories of this process."""
    words = words_of(logits, count, first)
    for memory in to:
        memory[: len(words)] = words


def take_reference(memory: Tensor, rows: int) -> Tensor:
    """What `take` does; it waits for the words of all ranks.

    Raises:
        TimeoutError: a rank gave nothing for a minute.
    """
    if memory.ndim == 1:
        return tokens_of(memory[:rows])
    end = time.monotonic() + PATIENCE
    while not bool((memory[:, :rows] != 0).all()):
        if time.monotonic() > end:
            raise TimeoutError(f"a rank gave no token for {PATIENCE:.0f} s")
        time.sleep(1e-4)
    words = memory[:, :rows].amax(0)
    memory.zero_()
    return tokens_of(words)
