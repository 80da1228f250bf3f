"""A decoder's part of one rank under tensor parallelism: which heads, hidden units and channels of a layer it holds.

q, k, v, gate and up are split by their outputs, o and down by their inputs, so that a rank's attention and MLP need no
other rank and its outputs of o and down are partial sums (Megatron-LM, arXiv 1909.08053, section 3). The head is split
by its outputs, the tokens. Norms are whole on every rank, and so is the embedding, of which a step reads one row a
token: a copy costs memory and no time, and needs no other rank.

Where the ranks do not divide the heads, as three ranks and the 32, 40 and 64 heads of Llama 2, which the paper does not
explain (audit A070), heads are padded: every rank has the same number, whole groups of queries with their key-value
head, and what is left over on the last rank has weights of zero. Hidden units of the MLP are padded likewise, to a
multiple of 16 on each rank, and so are tokens of the head. The padded channels are computed and add nothing.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from repro.core.errors import UserError
from repro.engine.corrected import Compensated
from repro.engine.step import Block, Decoder
from repro.engine.weights import Dense, Packed, head_size
from repro.kernels.compensated_gemv import PackedCompensators
from repro.kernels.packing import TILE, pack, unpack
from repro.kernels.vocabulary_argmax import rows_of_a_rank

NONE = -1  # in an index: a padded channel, whose weights are zero


def local_config(config: Any, ranks: int) -> Any:
    """The configuration of one rank's part of a model.

    Args:
        config: of Transformers.
        ranks: one or more.

    Raises:
        UserError: so many ranks that one would have padded heads alone.
    """
    if ranks < 1:
        raise UserError(f"tensor parallelism over {ranks} ranks; give 1 or more")
    heads = config.num_key_value_heads
    of_a_rank = -(-heads // ranks)
    if (ranks - 1) * of_a_rank >= heads:
        problem = f"the model has {heads} key-value heads, and the last rank would have none of them; give fewer ranks"
        raise UserError(f"tensor parallelism over {ranks} ranks: {problem}")
    local = copy.deepcopy(config)
    local.head_dim = head_size(config)
    local.num_key_value_heads = of_a_rank
    local.num_attention_heads = local.num_key_value_heads * (config.num_attention_heads // config.num_key_value_heads)
    local.intermediate_size = -(-config.intermediate_size // (ranks * TILE)) * TILE
    return local  # of the whole vocabulary, since every rank embeds all tokens


def indices(count: int, local: int, rank: int) -> Tensor:
    """int64 `[local]`: the channels of `count` that a rank holds, `NONE` for those beyond them."""
    index = torch.arange(rank * local, (rank + 1) * local)
    index[index >= count] = NONE
    return index


def shard(model: Decoder, rank: int, ranks: int) -> Decoder:
    """The part of a rank of a decoder.

    Raises:
        UserError: as `local_config`; or a product of another format than 16 bits and 4 bits with one group a row.
    """
    config = model.config
    local = local_config(model.config, ranks)
    size = head_size(config)
    query = indices(config.num_attention_heads * size, local.num_attention_heads * size, rank)
    key = indices(config.num_key_value_heads * size, local.num_key_value_heads * size, rank)
    unit = indices(config.intermediate_size, local.intermediate_size, rank)
    wide, narrow = config.num_attention_heads * size, config.num_key_value_heads * size
    qkv = joined([query, key, key], [0, wide, wide + narrow])
    gate_up = joined([unit, unit], [0, config.intermediate_size])

    def part(block: Block) -> Block:
        return replace(
            block,
            qkv=of_outputs(block.qkv, qkv.to(model.device)),
            out=of_inputs(block.out, query.to(model.device)),
            gate_up=of_outputs(block.gate_up, gate_up.to(model.device)),
            down=of_inputs(block.down, unit.to(model.device)),
        )

    blocks = tuple(part(block) for block in model.blocks)
    return replace(model, config=local, blocks=blocks, head=head_of(model, rank, ranks))


def head_of(model: Decoder, rank: int, ranks: int) -> nn.Module:
    """The head of a whole vocabulary with the tokens of a rank alone, and zeros for those that are padding."""
    vocabulary = model.config.vocab_size
    token = indices(vocabulary, rows_of_a_rank(vocabulary, ranks), rank)
    return of_outputs(model.head, token.to(model.device))


def joined(parts: Sequence[Tensor], starts: Sequence[int]) -> Tensor:
    """Indices of layers that share a product, each from its first output on."""
    return torch.cat([torch.where(index == NONE, NONE, index + start) for index, start in zip(parts, starts)])


def picked(tensor: Tensor, index: Tensor, dim: int) -> Tensor:
    """The slices of a tensor that an index names, zeros for `NONE`."""
    selected = tensor.index_select(dim, index.clamp(min=0))
    shape = [1] * tensor.ndim
    shape[dim] = len(index)
    return selected.masked_fill((index == NONE).view(shape), 0)


def of_outputs(product: nn.Module, index: Tensor) -> nn.Module:
    """A product whose outputs are those of an index, in its order; those of `NONE` are 0."""
    if isinstance(product, Dense):
        bias = None if product.bias is None else picked(product.bias, index, 0)
        return Dense(picked(product.weight, index, 0), bias)
    if isinstance(product, Packed) and product.order is None:
        codes, scales, zeros = (picked(tensor, index, 0) for tensor in unpack(product.packed))
        packed = product.packed
        part = pack(codes, scales, None if packed.symmetric else zeros, packed.bits, packed.group)
        return Packed(part, None if product.bias is None else picked(product.bias, index, 0), None)
    if isinstance(product, Compensated):
        return Compensated(of_outputs(product.product, index), outputs_of_compensators(product, index))
    raise UserError(f"tensor parallelism: a product of {type(product).__name__} has no part of its outputs")


def outputs_of_compensators(product: Compensated, index: Tensor) -> PackedCompensators:
    """The compensators of those outputs; each keeps its z, which takes all inputs."""
    spans, up, before = [], [], 0
    for e in range(len(product.down)):
        first, end = product.spans[2 * e], product.spans[2 * e + 1]
        mine = torch.nonzero((index >= first) & (index < end))[:, 0]
        spans += [int(mine[0]), int(mine[-1]) + 1]
        up.append(product.up[index[mine] - first + before])
        before += end - first
    spans += [0] * (len(product.spans) - len(spans))
    return PackedCompensators(product.down, product.gates, product.scales, torch.cat(up), tuple(spans))


def of_inputs(product: nn.Module, index: Tensor) -> nn.Module:
    """A product of those inputs alone that an index names, in its order; those of `NONE` count as 0."""
    if getattr(product, "bias", None) is not None:
        raise UserError("tensor parallelism: a product split by its inputs has a bias, which every rank would add")
    if isinstance(product, Dense):
        return Dense(picked(product.weight, index, 1), None)
    if isinstance(product, Packed) and product.order is None and product.packed.group == 0:
        packed = product.packed
        codes, scales, zeros = unpack(packed)
        part = pack(picked(codes, index, 1), scales, None if packed.symmetric else zeros, packed.bits, 0)
        return Packed(part, None, None)
    if isinstance(product, Compensated):
        columns = picked(product.down[:, :, : product.product.packed.columns], index, 2)
        padded = columns.new_zeros(*columns.shape[:2], len(index) + -len(index) % 16)
        padded[:, :, : len(index)] = columns
        compensators = PackedCompensators(padded, product.gates, product.scales, product.up, product.spans)
        return Compensated(of_inputs(product.product, index), compensators)
    problem = "has no part of its inputs; take 16 bits, or 4 bits with one group a row"
    raise UserError(f"tensor parallelism: a product of {type(product).__name__} {problem}")
