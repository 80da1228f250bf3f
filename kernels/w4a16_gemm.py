"""Low-bit GEMM for small batches, verification and short prompts, directly on the packed weights of `packing.py`.

    y[m, n] = sum_k x[m, k] * (q[n, k] - zero[n, group(k)]) * scale[n, group(k)]

x: fp16 or bf16 [M, K], M = 1 … 2048 (`linear.py` uses the decode kernel for one token, or few, and dequantizes for
larger M).
Weights of 4 bits (2 and 8 too), groups of 32, 64, 128 columns or one per row, symmetric or not. y: [M, N] in x's type,
summed in fp32. Bytes moved: packed weights + 2 M (K + N); operations: 2 M N K.

Algorithm of one thread block (`w4a16_gemm.cu`): WR x WK warps own 16 RT rows each; the WK warps of the same rows split
the columns of a stage. Packed weights, in the order of `mma.m16n8k16`'s A operand, their scales and MT tokens of x are
copied to shared memory several stages ahead, to keep enough bytes in flight. A lane unpacks in registers: (code - zero)
is exact in the activations' type (for bf16 a non-integer zero is rounded to 8 bits). One 16-byte read of x feeds two
k-steps. The products of one group are summed separately and multiplied by the group's scale in fp32; with SCALED the
weights are multiplied by it in the activations' type, which rounds once more (in fp16 scales must be below 128).
With KNOWN the columns are a constant of the source if they and the rows divide into whole tiles: 6 to 13 % fewer
instructions, those of addresses and of the ends. If shared memory then has a place for each stage of a thread block,
all are copied at once, one more than a ring lets be on its way, and the loop over them is unrolled.

`w4a16_wgmma.cu` runs if a configuration has WGS, on compute capability 9.0: a warpgroup holds 64 rows of A in
registers, SCALED unless a configuration says 0, and shares each read of x. Producer warps load x; the others unpack
while the tensor cores multiply what they unpacked before. With KNOWN the loop is unrolled (`turns.cuh`) if the columns
divide into whole stages: a third fewer instructions a stage. Where scales multiply the sums of groups, two groups take
turns: the tensor cores work on one while the sums of the other are scaled. Sums that do not fit into shared memory
beside the stages lie where those did, when all thread blocks of a cluster have read theirs.

A tile of tokens is no larger than they need: of 65 tokens and a configuration for 128 it has 72.

`w4a16_multicast.cu` runs if a configuration has PAIR, for more than 64 tokens on the same devices: up to 352 tokens
share what is unpacked, and x is copied by tensor maps, one thread instead of four warps that pass it through
registers. Two warpgroups have registers for the sums of 352 tokens, three for 192, four for 128, or for 160 if the
thread that copies is one of theirs (PRODUCER 0). Which is fastest depends on how many waves of 128, 192 or 256 rows
fill the SMs.

SPLIT thread blocks of a cluster split K. Each adds up and stores a part of the sums: what the others have of it, added
up over their warps, they send to its shared memory. The order is always the same: no workspace, and bitwise
reproducible results.

    w4a16_tiles.py       the configurations there are
    w4a16_plans.py       what a source is compiled and launched with for a configuration and a shape
    w4a16_estimates.py   how long that is estimated to take
    w4a16_choice.py      which configuration is taken
    w4a16_beside.py      whether two launches beside each other are faster than one
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from repro.kernels import nvrtc, packing
from repro.kernels.launch_config import lacks
from repro.kernels.launches import Mapped, Parameter, Step, behind
from repro.kernels.operators import HALVES, VECTOR, Argument, operator
from repro.kernels.prepared import blank
from repro.kernels.w4a16_choice import configuration
from repro.kernels.w4a16_plans import MULTICAST_SOURCE, box_rows, format_defines, plan_of, uses_wgmma
from repro.kernels.w4a16_tiles import CANDIDATES, MAX_ROWS

SPACE = [candidate.config for candidate in itertools.chain.from_iterable(CANDIDATES.values())]

CASES = [  # tokens, rows, columns (Llama 3.2 1B, 3.1 8B, 2 13B and ragged ones), bits, group, symmetric, dtype, seed
    {"M": 16, "N": 2048, "K": 8192, "bits": 4, "group": 128, "symmetric": False, "dtype": "float16", "seed": 0},
    {"M": 64, "N": 4096, "K": 14336, "bits": 4, "group": 128, "symmetric": False, "dtype": "bfloat16", "seed": 1},
    {"M": 256, "N": 5120, "K": 5120, "bits": 4, "group": 64, "symmetric": True, "dtype": "float16", "seed": 2},
    {"M": 2048, "N": 1024, "K": 4096, "bits": 4, "group": 128, "symmetric": True, "dtype": "bfloat16", "seed": 3},
    {"M": 33, "N": 127, "K": 416, "bits": 4, "group": 32, "symmetric": False, "dtype": "bfloat16", "seed": 4},
    {"M": 19, "N": 129, "K": 1001, "bits": 4, "group": 0, "symmetric": False, "dtype": "float16", "seed": 5},
    {"M": 65, "N": 300, "K": 1536, "bits": 2, "group": 64, "symmetric": False, "dtype": "float16", "seed": 6},
    {"M": 17, "N": 300, "K": 1032, "bits": 8, "group": 0, "symmetric": True, "dtype": "bfloat16", "seed": 7},
    {"M": 300, "N": 384, "K": 1024, "bits": 4, "group": 128, "symmetric": False, "dtype": "bfloat16", "seed": 8},
    {"M": 24, "N": 256, "K": 1536, "bits": 4, "group": 64, "symmetric": True, "dtype": "float16", "seed": 9},
]


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
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("w4a16_gemm", device) or nvrtc.unavailable()


def is_aligned(x: Tensor) -> bool:
    """Whether rows of x begin at multiples of 16 bytes."""
    return x.shape[1] % 8 == 0 and x.is_contiguous() and x.data_ptr() % VECTOR == 0


def _aligned(x: Tensor) -> Tensor:
    """x with rows aligned to 16 bytes, padded with zeros."""
    if not is_aligned(x):
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % 8)).clone(memory_format=torch.contiguous_format)
    return x


def launch(x: Tensor, packed: packing.PackedWeight, config: dict) -> Tensor:
    """One launch with one configuration of SPACE; y `[M, N]`. Arguments as in the operator, unchecked.

    Raises:
        ValueError: the configuration is for compute capability 9.0 and the device has another.
    """
    form = packed.bits, packed.group, packed.rows, packed.columns, packed.symmetric
    return prepared(x, *form, config)(x, packed.codes, packed.scale_zero)


def prepared(
    x: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool, config: dict
) -> Callable[..., Tensor]:
    """The launch with one configuration for activations like x; it takes x, codes and scale_zero first."""
    kernel, step = planned(x, x.shape[0], bits, group, rows, columns, symmetric, config)
    write = kernel.in_a_row(("x", "codes", "scale_zero", "y"), (step,))
    aligned, made = is_aligned(x), blank(x.dtype, x.shape[0], rows)

    def launch(x: Tensor, codes: Tensor, scale_zero: Tensor, *_: object) -> Tensor:
        x = x if aligned else _aligned(x)
        y = made(x)
        write(x, codes, scale_zero, y)
        return y

    return launch


def planned(
    x: Tensor, count: int, bits: int, group: int, rows: int, columns: int, symmetric: bool, config: dict,
    part: str = "", before: int = 0,
) -> tuple[nvrtc.Function, Step]:  # fmt: skip
    """The kernel for `count` tokens of activations like x, and its launch with x, codes, scale_zero and y.

    Args:
        x: float16 or bfloat16 `[M, K]`; what the launch gets has rows that are aligned to 16 bytes.
        count: tokens, at most M.
        bits, group, rows, columns, symmetric: of the weight.
        config: one of SPACE.
        part: "HEAD" or "TAIL" of two launches that run beside each other (beside.cuh), or all.
        before: tokens of x and y before those of the launch.
    """
    capability = torch.cuda.get_device_capability(x.device)
    if uses_wgmma(config) and capability != (9, 0):
        raise ValueError(f"w4a16_gemm: {config} is for compute capability 9.0, this device has {capability}")
    if capability < (9, 0):  # no clusters
        config = config | {"SPLIT": 1}
    form = bits, group, symmetric
    source, plan = plan_of(config, count, rows, columns, form, capability)
    macros = format_defines(*form, x.dtype) | plan.macros | ({part: 1} if part else {})
    kernel = nvrtc.load(source, "gemm", macros, x.device, plan.shared)
    padded, groups = columns + -columns % 8, columns // group if group else 1
    if source == MULTICAST_SOURCE:
        box = box_rows(plan.macros)
        tokens: Parameter = Mapped("x", lambda x: nvrtc.TensorMap(x[before:], box))
    else:
        tokens = behind("x", before * columns * x.element_size())
    y = behind("y", before * rows * x.element_size())
    parameters = tokens, "codes", "scale_zero", y, count, rows, padded, groups
    return kernel, kernel.step(plan.grid, plan.threads, parameters, beside=part == "TAIL")


def on_cpu(
    x: Tensor, codes: Tensor, scale_zero: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool
) -> Tensor:
    """y [M, N] of the operator by the reference."""
    return reference(x, packing.PackedWeight(codes, scale_zero, bits, group, rows, columns, symmetric)).to(x.dtype)


def on_cuda(
    x: Tensor, codes: Tensor, scale_zero: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool
) -> Tensor:
    """y [M, N] of the operator by the kernel, with its tuned configuration."""
    return prepare(x, codes, scale_zero, bits, group, rows, columns, symmetric)(x, codes, scale_zero)


def prepare(
    x: Tensor, codes: Tensor, scale_zero: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool
) -> Callable[..., Tensor]:
    """The launch of the operator for calls like this one, with its tuned configuration."""
    config = configuration(x.shape[0], rows, columns, bits, x.device)
    return prepared(x, bits, group, rows, columns, symmetric, config)


def limit(
    x: Tensor, codes: Tensor, scale_zero: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool
) -> str | None:
    """What is wrong with checked arguments, or None."""
    if x.shape[1] != columns or x.shape[0] > MAX_ROWS:
        return f"x is {list(x.shape)}, expected [1 to {MAX_ROWS}, {columns}]"
    return packing.misfit(codes.shape, scale_zero.shape, bits, group, rows, columns, symmetric)


w4a16_gemm = operator(
    "w4a16_gemm",
    on_cpu,
    on_cuda,
    {"x": Argument(HALVES, "M K"), **packing.TENSORS},
    empty=lambda x, codes, scale_zero, bits, group, rows, *_: x.new_empty(x.shape[0], rows),
    limit=limit,
    prepare=prepare,
)
