"""Decode one token through a 4-bit layer with error compensators (SPEAR, sections 3.1 and 4.1), in two launches.

    y = x W^T + sum over compensators e, on their own outputs:  B_e (gamma_e(z_e) z_e),    z_e = A_e x        (3)
    gamma(z) = 1 + tanh(W2 relu(W1 z + b1) + b2)

x: float16 or bfloat16 `[1, K]`. W: `PackedWeight`, as of `wna16_gemv`, of up to three layers that share x, each with
or without a compensator: of layer e the outputs `first` to `end`. A, B: int8 with a float32 scale per latent channel;
alpha is part of that of B. Latent channels are padded with zeros to R, a multiple of 16.
Bytes moved: packed.nbytes + R (K + outputs with a compensator) + the gates' 2 (2 h R^2 + h R + R).

The first launch (compensated_gemv.cu) makes the latent vector of each compensator: a cluster of thread blocks shares
the columns of A, its first block adds up and computes the gate. The second is `wna16_gemv` itself, launched beside the
first (beside.cuh): it streams its weights meanwhile, and only its epilogue, which adds the row of B times the latent
vector in float32 before y is rounded, waits for it. The paper puts all of it into the epilogue of one launch; A x needs
every column of x, so that every thread block of it would compute or wait for the same latent vector.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro.kernels import nvrtc, wna16_gemv
from repro.kernels.launch_config import lacks
from repro.kernels.operators import HALVES, VECTOR, Argument, operator
from repro.kernels.packing import TENSORS, TILE, PackedWeight, dequantize, misfit
from repro.kernels.prepared import blank

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, SPLITS = 256, 8  # of a thread block; blocks of a cluster: as many as every device with clusters has
BITS = 4  # of the weight: what the paper decodes
PAD = 16  # what ranks are padded to a multiple of: a row of B is read by 16 bytes
MOST_RANK = 112  # whose gate the shared memory of a block holds
MOST_LAYERS = 3  # of a product
SPANS = ("first", "end", "first2", "end2", "first3", "end3")  # outputs of each compensator
MOST_SHARED = 227 << 10  # bytes of a thread block
INT8 = (torch.int8,)
CASES = [  # ranks of SPEAR's Table 8; `layers` are outputs, `ranks` 0 without a compensator, `hidden` 0 without a gate
    {"layers": [40], "columns": 416, "ranks": [5], "hidden": 4, "group": 32, "dtype": "float16", "seed": 0},
    {"layers": [17, 16, 24], "columns": 203, "ranks": [20, 0, 3], "hidden": 4, "group": 0, "dtype": "bfloat16",
     "seed": 1},
    {"layers": [33, 30], "columns": 1056, "ranks": [0, 7], "hidden": 0, "group": 0, "dtype": "bfloat16", "seed": 2},
    {"layers": [2048], "columns": 8192, "ranks": [26], "hidden": 4, "group": 0, "dtype": "bfloat16", "seed": 3},
    {"layers": [2048, 512, 512], "columns": 2048, "ranks": [26, 26, 26], "hidden": 4, "group": 0, "dtype": "bfloat16",
     "seed": 4},
    {"layers": [11008, 11008], "columns": 4096, "ranks": [24, 0], "hidden": 4, "group": 0, "dtype": "bfloat16",
     "seed": 5},
    {"layers": [8192], "columns": 28672, "ranks": [70], "hidden": 4, "group": 128, "dtype": "float16", "seed": 6},
]  # fmt: skip
CHECKED = [  # launch configurations of the product that tests on a GPU and the sanitizer run, too
    {"warps": 4, "tiles": 2, "chunk": 128, "stages": 2, "splits": 1, "blocks": 4},
    {"warps": 2, "tiles": 1, "chunk": 256, "stages": 1, "splits": 2, "blocks": 4},
    {"warps": 4, "tiles": 4, "chunk": 128, "stages": 2, "splits": 1, "blocks": 2},
]


@dataclass(frozen=True)
class PackedCompensators:
    """The compensators of a product's layers, as the kernel reads them.

    Attributes:
        down: int8 `[E, R, K padded to a multiple of 16]`, A.
        gates: float16 `[E, 2 h R^2 + h R + R]`, W1 `[h R, R]`, W2 `[R, h R]`, b1 and b2; None without gates.
        scales: float32 `[E, 2, R]`, of A and of B times alpha.
        up: int8 `[outputs that have one, R]`, B of all.
        spans: first and end of the outputs of each, six numbers; 0 and 0 for those that are not there.
    """

    down: Tensor
    gates: Tensor | None
    scales: Tensor
    up: Tensor
    spans: tuple[int, ...]


def padded(r: int) -> int:
    """R for compensators of rank up to r."""
    return r + -r % PAD


def pack(
    starts: Sequence[int], stored: Sequence[dict[str, Tensor]], alphas: Sequence[float], hidden: int
) -> PackedCompensators:
    """Put compensators into the kernel's layout.

    Args:
        starts: the first output of each, in order.
        stored: tensors of each, as `methods.spear.compensator.pack` makes them; all with a gate, or none.
        alphas: of each.
        hidden: h; 0 without gates.

    Raises:
        ValueError: more than three, or a rank above 112.
    """
    ranks = [len(tensors["A"]) for tensors in stored]
    if len(stored) > MOST_LAYERS or max(ranks) > MOST_RANK:
        raise ValueError(
            f"{len(stored)} compensators of rank {max(ranks)}; the kernel takes {MOST_LAYERS} of up to {MOST_RANK}"
        )
    R = padded(max(ranks))
    columns = stored[0]["A"].shape[1]
    device = stored[0]["A"].device
    down = torch.zeros(len(stored), R, columns + -columns % 16, dtype=torch.int8, device=device)
    scales = torch.zeros(len(stored), 2, R, device=device)
    gates, up, spans = [], [], []
    for e, (start, tensors, alpha) in enumerate(zip(starts, stored, alphas)):
        r = ranks[e]
        rows = len(tensors["B"])
        down[e, :r, :columns] = tensors["A"]
        scales[e, 0, :r], scales[e, 1, :r] = tensors["A_scale"], alpha * tensors["B_scale"]
        own = torch.zeros(rows, R, dtype=torch.int8, device=device)
        own[:, :r] = tensors["B"]
        up.append(own)
        spans += [start, start + rows]
        if hidden:
            gates.append(_gate(tensors, r, R, hidden))
    spans += [0] * (2 * MOST_LAYERS - len(spans))
    return PackedCompensators(down, torch.stack(gates) if hidden else None, scales, torch.cat(up), tuple(spans))


def _gate(tensors: dict[str, Tensor], r: int, R: int, hidden: int) -> Tensor:
    """float16 `[2 h R^2 + h R + R]` of one gate; what is padded is zero."""
    W1 = tensors["W1"].new_zeros(hidden * R, R)
    W2 = W1.new_zeros(R, hidden * R)
    b1 = W1.new_zeros(hidden * R)
    b2 = W1.new_zeros(R)
    W1[: hidden * r, :r], W2[:r, : hidden * r] = tensors["W1"], tensors["W2"]
    b1[: hidden * r], b2[:r] = tensors["b1"], tensors["b2"]
    return torch.cat([W1.flatten(), W2.flatten(), b1, b2]).half()


def hidden_of(gates: Tensor | None, R: int) -> int:
    """h of gates whose latent vectors have R channels; 0 without gates."""
    return 0 if gates is None else (gates.shape[1] - R) // (2 * R * R + R)


def wrong_gates(gates: Tensor | None, R: int) -> str | None:
    """What is wrong with the shape of gates whose latent vectors have R channels, or None."""
    if gates is not None and (hidden_of(gates, R) < 1 or (gates.shape[1] - R) % (2 * R * R + R)):
        return f"gates are {list(gates.shape)}, expected 2 h R^2 + h R + R columns for R = {R}"
    return None


def wrong_spans(ends: Sequence[int], count: int, covered: int, rows: int) -> str | None:
    """What is wrong with first and end of the outputs of so many compensators, or None.

    Args:
        ends: six numbers, as of `PackedCompensators`.
        count: of compensators.
        covered: outputs that they have in all.
        rows: outputs of the product.
    """
    spans = list(zip(ends[::2], ends[1::2]))
    order = [0, *ends[: 2 * count], rows]
    widths = [end - first for first, end in spans[:count]]
    if order != sorted(order) or any(map(any, spans[count:])) or sum(widths) != covered:
        return f"outputs {spans} are not those of {count} compensators in order, {covered} of {rows}"
    return None


def parts(down: Tensor, gates: Tensor | None, scales: Tensor, up: Tensor, columns: int, spans: Sequence[int]) -> list:
    """(first output, float32 tensors A, B and of the gate) of each compensator, padded channels included."""
    R = down.shape[1]
    unpacked = []
    before = 0
    h = hidden_of(gates, R)
    for e in range(len(down)):
        first, end = spans[2 * e], spans[2 * e + 1]
        B = up[before : before + end - first].float() * scales[e, 1]
        tensors = {"A": down[e, :, :columns].float() * scales[e, 0, :, None], "B": B}
        if gates is not None:
            W1, W2, b1, b2 = gates[e].float().split([h * R * R, h * R * R, h * R, R])
            tensors |= {"W1": W1.view(h * R, R), "b1": b1, "W2": W2.view(R, h * R), "b2": b2}
        unpacked.append((first, tensors))
        before += end - first
    return unpacked


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator: corrections of the size of the product, gates that are far from 1."""
    rng = torch.Generator().manual_seed(case["seed"])
    rows = sum(case["layers"])
    columns = case["columns"]
    hidden = case["hidden"]
    weight = {"rows": rows, "columns": columns, "bits": 4, "group": case["group"], "symmetric": False, "m": 1}
    x, packed = wna16_gemv.make_inputs(weight | {"seed": case["seed"]}, dtype=getattr(torch, case["dtype"]))
    starts, stored, start = [], [], 0
    for size, r in zip(case["layers"], case["ranks"]):
        if r:
            starts.append(start)
            stored.append(random_compensator(r, size, columns, hidden, rng))
        start += size
    compensators = pack(starts, stored, [1.0] * len(stored), hidden)
    tensors = {
        "x": x,
        "codes": packed.codes,
        "scale_zero": packed.scale_zero,
        "down": compensators.down,
        "scales": compensators.scales,
    }
    tensors |= {"up": compensators.up}
    form = {"bits": 4, "group": case["group"], "rows": rows, "columns": columns, "symmetric": False}
    spans = dict(zip(SPANS, compensators.spans))
    gates = None if compensators.gates is None else compensators.gates.to(device)
    return {name: tensor.to(device) for name, tensor in tensors.items()} | form | spans | {"gates": gates}


def random_compensator(
    r: int, outputs: int, columns: int, hidden: int, rng: torch.Generator | None, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """A compensator as stored whose correction and whose gate's inputs are about 1 for inputs of about 1."""
    A = torch.randint(-127, 128, (r, columns), generator=rng, dtype=torch.int8, device=device)
    B = torch.randint(-127, 128, (outputs, r), generator=rng, dtype=torch.int8, device=device)
    ones = torch.ones(r, device=device)
    tensors = {"A": A, "A_scale": ones / (73 * columns**0.5), "B": B, "B_scale": ones / (73 * r**0.5)}
    if hidden:
        sizes = {"W1": (hidden * r, r), "b1": (hidden * r,), "W2": (r, hidden * r), "b2": (r,)}
        for name, size in sizes.items():
            values = torch.randn(*size, generator=rng, device=device) * size[-1] ** -0.5
            tensors[name] = values.half()
    return tensors


def reference(
    x: Tensor, codes: Tensor, scale_zero: Tensor, down: Tensor, scales: Tensor, up: Tensor, bits: int, group: int,
    rows: int, columns: int, symmetric: bool, first: int, end: int, first2: int = 0, end2: int = 0, first3: int = 0,
    end3: int = 0, gates: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y `[1, N]` in the dtype of x, computed in float32 with everything dequantized."""
    values = x.float()
    y = values @ dequantize(PackedWeight(codes, scale_zero, bits, group, rows, columns, symmetric)).T
    spans = first, end, first2, end2, first3, end3
    for start, tensors in parts(down, gates, scales, up, columns, spans):
        z = values @ tensors["A"].T
        if gates is not None:
            inner = torch.relu(z @ tensors["W1"].T + tensors["b1"])
            z = (1 + torch.tanh(inner @ tensors["W2"].T + tensors["b2"])) * z
        y[:, start : start + len(tensors["B"])] += z @ tensors["B"].T
    return y.to(x.dtype)


def unsupported(device: torch.device | str) -> str | None:
    """Why the kernel cannot run on `device`, or None if it can: it needs clusters."""
    return lacks("compensated_gemv", device, (9, 0)) or nvrtc.unavailable()


def latent_shared(R: int, hidden: int) -> int:
    """Shared memory of a thread block of the first launch, in bytes: sums of a cluster, z, hidden layer, gate."""
    width = hidden * R
    return 4 * (SPLITS * R + R + width) + (2 * (2 * width * R + width + R) if hidden else 0)


def fits(r: int, hidden: int) -> bool:
    """Whether the kernel takes rank r, and the shared memory of a thread block holds its gate."""
    return r <= MOST_RANK and latent_shared(padded(r), hidden) <= MOST_SHARED


@cache
def _plan(form: tuple, dtype: torch.dtype, R: int, hidden: int, device: torch.device, **config: int) -> tuple:
    """(first launch, second launch, its grid, its block, padded columns) for calls of one shape."""
    if sentence := unsupported(device):
        raise RuntimeError(sentence)
    bits, group, rows, columns, symmetric = form
    config = config or wna16_gemv.configuration(rows, columns, bits, 1, device)
    macros = wna16_gemv.defines(bits, group, columns, symmetric, dtype, 1, config)
    of_epilogue = {"K": macros["K"], "RANK": R, "HIDDEN": hidden, "BF16": macros["BF16"], "SPLITS": SPLITS}
    latent = nvrtc.load(SOURCE, "compensator_latent", of_epilogue, device, latent_shared(R, hidden))
    macros |= {"RANK": R}
    product = nvrtc.load(wna16_gemv.SOURCE, "wna16_gemv", macros, device, wna16_gemv.shared_bytes(macros))
    tiles = -(-rows // TILE)
    grid = -(-tiles // config["tiles"]) * config["splits"]
    return latent, product.beside, grid, 32 * config["warps"], macros["K"]


def launch(
    x: Tensor, codes: Tensor, scale_zero: Tensor, down: Tensor, scales: Tensor, up: Tensor, bits: int, group: int,
    rows: int, columns: int, symmetric: bool, first: int, end: int, first2: int = 0, end2: int = 0, first3: int = 0,
    end3: int = 0, gates: Tensor | None = None, config: dict[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """y of the operator by the kernel; `config` is that of the product, by default the tuned one of `wna16_gemv`."""
    form = (bits, group, rows, columns, symmetric)
    spans = first, end, first2, end2, first3, end3
    run = prepared(x, down, form, spans, hidden_of(gates, down.shape[1]), config)
    return run(x, codes, scale_zero, down, scales, up, gates)


def prepare(
    x: Tensor, codes: Tensor, scale_zero: Tensor, down: Tensor, scales: Tensor, up: Tensor, bits: int, group: int,
    rows: int, columns: int, symmetric: bool, first: int, end: int, first2: int = 0, end2: int = 0, first3: int = 0,
    end3: int = 0, gates: Tensor | None = None,
) -> Callable[..., Tensor]:  # fmt: skip
    """The launches of the operator for calls like this one, with the product's tuned configuration."""
    form = (bits, group, rows, columns, symmetric)
    spans = first, end, first2, end2, first3, end3
    run = prepared(x, down, form, spans, hidden_of(gates, down.shape[1]))

    def launch(
        x: Tensor, codes: Tensor, scale_zero: Tensor, down: Tensor, scales: Tensor, up: Tensor, *numbers: Any
    ) -> Tensor:
        return run(x, codes, scale_zero, down, scales, up, numbers[-1] if gated else None)

    gated = gates is not None
    return launch


def prepared(
    x: Tensor, down: Tensor, form: tuple, spans: tuple[int, ...], hidden: int, config: dict[str, int] | None = None
) -> Callable[..., Tensor]:
    """Both launches for tensors like these; they take the operator's tensors in order, gates being the last."""
    count, R, _ = down.shape
    rows, columns = form[2:4]
    latent, product, grid, block, width = _plan(form, x.dtype, R, hidden, x.device, **(config or {}))
    gate = "gates" if hidden else "scales"
    first = latent.step(count * SPLITS, THREADS, ("down", gate, "scales", "x", "z"))
    parameters = "codes", "scale_zero", "x", "y", rows, 1, "up", "z", *spans
    second = product.step(grid, block, parameters, beside=True)
    write = latent.in_a_row(("x", "codes", "scale_zero", "down", "scales", "up", "gates", "z", "y"), (first, second))
    allocate, allocate_latent = blank(x.dtype, 1, rows), blank(torch.float32, count, R)

    def run(
        x: Tensor, codes: Tensor, scale_zero: Tensor, down: Tensor, scales: Tensor, up: Tensor, gates: Tensor | None
    ) -> Tensor:
        if width != columns:
            x = torch.nn.functional.pad(x, (0, width - columns))
        elif x.data_ptr() % VECTOR:
            x = x.clone()
        z, y = allocate_latent(x), allocate(x)
        write(x, codes, scale_zero, down, scales, up, scales if gates is None else gates, z, y)
        return y

    return run


def limit(
    x: Tensor, codes: Tensor, scale_zero: Tensor, down: Tensor, scales: Tensor, up: Tensor, bits: int, group: int,
    rows: int, columns: int, symmetric: bool, first: int, end: int, first2: int = 0, end2: int = 0, first3: int = 0,
    end3: int = 0, gates: Tensor | None = None,
) -> str | None:  # fmt: skip
    """What is wrong with checked arguments, or None."""
    count, R, width = down.shape
    if x.shape[1] != columns:
        return f"x is {list(x.shape)}, expected [1, {columns}]"
    if count > MOST_LAYERS or R % PAD or R > MOST_RANK or width != columns + -columns % 16:
        shape = f"[1 to {MOST_LAYERS}, a multiple of {PAD} up to {MOST_RANK}, {columns + -columns % 16}]"
        return f"down is {list(down.shape)}, expected {shape}"
    if sentence := wrong_gates(gates, R):
        return sentence
    if not fits(R, hidden_of(gates, R)):
        return f"gates of {hidden_of(gates, R)} x {R} hidden units do not fit the shared memory of a thread block"
    if sentence := wrong_spans((first, end, first2, end2, first3, end3), count, len(up), rows):
        return sentence
    return misfit(codes.shape, scale_zero.shape, bits, group, rows, columns, symmetric)


compensated_gemv = operator(
    "compensated_gemv",
    reference,
    launch,
    {
        "x": Argument(HALVES, "1 K"),
        **TENSORS,
        "down": Argument(INT8, "E R C", VECTOR),
        "scales": Argument((torch.float32,), "E 2 R"),
        "up": Argument(INT8, "U R", VECTOR),
        "gates": Argument((torch.float16,), "E G", VECTOR),
    },
    empty=lambda x, codes, scale_zero, down, scales, up, bits, group, rows, *rest, **more: x.new_empty(1, rows),
    limit=limit,
    prepare=prepare,
)
