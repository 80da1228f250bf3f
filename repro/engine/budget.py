"""Memory budgets: the bytes of every part, computed from a configuration, and which blocks stay on the device.

Nothing is loaded for it. What is always on the device: embedding, head, norms and biases, the cache with the slots of a
draft tree, working memory of a pass, buffers of one block, and the draft's substitute of every block that streams (of
every block where the draft's configuration says so).
What is left holds whole blocks of the target.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from repro.core.errors import NotMeasurable, UserError, shortened
from repro.engine.drafted import TOGETHER
from repro.engine.weights import head_size, layer_sizes, slot
from repro.kernels.packing import TILE
from repro.methods import subspec

MIB = 2**20
SMALL = MIB  # bytes of a tensor that the allocator puts among small ones
LARGE = 10 * MIB  # of one that has a segment of its own
SEGMENT, STEP = 20 * MIB, 2 * MIB  # of tensors between the two, and what every other segment is a multiple of
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
CHUNK = 256  # tokens of a prefill at a time (section 4.3)


def parse_bytes(text: str) -> int:
    """`8GiB`, `8 GB` or `800MiB` as bytes.

    Raises:
        UserError: it is not an amount of memory.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS:
        raise UserError(f"memory {shortened(text)!r}: write an amount such as 8GiB, 8GB or 800MiB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def shown(count: float, enough: bool = False) -> str:
    """Bytes as a person reads them; `enough` rounds up, so that the amount that is shown is enough when it is given."""
    for unit in ("GiB", "MiB", "KiB"):
        size = UNITS[unit.upper()]
        if count >= size:
            hundredths = 100 * count / size
            return f"{(math.ceil(hundredths) if enough else round(hundredths)) / 100:,.2f} {unit}"
    return f"{count:,.0f} bytes"


@dataclass(frozen=True)
class MemoryPlan:
    """Where each part of a model is: on the device or on the host.

    Attributes:
        budget: bytes that may be used on the device.
        parts: bytes on the device by what they are for.
        resident: the blocks that stay.
        blocks: how many there are.
        block_bytes: of the products of one.
    """

    budget: int
    parts: dict[str, int]
    resident: tuple[int, ...]
    blocks: int
    block_bytes: int

    @property
    def used(self) -> int:
        """Bytes on the device."""
        return sum(self.parts.values())

    @property
    def streamed_bytes(self) -> int:
        """Bytes that a pass of the target copies, which are the bytes in pinned host memory."""
        return (self.blocks - len(self.resident)) * self.block_bytes


def plan(
    name: str,
    config: Any,
    context: int,
    dtype: torch.dtype,
    budget: int,
    draft: subspec.Config | None,
    reserve: int = 0,
    packed: bool = True,
    segments: bool = False,
    own_draft: int = 0,
    target: subspec.Config | None = None,
) -> MemoryPlan:
    """Keep as many blocks as a budget holds, spread evenly over the depth.

    The paper does not say which blocks stay; evenly spread ones leave the bus no longer pause than a single block.

    Args:
        name: of the model, for messages.
        config: of Transformers.
        context: slots of the sequence, without those of a tree.
        dtype: of weights and activations.
        budget: bytes.
        draft: of the streamed blocks; None is offloading alone.
        reserve: bytes that the device needs besides (its context, kernels).
        packed: whether substitutes are packed; they are dequantized where no kernel runs, on a GPU in float32. On a CPU
            they count as packed, so that a plan there is that of a GPU.
        segments: whether to plan for what PyTorch's allocator on a GPU takes beyond the tensors.
        own_draft: bytes of a draft that is a model of its own.
        target: the grid of a quantized target's codes; None is the target in `dtype`.

    Raises:
        NotMeasurable: not even an empty set of blocks fits; the sentence names the least budget that works.
        UserError: a tree that is deeper than the context, or whose levels are wider than the vocabulary.
    """
    if draft:
        _check_tree(name, config, context, draft)
    memory = EngineMemory(config, context, dtype, draft, packed, target)
    blocks = config.num_hidden_layers
    least = None
    for count in range(blocks, -1, -1):
        resident = spread(count, blocks)
        parts = memory.parts(len(resident)) | {"device context": reserve}
        if segments:
            parts["allocator"] = memory.overhead(len(resident))
        if own_draft:
            parts["draft"] = own_draft
        candidate = MemoryPlan(budget, parts, resident, blocks, memory.block_bytes)
        if candidate.used <= budget:
            return candidate
        least = candidate.used if least is None else min(least, candidate.used)
    draft_note = "with its draft" if draft or own_draft else "without a draft"
    amount = shown(least, enough=True).replace(" ", "")  # one word, as an option takes it
    problem = f"{name} needs at least {amount} {draft_note} at a context of {context:,}"
    raise NotMeasurable("oom", f"memory {shown(budget)}: {problem}; give more, or choose a shorter context")


def _check_tree(name: str, config: Any, context: int, draft: subspec.Config) -> None:
    if draft.depth >= context:
        raise UserError(f"draft depth is {draft.depth:,}; a context of {context:,} has room for fewer tokens")
    if draft.top_k > config.vocab_size:
        raise UserError(f"draft top_k is {draft.top_k:,}; {name} has {config.vocab_size:,} tokens to choose from")


def spread(count: int, blocks: int) -> tuple[int, ...]:
    """`count` of `blocks` numbers, evenly spread."""
    return tuple(sorted({(2 * i + 1) * blocks // (2 * count) for i in range(count)}))


def products(config: Any) -> dict[str, tuple[int, int]]:
    """(N, K) of the products of a block."""
    return {product: (sum(rows), columns) for product, (rows, columns) in layer_sizes(config).items()}


def block_sizes(config: Any, dtype: torch.dtype) -> list[int]:
    """Bytes of the weight of each product of a block."""
    return [rows * columns * dtype.itemsize for rows, columns in products(config).values()]


def substitute_sizes(config: Any, draft: subspec.Config) -> list[int]:
    """Bytes of the tensors of a block's packed substitute: codes, and a scale and a zero point in 16 bits a group."""
    sizes = []
    for rows, columns in products(config).values():
        padded = -(-rows // TILE) * TILE
        sizes.append(padded * columns * slot(draft.bits) // 8)
        sizes.append(padded * (columns // draft.group) * 4)
    return sizes


def substitute_bytes(config: Any, draft: subspec.Config) -> int:
    """Bytes of a block's packed substitute."""
    return sum(substitute_sizes(config, draft))


def pass_bytes(config: Any, dtype: torch.dtype, nodes: int = 0) -> int:
    """Bytes of the intermediate results of a block for a chunk of the prefill, or for a tree with more nodes."""
    rows = sum(rows for rows, _ in products(config).values())
    return 2 * max(CHUNK, nodes) * (rows + config.intermediate_size + 2 * config.hidden_size) * dtype.itemsize


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of an engine on the device, by arithmetic on its configuration and the number of resident blocks.

    Attributes:
        config, context, dtype, draft, packed, target: as of `plan`.
    """

    config: Any
    context: int
    dtype: torch.dtype
    draft: subspec.Config | None = None
    packed: bool = True
    target: subspec.Config | None = None

    @property
    def slots(self) -> int:
        """Slots of the cache, those of a draft's tree among them."""
        return self.context + (self.draft.nodes if self.draft else 0)

    @property
    def tables(self) -> int:
        """Tables of the vocabulary: embedding and head, which may be one."""
        return 1 if self.config.tie_word_embeddings else 2

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values."""
        config = self.config
        width = config.num_key_value_heads * head_size(config) * self.dtype.itemsize
        return 2 * config.num_hidden_layers * self.slots * width

    @property
    def block_bytes(self) -> int:
        """Bytes of the target's products of a block, without biases."""
        return substitute_bytes(self.config, self.target) if self.target else sum(block_sizes(self.config, self.dtype))

    def substitutes(self, resident: int) -> int:
        """Blocks with a substitute: those that stream, or all of them."""
        blocks = self.config.num_hidden_layers
        return blocks if self.draft.EVERY else blocks - resident

    def parts(self, resident: int) -> dict[str, int]:
        """Bytes by what they are for, with so many resident blocks."""
        config, item = self.config, self.dtype.itemsize
        blocks, hidden = config.num_hidden_layers, config.hidden_size
        streamed = blocks - resident
        dense = block_sizes(config, self.dtype)
        biases = sum(rows for rows, _ in products(config).values())  # at most
        small = (2 * blocks + 1) * hidden * item + blocks * biases * item + 2 * self.slots * head_size(config) * 4
        dequantized = max(dense) if self.target else 0
        parts = {
            "embedding and head": self.tables * config.vocab_size * hidden * item,
            "norms, biases, rotary tables": small,
            "cache": self.cache_bytes,
            "working memory": self.working_bytes + dequantized,
            "resident blocks": resident * self.block_bytes,
            "buffers": self.block_bytes if streamed else 0,
        }
        if self.draft:
            draft_bytes = substitute_bytes(config, self.draft) if self.packed else sum(dense)
            parts["draft"] = self.substitutes(resident) * draft_bytes
        return parts

    @property
    def working_bytes(self) -> int:
        """Bytes of a pass's intermediate results: a chunk of the prefill or a whole tree, and some tokens' logits."""
        config, item = self.config, self.dtype.itemsize
        states = 6 * self.slots * config.hidden_size * item  # of a prefill: hidden states, residuals, queries, outputs
        logits = TOGETHER * config.vocab_size * (item + 12)
        return pass_bytes(config, self.dtype, self.draft.nodes if self.draft else 0) + states + logits

    def lasting_sizes(self, resident: int) -> list[int]:
        """Bytes of the tensors that stay as long as the engine, in the order in which they are made."""
        config = self.config
        streamed = config.num_hidden_layers - resident
        dense = block_sizes(config, self.dtype)
        block, buffers = dense, dense
        if self.target:
            block = substitute_sizes(config, self.target)
            buffers = [codes + scales for codes, scales in zip(block[::2], block[1::2])]
        sizes = []
        if self.draft:
            draft_sizes = substitute_sizes(config, self.draft) if self.packed else dense
            sizes += self.substitutes(resident) * draft_sizes
        sizes += resident * block
        if streamed:
            sizes += buffers
        sizes += self.tables * [config.vocab_size * config.hidden_size * self.dtype.itemsize]
        sizes.append(self.cache_bytes)
        return sizes

    def overhead(self, resident: int) -> int:
        """Bytes that the allocator takes beyond the tensors.

        These are what rounding adds to the tensors that stay; two segments of 20 MiB that intermediate results leave
        partly empty, one among what stays and one of their own; and the pool of the draft's captured passes, whose
        logits (`top_k` x vocabulary: in their dtype, and three times in float32 while they become probabilities) no
        other pass can use. The pool is one for all graphs of an engine (`Drafter.capture`).
        """
        sizes = self.lasting_sizes(resident)
        total = segment_bytes(sizes) - sum(sizes) + 2 * SEGMENT
        if self.draft:
            logits = self.draft.top_k * self.config.vocab_size * (self.dtype.itemsize + 12)
            total += -(-logits // SEGMENT) * SEGMENT + STEP
        return total


# --- the allocator ----------------------------------------------------------------------------------------------------


def segment_bytes(sizes: Sequence[int]) -> int:
    """Bytes that PyTorch's caching allocator takes from the device for tensors that stay.

    Up to 1 MiB they share segments of 2 MiB, below 10 MiB segments of 20 MiB, into which they are put first fit; a
    larger one has a segment of its own in steps of 2 MiB.
    """
    total, small = 0, 0
    room: list[int] = []  # bytes that are left in each segment of 20 MiB
    for size in sizes:
        if size <= SMALL:
            small += size
        elif size >= LARGE:
            total += -(-size // STEP) * STEP
        else:
            fitting = [number for number, left in enumerate(room) if left >= size]
            if not fitting:
                room.append(SEGMENT)
                fitting = [len(room) - 1]
            room[fitting[0]] -= size
    return total + -(-small // STEP) * STEP + len(room) * SEGMENT
