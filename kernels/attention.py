"""Attention of new tokens over the key-value cache: decode, speculative trees and chunks of a prefill.

    y[t, h] = sum_s p[s] v[s]          p = softmax over visible s of scale * q[t, h] . k[s]

with k, v = keys, values[rows[t], h // (Hq / Hk)]. Slot s is visible to token t if s < lengths[t] (which counts the
token itself: causal by lengths) and, when a tree is given, s < start[t] or mask[t, s - start[t]]; slots past the mask's
columns are not. A token with lengths[t] of 0 or less or a row below 0 (padding), or that sees no slot, gets zeros.
q: fp16, bf16 or float32 [T, Hq, D], D 64 or 128; keys, values: the same dtype [B, Hk, L, D]; rows, lengths, start:
int32 [T] and mask: bool [T, N], read on the device (rows beyond B and lengths beyond L are not checked on a GPU);
y: [T, Hq, D]. Softmax and sums are float32; p of 16-bit operands is rounded to their type before the product with v;
products of float32 are float32, not TF32. A visible NaN gives NaN. Bytes moved at least, of element size s: 2 s Hk D
for every slot of a row that a token sees, and 2 s T Hq D.

Online softmax (FlashAttention, arXiv 2205.14135, algorithm 1) over a context that is split over programs
(Flash-Decoding, Dao et al., 2023): the split follows the lengths, and a second kernel joins the parts in one order.
"""

import itertools
import math
from collections.abc import Callable

import torch

from repro.kernels.launch_config import lacks
from repro.kernels.operators import FLOATS, Argument, operator
from repro.kernels.prepared import Prepared, blank
from repro.kernels.triton_language import tl, triton

CASES = [  # rows, new tokens of each, context before them, query and key heads, head size, tree or not, dtype, seed
    {"B": 2, "n": 3, "context": 37, "Hq": 3, "Hk": 1, "D": 64, "tree": True, "dtype": "float32", "seed": 6},
    {"B": 1, "n": 1, "context": 1023, "Hq": 32, "Hk": 8, "D": 128, "tree": False, "dtype": "bfloat16", "seed": 1},
    {"B": 1, "n": 1, "context": 8191, "Hq": 32, "Hk": 8, "D": 64, "tree": False, "dtype": "float16", "seed": 2},
    {"B": 16, "n": 1, "context": 2047, "Hq": 32, "Hk": 8, "D": 128, "tree": False, "dtype": "bfloat16", "seed": 3},
    {"B": 1, "n": 64, "context": 1500, "Hq": 32, "Hk": 8, "D": 128, "tree": True, "dtype": "float16", "seed": 4},
    {"B": 2, "n": 256, "context": 700, "Hq": 8, "Hk": 8, "D": 64, "tree": False, "dtype": "bfloat16", "seed": 5},
]


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator: rows of different lengths; trees in which each token hangs on a random earlier one."""
    generator = torch.Generator().manual_seed(case["seed"])
    b, n, context, size = case["B"], case["n"], case["context"], case["D"]
    before = torch.randint(context // 2, context + 1, (b, 1), generator=generator)
    before[0] = context
    shape = (b, case["Hk"], context + n, size)
    dtype = getattr(torch, case["dtype"])
    typed = {"q": (b * n, case["Hq"], size), "keys": shape, "values": shape}
    inputs = {m: torch.randn(s, generator=generator).to(device, dtype) for m, s in typed.items()}
    plain = {"rows": torch.arange(b)[:, None].expand(b, n), "lengths": before + 1 + torch.arange(n)}
    if case["tree"]:
        mask = torch.eye(n, dtype=torch.bool)
        for t in range(1, n):
            mask[t] |= mask[torch.randint(t, (), generator=generator)]
        plain["start"] = before.expand(b, n)
        inputs["mask"] = mask.repeat(b, 1).to(device)
    return inputs | {m: t.flatten().int().to(device) for m, t in plain.items()} | {"scale": size**-0.5}


def reference(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, scale: float,
    mask: torch.Tensor | None = None, start: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """y [T, Hq, D] in the dtype of q, row by row in float32; NaN past a token's length does no harm.

    Raises:
        ValueError: a row or a length beyond the cache.
    """
    y = torch.zeros_like(q)
    ends, of_tokens = [max(end, 0) for end in lengths.tolist()], rows.tolist()
    if max(of_tokens) >= keys.shape[0] or max(ends) > keys.shape[2]:
        reach = f"rows up to {max(of_tokens)} and lengths up to {max(ends)}"
        raise ValueError(f"attention: {reach}; the cache has {keys.shape[0]} rows of {keys.shape[2]} slots")
    stop = 0
    group = q.shape[1] // keys.shape[1]
    for row, run in itertools.groupby(of_tokens):  # neighbours that share a row
        here = slice(stop, stop := stop + len(list(run)))
        if row < 0:
            continue
        k, v = (cache[row, :, : max(ends[here])].float() for cache in (keys, values))
        heads = q[here].float().view(-1, len(k), group, q.shape[2]).transpose(0, 1)
        score = torch.bmm(heads.flatten(1, 2), k.mT) * scale  # [Hk, t Hq / Hk, n]
        if mask is None and heads.shape[1] == 1:  # it sees all of them
            p = score.softmax(2)
        else:
            slot = torch.arange(k.shape[1], device=q.device)
            unseen = slot >= lengths[here, None]
            if mask is not None:
                column = slot - start[here, None]
                inside = mask[here].gather(1, column.clamp(0, mask.shape[1] - 1)) & (column < mask.shape[1])
                unseen |= (column >= 0) & ~inside
                v = v.masked_fill(unseen.all(0)[:, None], 0)  # what nobody sees may be anything
            unseen = unseen.repeat_interleave(group, 0)
            p = score.masked_fill(unseen, -torch.inf).softmax(2).masked_fill(unseen, 0)
        y[here] = torch.bmm(p, v).view_as(heads).transpose(0, 1).flatten(1, 2)
    return y


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("attention", device)


@triton.jit
def attention_kernel(  # noqa: ANN201
    q, keys, values, rows, lengths, mask, start, y, acc_part, top_part, sum_part, T, L, COLUMNS, scale,  # noqa: ANN001
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A tile of TOKENS tokens and the heads that share a key head, GROUP (a power of two) of them, in M rows."""
    head, split = tl.program_id(1), tl.program_id(2)
    lane, column = tl.arange(0, M), tl.arange(0, D)
    token, member = tl.program_id(0) * TOKENS + lane // GROUP, lane % GROUP
    valid = (lane < TOKENS * GROUP) & (token < T) & (member < HQ // HK)
    at = token.to(tl.int64) * HQ + head * (HQ // HK) + member
    query = tl.load(q + at[:, None] * D + column, mask=valid[:, None], other=0.0)
    row = tl.load(rows + token, mask=valid, other=-1)
    length = tl.where(row < 0, 0, tl.load(lengths + token, mask=valid, other=0))
    row = tl.where(length > 0, row, 2147483647)  # of padding: after all others
    first = length
    if start is not None:
        first = tl.load(start + token, mask=valid, other=0)

    acc = tl.zeros((M, D), dtype=tl.float32)
    top = tl.full((M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((M,), dtype=tl.float32)
    current = tl.min(row, axis=0)
    while current < 2147483647:  # one row of the cache after the other: decode has one a tile, a prefill few
        here = row == current
        end = tl.max(tl.where(here, length, 0), axis=0)
        share = tl.cdiv(tl.cdiv(end, BLOCK), SPLIT) * BLOCK
        base = (current.to(tl.int64) * HK + head) * L
        for position in range(split * share, min((split + 1) * share, end), BLOCK):
            slot = position + tl.arange(0, BLOCK)
            place = (base + slot)[:, None] * D + column
            seen = here[:, None] & (slot[None, :] < length[:, None])
            inside = slot < end
            if mask is not None:
                branch = slot[None, :] - first[:, None]
                entry = mask + token.to(tl.int64)[:, None] * COLUMNS + branch
                marked = tl.load(entry, mask=seen & (branch >= 0) & (branch < COLUMNS), other=0)
                seen = seen & ((branch < 0) | (marked != 0))
                inside = tl.max(seen.to(tl.int32), axis=0) > 0  # what nobody sees may be NaN
            k = tl.load(keys + place, mask=inside[:, None], other=0.0)
            score = tl.dot(query, k.T, input_precision="ieee") * scale
            score = tl.where(seen, score, float("-inf"))
            larger = tl.maximum(top, tl.max(score, axis=1))
            finite = tl.where(larger == float("-inf"), 0.0, larger)
            p = tl.exp(score - finite[:, None])
            fade = tl.exp(top - finite)
            v = tl.load(values + place, mask=inside[:, None], other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
            total, top = total * fade + tl.sum(p, axis=1), larger
        current = tl.min(tl.where(row > current, row, 2147483647), axis=0)

    if SPLIT == 1:
        mean = acc * (1.0 / tl.where(total > 0, total, 1.0))[:, None]
        tl.store(y + at[:, None] * D + column, mean.to(y.dtype.element_ty), mask=valid[:, None])
    else:
        at += split.to(tl.int64) * T * HQ
        tl.store(acc_part + at[:, None] * D + column, acc, mask=valid[:, None])
        tl.store(top_part + at, top, mask=valid)
        tl.store(sum_part + at, total, mask=valid)


@triton.jit
def join_splits_kernel(acc_part, top_part, sum_part, y, COUNT, D: tl.constexpr, SPLIT: tl.constexpr, PAD: tl.constexpr):  # noqa: ANN001, ANN201
    at, split, column = tl.program_id(0).to(tl.int64), tl.arange(0, PAD), tl.arange(0, D)
    part = split.to(tl.int64) * COUNT + at
    top = tl.load(top_part + part, mask=split < SPLIT, other=float("-inf"))
    largest = tl.max(top, axis=0)
    weight = tl.exp(top - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weight * tl.load(sum_part + part, mask=split < SPLIT, other=0.0), axis=0)
    acc = tl.load(acc_part + part[:, None] * D + column, mask=(split < SPLIT)[:, None], other=0.0)
    mean = tl.sum(acc * weight[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(y + at * D + column, mean.to(y.dtype.element_ty))


def plan(count: int, shape: tuple[int, ...], heads: int, wide: bool, tree: bool, sms: int) -> tuple[int, int, int]:
    """(heads of a group as a power of two, tokens of a tile, programs that split a context) for `count` tokens.

    `shape` is that of the cache, `heads` Hq: up to three programs for each SM in splits by a power of two, of at least
    64 slots each. Tiles of float32 (`wide`) have up to 32 rows: of 64, Triton 3.7.1 makes TF32 products for sm_100,
    whatever the precision. So have those of a tree, whose mask takes registers.
    """
    group = triton.next_power_of_2(heads // shape[1])
    tokens = max(min(triton.next_power_of_2(triton.cdiv(count, shape[0])), (32 if wide or tree else 64) // group), 1)
    programs = triton.cdiv(count, tokens) * shape[1]
    split = max(min(triton.cdiv(3 * sms, programs), triton.cdiv(shape[2], 64), 64), 1)
    return group, tokens, 1 << (split.bit_length() - 1)


def launch(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, scale: float,
    mask: torch.Tensor | None = None, start: torch.Tensor | None = None, tiling: tuple[int, int, int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """y of the operator, computed by the kernels, with the tiling of `plan` or another; the tensors are not checked."""
    given = q, keys, values, rows, lengths, scale, mask, start
    return prepare(*given, tiling=tiling)(*given)


def prepare(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, scale: float,
    mask: torch.Tensor | None = None, start: torch.Tensor | None = None, tiling: tuple[int, int, int] | None = None,
) -> Callable[..., torch.Tensor]:  # fmt: skip
    """The launches of the operator for calls like this one, with the tiling of `plan` or another."""
    count, heads, size = q.shape
    _, groups, length, _ = keys.shape
    wide = q.dtype == torch.float32
    if tiling is None:
        sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        tiling = plan(count, keys.shape, heads, wide, mask is not None, sms)
    group, tokens, split = tiling
    columns = 0 if mask is None else mask.shape[1]
    kernel = Prepared(
        attention_kernel, (triton.cdiv(count, tokens), groups, split), HQ=heads, HK=groups, D=size, GROUP=group,
        TOKENS=tokens, M=max(16, tokens * group), BLOCK=32 if wide else 64, SPLIT=split, num_warps=4,
        num_stages=2 if wide else 3,
    )  # fmt: skip
    pad = triton.next_power_of_2(split)
    allocate = blank(q.dtype, *q.shape)
    make_acc = blank(torch.float32, split, count, heads, size)
    make_sum = blank(torch.float32, split, count, heads)
    join = Prepared(join_splits_kernel, (count * heads,), D=size, SPLIT=split, PAD=pad)

    def launch(
        q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor,
        scale: float, mask: torch.Tensor | None = None, start: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        y = allocate(q)
        parts = (None, None, None)
        if split > 1:
            parts = make_acc(q), make_sum(q), make_sum(q)
        bytes_ = None if mask is None else mask.view(torch.uint8)
        kernel(q, keys, values, rows, lengths, bytes_, start, y, *parts, count, length, columns, scale)
        if split > 1:
            join(*parts, y, count * heads)
        return y

    return launch


def limit(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, scale: float,
    mask: torch.Tensor | None = None, start: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    """What is wrong with checked arguments, or None."""
    _, heads, size = q.shape
    groups = keys.shape[1]
    if not abs(scale) < math.inf:
        return f"scale is {scale}, which is no number"
    if (mask is None) != (start is None):
        return "mask and start belong to a tree; give both or neither"
    if size in (64, 128) and heads % groups == 0 and heads <= 32 * groups:
        return None
    return f"D must be 64 or 128, not {size}, and Hq = {heads} a multiple of Hk = {groups}, at most 32 Hk"


CACHE = Argument("q", "B Hk L D")
WHOLE = Argument((torch.int32,), "T")
attention = operator(
    "attention",
    reference,
    launch,
    {
        "q": Argument(FLOATS, "T Hq D"),
        "keys": CACHE,
        "values": CACHE,
        "rows": WHOLE,
        "lengths": WHOLE,
        "mask": Argument((torch.bool,), "T N"),
        "start": WHOLE,
    },
    empty=lambda q, *rest, **more: torch.empty_like(q),
    limit=limit,
    prepare=prepare,
)
