"""Unpack low-bit weights to a dense matrix, for the library's matrix product at many tokens.

    w[n, k] = (q[n, k] - zero[n, group(k)]) * scale[n, group(k)]

codes, scale_zero: as in `packing.py`, of 2, 4 or 8 bits. w: fp16 or bf16 [N, K], the fp32 value rounded once. Bytes
moved: the packed weights + 2 N K; a subtraction and a product per weight. A warp unpacks one block of 16 rows with
16-byte stores of eight neighbouring columns (`dequantize` in `w4a16_gemm.cu`, which shares the layout's helpers).
"""

import torch
from torch import Tensor

from repro.kernels import nvrtc, packing
from repro.kernels.launch_config import lacks
from repro.kernels.w4a16_gemm import SOURCE, check_weight, format_defines, random_weight

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
    w = torch.empty(packed.rows, packed.columns, dtype=dtype, device=packed.codes.device)
    kernel = nvrtc.load(SOURCE, "dequantize", format_defines(packed, dtype), w.device)
    blocks = packed.codes.shape[0] * packed.codes.shape[1]
    kernel(-(-blocks // WARPS), 32 * WARPS, packed.codes, packed.scale_zero, w, *w.shape, packed.groups)
    return w


@torch.library.custom_op("lowbit::dequantize", mutates_args=())
def dequantize(
    codes: Tensor,
    scale_zero: Tensor,
    bits: int,
    group: int,
    rows: int,
    columns: int,
    symmetric: bool,
    dtype: torch.dtype,
) -> Tensor:
    """w `[rows, columns]` in `dtype`, float16 or bfloat16; the packed arguments are those of `packing.PackedWeight`.

    Raises:
        ValueError: tensors that do not fit `rows` x `columns`, or another dtype.
    """
    return launch(check_weight("dequantize", codes, scale_zero, bits, group, rows, columns, symmetric, dtype), dtype)


@dequantize.register_kernel("cpu")
def _(codes, scale_zero, bits, group, rows, columns, symmetric, dtype):  # noqa: ANN001, ANN202
    packed = check_weight("dequantize", codes, scale_zero, bits, group, rows, columns, symmetric, dtype)
    return packing.dequantize(packed).to(dtype)


@dequantize.register_fake
def _(codes, scale_zero, bits, group, rows, columns, symmetric, dtype):  # noqa: ANN001, ANN202
    return codes.new_empty((rows, columns), dtype=dtype)
