"""Unpack low-bit weights to a dense matrix, for the library's matrix product at many tokens.

    w[n, k] = (q[n, k] - zero[n, group(k)]) * scale[n, group(k)]

codes, scale_zero: as in `packing.py`, of 2, 4 or 8 bits. w: fp16 or bf16 [N, K], the fp32 value rounded once. Bytes
moved: the packed weights + 2 N K; a subtraction and a product per weight. A warp unpacks one block of 16 rows with
16-byte stores of eight neighbouring columns (`dequantize` in `w4a16_gemm.cu`, which shares the layout's helpers).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from repro.kernels import nvrtc, packing
from repro.kernels.launch_config import lacks
from repro.kernels.operators import HALVES, operator, plain
from repro.kernels.prepared import blank
from repro.kernels.w4a16_gemm import random_weight
from repro.kernels.w4a16_plans import SOURCE, format_defines

CASES = [  # rows, columns (Llama 3.2 1B, 3.1 8B and ragged ones), bits, group, symmetric, dtype, seed
    {"N": 2048, "K": 2048, "bits": 4, "group": 128, "symmetric": False, "dtype": "bfloat16", "seed": 0},
    {"N": 4096, "K": 4096, "bits": 4, "group": 64, "symmetric": True, "dtype": "float16", "seed": 1},
    {"N": 130, "K": 672, "bits": 4, "group": 32, "symmetric": False, "dtype": "float16", "seed": 2},
    {"N": 127, "K": 1001, "bits": 2, "group": 0, "symmetric": False, "dtype": "bfloat16", "seed": 3},
    {"N": 100, "K": 644, "bits": 8, "group": 0, "symmetric": True, "dtype": "bfloat16", "seed": 4},
]
WARPS = 4


def make_inputs(case: dict, device: torch.device | str = "cpu") -> packing.PackedWeight:
    """A random packed weight of one case."""
    return random_weight(case).to(device)


def reference(packed: packing.PackedWeight) -> Tensor:
    """w [N, K] in float32."""
    return packing.dequantize(packed)


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("dequantize", device) or nvrtc.unavailable()


def launch(packed: packing.PackedWeight, dtype: torch.dtype) -> Tensor:
    """Run the kernel on `packed`, which is not checked."""
    form = packed.bits, packed.group, packed.rows, packed.columns, packed.symmetric
    return on_cuda(packed.codes, packed.scale_zero, *form, dtype)


def prepare(
    codes: Tensor, scale_zero: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool,
    dtype: torch.dtype,
) -> Callable[..., Tensor]:  # fmt: skip
    """The launch of the operator for weights like this one; it takes `codes` and `scale_zero` first."""
    write = writer(codes, bits, group, rows, columns, symmetric, dtype)
    allocate = blank(dtype, rows, columns)

    def launch(codes: Tensor, scale_zero: Tensor, *_: object) -> Tensor:
        w = allocate(scale_zero)
        write(codes, scale_zero, w)
        return w

    return launch


def writer(
    codes: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """The launch for weights with codes like these; it takes `codes`, `scale_zero` and memory of w, row by row."""
    kernel = nvrtc.load(SOURCE, "dequantize", format_defines(bits, group, symmetric, dtype), codes.device)
    grid = -(-codes.shape[0] * codes.shape[1] // WARPS)
    groups = columns // group if group else 1
    step = kernel.step(grid, 32 * WARPS, ("codes", "scale_zero", "w", rows, columns, groups))
    return kernel.in_a_row(("codes", "scale_zero", "w"), (step,))


def on_cpu(
    codes: Tensor, scale_zero: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """w [N, K] of the operator by the reference."""
    return reference(packing.PackedWeight(codes, scale_zero, bits, group, rows, columns, symmetric)).to(dtype)


def on_cuda(
    codes: Tensor, scale_zero: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """w [N, K] of the operator by the kernel."""
    return prepare(codes, scale_zero, bits, group, rows, columns, symmetric, dtype)(codes, scale_zero)


def limit(
    codes: Tensor, scale_zero: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool,
    dtype: torch.dtype,
) -> str | None:  # fmt: skip
    """What is wrong with checked arguments, or None."""
    if dtype not in HALVES:
        return f"dtype is {plain(dtype)} for a weight of {rows} x {columns}, expected float16 or bfloat16"
    return packing.misfit(codes.shape, scale_zero.shape, bits, group, rows, columns, symmetric)


dequantize = operator(
    "dequantize",
    on_cpu,
    on_cuda,
    packing.TENSORS,
    empty=lambda codes, scale_zero, bits, group, rows, columns, symmetric, dtype: codes.new_empty(
        (rows, columns), dtype=dtype
    ),
    limit=limit,
    prepare=prepare,
)
