"""Add error compensators to a product of several tokens: SPEAR's semi-fused path (sections 3.1 and 4.1, figure 6).

    z = A x,   latent = gamma(z) z,   gamma(z) = 1 + tanh(W2 relu(W1 z + b1) + b2)       `latent`, beside the product
    y[t, first : end] += B latent                                                         `add`, behind both

Operands are those of `compensated_gemv.PackedCompensators`: of up to three layers that share x, int8 A and B with a
float32 scale per latent channel, alpha in that of B, ranks padded to R. x, y: float16 or bfloat16 `[T, K]`, `[T, N]`.

An int8 code is exact in both types, so that A x is the method's own product, summed in float32. The gate is float32,
too. `add` takes the latent vector as the sum of two values of the type of y, which has 16 bits of it or more, and adds
in float32 to y as the product has rounded it. On a CPU both are computed by plain PyTorch.
Bytes moved: R (K + outputs) of codes, the gates, x once a compensator, and y's outputs twice.
"""

import torch
from torch import Tensor

from repro.kernels.compensated_gemv import (
    PackedCompensators,
    hidden_of,
    pack,
    parts,
    random_compensator,
    wrong_gates,
    wrong_spans,
)
from repro.kernels.launch_config import lacks, processors
from repro.kernels.operators import FLOATS, Argument, checked_once, not_on_gpu, tensor_check
from repro.kernels.triton_language import tl, triton

CASES = [  # as of `compensated_gemv`, with their number of tokens; ragged ones first
    {"tokens": 5, "layers": [40], "ranks": [5], "columns": 416, "hidden": 4, "dtype": "float16", "seed": 4},
    {"tokens": 33, "layers": [17, 16, 24], "ranks": [20, 0, 3], "columns": 203, "hidden": 4, "dtype": "bfloat16",
     "seed": 5},
    {"tokens": 512, "layers": [130, 70], "ranks": [0, 70], "columns": 203, "hidden": 0, "dtype": "bfloat16", "seed": 3},
    {"tokens": 2, "layers": [4096], "ranks": [24], "columns": 11008, "hidden": 4, "dtype": "bfloat16", "seed": 0},
    {"tokens": 32, "layers": [11008, 11008], "ranks": [24, 24], "columns": 4096, "hidden": 4, "dtype": "bfloat16",
     "seed": 1},
    {"tokens": 130, "layers": [4096, 4096, 4096], "ranks": [24, 0, 24], "columns": 4096, "hidden": 4,
     "dtype": "float16", "seed": 2},
]  # fmt: skip
COLUMNS = 128  # of x that a step of the first product takes
OUTPUTS = 128  # of a tile of the second
GATED = 16  # tokens of a tile of the gate


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """The arguments of `launch` for a case: x `[T, K]`, y `[T, N]` and the packed compensators, `made`."""
    generator = torch.Generator().manual_seed(case["seed"])
    dtype = getattr(torch, case["dtype"])
    starts, stored, start = [], [], 0
    for size, r in zip(case["layers"], case["ranks"]):
        if r:
            starts.append(start)
            stored.append(random_compensator(r, size, case["columns"], case["hidden"], generator))
        start += size
    compensators = pack(starts, stored, [1.0] * len(stored), case["hidden"])
    x = torch.randn(case["tokens"], case["columns"], generator=generator)
    y = torch.randn(case["tokens"], start, generator=generator)
    tensors = {name: getattr(compensators, name) for name in ("down", "gates", "scales", "up")}
    moved = {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
    inputs = {"x": x.to(device, dtype), "y": y.to(device, dtype)}
    return inputs | {"made": PackedCompensators(**moved, spans=compensators.spans)}


def reference(x: Tensor, y: Tensor, made: PackedCompensators) -> Tensor:
    """y `[T, N]` with its corrections, computed in float32."""
    corrected = y.clone()
    add_reference(corrected, latent_reference(x, made), made)
    return corrected


def launch(x: Tensor, y: Tensor, made: PackedCompensators) -> Tensor:
    """`reference` by the kernels, with unchecked arguments."""
    corrected = y.clone()
    launch_add(corrected, launch_latent(x, made), made)
    return corrected


def unsupported(device: torch.device | str) -> str | None:
    """Why the kernels cannot run on `device`, or None if they can; there the references do."""
    return lacks("compensate", device)


@triton.jit
def down_kernel(  # noqa: ANN201
    x, down, part, T, K, WIDTH, SPLIT, R: tl.constexpr, PAD: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,  # noqa: ANN001
):  # fmt: skip
    """part[split, e, t, r], sums of A x over the columns of a split: A by its codes."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e, split, count = tl.program_id(1), tl.program_id(2), tl.num_programs(1)
    channel, lane = tl.arange(0, PAD), tl.arange(0, BLOCK)
    share = tl.cdiv(tl.cdiv(K, BLOCK), SPLIT) * BLOCK
    acc = tl.zeros((TOKENS, PAD), dtype=tl.float32)
    for start in range(split * share, min((split + 1) * share, K), BLOCK):
        column = start + lane
        values = tl.load(
            x + token[:, None].to(tl.int64) * K + column[None, :],
            mask=(token[:, None] < T) & (column[None, :] < K), other=0.0,
        )  # fmt: skip
        codes = tl.load(
            down + (e * R + channel[None, :]) * WIDTH + column[:, None],
            mask=(channel[None, :] < R) & (column[:, None] < K), other=0,
        )  # fmt: skip
        acc = tl.dot(values, codes.to(values.dtype), acc)
    at = ((split * count + e) * T + token[:, None]) * R + channel[None, :]
    tl.store(part + at, acc, mask=(token[:, None] < T) & (channel[None, :] < R))


@triton.jit
def gate_kernel(  # noqa: ANN201
    part, scales, gates, latent, T, SPLIT, R: tl.constexpr, PAD: tl.constexpr, H: tl.constexpr, WIDE: tl.constexpr,  # noqa: ANN001
    TOKENS: tl.constexpr,
):  # fmt: skip
    """latent[e, t, r] of the sums, times the scales of both factors."""
    token, e, count = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1), tl.num_programs(1)
    channel = tl.arange(0, PAD)
    real, inside = channel < R, (token[:, None] < T) & (channel[None, :] < R)
    z = tl.zeros((TOKENS, PAD), dtype=tl.float32)
    for split in range(0, SPLIT):
        at = ((split * count + e) * T + token[:, None]) * R + channel[None, :]
        z += tl.load(part + at, mask=inside, other=0.0)
    z = z * tl.load(scales + e * 2 * R + channel, mask=real, other=0.0)[None, :]
    if H > 0:
        unit = tl.arange(0, WIDE)
        own = gates + e * (2 * H * R + H + R)
        both = (unit[None, :] < H) & real[:, None]
        first = tl.load(own + unit[None, :] * R + channel[:, None], mask=both, other=0.0).to(tl.float32)
        second = tl.load(own + H * R + channel[:, None] * H + unit[None, :], mask=both, other=0.0).to(tl.float32)
        hidden_bias = tl.load(own + 2 * H * R + unit, mask=unit < H, other=0.0).to(tl.float32)
        bias = tl.load(own + 2 * H * R + H + channel, mask=real, other=0.0).to(tl.float32)
        inner = tl.maximum(tl.dot(z, first, input_precision="ieee") + hidden_bias[None, :], 0.0)
        u = tl.dot(inner, second.T, input_precision="ieee") + bias[None, :]
        z = z * (2.0 - 2.0 / (tl.exp(2.0 * u) + 1.0))
    z = z * tl.load(scales + e * 2 * R + R + channel, mask=real, other=0.0)[None, :]
    tl.store(latent + (e * T + token[:, None]) * R + channel[None, :], z, mask=inside)


@triton.jit
def up_kernel(  # noqa: ANN201
    y, latent, up, T, N, first, end, first2, end2, first3, end3,  # noqa: ANN001
    R: tl.constexpr, PAD: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y += B latent on a tile of tokens and of the outputs of one compensator."""
    token, tile = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    tiles, tiles2 = tl.cdiv(end - first, BLOCK), tl.cdiv(end2 - first2, BLOCK)
    e = (tile >= tiles).to(tl.int32) + (tile >= tiles + tiles2).to(tl.int32)
    begin = tl.where(e == 0, first, tl.where(e == 1, first2, first3))
    stop = tl.where(e == 0, end, tl.where(e == 1, end2, end3))
    before = tl.where(e == 0, 0, tl.where(e == 1, end - first, end - first + end2 - first2))
    tile -= tl.where(e == 0, 0, tl.where(e == 1, tiles, tiles + tiles2))
    output, channel = tile * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PAD)
    seen = output < stop - begin
    z = tl.load(
        latent + (e * T + token[:, None]) * R + channel[None, :],
        mask=(token[:, None] < T) & (channel[None, :] < R), other=0.0,
    )  # fmt: skip
    codes = tl.load(
        up + (before + output[None, :]) * R + channel[:, None],
        mask=seen[None, :] & (channel[:, None] < R), other=0,
    ).to(y.dtype.element_ty)  # fmt: skip
    high = z.to(y.dtype.element_ty)
    low = (z - high.to(tl.float32)).to(y.dtype.element_ty)
    sums = tl.dot(low, codes, tl.dot(high, codes))
    at = y + token[:, None].to(tl.int64) * N + begin + output[None, :]
    inside = (token[:, None] < T) & seen[None, :]
    tl.store(at, (tl.load(at, mask=inside, other=0.0).to(tl.float32) + sums).to(y.dtype.element_ty), mask=inside)


def tokens_of_tile(count: int) -> int:
    """Tokens of a tile for so many: 16, 32 or 64."""
    return max(16, min(64, triton.next_power_of_2(count)))


def splits_of(count: int, compensators: int, columns: int, sms: int) -> int:
    """Programs that share the columns of a compensator's product: about one an SM in all."""
    tiles = triton.cdiv(count, tokens_of_tile(count)) * compensators
    return max(1, min(triton.cdiv(columns, COLUMNS), sms // tiles))


def latent(x: Tensor, made: PackedCompensators) -> Tensor:
    """float32 `[E, T, R]`: the latent vector of each compensator, gated and scaled, for x `[T, K]` of any layout.

    Raises:
        ValueError: tensors that do not fit together.
    """
    x = x.contiguous()
    check_latent((x.shape,), (x, made.down, made.scales, made.gates))
    return (launch_latent if x.is_cuda else latent_reference)(x, made)


def add(y: Tensor, vectors: Tensor, made: PackedCompensators) -> None:
    """Add what compensators make of their latent vectors `[E, T, R]` to their outputs of y `[T, N]`, contiguous.

    Raises:
        ValueError: tensors that do not fit together.
    """
    check_add((y.shape, made.spans), (y, vectors, made.up))
    (launch_add if y.is_cuda else add_reference)(y, vectors, made)


def latent_limit(x: Tensor, down: Tensor, scales: Tensor, gates: Tensor | None) -> str | None:
    """What is wrong with checked arguments of `latent`, or None."""
    R, width = down.shape[1:]
    columns = x.shape[1]
    if width != columns + -columns % 16:
        return f"down is {list(down.shape)}, expected [E, R, {columns + -columns % 16}] for {columns} columns of x"
    return wrong_gates(gates, R) or not_on_gpu(x, "x")


check_down = tensor_check(
    "compensate",
    {
        "x": Argument(FLOATS, "T K"),
        "down": Argument((torch.int8,), "E R C"),
        "scales": Argument((torch.float32,), "E 2 R"),
        "gates": Argument((torch.float16,), "E G"),
    },
    latent_limit,
    optional=("gates",),
)
check_up = tensor_check(
    "compensate",
    {
        "y": Argument(FLOATS, "T N"),
        "vectors": Argument((torch.float32,), "E T R"),
        "up": Argument((torch.int8,), "U R"),
    },
    lambda y, vectors, up: not_on_gpu(y, "y"),
)


@checked_once
def check_latent(_: tuple, tensors: tuple) -> None:
    """Raise ValueError unless x, down, scales and gates fit together."""
    check_down(*tensors)


@checked_once
def check_add(numbers: tuple, tensors: tuple) -> None:
    """Raise ValueError unless y, latent vectors and up fit together; `numbers` are the sizes of y, and the spans."""
    (_, spans), (y, vectors, up) = numbers, tensors
    check_up(y, vectors, up)
    if sentence := wrong_spans(spans, len(vectors), len(up), y.shape[1]):
        raise ValueError(f"compensate: {sentence}")


def launch_latent(x: Tensor, made: PackedCompensators) -> Tensor:
    """`latent` by the kernels."""
    (count, R, width), (tokens, columns) = made.down.shape, x.shape
    hidden = hidden_of(made.gates, R) * R
    tile = tokens_of_tile(tokens)
    splits = splits_of(tokens, count, columns, processors(x.device))
    part = torch.empty(splits, count, tokens, R, dtype=torch.float32, device=x.device)
    vectors = torch.empty(count, tokens, R, dtype=torch.float32, device=x.device)
    channels = triton.next_power_of_2(R)
    down_kernel[triton.cdiv(tokens, tile), count, splits](
        x, made.down, part, tokens, columns, width, splits,
        R=R, PAD=channels, TOKENS=tile, BLOCK=COLUMNS, num_warps=4, num_stages=3,
    )  # fmt: skip
    gate_kernel[triton.cdiv(tokens, GATED), count](
        part, made.scales, made.scales if made.gates is None else made.gates, vectors, tokens, splits,
        R=R, PAD=channels, H=hidden, WIDE=triton.next_power_of_2(max(hidden, 16)), TOKENS=GATED, num_warps=4,
    )  # fmt: skip
    return vectors


def launch_add(y: Tensor, vectors: Tensor, made: PackedCompensators) -> None:
    """`add` by the kernel."""
    tokens, outputs = y.shape
    R = vectors.shape[2]
    tile = tokens_of_tile(len(y))
    tiles = 0
    for first, end in zip(made.spans[::2], made.spans[1::2]):
        tiles += triton.cdiv(end - first, OUTPUTS)
    up_kernel[triton.cdiv(tokens, tile), tiles](
        y, vectors, made.up, tokens, outputs, *made.spans,
        R=R, PAD=triton.next_power_of_2(R), TOKENS=tile, BLOCK=OUTPUTS, num_warps=4,
    )  # fmt: skip


# --- references -------------------------------------------------------------------------------------------------------


def latent_reference(x: Tensor, made: PackedCompensators) -> Tensor:
    """`latent` in float32, compensator by compensator."""
    vectors = []
    scales = made.scales[:, 1]
    for e, (_, tensors) in enumerate(parts(made.down, made.gates, made.scales, made.up, x.shape[1], made.spans)):
        z = x.float() @ tensors["A"].T
        if "W1" in tensors:
            inner = torch.relu(z @ tensors["W1"].T + tensors["b1"])
            z = z * (1 + torch.tanh(inner @ tensors["W2"].T + tensors["b2"]))
        vectors.append(z * scales[e])
    return torch.stack(vectors)


def add_reference(y: Tensor, vectors: Tensor, made: PackedCompensators) -> None:
    """`add` in float32."""
    before = 0
    for e in range(len(vectors)):
        first, end = made.spans[2 * e : 2 * e + 2]
        codes = made.up[before : before + end - first].float()
        y[:, first:end] = (y[:, first:end].float() + vectors[e] @ codes.T).to(y.dtype)
        before += end - first
