"""Decode steps under tensor parallelism, one process a rank, with SPEAR's compensators (sections 4.2 and 5.3.2).

A rank runs the plain step on its part of a decoder (`sharding.py`). Its outputs of o and down are partial sums, which
have to be added up over all ranks, in one of these ways:

    plain       an all-reduce of the outputs behind the product; of a compensator nothing is computed
    separate    the same, and the compensator in launches of its own, z being all-reduced by itself (the paper's naive)
    joined      one launch of product and A x, one all-reduce of their sums, one launch of all that is behind it
    peers       the first launch gives its sums to the peers' memory itself, and the last one waits for theirs (SPEAR)

The gate needs the whole z, so that a gate on a rank's own part would be another function (Figure 7). Compensators of
layers that are split by their outputs need no other rank. All-reduces are NCCL's, captured in the step's graph. A
product without a compensator is `plain` under `joined`. Several tokens at a time go through `separate` or `plain`.

The head is split by tokens: a greedy step exchanges each rank's best logit and its token, 8 bytes, over NVLink under
`peers`, else by an all-reduce that takes the largest. Logits are gathered where somebody asks for them.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from repro.core.errors import UserError
from repro.engine.core import Core
from repro.engine.corrected import Compensated
from repro.engine.decoding import Steps
from repro.engine.step import Decoder
from repro.engine.weights import LAYERS, Dense, Packed
from repro.kernels import nvrtc, row_parallel, vocabulary_argmax
from repro.kernels.compensated_gemv import hidden_of, parts
from repro.kernels.row_parallel import Address
from repro.methods.spear.compensator import Compensator, gate

Way = Literal["plain", "separate", "joined", "peers"]
ROW_PARALLEL = ("out", "down")
COMPILERS = 12  # processes of a rank that compile kernels, 1.5 s each
SIDES = 2  # memories that products use in turn


@dataclass(frozen=True)
class Side:
    """Memory that all ranks write to, int64 `[ranks, values]`, and where this rank's part is in that of each rank."""

    memory: Tensor
    to: Sequence[Address]


class Link(Protocol):
    """What joins the ranks."""

    rank: int
    ranks: int

    def add(self, x: Tensor) -> Tensor:
        """x, in place the sum over all ranks."""

    def largest(self, words: Tensor) -> Tensor:
        """int64 words, in place the largest over all ranks."""

    def gathered(self, x: Tensor) -> Tensor:
        """`[T, ranks N]`: x `[T, N]` of all ranks, in their order."""

    def sides(self, values: int, device: torch.device) -> list[Side]:
        """Two memories of so many values a rank, all zeros on every rank."""


class Group:
    """The ranks of a group of `torch.distributed`: NCCL on GPUs, gloo on CPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def add(self, x: Tensor) -> Tensor:
        """x, in place the sum over all ranks."""
        dist.all_reduce(x, group=self.group)
        return x

    def largest(self, words: Tensor) -> Tensor:
        """int64 words, in place the largest over all ranks."""
        dist.all_reduce(words, dist.ReduceOp.MAX, group=self.group)
        return words

    def gathered(self, x: Tensor) -> Tensor:
        """`[T, ranks N]`: x `[T, N]` of all ranks, in their order."""
        tokens, values = x.shape
        of_all = x.new_empty(self.ranks * tokens, values)
        dist.all_gather_into_tensor(of_all, x.contiguous(), group=self.group)
        return of_all.view(self.ranks, tokens, values).transpose(0, 1).flatten(1)

    def sides(self, values: int, device: torch.device) -> list[Side]:
        """Two memories that the peers reach over NVLink.

        Raises:
            UserError: the ranks are not on GPUs.
        """
        if device.type != "cuda":
            raise UserError("tensor parallelism by peers: the ranks need GPUs that reach one another's memory")
        from torch.distributed import _symmetric_memory as symmetric  # imports triton

        made = symmetric.empty(SIDES, self.ranks, values, dtype=torch.int64, device=device)
        addresses = symmetric.rendezvous(made, self.group.group_name).buffer_ptrs
        made.zero_()
        torch.cuda.synchronize(device)
        dist.barrier(self.group)
        result = []
        for number in range(SIDES):
            offset = made.element_size() * values * (number * self.ranks + self.rank)
            result.append(Side(made[number], [address + offset for address in addresses]))
        return result


# --- products ---------------------------------------------------------------------------------------------------------


class RowParallel(nn.Module):
    """A product of a rank's inputs, x `[T, K/ranks]` to y `[T, N]`, summed over ranks in the dtype of x."""

    def __init__(self, product: nn.Module, link: Link) -> None:
        super().__init__()
        self.product, self.link = product, link

    def forward(self, x: Tensor) -> Tensor:
        return self.link.add(self.product(x))

    __call__ = forward  # a module's own looks for hooks


class SeparateRowParallel(nn.Module):
    """The same with a compensator in launches of its own, whose z is summed over ranks before its gate."""

    def __init__(self, product: Compensated, link: Link) -> None:
        super().__init__()
        self.product, self.link = product.product, link
        columns = self.product.packed.columns
        made = parts(product.down, product.gates, product.scales, product.up, columns, product.spans)
        self.compensator = Compensator(made[0][1], 1.0)

    def forward(self, x: Tensor) -> Tensor:
        y, own = self.link.add(self.product(x)), self.compensator
        z = self.link.add(F.linear(x.to(own.A.dtype), own.A))
        if own.gated:
            z = gate(z, own.W1, own.b1, own.W2, own.b2) * z
        y += F.linear(z, own.B).to(y.dtype)
        return y

    __call__ = forward


@dataclass(frozen=True)
class PartialSums:
    """The partial sums of a product, as its output: the norm behind it adds them up.

    Attributes:
        memory: as `row_parallel.take` reads it.
        up, gates, scales: of the compensator; None without one.
    """

    memory: Tensor
    up: Tensor | None
    gates: Tensor | None
    scales: Tensor | None

    def normed(self, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of sum + residual, and that sum."""
        return row_parallel.take(self.memory, self.up, self.gates, self.scales, residual, weight, eps)


class FusedRowParallel(nn.Module):
    """A packed product whose launch gives its partial sums, and those of its compensator's z, of one token.

    Args:
        side: memory that all ranks write to; None for memory of one's own, which is all-reduced.
    """

    def __init__(self, product: nn.Module, link: Link, side: Side | None) -> None:
        super().__init__()
        self.link, self.side = link, side
        compensated = isinstance(product, Compensated)
        self.product = product.product if compensated else product
        for name in ("down", "gates", "scales", "up"):
            self.register_buffer(name, getattr(product, name) if compensated else None)
        self.several = SeparateRowParallel(product, link) if compensated else RowParallel(product, link)

    def forward(self, x: Tensor) -> Tensor | PartialSums:
        if len(x) > 1:
            return self.several(x)
        if self.side is None:
            values = self.product.packed.rows + (0 if self.down is None else self.down.shape[1])
            memory = x.new_empty(values, dtype=torch.float32)
            row_parallel.give(x, self.product.packed, self.down, self.scales, [memory])
            self.link.add(memory)
        else:
            memory = self.side.memory
            row_parallel.give(x, self.product.packed, self.down, self.scales, self.side.to)
        return PartialSums(memory, self.up, self.gates, self.scales)

    __call__ = forward


def norm_of_sums(plain: Callable) -> Callable:
    """The norm of a block, for partial sums by the launch that adds them up and for tensors by `plain`."""

    def norm(
        x: Tensor | PartialSums, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return x.normed(weight, eps, residual) if isinstance(x, PartialSums) else plain(x, weight, eps, residual)

    return norm


class VocabularyParallel(nn.Module):
    """The head of a rank's tokens, joined with the others'.

    Args:
        product: x `[T, H]` to the logits `[T, V/ranks]` of this rank's tokens, padded (`sharding.head_of`).
        vocabulary: V, the tokens of all ranks.
        sides: memories that all ranks write to, of a word for each of T, which choices use in turn; none for a
            collective.
    """

    def __init__(self, product: nn.Module, vocabulary: int, link: Link, sides: Sequence[Side]) -> None:
        super().__init__()
        self.product, self.vocabulary, self.link, self.sides = product, vocabulary, link, sides
        self.choices = 0
        self.first, self.count = vocabulary_argmax.tokens_of_a_rank(vocabulary, link.rank, link.ranks)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `[T, V]` of all tokens, which every rank gets."""
        return self.link.gathered(self.product(x))[:, : self.vocabulary]

    __call__ = forward

    def greedy(self, x: Tensor) -> Tensor:
        """int64 `[T]`: the first of the largest logits; -1 where they are not finite."""
        logits, rows = self.product(x), len(x)
        if not self.sides or rows > vocabulary_argmax.MOST_ROWS:
            words = torch.empty(rows, dtype=torch.int64, device=x.device)
            vocabulary_argmax.give(logits, self.count, self.first, [words])
            return vocabulary_argmax.take(self.link.largest(words), rows)
        side = self.sides[self.choices % len(self.sides)]
        self.choices += 1
        vocabulary_argmax.give(logits, self.count, self.first, side.to)
        return vocabulary_argmax.take(side.memory, rows)


# --- decoders ---------------------------------------------------------------------------------------------------------


def parallel(model: Decoder, link: Link, way: Way) -> Decoder:
    """A rank's part of a decoder, joined with the others'.

    Args:
        model: as `sharding.shard` makes it, or with random weights of `sharding.local_config`.
        link: to the other ranks.
        way: in which partial sums are added up; under `plain` compensators are left out.

    Raises:
        UserError: a product that no kernel of `joined` or `peers` takes.
    """
    sides: list[Side] = link.sides(most_values(model), model.device) if way == "peers" else []
    blocks = []
    for block in model.blocks:
        made: dict[str, Any] = {}
        for name in LAYERS:
            product = getattr(block, name)
            if name not in ROW_PARALLEL:
                made[name] = of_own(product, way)
                continue
            side = sides[ROW_PARALLEL.index(name)] if sides else None
            made[name] = of_all(product, link, way, side)
        if way in ("joined", "peers"):
            made["norm"] = norm_of_sums(block.norm)
        blocks.append(replace(block, **made))
    sides_of_words = link.sides(vocabulary_argmax.MOST_ROWS, model.device) if way == "peers" else []
    head = VocabularyParallel(model.head, model.config.vocab_size, link, sides_of_words)
    return replace(model, blocks=tuple(blocks), head=head)


def most_values(model: Decoder) -> int:
    """Values that a rank gives of one product at most: its outputs, and z of its compensator."""
    most = 0
    for block in model.blocks:
        for name in ROW_PARALLEL:
            product = getattr(block, name)
            z = product.down.shape[1] if isinstance(product, Compensated) else 0
            most = max(most, model.embedding.shape[1] + z)
    return most


def loads(model: Decoder, ranks: int, device: torch.device, dtype: torch.dtype) -> list[Callable[[], object]]:
    """Calls that compile most of what a step of one token launches in all ways (`nvrtc.jobs_of`).

    Args:
        model: a rank's part, which may be on `meta`, of packed products.
        ranks: number of them.
        device, dtype: on which it will run.
    """
    calls: list[Callable[[], object]] = []
    known: set[tuple] = set()
    stride = most_values(model)
    for block in model.blocks:
        for name in LAYERS:
            product = getattr(block, name)
            packed = product.product.packed if isinstance(product, Compensated) else product.packed
            R = product.down.shape[1] if isinstance(product, Compensated) and name in ROW_PARALLEL else 0
            hidden = hidden_of(product.gates, R) if R else 0
            counts = (1, ranks) if name in ROW_PARALLEL else ()
            key = packed.rows, packed.columns, R, counts
            if key not in known:
                known.add(key)
                calls += row_parallel.loads(packed, R, hidden, counts, stride, dtype, device)
    return calls + vocabulary_argmax.loads((1, ranks), dtype, device)


def compile_on_ranks(calls: Sequence[Callable[[], object]]) -> None:
    """Compile what `loads` gives into the cache, each kernel on one of all ranks, and wait for the others.

    Else every rank would compile all of them, one by one.
    """
    mine = nvrtc.jobs_of(calls)[dist.get_rank() :: dist.get_world_size()]
    left = [job for job in mine if not nvrtc.is_compiled(job)]
    if left:
        with ProcessPoolExecutor(min(COMPILERS, len(left)), multiprocessing.get_context("spawn")) as pool:
            list(pool.map(nvrtc.compile_job, left))
    dist.barrier()


def of_own(product: nn.Module, way: Way) -> nn.Module:
    """A product that needs no other rank."""
    if not isinstance(product, Compensated):
        return product
    if way == "plain":
        return product.product
    return product.separate(product.product) if way == "separate" else product


def of_all(product: nn.Module, link: Link, way: Way, side: Side | None) -> nn.Module:
    """A product whose outputs are summed over ranks."""
    compensated = isinstance(product, Compensated)
    if way == "plain":
        return RowParallel(product.product if compensated else product, link)
    if way == "peers" or (way == "joined" and compensated):
        inner = product.product if compensated else product
        if not isinstance(inner, Packed) or inner.order is not None:
            raise UserError(f"tensor parallelism, {way}: a product of {type(inner).__name__}; take one of 4 bits")
        return FusedRowParallel(product, link, side)
    if compensated:
        return SeparateRowParallel(product, link)
    if not isinstance(product, (Dense, Packed)):
        raise UserError(f"tensor parallelism: a product of {type(product).__name__} is not summed over ranks")
    return RowParallel(product, link)


class ParallelSteps(Steps):
    """Steps whose graphs hold collectives: NCCL's watchdog asks the device while a step is captured."""

    CAPTURE = {"capture_error_mode": "thread_local"}


class ParallelCore(Core):
    """A rank's engine; every rank makes the same calls."""

    STEPS = ParallelSteps
    RATED = False
