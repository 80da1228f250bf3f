"""The plain decode step: T tokens of any sequences through a decoder, their keys and values into a static cache.

It is the reference of every fused operator, and the whole of it is `step`: about a dozen operators per block, which
come from the block, so that one of them can be replaced (a compensator, a sparse product, another format). On a CPU
they are the references of `kernels/`, on a GPU its kernels. Everything that a step reads besides the weights is on the
device: rows, positions and lengths, so that a captured step can be replayed for any of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from repro.kernels import attention, rms_norm, rms_norm_active, rope_append, silu_product, silu_product_active

Operator = Callable[..., Any]


def on(device: torch.device, kernel: ModuleType) -> Operator:
    """A kernel's launcher on a GPU, its reference elsewhere."""
    return getattr(kernel, kernel.__name__.rpartition(".")[2]) if device.type == "cuda" else kernel.reference


@dataclass(frozen=True)
class Block:
    """The operators of a transformer block: weights `[H]` of norms, products, and what `kernels/` has between them.

    Attributes:
        norm_list, product_list: `norm` and `product`, with the list of their large outputs (SpQt, section 4.2.3).
    """

    input_norm: Tensor
    qkv: nn.Module
    out: nn.Module
    post_norm: Tensor
    gate_up: nn.Module
    down: nn.Module
    norm: Operator
    rope: Operator
    attention: Operator
    product: Operator
    norm_list: Operator
    product_list: Operator

    @classmethod
    def make(cls, input_norm: Tensor, post_norm: Tensor, **products: nn.Module) -> "Block":
        """A block with the operators of its weights' device."""
        names = {"norm": rms_norm, "rope": rope_append, "attention": attention, "product": silu_product}
        names |= {"norm_list": rms_norm_active, "product_list": silu_product_active}
        operators = {name: on(input_norm.device, kernel) for name, kernel in names.items()}
        return cls(input_norm=input_norm, post_norm=post_norm, **products, **operators)

    def after_norm(
        self, layer: nn.Module, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """A layer of the norm of x + residual, and that sum; the norm lists the layer's inputs if it reads a list."""
        if not takes_list(layer, x):
            x, residual = self.norm(x, weight, eps, residual)
            return layer(x), residual
        x, residual, active = self.norm_list(x, weight, eps, layer.threshold, residual)
        return layer.listed(x, active), residual

    def after_product(self, layer: nn.Module, x: Tensor) -> Tensor:
        """A layer of the gated activation of gate and up, which lists the layer's inputs if it reads a list."""
        if not takes_list(layer, x):
            return layer(self.product(x))
        x, active = self.product_list(x, layer.threshold)
        return layer.listed(x, active)

    @property
    def dense(self) -> "Block":
        """The block as a prefill runs it: without the thresholds of those products that have some (SpQt, section 5)."""
        return replace(self, **{name: part.dense for name, part in vars(self).items() if hasattr(part, "dense")})

    def expanded(self, tokens: int, dtype: torch.dtype) -> "Block":
        """The block with dense weights where its products of so many tokens would dequantize them at every call."""
        able = {name: part for name, part in vars(self).items() if hasattr(part, "expanded")}
        return replace(self, **{name: part.expanded(tokens, dtype) for name, part in able.items()})


def takes_list(layer: nn.Module, x: Tensor) -> bool:
    """Whether a layer reads a list of those inputs that are not zero, for as many tokens as x has."""
    return hasattr(layer, "takes_list") and layer.takes_list(x)


@dataclass(frozen=True)
class Decoder:
    """A decoder as the step reads it; frozen, because a captured step reads these very tensors.

    Attributes:
        config: of Transformers.
        embedding: `[V, H]`, in the dtype of the activations.
        norm: `[H]`, of the last norm.
        head: `[T, H]` to logits `[T, V]`.
        cos, sin: float32 `[L, D]`, tables of the rotary embedding, L being the context.
        stored_bytes: the model as it is stored, at the width of its codes.
        streams: whether weights come from the host while a step runs, which no captured graph holds.
    """

    config: Any
    embedding: Tensor
    blocks: tuple[Block, ...]
    norm: Tensor
    head: nn.Module
    cos: Tensor
    sin: Tensor
    stored_bytes: int = 0
    streams: bool = False

    def in_turn(self) -> Iterator[Block]:
        """The blocks as a step runs them, one after another; where weights are streamed, each is waited for here."""
        yield from self.blocks

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.embedding.device

    @property
    def read_bytes(self) -> int:
        """Bytes of the tensors that a step reads whole, each once; an embedding only where it is the head as well."""
        tensors = [self.norm, *self.head.buffers()]
        for block in self.blocks:
            for part in vars(block).values():
                if isinstance(part, nn.Module):
                    tensors += part.buffers()
                elif isinstance(part, Tensor):
                    tensors.append(part)
        return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())


class Cache:
    """Keys and values of B sequences in fixed memory: a row each, of L slots, of which the first `lengths` are valid.

    Attributes:
        keys, values: one tensor `[B, Hk, L, D]` for each block.
        lengths: int32 `[B]` on the device; what lies beyond is never read.
    """

    def __init__(self, model: Decoder, rows: int) -> None:
        config, (length, size) = model.config, model.cos.shape
        shape = (2, config.num_hidden_layers, rows, config.num_key_value_heads, length, size)
        self.keys, self.values = torch.zeros(shape, dtype=model.embedding.dtype, device=model.device).unbind()
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=model.device)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's keys and values in all blocks."""
        return 2 * self.keys[:, 0, :, 0].nbytes

    def gather(self, row: int, length: int, slots: Tensor) -> None:
        """Move `slots` (int64, in order) of a row after its first `length` slots and drop all others."""
        end = length + len(slots)
        for cache in (self.keys, self.values):
            cache[:, row, :, length:end] = cache[:, row].index_select(2, slots)
        self.lengths[row] = end


@dataclass(frozen=True)
class Tokens:
    """The tokens that a step computes; all tensors are on the device.

    Attributes:
        ids: int64 `[T]`.
        rows: int32 `[T]` rows of the cache; below 0 is padding, which writes nothing.
        positions: int32 `[T]`, from which the rotary embedding turns.
        slots: int32 `[T]`, where key and value are written; the positions except in a tree.
        lengths: int32 `[T]`, slots that a token sees, its own among them.
        mask, start: a tree's, bool `[T, N]` and int32 `[T]`: slot start + j is seen where mask[j].
    """

    ids: Tensor
    rows: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    mask: Tensor | None = None
    start: Tensor | None = None


def run_of(ids: Tensor, row: int, start: int) -> Tokens:
    """Tokens `[T]` that follow one another in one row from slot `start` on."""
    slots = torch.arange(start, start + len(ids), dtype=torch.int32, device=ids.device)
    return Tokens(ids, torch.full_like(slots, row), slots, slots, slots + 1)


def tree_of(ids: Tensor, parents: list[int], row: int, start: int) -> Tokens:
    """Nodes `[T]` of a tree in slots `start …` of a row; a parent is an earlier node, -1 the last token before them."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    chain, mask = run_of(ids, row, start), mask.to(ids.device)
    positions = start - 1 + mask.sum(1, dtype=torch.int32)
    ends = torch.full_like(chain.slots, start + len(parents))
    return Tokens(ids, chain.rows, positions, chain.slots, ends, mask, torch.full_like(chain.slots, start))


@torch.inference_mode()
def step(model: Decoder, cache: Cache, tokens: Tokens) -> Tensor:
    """The last hidden states `[T, H]` after the last norm, for `model.head`; `cache` gets the tokens' keys and values.

    Tokens are decoded, on sparse inputs where a layer has a threshold; prompts go through `prefill.py`.
    """
    eps = model.config.rms_norm_eps
    scale = model.cos.shape[1] ** -0.5
    x = model.embedding[tokens.ids]
    residual = None
    for index, block in enumerate(model.in_turn()):
        keys, values = cache.keys[index], cache.values[index]
        qkv, residual = block.after_norm(block.qkv, x, block.input_norm, eps, residual)
        q = block.rope(qkv, model.cos, model.sin, tokens.positions, tokens.rows, tokens.slots, keys, values)
        x = block.attention(q, keys, values, tokens.rows, tokens.lengths, scale, tokens.mask, tokens.start)
        x = block.out(x.flatten(1))
        x, residual = block.after_norm(block.gate_up, x, block.post_norm, eps, residual)
        x = block.after_product(block.down, x)
    return model.blocks[0].norm(x, model.norm, eps, residual)[0]
