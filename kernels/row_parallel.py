"""A row-parallel 4-bit product of one token under tensor parallelism, with its compensator (SPEAR, section 4.2).

    v = sum over ranks of x_r W_r^T + B (gamma(z) z),    z = sum over ranks of A_r x_r                       (3)
    total = v + residual,    y = weight * total / sqrt(mean total^2 + eps)

Each rank has a part of the columns of W and A and of x: x_r float16 or bfloat16 `[1, K/ranks]`, W_r `PackedWeight`
`[N, K/ranks]`, A_r int8. B, the gate, the residual and the norm's weight are the same on every rank, and so are y and
total `[1, N]`. The gate is not linear, so that it needs the whole z, which no rank has by itself.

`give` is the product's launch (wna16_gemv.cu) and beside it that of A_r x_r (compensated_gemv.cu), whose epilogues give
the partial sums, N of outputs and R of z: as float32 to one memory of this rank's own, which a collective adds up, or
straight to the memory of every rank, over NVLink (the paper's dual-write; peers.cuh). `take` is the paper's fused tail
in one launch of one cluster (row_parallel.cu): it waits for each partial sum, adds them up in the order of the ranks,
and computes gate, B, residual sum and RMSNorm.

Memory of a rank that others write to is int64 `[ranks, N + R]`: a float32 and a mark above it, which `take` clears. Two
such memories, used in turn, need no barrier between products: a rank gives its next product into the first again only
after it has taken the second, which every rank has given after it took the first.
"""

import struct
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from repro.core.errors import UserError
from repro.kernels import compensated_gemv as ec
from repro.kernels import nvrtc, rms_norm, wna16_gemv
from repro.kernels.launch_config import lacks
from repro.kernels.operators import FLOATS, VECTOR, Argument, checked_once, not_on_gpu, plain, tensor_check
from repro.kernels.packing import TENSORS, TILE, PackedWeight, dequantize, pack, unpack

SOURCE = Path(__file__).with_suffix(".cu")
MOST_RANKS = 4  # addresses that a launch takes
SPLITS, MOST_THREADS = 8, 1024  # thread blocks of the cluster of `take`; threads of a block
MARK = 1 << 32  # above the 32 bits of a value
PATIENCE = 60.0  # seconds that the reference waits for a mark
EPS = 1e-5  # of the norm in the cases
Address = Tensor | int  # memory of this process, or the address of another rank's
Part = tuple[Tensor, PackedWeight, Tensor | None]  # of a rank: its columns of x, of the weight and of A
CASES = [  # rows; columns of all ranks; ranks; rank of the compensator, 0 without one; gate; whether sums are collected
    {"rows": 40, "columns": 416, "ranks": 2, "r": 5, "hidden": 4, "dtype": "float16", "collected": False},
    {"rows": 300, "columns": 192, "ranks": 3, "r": 20, "hidden": 4, "dtype": "bfloat16", "collected": False},
    {"rows": 65, "columns": 256, "ranks": 4, "r": 7, "hidden": 0, "dtype": "bfloat16", "collected": False},
    {"rows": 48, "columns": 128, "ranks": 2, "r": 0, "hidden": 0, "dtype": "float16", "collected": False},
    {"rows": 40, "columns": 416, "ranks": 2, "r": 5, "hidden": 4, "dtype": "float16", "collected": True},
    {"rows": 300, "columns": 192, "ranks": 3, "r": 20, "hidden": 4, "dtype": "bfloat16", "collected": True},
    {"rows": 4096, "columns": 4096, "ranks": 2, "r": 24, "hidden": 4, "dtype": "bfloat16", "collected": False},
    {"rows": 5120, "columns": 13824, "ranks": 3, "r": 26, "hidden": 4, "dtype": "bfloat16", "collected": False},
    {"rows": 8192, "columns": 28672, "ranks": 4, "r": 20, "hidden": 4, "dtype": "bfloat16", "collected": False},
]
CHECKED = [  # launch configurations of the product that tests and the sanitizer run, too
    {"warps": 4, "tiles": 1, "chunk": 128, "stages": 2, "splits": 1, "blocks": 1},
    {"warps": 2, "tiles": 2, "chunk": 128, "stages": 1, "splits": 2, "blocks": 1},
]


def make_whole(case: dict) -> tuple[Tensor, PackedWeight, ec.PackedCompensators | None, Tensor, Tensor]:
    """x `[1, K]`, weight, compensator or None, residual `[1, N]` and the norm's weight `[N]` of a case, undivided."""
    rows, columns, dtype = case["rows"], case["columns"], getattr(torch, case["dtype"])
    generator = torch.Generator().manual_seed(rows)
    form = {"rows": rows, "columns": columns, "bits": 4, "group": 0, "symmetric": False, "m": 1, "seed": rows}
    x, packed = wna16_gemv.make_inputs(form, dtype=dtype)
    residual = torch.randn(1, rows, generator=generator)
    weight = 1 + torch.randn(rows, generator=generator) / 4
    made = None
    if case["r"]:
        stored = ec.random_compensator(case["r"], rows, columns, case["hidden"], generator)
        made = ec.pack([0], [stored], [1.0], case["hidden"])
    return x, packed, made, residual.to(dtype), weight.to(dtype)


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Arguments of `launch`: what each rank has of `make_whole`, and what all have."""
    x, packed, made, residual, weight = make_whole(case)
    codes, scales, zeros = unpack(packed)
    parts: list[Part] = []
    for rank in range(case["ranks"]):
        begin, end = (case["columns"] * one // case["ranks"] for one in (rank, rank + 1))
        down = None
        if made is not None:
            down = torch.zeros(1, made.down.shape[1], end - begin + -(end - begin) % 16, dtype=torch.int8)
            down[:, :, : end - begin] = made.down[:, :, begin:end]
            down = down.to(device)
        own = pack(codes[:, begin:end].contiguous(), scales, zeros, 4, 0)
        parts.append((x[:, begin:end].contiguous().to(device), own.to(device), down))
    behind = {}
    for name in ("up", "gates", "scales"):
        tensor = getattr(made, name, None)
        behind[name] = None if tensor is None else tensor.to(device)
    behind |= {"residual": residual.to(device), "weight": weight.to(device), "eps": EPS}
    return {"parts": parts, **behind, "collected": case["collected"]}


def unsupported(device: torch.device | str) -> str | None:
    """Why the kernels cannot run on `device`, or None if they can: they need clusters."""
    return lacks("row_parallel", device, (9, 0)) or nvrtc.unavailable()


def launch(
    parts: Sequence[Part], up: Tensor | None, gates: Tensor | None, scales: Tensor | None, residual: Tensor,
    weight: Tensor, eps: float, collected: bool = False, config: dict[str, int] | None = None,
) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
    """(y, total) of each rank by the kernels, all of them on one device, one after the other.

    `collected` sums are added up by plain PyTorch, as by a collective, and only one rank takes them.
    """
    rows, R = residual.shape[1], 0 if up is None else up.shape[1]
    values, ranks = rows + R, len(parts)
    if collected:
        sums = torch.zeros(ranks, values, device=residual.device)
        for own, (x, packed, down) in zip(sums, parts):
            give(x, packed, down, scales, [own], config)
        return [take(sums.sum(0), up, gates, scales, residual, weight, eps, on_kernel=True)]
    memories = torch.zeros(ranks, ranks, values, dtype=torch.int64, device=residual.device)  # of a rank, from a rank
    for rank, (x, packed, down) in enumerate(parts):
        give(x, packed, down, scales, list(memories[:, rank]), config)
    return [take(memory, up, gates, scales, residual, weight, eps, on_kernel=True) for memory in memories]


def take_shared(R: int, hidden: int, threads: int) -> int:
    """Shared memory of a thread block of `take`, in bytes: sums of warps and blocks, z, hidden layer, gate."""
    width = hidden * R
    sums = -(-(threads // 8 + SPLITS * 4) // 16) * 16
    return sums + 4 * (R + width) + (2 * (2 * width * R + width + R) if hidden else 0)


def threads_of(rows: int) -> int:
    """Threads of a block of `take`: one for each of its outputs, in whole warps, as far as a block has so many."""
    share = -(-rows // SPLITS)
    return min(MOST_THREADS, share + -share % 32)


@cache
def _product_plan(
    form: tuple, dtype: torch.dtype, ranks: int, device: torch.device, **config: int
) -> tuple[nvrtc.Function, int, int, int]:
    """(launch of the product, grid, block, padded columns) for calls of one shape."""
    bits, group, rows, columns, symmetric = form
    config = config or wna16_gemv.configuration(rows, columns, bits, 1, device)
    macros = wna16_gemv.defines(bits, group, columns, symmetric, dtype, 1, config)
    macros |= {"RANKS": ranks} if ranks else {}  # 0 is the product of one rank, whose outputs are whole
    function = nvrtc.load(wna16_gemv.SOURCE, "wna16_gemv", macros, device, wna16_gemv.shared_bytes(macros))
    tiles = -(-rows // TILE)
    return function, -(-tiles // config["tiles"]) * config["splits"], 32 * config["warps"], macros["K"]


@cache
def _latent_plan(columns: int, dtype: torch.dtype, R: int, ranks: int, device: torch.device) -> nvrtc.Function:
    """The launch of A x for calls of one shape; `columns` are padded as the product's."""
    macros = {"K": columns, "RANK": R, "HIDDEN": 0, "BF16": int(dtype == torch.bfloat16), "SPLITS": ec.SPLITS}
    return nvrtc.load(ec.SOURCE, "compensator_latent", macros | {"RANKS": ranks}, device, ec.latent_shared(R, 0))


def give(
    x: Tensor, packed: PackedWeight, down: Tensor | None, scales: Tensor | None, to: Sequence[Address],
    config: dict[str, int] | None = None,
) -> None:  # fmt: skip
    """Give the partial sums of this rank to every rank.

    Args:
        x: float16 or bfloat16 `[1, K]`, this rank's columns.
        packed: its columns of the weight `[N, K]`, 4 bits.
        down: int8 `[1, R, K padded to a multiple of 16]`, its columns of A; None without a compensator.
        scales: float32 `[1, 2, R]`, of A and of B.
        to: where this rank's N + R sums begin in the memory of each rank, in order, int64 with marks; or one float32
            memory of its own.
        config: launch configuration of the product, by default the tuned one of `wna16_gemv`.

    Raises:
        UserError: more ranks than a launch has addresses for.
        ValueError: tensors that do not fit together.
    """
    if len(to) > MOST_RANKS:
        raise UserError(f"{len(to)} ranks; the kernel gives partial sums to at most {MOST_RANKS}")
    form = packed.bits, packed.group, packed.rows, packed.columns, packed.symmetric
    R = 0 if down is None else down.shape[1]
    own = [memory for memory in to if not isinstance(memory, int)]
    sizes = x.shape, packed.rows, packed.columns, packed.bits, len(to)
    check_give(sizes, (x, packed.codes, packed.scale_zero, scales, down, *own))
    if x.device.type != "cuda" and config is None:
        return give_reference(x, packed, down, scales, to)
    product, grid, block, width = _product_plan(form, x.dtype, len(to), x.device, **(config or {}))
    if width != packed.columns:
        x = torch.nn.functional.pad(x, (0, width - packed.columns))
    elif x.data_ptr() % VECTOR:
        x = x.clone()
    addresses = [*to, *[to[0]] * (MOST_RANKS - len(to))]
    if R:
        latent, product = _latent_plan(width, x.dtype, R, len(to), x.device), product.beside
        behind = [_moved(one, packed.rows) for one in addresses]
        latent(ec.SPLITS, ec.THREADS, down, scales, scales, x, scales, *behind)
    product(grid, block, packed.codes, packed.scale_zero, x, x, packed.rows, 1, *addresses)
    return None


check_columns = tensor_check(
    "row_parallel",
    {
        "x": Argument(FLOATS, "1 K"),
        **TENSORS,
        "scales": Argument((torch.float32,), "1 2 R"),
        "down": Argument((torch.int8,), "1 R C", VECTOR),
    },
    lambda x, *rest: not_on_gpu(x, "x"),
    optional=("scales", "down"),
)


@checked_once
def check_give(numbers: tuple, tensors: tuple) -> None:
    """Raise ValueError unless what `give` takes fits together.

    Args:
        numbers: sizes of x, rows, columns and bits of the weight, and how many memories there are.
        tensors: x, those of the weight, scales, down, and the memories of this process.
    """
    _, rows, columns, bits, count = numbers
    x, codes, scale_zero, scales, down, *memories = tensors
    if down is not None and scales is None:
        raise ValueError("row_parallel: down has no scales")
    check_columns(x, codes, scale_zero, scales, down)
    values = rows if down is None else rows + down.shape[1]
    sentence = "" if count else "no memory to give partial sums to"
    if x.shape[1] != columns:
        sentence = f"x is {list(x.shape)}, expected [1, {columns}] for a weight of {rows} x {columns}"
    elif bits != 4:
        sentence = f"the weight has {bits} bits; the kernel takes 4"
    elif down is not None and down.shape[2] != columns + -columns % 16:
        sentence = f"down is {list(down.shape)}, expected [1, {down.shape[1]}, {columns + -columns % 16}]"
    for memory in memories:
        fits = memory.ndim == 1 and memory.shape[0] >= values and memory.is_contiguous() and memory.device == x.device
        if not fits or memory.dtype not in (torch.int64, torch.float32):
            kind = f"a {plain(memory.dtype)} tensor {list(memory.shape)} on {memory.device}"
            sentence = (
                f"memory must be a contiguous int64 or float32 tensor [{values} or more] on {x.device}, not {kind}"
            )
        elif memory.dtype == torch.float32 and count > 1:
            sentence = f"{count} memories, one of float32, which has no marks; ranks write to int64"
    if sentence:
        raise ValueError(f"row_parallel: {sentence}")


def _moved(address: Address, values: int) -> Address:
    """The address behind some values; those of another rank have 8 bytes each."""
    return address + 8 * values if isinstance(address, int) else address[values:]


@cache
def _take_plan(
    rows: int, dtype: torch.dtype, R: int, hidden: int, ranks: int, stride: int, device: torch.device
) -> tuple[nvrtc.Function, int]:
    """(launch, threads of a block)."""
    threads = threads_of(rows)
    macros = {"OUTPUTS": rows, "RANKS": ranks, "STRIDE": stride, "RANK": R, "HIDDEN": hidden}
    macros |= {"BF16": int(dtype == torch.bfloat16), "SPLITS": SPLITS, "THREADS": threads}
    function = nvrtc.load(SOURCE, "row_parallel", macros, device, take_shared(R, hidden, threads))
    return function.beside if ranks > 1 else function, threads


def take(
    memory: Tensor, up: Tensor | None, gates: Tensor | None, scales: Tensor | None, residual: Tensor, weight: Tensor,
    eps: float, on_kernel: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, total), `[1, N]` each, once every rank has given its partial sums.

    Args:
        memory: int64 `[ranks, N + R or more]` of this rank, or float32 `[N + R]`, the sums over ranks.
        up: int8 `[N, R]`, B; None without a compensator.
        gates: float16 `[1, 2 h R^2 + h R + R]`; None without gates.
        scales: as of `give`.
        residual, weight: float16 or bfloat16 `[1, N]` and `[N]`.
        eps: of the norm.
        on_kernel: whether the kernel computes it; by default where the memory is on a GPU.

    Raises:
        ValueError: tensors that do not fit together.
    """
    check_take((residual.shape, memory.shape), (residual, weight, scales, up, gates, memory))
    if not (memory.device.type == "cuda" if on_kernel is None else on_kernel):
        return take_reference(memory, up, gates, scales, residual, weight, eps)
    ranks = 1 if memory.dtype == torch.float32 else len(memory)
    rows, R = residual.shape[1], 0 if up is None else up.shape[1]
    hidden, stride = ec.hidden_of(gates, R) if R else 0, memory.shape[-1]
    function, threads = _take_plan(rows, residual.dtype, R, hidden, ranks, stride, residual.device)
    y, total = torch.empty_like(residual), torch.empty_like(residual)
    bits = struct.unpack("I", struct.pack("f", eps))[0]
    none = [residual if one is None else one for one in (up, gates, scales)]
    function(SPLITS, threads, memory, *none, residual, weight, bits, y, total)
    return y, total


check_sums = tensor_check(
    "row_parallel",
    {
        "residual": Argument(FLOATS, "1 N"),
        "weight": Argument("residual", "N"),
        "scales": Argument((torch.float32,), "1 2 R"),
        "up": Argument((torch.int8,), "N R", VECTOR),
        "gates": Argument((torch.float16,), "1 G", VECTOR),
    },
    lambda residual, *rest: not_on_gpu(residual, "residual"),
    optional=("scales", "up", "gates"),
)


@checked_once
def check_take(_: tuple, tensors: tuple) -> None:
    """Raise ValueError unless what `take` takes fits together: residual, weight, scales, up, gates and memory."""
    residual, weight, scales, up, gates, memory = tensors
    if up is not None and scales is None:
        raise ValueError("row_parallel: up has no scales")
    if up is None and gates is not None:
        raise ValueError("row_parallel: gates without up")
    check_sums(residual, weight, scales, up, gates)
    rows, R = residual.shape[1], 0 if up is None else up.shape[1]
    given = f"a {plain(memory.dtype)} tensor {list(memory.shape)} on {memory.device}"
    of_ranks = memory.dtype == torch.int64 and memory.ndim == 2 and 1 <= len(memory) <= MOST_RANKS
    summed = memory.dtype == torch.float32 and memory.ndim == 1
    sentence = ec.wrong_gates(gates, R)
    if not (of_ranks or summed) or memory.shape[-1] < rows + R or memory.device != residual.device:
        kinds = f"int64 [1 to {MOST_RANKS}, {rows + R} or more] or float32 [{rows + R} or more] on {residual.device}"
        sentence = f"memory must be {kinds}, not {given}"
    elif not memory.is_contiguous():
        sentence = f"memory must be contiguous, not a strided {given[2:]}"
    if sentence:
        raise ValueError(f"row_parallel: {sentence}")


def loads(
    packed: PackedWeight, R: int, hidden: int, ranks: Sequence[int], stride: int, dtype: torch.dtype,
    device: torch.device,
) -> list[Callable[[], object]]:  # fmt: skip
    """Calls that compile what products of one token of a shape launch, one kernel each (`nvrtc.jobs_of`).

    Args:
        packed: the weight; its tensors are not read.
        R, hidden: of its compensator, 0 without one.
        ranks: numbers of ranks that it is given to; 1 is a memory of one's own; none is a product of one rank.
        stride: values of a rank in memories that others write to.
        dtype, device: of the activations.
    """
    form = packed.bits, packed.group, packed.rows, packed.columns, packed.symmetric
    width = packed.columns + -packed.columns % 8
    calls = [partial(_product_plan, form, dtype, 0, device)]
    for count in ranks:
        values = packed.rows + R if count == 1 else stride
        calls.append(partial(_product_plan, form, dtype, count, device))
        calls.append(partial(_take_plan, packed.rows, dtype, R, hidden, count, values, device))
        if R:
            calls.append(partial(_latent_plan, width, dtype, R, count, device))
    return calls


# --- references -------------------------------------------------------------------------------------------------------


def reference(
    parts: Sequence[Part], up: Tensor | None, gates: Tensor | None, scales: Tensor | None, residual: Tensor,
    weight: Tensor, eps: float, collected: bool = False,
) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
    """(y, total) of each rank, which are the same, from sums in float32."""
    rows, R = residual.shape[1], 0 if up is None else up.shape[1]
    sums = torch.zeros(len(parts), rows + R, device=residual.device)
    for own, (x, packed, down) in zip(sums, parts):
        give_reference(x, packed, down, scales, [own])
    found = take_reference(sums.sum(0), up, gates, scales, residual, weight, eps)
    return [found] * (1 if collected else len(parts))


def give_reference(
    x: Tensor, packed: PackedWeight, down: Tensor | None, scales: Tensor | None, to: Sequence[Tensor]
) -> None:
    """What `give` does, in float32, into memories of this process."""
    values = x.float()
    sums = values @ dequantize(packed).T
    if down is not None:
        A = down[0, :, : packed.columns].float() * scales[0, 0, :, None]
        sums = torch.cat([sums, values @ A.T], 1)
    for memory in to:
        if memory.dtype == torch.float32:
            memory[: sums.shape[1]] = sums[0]
        else:
            memory[: sums.shape[1]] = MARK | (sums[0].view(torch.int32).long() & (MARK - 1))


def take_reference(
    memory: Tensor, up: Tensor | None, gates: Tensor | None, scales: Tensor | None, residual: Tensor, weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What `take` does; it waits for the marks of all partial sums.

    Raises:
        TimeoutError: a rank gave nothing for a minute.
    """
    rows, R = residual.shape[1], 0 if up is None else up.shape[1]
    sums = memory[None, : rows + R] if memory.dtype == torch.float32 else _marked(memory[:, : rows + R])
    total = sums.sum(0, keepdim=True)
    value, z = total[:, :rows], total[:, rows:]
    if up is not None:
        B = up.float() * scales[0, 1]
        if gates is not None:
            h = ec.hidden_of(gates, R)
            W1, W2, b1, b2 = gates[0].float().split([h * R * R, h * R * R, h * R, R])
            inner = torch.relu(z @ W1.view(h * R, R).T + b1)
            z = (1 + torch.tanh(inner @ W2.view(R, h * R).T + b2)) * z
        value = value + z @ B.T
    return rms_norm.reference(value.to(residual.dtype), weight, eps, residual)


def _marked(memory: Tensor) -> Tensor:
    """float32 values of a memory once all of them have marks, which are cleared."""
    end = time.monotonic() + PATIENCE
    while not bool((memory >> 32 == 1).all()):
        if time.monotonic() > end:
            raise TimeoutError(f"a rank gave no partial sums for {PATIENCE:.0f} s")
        time.sleep(1e-4)
    values = (memory & (MARK - 1)).to(torch.int64)
    values = torch.where(values >= MARK // 2, values - MARK, values).to(torch.int32).view(torch.float32)
    memory.zero_()
    return values
