"""Rotary embedding of queries and keys, and keys and values written to their slots of the cache, in one launch.

    rotate(x)[d] = x[d] * cos[p, d] + (-x[d + D/2] if d < D/2 else x[d - D/2]) * sin[p, d]       p = positions[t]
    q[t], keys[rows[t], :, slots[t]] = rotate(query heads, key heads of qkv[t])
    values[rows[t], :, slots[t]] = value heads of qkv[t]

RoPE (arXiv 2104.09864, section 3.4.2) with halves rotated as in Transformers' Llama, whose roundings are kept: cos and
sin are rounded to the dtype of qkv, so are both products and their sum.
qkv: fp16, bf16 or float32 [T, (Hq + 2 Hk) D], a token's query, key and value heads; cos, sin: float32 [L', D], L' above
every position; positions, rows, slots: int32 [T], read on the device; keys, values: the dtype of qkv [B, Hk, L, D];
q: [T, Hq, D]. A row below 0 is padding: nothing is written and q is 0. A slot is a position except in a tree, where
siblings share a position; no two tokens may share a row and a slot. Rows, slots and positions beyond their tensors are
not checked on a GPU. Bytes moved, of element size s: 2 s T (Hq + 2 Hk) D + 8 T D.
"""

from collections.abc import Callable, Sequence

import torch

from repro.kernels.launch_config import lacks
from repro.kernels.operators import FLOATS, Argument, operator
from repro.kernels.prepared import Prepared, blank
from repro.kernels.triton_language import tl, triton

CASES = [  # tokens, query and key heads, head size, cache slots, context, padding tokens, dtype, seed
    {"T": 3, "Hq": 3, "Hk": 1, "D": 64, "B": 2, "L": 16, "padding": 1, "dtype": "float32", "seed": 0},
    {"T": 1, "Hq": 32, "Hk": 8, "D": 64, "B": 1, "L": 512, "padding": 0, "dtype": "bfloat16", "seed": 1},
    {"T": 1, "Hq": 32, "Hk": 8, "D": 128, "B": 1, "L": 512, "padding": 0, "dtype": "float16", "seed": 2},
    {"T": 64, "Hq": 32, "Hk": 8, "D": 128, "B": 8, "L": 512, "padding": 5, "dtype": "bfloat16", "seed": 3},
    {"T": 33, "Hq": 4, "Hk": 4, "D": 64, "B": 3, "L": 100, "padding": 2, "dtype": "float16", "seed": 4},
]


def tables(length: int, size: int, theta: float = 5e5) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) float32 [length, size] of plain RoPE; the engine makes its own, with a model's scaling."""
    angle = torch.arange(length)[:, None] * theta ** (-torch.arange(0, size, 2) / size).repeat(2)
    return angle.cos(), angle.sin()


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator: tokens at random free slots, the last ones padding, siblings among them."""
    generator = torch.Generator().manual_seed(case["seed"])
    count = case["T"]
    size = case["D"]
    dtype = getattr(torch, case["dtype"])
    order = torch.randperm(case["B"] * case["L"], generator=generator)[:count]
    rows = (order // case["L"]).int()
    slots = (order % case["L"]).int()
    rows[count - case["padding"] :] = -1
    qkv = torch.randn(count, (case["Hq"] + 2 * case["Hk"]) * size, generator=generator)
    cos, sin = tables(case["L"], size)
    keys, values = (torch.randn(case["B"], case["Hk"], case["L"], size, generator=generator) for _ in range(2))
    plain = {"positions": (slots - slots % 2).int(), "rows": rows, "slots": slots, "cos": cos, "sin": sin}
    typed = {"qkv": qkv, "keys": keys, "values": values}
    return {n: t.to(device) for n, t in plain.items()} | {n: t.to(device, dtype) for n, t in typed.items()}


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads [T, heads, D] by rows [T, D] of the tables, in the dtype of x."""
    low, high = x.chunk(2, dim=2)
    return x * cos[:, None].to(x.dtype) + torch.cat([-high, low], 2) * sin[:, None].to(x.dtype)


def reference(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor,
    slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """q [T, Hq, D] in the dtype of qkv; writes to `keys` and `values`.

    Raises:
        ValueError: a row, slot or position of a token that is no padding is beyond its tensor.
    """
    heads = qkv.view(len(qkv), -1, keys.shape[3])
    new = keys.shape[1]
    of_tokens = rows.tolist()
    if min(of_tokens) < 0:  # the others alone, then zeros between them
        live = (rows >= 0).nonzero()[:, 0]
        q = torch.zeros_like(heads[:, : -2 * new])
        live_inputs = [tensor.index_select(0, live) for tensor in (qkv, positions, rows, slots)]
        return (
            q.index_copy_(0, live, reference(live_inputs[0], cos, sin, *live_inputs[1:], keys, values))
            if len(live)
            else q
        )
    check_indices("rows", of_tokens, keys.shape[0])
    check_indices("slots", slots.tolist(), keys.shape[2])
    check_indices("positions", positions.tolist(), len(cos))
    turned = rotate(heads[:, :-new], cos.index_select(0, positions), sin.index_select(0, positions))  # queries, keys
    cache_index = rows.long(), slots.long()
    keys.transpose(1, 2).index_put_(cache_index, turned[:, -new:])
    values.transpose(1, 2).index_put_(cache_index, heads[:, -new:])
    return turned[:, :-new].contiguous()


def check_indices(name: str, indices: Sequence[int], size: int) -> None:
    """Raise ValueError unless all are from 0 to below a size."""
    if min(indices) < 0 or max(indices) >= size:
        ends = f"from {min(indices)} to {max(indices)}"
        raise ValueError(f"rope_append: {name} are {ends}; they must be from 0 to {size - 1}")


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("rope_append", device)


@triton.jit
def rope_append_kernel(  # noqa: ANN201
    qkv, cos, sin, positions, rows, slots, keys, values, q, L,  # noqa: ANN001
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    row = tl.load(rows + token)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    half = tl.arange(0, D // 2)[None, :]
    inside = (head < HQ + 2 * HK) & (row >= 0)
    source = qkv + (token.to(tl.int64) * (HQ + 2 * HK) + head) * D + half
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + D // 2, mask=inside, other=0.0)

    table = tl.load(positions + token, mask=row >= 0, other=0).to(tl.int64) * D + half
    rotated_low = rounded(low, -high.to(tl.float32), cos, sin, table)
    rotated_high = rounded(high, low.to(tl.float32), cos, sin, table + D // 2)
    target = q + (token.to(tl.int64) * HQ + head) * D + half
    tl.store(target, rotated_low, mask=head < HQ)
    tl.store(target + D // 2, rotated_high, mask=head < HQ)

    slot = tl.load(slots + token, mask=row >= 0, other=0)
    key, value = head - HQ, head - HQ - HK
    place = keys + ((row.to(tl.int64) * HK + key) * L + slot) * D + half
    tl.store(place, rotated_low, mask=inside & (key >= 0) & (key < HK))
    tl.store(place + D // 2, rotated_high, mask=inside & (key >= 0) & (key < HK))
    place = values + ((row.to(tl.int64) * HK + value) * L + slot) * D + half
    tl.store(place, low, mask=inside & (value >= 0))
    tl.store(place + D // 2, high, mask=inside & (value >= 0))


@triton.jit
def rounded(x, partner, cos, sin, at):  # noqa: ANN001, ANN201
    """x * cos + partner * sin, the tables, both products and the sum rounded to the type of x."""
    c, s = tl.load(cos + at).to(x.dtype).to(tl.float32), tl.load(sin + at).to(x.dtype).to(tl.float32)
    a, b = (x.to(tl.float32) * c).to(x.dtype), (partner * s).to(x.dtype)
    return (a.to(tl.float32) + b.to(tl.float32)).to(x.dtype)


def launch(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor,
    slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """q of the operator, computed by the kernel, which writes to the cache; the tensors are not checked."""
    arguments = qkv, cos, sin, positions, rows, slots, keys, values
    return prepare(*arguments)(*arguments)


def prepare(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor,
    slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
) -> Callable[..., torch.Tensor]:  # fmt: skip
    """The launch of the operator for calls like this one."""
    _, heads, length, size = keys.shape
    count = len(qkv)
    total = qkv.shape[1] // size
    block = 4 if count < 16 else 16  # heads of a program
    queries = total - 2 * heads
    kernel = Prepared(
        rope_append_kernel, (count, triton.cdiv(total, block)), HQ=queries, HK=heads, D=size, HEADS=block,
        num_warps=block * size // 256, enable_fp_fusion=False,  # products are rounded before their sum
    )  # fmt: skip

    allocate = blank(qkv.dtype, count, queries, size)

    def launch(*arguments: torch.Tensor) -> torch.Tensor:
        q = allocate(arguments[0])
        kernel(*arguments, q, length)
        return q

    return launch


def limit(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor,
    slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
) -> str | None:  # fmt: skip
    """What is wrong with checked arguments, or None."""
    width = qkv.shape[1]
    _, heads, _, size = keys.shape
    if size in (64, 128) and width % (heads * size) == 0 and width >= 3 * heads * size:
        return None
    return f"qkv of {width} columns must be (Hq + 2 Hk) D, Hq a multiple of Hk = {heads}, D 64 or 128, not {size}"


WHOLE = Argument((torch.int32,), "T")
TABLE = Argument((torch.float32,), "L' D")
CACHE = Argument("qkv", "B Hk L D")
rope_append = operator(
    "rope_append",
    reference,
    launch,
    {
        "qkv": Argument(FLOATS, "T (Hq+2Hk)D"),
        "cos": TABLE,
        "sin": TABLE,
        "positions": WHOLE,
        "rows": WHOLE,
        "slots": WHOLE,
        "keys": CACHE,
        "values": CACHE,
    },
    empty=lambda qkv, cos, sin, positions, rows, slots, keys, values: qkv.new_empty(
        qkv.shape[0], qkv.shape[1] // keys.shape[3] - 2 * keys.shape[1], keys.shape[3]
    ),
    limit=limit,
    mutates=("keys", "values"),
    prepare=prepare,
)
