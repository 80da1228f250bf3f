"""Q4_K in zigzag times one token, all of its inputs: SpQt's dense kernel (arXiv 2511.04477, section 4.2).

    y[256 R + r] = sum_k w[R, k, r] x[k],    r = 0 ... 255, of the bands R of 256 rows

x: fp16 or bf16 [1, K], on a CPU float32 as well; codes and headers in zigzag and two planes (`q4_k_planes.py`), K any
number; y: [1, N] like x, N = `rows`, of which a last band may have fewer than 256. Bytes moved: 144 K ceil(N / 256) +
(K + N) sizes of x; operations 2 N K. `zigzag_sparse.py` and `zigzag_masked.py` run the same kernel over a part of the
columns.

A warp reads 16 columns of a band at a time by asynchronous copies, eight neighbouring lanes a line of 128 bytes, into a
ring of its own. Codes are operand A of `mma.m16n8k16` as they are, float16 subnormals; operand B is x d scale by
sub-block, in float16 with a power of two that follows the largest x d, so that one product has 16 columns of 16 rows
and no sum needs another scale. d minimum x is a float32 sum a sub-block. That rounds to 11 bits twice, x d and its
product with the scale: about 3.5e-4 of the result, too much for an x in float32.

A band has only one vector of results, so that `n1` programs (the paper's threadgroups) of `n2` warps (its simdgroups)
divide its columns, or its listed ones evenly, which is SpQt's load balance (section 4.2.3); above a threshold every
program has as many columns of which it skips some. Each sums its columns in float32. Then either the last one that
arrives at a band joins the sums of all: `ordered` keeps them apart in memory and adds them up by their number, which
gives the same bits at every run; without it every program adds to one vector by atomics. Or, with `cluster` in the
configuration (compute capability 9.0 and later), the programs of a band are a cluster and send each other their sums,
in a fixed order in any case: about 1 us less than the best without at 56 and 112 bands, slower at 16 and 32 (H100).
With `posts` the programs of a band are all on the device at once (a cooperative launch), each adds up a share of its
rows, and the others write their sums into memory that it reads until they are there, in a fixed order too: no fence, no
ticket, 0.5 us less than with them at 16 and 32 bands (H200).
"""

import struct
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from repro.kernels import nvrtc
from repro.kernels import q4_k_planes as planes
from repro.kernels.launch_config import lacks, launch_config, processors
from repro.kernels.operators import operator
from repro.kernels.prepared import blank
from repro.kernels.q4_k_planes import CODES, HEADERS, SUPER, X

CASES = [  # output and input channels (ragged ones; Llama 3 8B, Llama 2 70B), ordered sums, dtype, seed
    {"N": 300, "K": 333, "ordered": True, "dtype": "bfloat16", "seed": 0},
    {"N": 512, "K": 97, "ordered": False, "dtype": "float16", "seed": 1},
    {"N": 4096, "K": 4096, "ordered": True, "dtype": "bfloat16", "seed": 2},
    {"N": 14336, "K": 4096, "ordered": True, "dtype": "bfloat16", "seed": 3},
    {"N": 28672, "K": 8192, "ordered": True, "dtype": "bfloat16", "seed": 4},
    {"N": 8192, "K": 28672, "ordered": True, "dtype": "bfloat16", "seed": 5},
]
SOURCE = Path(__file__).with_suffix(".cu")
OPERAND = 2 * 16 * 8  # bytes of operand B
SLOT = 16 * (planes.LINE + planes.HEADER)  # bytes of a batch of 16 columns
FORMS = [  # warps of a program, batches that each has in flight, programs of an SM: 12 to 16 warps there
    {"n2": n2, "stages": stages, "blocks": blocks}
    for n2, stages, blocks in (
        (8, 2, 2), (8, 3, 2), (4, 2, 4), (4, 3, 4), (4, 3, 3), (4, 4, 3), (2, 3, 8), (2, 2, 8), (2, 3, 6), (1, 3, 12),
        (8, 1, 2), (16, 1, 1), (16, 2, 1), (16, 3, 1),
    )
]  # fmt: skip
PROGRAMS = (*range(1, 17), 19, 20, 22, 24, 26, 28, 32, 33, 40, 49, 66, 82, 99)  # of a band
SPACE = []
for form in FORMS:
    for n1 in PROGRAMS:
        SPACE.append(form | {"n1": n1})
        if 1 < n1 <= 8 and form["n2"] >= 4:
            SPACE.append(form | {"n1": n1, "cluster": True})
        if 1 < n1 <= 33 and form["n2"] >= 8:
            SPACE.append(form | {"n1": n1, "posts": True})
ALL, LISTED, MASKED = 0, 1, 2  # which columns are computed
CLUSTER_BANDS = 48  # from which on clusters are faster


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator."""
    return planes.make_inputs(case, True, device) | {"rows": case["N"], "ordered": case["ordered"]}


def reference(x: Tensor, codes: Tensor, headers: Tensor, rows: int, ordered: bool = True) -> Tensor:
    """y [1, N] in the dtype of x, computed in float64 with the dequantized weight."""
    return (x.double() @ planes.dense(codes, headers, zigzag=True)[:rows].T).to(x.dtype)


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("zigzag_gemv", device) or nvrtc.unavailable()


def heuristic(bands: int, columns: int, processors: int = 132, clusters: bool = True) -> dict:
    """A configuration for an untuned shape, the fastest of a few on four shapes on an H100: as many programs as fit.

    Args:
        bands: of 256 rows.
        columns: K, of which a warp has a batch at least.
        processors: SMs of the device.
        clusters: it has thread block clusters.
    """
    if clusters and bands >= CLUSTER_BANDS:
        n1 = min(8, 4 * processors // bands, columns // 64)
        if n1 > 1:
            return {"n2": 4, "stages": 2, "blocks": 4, "n1": n1, "cluster": True}
    return {"n2": 8, "stages": 2, "blocks": 2, "n1": max(1, min(2 * processors // bands, columns // 128))}


def fill(config: dict, bands: int, processors: int = 132) -> float:
    """Which share of the places for programs is taken, over all waves of programs."""
    programs, places = bands * config["n1"], processors * config["blocks"]
    waves = -(-programs // places)
    return programs / (waves * places)


def worth_trying(config: dict, bands: int, processors: int = 132) -> bool:
    """Whether a configuration of SPACE fills the SMs once or twice, about, or as far as SPACE goes."""
    fits = bands * config["n1"] <= (1 if config.get("posts") else 2) * processors * config["blocks"]
    return fits and (fill(config, bands, processors) >= 0.72 or config["n1"] >= 66)


def configuration(kernel: str, bands: int, rows: int, columns: int, device: torch.device) -> dict:
    """The configuration tuned for the shape, or that of `heuristic`."""
    tuned = launch_config(kernel, f"{rows}x{columns}", device)
    return tuned or heuristic(bands, columns, processors(device), lacks(kernel, device, (9, 0)) is None)


def prepared(
    kernel: str, mode: int, x: Tensor, codes: Tensor, rows: int, ordered: bool, threshold: float = 0.0,
    config: dict | None = None,
) -> Callable[..., Tensor]:  # fmt: skip
    """The launch of one of the three zigzag operators for calls like this one; it takes what the operator takes.

    `config` is one of SPACE, or that of `configuration`.
    """
    bands, columns = codes.shape[:2]
    config = config or configuration(kernel, bands, rows, columns, x.device)
    n1 = config["n1"]
    if config.get("posts") and bands * n1 > processors(x.device) * config["blocks"]:  # they would wait for one another
        config = config | {"posts": False}
    if config.get("posts"):
        parts = scratch_parts("zigzag posts", bands * -(-SUPER // n1) * n1 * n1, x.device)
    else:
        size = bands * SUPER * (n1 if ordered else 1)
        parts = scratch_parts("zigzag ordered" if ordered else "zigzag", size, x.device)
    tickets = planes.scratch("zigzag tickets", bands, torch.int32, x.device)
    function = nvrtc.load(SOURCE, "zigzag", defines(mode, ordered, x.dtype, config), x.device, shared_bytes(config))
    grid, block, bits = bands * n1, 32 * config["n2"], struct.unpack("<i", struct.pack("<f", threshold))[0]
    listed = "active" if mode == LISTED else tickets  # some memory, where no list is read
    parameters = "codes", "headers", "x", listed, "y", parts, tickets, rows, columns, n1, bits
    step, allocate = function.step(grid, block, parameters), blank(x.dtype, 1, rows)
    if mode == LISTED:
        write = function.in_a_row(("codes", "headers", "x", "active", "y"), (step,))

        def launch(x: Tensor, codes: Tensor, headers: Tensor, rows: int, active: Tensor, *_: object) -> Tensor:
            y = allocate(x)
            write(codes, headers, x, active, y)
            return y

    else:
        write = function.in_a_row(("codes", "headers", "x", "y"), (step,))

        def launch(x: Tensor, codes: Tensor, headers: Tensor, *_: object) -> Tensor:
            y = allocate(x)
            write(codes, headers, x, y)
            return y

    return launch


def scratch_parts(name: str, count: int, device: torch.device) -> Tensor:
    """float32 memory for the sums of programs."""
    return planes.scratch(name, count, torch.float32, device)


def defines(mode: int, ordered: bool, dtype: torch.dtype, config: dict) -> dict[str, int]:
    """The macros of zigzag_gemv.cu."""
    cluster = config["n1"] if config.get("cluster") else 1
    problem = {"MODE": mode, "ORDERED": int(ordered), "BF16": int(dtype == torch.bfloat16), "CLUSTER": cluster}
    problem["PROGRAMS"] = config["n1"] if config.get("posts") else 1
    return problem | {name.upper(): config[name] for name in ("n2", "stages", "blocks")}


def shared_bytes(config: dict) -> int:
    """Shared memory of a program: float32 sums, operand B and a ring of every warp."""
    return config["n2"] * (4 * SUPER + OPERAND + config["stages"] * SLOT)


def launch(
    x: Tensor, codes: Tensor, headers: Tensor, rows: int, ordered: bool = True, config: dict | None = None
) -> Tensor:
    """y of the operator by the kernel, with one configuration of SPACE; its tensors are not checked."""
    return prepare(x, codes, headers, rows, ordered, config)(x, codes, headers)


def on_cuda(x: Tensor, codes: Tensor, headers: Tensor, rows: int, ordered: bool = True) -> Tensor:
    """y of the operator by the kernel, with its tuned configuration."""
    return launch(x, codes, headers, rows, ordered)


def prepare(
    x: Tensor, codes: Tensor, headers: Tensor, rows: int, ordered: bool = True, config: dict | None = None
) -> Callable[..., Tensor]:
    """The launch of the operator for calls like this one, with one configuration of SPACE or the tuned one."""
    return prepared("zigzag_gemv", ALL, x, codes, rows, ordered, config=config)


zigzag_gemv = operator(
    "zigzag_gemv",
    reference,
    on_cuda,
    {"x": X, "codes": CODES, "headers": HEADERS},
    empty=lambda x, codes, headers, rows, *_, **more: x.new_empty(1, rows),
    limit=lambda x, codes, headers, rows, ordered=True: planes.misfit(x, codes, rows),
    prepare=prepare,
)
