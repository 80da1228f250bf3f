"""A linear layer on packed low-bit weights for any number of tokens: picks the fastest of three code paths.

    y[m, n] = sum_k x[m, k] * (q[n, k] - zero[n, group(k)]) * scale[n, group(k)]

    decode      `wna16_gemv.py`, one token, or a few where nothing else is measured: bound by the bytes of the weights
    gemm        `w4a16_gemm.py`, more tokens, from the same packed weights; where a few tokens more than its tiles hold
                would take a wave of thread blocks of their own, they are a second launch beside the first (beside.cuh)
    dequantize  `dequantize.py` and the library's matrix product, many tokens; 2 N K bytes of temporary memory, up to
                32 MiB of which stay with the device (`prepared.Scratch`)

The largest M for which each of the first two paths is used is data: `kernels/configs/<device>.json`, "linear", "w4 NxK"
(bits and shape, measured with groups of 128), or "default". Where the decode kernel, which multiplies in x's type, is
the faster one for more tokens in float16 than in bfloat16, "decode_fp16" says for how many. `LIMITS`: the largest M
each path supports.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from repro.kernels import dequantize as dense
from repro.kernels import w4a16_beside, w4a16_gemm, wna16_gemv
from repro.kernels.launch_config import launch_config
from repro.kernels.operators import HALVES, Argument, operator
from repro.kernels.packing import TENSORS, PackedWeight, misfit
from repro.kernels.prepared import Scratch, blank
from repro.kernels.w4a16_choice import configuration

CASES = w4a16_gemm.CASES  # the number of tokens selects the path
LIMITS = {"decode": 16, "gemm": 2048}
FALLBACK = {"decode": 8, "gemm": 128}  # largest M of a path on a device without measurements


def make_inputs(case: dict, device: torch.device | str = "cpu") -> tuple[Tensor, PackedWeight]:
    """x [M, K] and a random packed weight of one case."""
    return w4a16_gemm.make_inputs(case, device)


def reference(x: Tensor, packed: PackedWeight) -> Tensor:
    """y [M, N] in float32: dequantize, then multiply."""
    return w4a16_gemm.reference(x, packed)


def unsupported(device: torch.device | str) -> str | None:
    """Why this layer cannot run on `device`, or None if it can."""
    return next(filter(None, (kernel.unsupported(device) for kernel in (wna16_gemv, w4a16_gemm, dense))), None)


def path(x: Tensor, packed: PackedWeight) -> str:
    """The code path of `wna16(x, packed)`: "decode", "gemm" or "dequantize".

    Raises:
        ValueError: x `[..., K]` does not fit the weight.
    """
    tokens = _tokens(x, packed).shape[0]
    return path_of(tokens, packed.rows, packed.columns, packed.bits, packed.codes.device, x.dtype)


def _tokens(x: Tensor, packed: PackedWeight) -> Tensor:
    """x `[..., K]` as tokens `[M, K]`, contiguous; ValueError if it does not fit the weight."""
    if x.ndim == 0 or x.shape[-1] != packed.columns:
        raise ValueError(f"wna16: x {list(x.shape)} does not fit a weight of {packed.rows} x {packed.columns}")
    if x.ndim == 2 and x.is_contiguous():
        return x
    return x.reshape(-1, packed.columns).contiguous()


def path_of(tokens: int, rows: int, columns: int, bits: int, device: torch.device | str, dtype: torch.dtype) -> str:
    """The code path of tokens in a type for a layer `[rows, columns]` of codes of some bits on a device."""
    last = launch_config("linear", f"w{bits} {rows}x{columns}", device) or launch_config("linear", "default", device)
    last = last or FALLBACK
    decoded = last.get("decode_fp16", last["decode"]) if dtype == torch.float16 else last["decode"]
    for name, most in (("decode", decoded), ("gemm", last["gemm"])):
        if tokens <= min(most, LIMITS[name]):
            return name
    return "dequantize"


@lru_cache(maxsize=4096)
def known_path(tokens: int, rows: int, columns: int, bits: int, device: torch.device, dtype: torch.dtype) -> str:
    """`path_of`, looked up once a process: it takes a quarter of the host's time for `F.linear`."""
    return path_of(tokens, rows, columns, bits, device, dtype)


def on_cpu(
    x: Tensor, codes: Tensor, scale_zero: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool
) -> Tensor:
    """y [M, N] of the operator by the reference."""
    return reference(x, PackedWeight(codes, scale_zero, bits, group, rows, columns, symmetric)).to(x.dtype)


def on_cuda(
    x: Tensor, codes: Tensor, scale_zero: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool
) -> Tensor:
    """y [M, N] of the operator by the kernel of its code path, or by the library on the dense weight."""
    weight = codes, scale_zero, bits, group, rows, columns, symmetric
    return prepare(x, *weight)(x, *weight)


def prepare(
    x: Tensor, codes: Tensor, scale_zero: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool
) -> Callable[..., Tensor]:
    """The launch of the operator for calls like this one, by its code path."""
    weight = codes, scale_zero, bits, group, rows, columns, symmetric
    chosen = known_path(x.shape[0], rows, columns, bits, x.device, x.dtype)
    if chosen == "decode":
        return wna16_gemv.prepare(x, *weight)
    if chosen == "gemm":
        head = tokens_of_head(x, rows, columns, bits)
        return prepare_two(x, head, *weight[2:]) if head else w4a16_gemm.prepare(x, *weight)
    return prepare_dense(x.dtype, codes, *weight[2:])


def prepare_dense(
    dtype: torch.dtype, codes: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool
) -> Callable[..., Tensor]:
    """The launch that unpacks codes like these, and the library's product, which `F.linear` would be."""
    write = dense.writer(codes, bits, group, rows, columns, symmetric, dtype)
    memory = Scratch(dtype, (columns, rows), (1, columns))  # W^T, which takes a call less than W's view

    def launch(x: Tensor, codes: Tensor, scale_zero: Tensor, *_: object) -> Tensor:
        transposed = memory.take(scale_zero)
        write(codes, scale_zero, transposed)
        y = product(x, transposed)
        memory.give_back(transposed)
        return y

    return launch


def product(x: Tensor, transposed: Tensor) -> Tensor:
    """x W^T of two matrices in their type, also where autocast would take another for the library's product."""
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return torch.mm(x, transposed)
    return torch.mm(x, transposed)


def tokens_of_head(x: Tensor, rows: int, columns: int, bits: int) -> int:
    """How many tokens of x have a launch of their own, with the others beside them; 0 for one launch."""
    if not w4a16_gemm.is_aligned(x):
        return 0
    return w4a16_beside.tokens_of_head(x.shape[0], rows, columns, bits, x.device)


def launch_two(x: Tensor, packed: PackedWeight, head: int, tail: dict | None = None) -> Tensor:
    """y [M, N] by two launches beside each other, unchecked; arguments as of `prepare_two`."""
    form = packed.bits, packed.group, packed.rows, packed.columns, packed.symmetric
    return prepare_two(x, head, *form, tail)(x, packed.codes, packed.scale_zero)


def prepare_two(
    x: Tensor, head: int, bits: int, group: int, rows: int, columns: int, symmetric: bool, tail: dict | None = None
) -> Callable[..., Tensor]:
    """Two launches for activations like x: the first `head` tokens, and beside them the others.

    The second one's configuration is `tail`, or that which is chosen for it.
    """
    form, count = (bits, group, rows, columns, symmetric), x.shape[0] - head
    config = configuration(head, rows, columns, bits, x.device)
    kernel, first = w4a16_gemm.planned(x, head, *form, config, "HEAD")
    if count <= w4a16_beside.MOST_DECODED:
        second = wna16_gemv.tail(x, head, *form)
    else:
        tail = tail or configuration(count, rows, columns, bits, x.device, beside=True)
        _, second = w4a16_gemm.planned(x, count, *form, tail, "TAIL", head)
    write = kernel.in_a_row(("x", "codes", "scale_zero", "y"), (first, second))
    made = blank(x.dtype, x.shape[0], rows)

    def launch(x: Tensor, codes: Tensor, scale_zero: Tensor, *_: object) -> Tensor:
        y = made(x)
        write(x, codes, scale_zero, y)
        return y

    return launch


def limit(
    x: Tensor, codes: Tensor, scale_zero: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool
) -> str | None:
    """What is wrong with checked arguments, or None."""
    if x.shape[1] != columns:
        return f"x {list(x.shape)} does not fit a weight of {rows} x {columns}"
    return misfit(codes.shape, scale_zero.shape, bits, group, rows, columns, symmetric)


# One operator around the choice, so that a graph that `torch.compile` makes holds for any number of tokens.
OPERATOR = operator(
    "wna16",
    on_cpu,
    on_cuda,
    {"x": Argument(HALVES, "M K"), **TENSORS},
    empty=lambda x, codes, scale_zero, bits, group, rows, *_: x.new_empty(x.shape[0], rows),
    limit=limit,
    prepare=prepare,
)


def wna16(x: Tensor, packed: PackedWeight) -> Tensor:
    """y `[..., N]` = x W^T in x's type; none for no tokens.

    Args:
        x: float16 or bfloat16 `[..., K]` in any layout.
        packed: the weight `[N, K]`, 2, 4 or 8 bits, on the device of x.

    Raises:
        ValueError: shapes, types or devices that do not fit.
    """
    form = packed.bits, packed.group, packed.rows, packed.columns, packed.symmetric
    if x.ndim == 2 and x.is_contiguous() and x.numel():
        return OPERATOR(x, packed.codes, packed.scale_zero, *form)
    tokens = _tokens(x, packed)
    if tokens.shape[0] == 0:
        if not torch.compiler.is_compiling():
            OPERATOR.check((x.new_empty(1, packed.columns), packed.codes, packed.scale_zero, *form))
        return x.new_empty(*x.shape[:-1], packed.rows)
    return OPERATOR(tokens, packed.codes, packed.scale_zero, *form).view(*x.shape[:-1], packed.rows)


def into(x: Tensor, packed: PackedWeight, y: Tensor) -> None:
    """Write x W^T of one token `[1, K]` into y `[1, N]`, a slice of a longer row; as `wna16`, without a copy.

    Raises:
        ValueError: shapes, types or devices that do not fit together.
    """
    if known_path(1, packed.rows, packed.columns, packed.bits, x.device, x.dtype) == "decode":
        wna16_gemv.into(x.contiguous(), packed, y)
    else:
        wna16_gemv.check_into(x.contiguous(), packed, y)
        y.copy_(wna16(x, packed))


w2a16 = w4a16 = w8a16 = wna16  # the bits are those of the packed weight
