"""Low-bit GEMM for small batches, verification and short prompts, on the packed weights of `packing.py` as they are.

    y[m, n] = sum_k x[m, k] * (q[n, k] - zero[n, group(k)]) * scale[n, group(k)]

x: fp16 or bf16 [M, K], M = 1 … 2048 (`linear.py` knows below which M the decode kernel and above which M dequantizing
wins). Weights of 4 bits (2 and 8 too), groups of 32, 64, 128 or one per row, symmetric or not. y: [M, N] in x's type,
summed in fp32. Bytes moved: packed weights + 2 M (K + N); operations: 2 M N K.

How one program works (`w4a16_gemm.cu`): WR x WK warps own 16 RT rows each; the WK share the columns of a stage. A lane
loads its weights from device memory in the order of `mma.m16n8k16`'s A operand, 16 bytes at a time, one stage ahead and
never through shared memory. Activations, MT tokens x KS columns a stage, come through shared memory with `cp.async`;
one 16-byte read feeds two steps of the matrix unit. (code - zero) is exact in the activations' type (for bf16 a zero
that is no integer is rounded to 8 bits). The products of one group are summed by themselves and folded with their scale
in fp32, or, with SCALED, scales go into the weights in the activations' type, which takes fewer registers and one more
rounding (in fp16 they must be below 128). SPLIT programs of a cluster share K and add their sums through each other's
shared memory, always in the same order: no workspace, the same bits every time.
"""

from pathlib import Path

import torch
from torch import Tensor

from repro.kernels import nvrtc, packing
from repro.kernels.launch_config import lacks, launch_config

SOURCE = Path(__file__).with_suffix(".cu")

CASES = [  # tokens, rows, columns (Llama 3.2 1B, 3.1 8B, 2 13B and ragged ones), bits, group, symmetric, dtype, seed
    {"M": 16, "N": 2048, "K": 8192, "bits": 4, "group": 128, "symmetric": False, "dtype": "float16", "seed": 0},
    {"M": 64, "N": 4096, "K": 14336, "bits": 4, "group": 128, "symmetric": False, "dtype": "bfloat16", "seed": 1},
    {"M": 256, "N": 5120, "K": 5120, "bits": 4, "group": 64, "symmetric": True, "dtype": "float16", "seed": 2},
    {"M": 2048, "N": 1024, "K": 4096, "bits": 4, "group": 128, "symmetric": True, "dtype": "bfloat16", "seed": 3},
    {"M": 33, "N": 127, "K": 416, "bits": 4, "group": 32, "symmetric": False, "dtype": "bfloat16", "seed": 4},
    {"M": 19, "N": 129, "K": 1001, "bits": 4, "group": 0, "symmetric": False, "dtype": "float16", "seed": 5},
    {"M": 65, "N": 300, "K": 1536, "bits": 2, "group": 64, "symmetric": False, "dtype": "float16", "seed": 6},
    {"M": 17, "N": 300, "K": 1032, "bits": 8, "group": 0, "symmetric": True, "dtype": "bfloat16", "seed": 7},
]
CONSTANTS = ("MT", "RT", "WR", "WK", "KS", "STAGES", "BLOCKS", "SCALED", "SPLIT")  # of the source: a configuration
TILES = [  # all of CONSTANTS but SPLIT
    (16, 1, 2, 4, 512, 3, 2, 0), (16, 1, 1, 8, 1024, 3, 1, 0), (16, 1, 4, 4, 1024, 2, 1, 0),
    (16, 2, 4, 1, 256, 4, 2, 0), (16, 1, 7, 4, 512, 3, 1, 0), (16, 1, 6, 4, 512, 3, 1, 0),
    (32, 1, 4, 2, 256, 3, 2, 0), (32, 1, 2, 4, 512, 2, 2, 0), (32, 2, 2, 4, 512, 3, 1, 0),
    (32, 2, 4, 3, 384, 3, 1, 0), (32, 3, 2, 4, 512, 3, 1, 0),
    (64, 1, 4, 2, 256, 3, 2, 1), (64, 1, 4, 4, 256, 3, 1, 1), (64, 2, 4, 2, 256, 3, 1, 0),
    (64, 3, 4, 2, 256, 3, 1, 1), (64, 4, 4, 2, 256, 4, 1, 1),
    (128, 2, 4, 2, 256, 3, 1, 1), (128, 2, 8, 1, 128, 3, 1, 1),
]  # fmt: skip
MOST_SHARED = 232448  # bytes of a program on sm_90 and sm_100; sm_80 takes what needs less
SPACE = [dict(zip(CONSTANTS, (*tile, split))) for tile in TILES for split in (1, 2, 3, 4, 5, 6, 7, 8)]


def random_weight(case: dict) -> packing.PackedWeight:
    """A random packed weight `[N, K]` of one case."""
    generator = torch.Generator().manual_seed(case["seed"])
    n, k, bits, group = (case[name] for name in ("N", "K", "bits", "group"))
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=generator)
    scales = torch.rand(n, k // group if group else 1, generator=generator) * 0.02 + 0.001
    zeros = torch.randint(0, 1 << bits, scales.shape, generator=generator).float()
    return packing.pack(codes, scales, None if case["symmetric"] else zeros, bits, group)


def make_inputs(case: dict, device: torch.device | str = "cpu") -> tuple[Tensor, packing.PackedWeight]:
    """x [M, K] and a random packed weight of one case."""
    x = torch.randn(case["M"], case["K"], generator=torch.Generator().manual_seed(case["seed"] + 1))
    return x.to(device, getattr(torch, case["dtype"])), random_weight(case).to(device)


def reference(x: Tensor, packed: packing.PackedWeight) -> Tensor:
    """y [M, N] in float32: dequantize, then multiply."""
    return x.float() @ packing.dequantize(packed).T


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None where it can."""
    return lacks("w4a16_gemm", device) or nvrtc.unavailable()


def heuristic(m: int, n: int, k: int) -> dict:
    """A configuration for a shape without a recorded one: as many programs as fit on 128 multiprocessors."""
    tile = TILES[0 if m <= 16 else 6 if m <= 32 else 11]
    config = dict(zip(CONSTANTS, (*tile, 1)))
    programs = -(-m // config["MT"]) * -(-n // (16 * config["RT"] * config["WR"]))
    most = min(8, -(-k // config["KS"]), 128 * config["BLOCKS"] // programs)
    return config | {"SPLIT": max(1, most)}


TOKENS = (16, 32, 64, 128, 256)  # numbers of tokens that have configurations of their own


def tuning_key(case: dict) -> str:
    """The key of a case in the device's file: shape and the next recorded number of tokens."""
    tokens = next((t for t in TOKENS if case["M"] <= t), TOKENS[-1])
    return f"{case['N']}x{case['K']} m{tokens}"


def configuration(m: int, n: int, k: int, device: torch.device | str) -> dict:
    """The recorded configuration, or the heuristic's."""
    return launch_config("w4a16_gemm", tuning_key({"M": m, "N": n, "K": k}), device) or heuristic(m, n, k)


def fitted(config: dict, bits: int) -> dict:
    """`config` for `bits`: a warp's columns of a stage are whole packed blocks, and not too many of 8 bits."""
    columns = config["KS"] // config["WK"]
    columns = max(columns, packing.block_columns(bits)) if bits < 8 else min(columns, 128)
    config = config | {"KS": columns * config["WK"]}
    while shared_bytes(config) > MOST_SHARED and config["STAGES"] > 2:
        config["STAGES"] -= 1
    return config


def shared_bytes(config: dict) -> int:
    """Dynamic shared memory of a program: the stages of x, and afterwards its sums."""
    sums = config["MT"] * (16 * config["RT"] * config["WR"] + 4) * 4
    return max(config["STAGES"] * config["MT"] * config["KS"] * 2, sums)


def check_weight(
    name: str, codes: Tensor, scale_zero: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool,
    dtype: torch.dtype,
) -> packing.PackedWeight:  # fmt: skip
    """The packed weight of an operator's arguments; ValueError where they, or the activations' type, do not fit."""
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"{name}: {dtype} for a weight of {rows} x {columns}, expected float16 or bfloat16")
    packed = packing.PackedWeight(codes, scale_zero, bits, group, rows, columns, symmetric)
    if scale_zero.device != codes.device or not codes.is_contiguous() or not scale_zero.is_contiguous():
        raise ValueError(
            f"{name}: codes {list(codes.shape)} on {codes.device} and scales {list(scale_zero.shape)} on "
            f"{scale_zero.device} must be contiguous on one device"
        )
    return packed


def format_defines(packed: packing.PackedWeight, dtype: torch.dtype) -> dict[str, int]:
    """The compile-time constants of `w4a16_gemm.cu` that a weight and the activations' type decide."""
    return {
        "BITS": packed.bits,
        "GROUP": packed.group,
        "SYMMETRIC": int(packed.symmetric),
        "BF16": int(dtype == torch.bfloat16),
    }


def launch(x: Tensor, packed: packing.PackedWeight, config: dict) -> Tensor:
    """One launch with one configuration of SPACE; y `[M, N]`. Arguments as in the operator, not checked again."""
    m, config = x.shape[0], fitted(config, packed.bits)
    if packed.columns % 8 or not x.is_contiguous() or x.data_ptr() % 16:  # rows of x begin at multiples of 16 bytes
        x = torch.nn.functional.pad(x, (0, -packed.columns % 8)).clone(memory_format=torch.contiguous_format)
    if torch.cuda.get_device_capability(x.device) < (9, 0):  # no clusters
        config = config | {"SPLIT": 1}
    rows = 16 * config["RT"] * config["WR"]
    programs = -(-m // config["MT"]) * -(-packed.rows // rows) * config["SPLIT"]
    defines = format_defines(packed, x.dtype) | {name: config[name] for name in CONSTANTS}
    kernel = nvrtc.load(SOURCE, "gemm", defines, x.device, shared_bytes(config))
    y = torch.empty(m, packed.rows, dtype=x.dtype, device=x.device)
    arguments = (x, packed.codes, packed.scale_zero, y, m, packed.rows, x.shape[1], packed.groups)
    kernel(programs, 32 * config["WR"] * config["WK"], *arguments)
    return y


@torch.library.custom_op("lowbit::w4a16_gemm", mutates_args=())
def w4a16_gemm(
    x: Tensor, codes: Tensor, scale_zero: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool
) -> Tensor:
    """y `[M, rows]` = x W^T in x's type.

    Args:
        x: float16 or bfloat16 `[M, columns]`.
        codes, scale_zero, bits, group, rows, columns, symmetric: as in `packing.PackedWeight`.

    Raises:
        ValueError: tensors that do not fit each other.
    """
    packed = check(x, codes, scale_zero, bits, group, rows, columns, symmetric)
    if x.shape[0] == 0:
        return x.new_empty(0, rows)
    return launch(x, packed, configuration(x.shape[0], rows, columns, x.device))


def check(x: Tensor, codes: Tensor, *weight: object) -> packing.PackedWeight:
    """The packed weight of the operator's arguments; ValueError where x or they do not fit."""
    packed = check_weight("w4a16_gemm", codes, *weight, x.dtype)
    if x.ndim != 2 or x.shape[1] != packed.columns or x.device != codes.device:
        raise ValueError(
            f"w4a16_gemm: x {list(x.shape)} on {x.device} does not fit a weight of "
            f"{packed.rows} x {packed.columns} on {codes.device}"
        )
    return packed


@w4a16_gemm.register_kernel("cpu")
def _(x, codes, scale_zero, bits, group, rows, columns, symmetric):  # noqa: ANN001, ANN202
    return reference(x, check(x, codes, scale_zero, bits, group, rows, columns, symmetric)).to(x.dtype)


@w4a16_gemm.register_fake
def _(x, codes, scale_zero, bits, group, rows, columns, symmetric):  # noqa: ANN001, ANN202
    return x.new_empty((x.shape[0], rows))
