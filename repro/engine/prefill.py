"""Prefill prompts into empty rows of the cache: a whole batch together, block by block, in chunks of tokens.

A block runs over every chunk before the next block begins. So its packed weights are dequantized once a prefill, and
weights that are streamed come once. What is between products holds a chunk, the hidden states all tokens. Attention is
causal over whole prompts, with the library's kernel, which skips what the mask hides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from repro.engine.step import Block, Cache, Decoder, Tokens

CHUNK = 4096  # tokens: a block's products of so many take longer than the host needs to launch the block


@dataclass(frozen=True)
class Span:
    """Neighbouring prompts of one length: `rows` rows of the cache from `row` on, `length` tokens of each."""

    row: int
    rows: int
    length: int


def spans(lengths: Sequence[int], first: int) -> list[Span]:
    """Prompts of so many tokens in rows from `first` on, those of one length that are neighbours in one span."""
    runs = []
    row = first
    for length, run in groupby(lengths):
        count = len(list(run))
        runs.append(Span(row, count, length))
        row += count
    return runs


def packed(prompts: Sequence[Sequence[int]], first: int, device: torch.device) -> Tokens:
    """Tokens `[T]` of all prompts, one after the other, each in a row of its own from `first` on."""
    ids, rows, slots = [], [], []
    for row, prompt in enumerate(prompts, start=first):
        ids.append(torch.as_tensor(prompt, dtype=torch.int64))
        rows.append(torch.full((len(prompt),), row, dtype=torch.int32))
        slots.append(torch.arange(len(prompt), dtype=torch.int32))
    ids, rows, slots = (torch.cat(parts).to(device) for parts in (ids, rows, slots))
    return Tokens(ids, rows, slots, slots, slots + 1)


@torch.inference_mode()
def together(
    model: Decoder, cache: Cache, prompts: Sequence[Sequence[int]], chunk: int = CHUNK, first: int = 0
) -> list[Tensor]:
    """Put prompts into the cache's rows from `first` on.

    Args:
        prompts: token ids, at least one of each.
        chunk: tokens that products compute at a time.

    Returns:
        The last hidden states `[T, H]` of each prompt after the last norm, for `model.head`.
    """
    lengths = [len(prompt) for prompt in prompts]
    tokens = packed(prompts, first, model.device)
    states = forward(model, cache, tokens, spans(lengths, first), chunk)
    cache.lengths[first : first + len(prompts)] = torch.tensor(lengths, dtype=torch.int32, device=model.device)
    return list(states.split(lengths))


@torch.inference_mode()
def forward(model: Decoder, cache: Cache, tokens: Tokens, groups: Sequence[Span], chunk: int = CHUNK) -> Tensor:
    """The last hidden states `[T, H]` of `together`: all that it does on the device, so that a graph can capture it.

    Args:
        tokens: of all prompts, as `packed` puts them on the device.
        groups: the prompts, as `spans` puts them together.
        chunk: tokens that products compute at a time.
    """
    eps = model.config.rms_norm_eps
    parts = [part.split(chunk) for part in (tokens.positions, tokens.rows, tokens.slots)]
    where = list(zip(*parts))
    hidden: list[Tensor] = list(model.embedding[tokens.ids].split(chunk))
    residuals: list[Tensor | None] = [None] * len(hidden)
    for index, layer in enumerate(model.in_turn()):
        block = layer.dense if len(hidden) == 1 else layer.dense.expanded(chunk, model.embedding.dtype)
        keys, values = cache.keys[index], cache.values[index]
        queries = []
        for number, x in enumerate(hidden):
            x, residuals[number] = block.norm(x, block.input_norm, eps, residuals[number])
            queries.append(block.rope(block.qkv(x), model.cos, model.sin, *where[number], keys, values))
        q = queries[0] if len(queries) == 1 else torch.cat(queries)
        y = causal_attention(block, q, keys, values, tokens, groups)
        for number, x in enumerate(y.flatten(1).split(chunk)):
            x, residuals[number] = block.norm(block.out(x), block.post_norm, eps, residuals[number])
            hidden[number] = block.down(block.product(block.gate_up(x)))
    norm = model.blocks[0].norm
    return torch.cat([norm(x, model.norm, eps, residual)[0] for x, residual in zip(hidden, residuals)])


def causal_attention(
    block: Block, q: Tensor, keys: Tensor, values: Tensor, tokens: Tokens, groups: Sequence[Span]
) -> Tensor:
    """y `[T, Hq, D]` of whole prompts, whose keys and values `[B, Hk, L, D]` are in the cache.

    On a GPU the library's fused kernels take float32 only without grouped heads, and its plain one holds all scores: so
    float32 goes through the kernel of a step.
    """
    heads, size = q.shape[1:]
    if q.is_cuda and q.dtype == torch.float32:
        return block.attention(q, keys, values, tokens.rows, tokens.lengths, size**-0.5)
    outputs, begin = [], 0
    for group in groups:
        end = begin + group.rows * group.length
        mine = slice(group.row, group.row + group.rows)
        query = q[begin:end].view(group.rows, group.length, heads, size).transpose(1, 2)
        k, v = keys[mine, :, : group.length], values[mine, :, : group.length]
        y = F.scaled_dot_product_attention(query, k, v, is_causal=True, enable_gqa=heads != k.shape[1])
        outputs.append(y.transpose(1, 2).reshape(end - begin, heads, size))
        begin = end
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
