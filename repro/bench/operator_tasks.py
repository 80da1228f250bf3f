"""Timer tasks for the operators of a decode step: our kernels and their peers on the cases of their files.

Inputs that a model has in cache are hot; what it reads from memory (the key-value cache) is rotated. A step without
such inputs is timed on data in L2, and the bytes that it moves are those of its inputs and outputs.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from repro.bench.kernel_list import load
from repro.bench.task import Task, tensors
from repro.kernels.q4_k_planes import kept
from repro.kernels.rope_append import rotate

Provider = Callable[[dict[str, Any]], Callable[..., Any]]  # from a case's inputs to the launch


def _sdpa(inputs: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """torch's attention over whole rows of the cache, under a mask made beforehand; without one where all is seen."""
    rows = len(inputs["keys"])
    length = inputs["keys"].shape[2]
    slot = torch.arange(length, device=inputs["keys"].device)
    seen = slot < inputs["lengths"][:, None]
    if "mask" in inputs:
        column = slot - inputs["start"][:, None]
        last = inputs["mask"].shape[1] - 1
        seen &= (column < 0) | (inputs["mask"].gather(1, column.clamp(0, last)) & (column <= last))
    seen = None if seen.all() else seen.view(rows, 1, -1, length)

    def launch(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, **_: Any) -> torch.Tensor:  # noqa: ANN401
        heads = q.view(rows, -1, *q.shape[1:]).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, keys, values, seen, scale=scale, enable_gqa=True)
        return y.transpose(1, 2).reshape(q.shape)

    return launch


def _rope(inputs: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """Indexing and arithmetic by torch; padding would need a copy of the cache, so all tokens are written."""
    keys, values = inputs["keys"], inputs["values"]
    heads, size = keys.shape[1], keys.shape[3]

    def launch(qkv, cos, sin, positions, rows, slots, **_):  # noqa: ANN001, ANN003, ANN202
        q, k, v = qkv.view(len(qkv), -1, size).tensor_split((-2 * heads, -heads), dim=1)
        cos, sin = cos[positions], sin[positions]
        keys[rows, :, slots], values[rows, :, slots] = rotate(k, cos, sin), v
        return rotate(q, cos, sin)

    return launch


def _reference(name: str) -> Provider:
    return lambda inputs: load(name).reference


def _compiled(eager: Provider) -> Provider:
    return lambda inputs: torch.compile(eager(inputs), dynamic=False)


OPERATORS: Mapping[str, dict[str, Provider]] = {  # its peers; `torch` is PyTorch's own operators one after the other
    "rms_norm": {"torch": _reference("rms_norm"), "torch.compile": _compiled(_reference("rms_norm"))},
    "rope_append": {"torch": _rope, "torch.compile": _compiled(_rope)},
    "attention": {"torch.scaled_dot_product_attention": _sdpa},
    "silu_product": {"torch": _reference("silu_product"), "torch.compile": _compiled(_reference("silu_product"))},
    "sample": {"torch": _reference("sample")},  # a compiled one fuses multiply-adds, which changes noise and tokens
    "argmax": {"torch": _reference("argmax"), "torch.compile": _compiled(_reference("argmax"))},
    "pple": {"torch": _reference("pple"), "torch.compile": _compiled(_reference("pple"))},
    # Products with Q4_K: `python -m repro.studies.sparse` compares them with each other, interleaved.
    "active_inputs": {},
    "rms_norm_active": {},
    "silu_product_active": {},
    "q4_k_gemv": {},
    "q4_k_naive_sparse": {},
    "zigzag_gemv": {},
    "zigzag_sparse": {},
    "zigzag_masked": {},
    "quantize_2bit": {},
    "w2a2_gemv": {},
    "w2a2_ready": {},
    "dense_gemv": {},
}
PRODUCTS = ("q4_k_gemv", "q4_k_naive_sparse", "zigzag_gemv", "zigzag_sparse", "zigzag_masked")  # with Q4_K
TOKENS = ("sample", "argmax", "active_inputs")  # operators whose outputs are integers

CACHE = ("keys", "values")
PLANES = ("codes", "headers")  # of a weight in Q4_K
UNITS = ("units", "factors")  # of a weight in 2 bits
COLD = (*CACHE, *PLANES, *UNITS, "w")  # what a model reads from memory
DATA = ("x", "w", "residual", "weight", "qkv", "q", "logits")  # what the timer may turn around; not indices
DATA += (*PLANES, *UNITS, "x_codes", "x_scales", "x_zeros")


def moved(name: str, inputs: Mapping[str, Any], results: Any) -> int:  # noqa: ANN401
    """Bytes that a launch reads and writes, as the operator's file counts them."""
    if name == "rope_append":
        return 2 * inputs["qkv"].nbytes + 8 * len(inputs["qkv"]) * inputs["keys"].shape[3]
    if name == "attention":
        keys = inputs["keys"]
        rows = inputs["rows"].long()
        seen = torch.zeros(len(keys), dtype=torch.int32, device=rows.device).scatter_reduce(
            0, rows, inputs["lengths"], "amax"
        )
        return 2 * inputs["q"].nbytes + 2 * int(seen.sum()) * keys[0, :, 0].nbytes
    if name in PRODUCTS:
        return plane_bytes(inputs) + inputs["x"].nbytes + results.nbytes
    return sum(t.nbytes for t in tensors([inputs.get(n) for n in DATA] + [results]))


def plane_bytes(inputs: Mapping[str, Any]) -> int:
    """Bytes of a weight in Q4_K that a product reads, and of the list of its inputs: in zigzag those not skipped."""
    whole = sum(inputs[name].nbytes for name in PLANES)
    in_zigzag = inputs["codes"].shape[1] == inputs["x"].shape[1]
    columns = share = inputs["x"].shape[1]
    listed = 0
    if "active" in inputs:
        share = int(inputs["active"][0])
        listed = 4 * (share + 1)
    elif "threshold" in inputs:
        share = int(kept(inputs["x"], inputs["threshold"]).sum())
    return listed + (whole * share // columns if in_zigzag else whole)


def comparable(name: str, result: Any, ordered: bool) -> Any:  # noqa: ANN401
    """What of an operator's outputs is the same at every launch: of a list in any order, how many it has.

    A list that is made with its vector has a rounding's choice at the threshold, and is compared by its count as well.
    """
    if name == "active_inputs" and not ordered:
        return result[:1]
    if name in ("rms_norm_active", "silu_product_active"):
        return (*result[:-1], result[-1][:1])
    return result


def tolerance(name: str, dtype: torch.dtype) -> float:
    """Relative error that is allowed: one rounding to the dtype, or some of float32; none for integers.

    An exponential turns the absolute error of an entropy near 12 nats, a few roundings of 1e-6, into a relative one.
    """
    if name in TOKENS:
        return 0.0
    if name == "pple":
        return 1e-5
    if name in PRODUCTS or name.startswith("w2a2"):
        return torch.finfo(dtype).eps + 1e-5
    return torch.finfo(dtype).eps + 1e-6


def task(name: str, case: dict[str, Any], provider: str, device: str = "cuda") -> Task:
    """The task of an operator on a case, run by the kernel itself (its own name) or by one of its peers.

    Raises:
        ValueError: the provider cannot compute the case.
    """
    module, dtype = load(name), getattr(torch, case["dtype"])
    inputs = module.make_inputs(case, device)
    if name == "rope_append" and case["padding"] and provider != name:
        raise ValueError(f"{provider} has no padding")
    launch = getattr(torch.ops.lowbit, name) if provider == name else OPERATORS[name][provider](inputs)
    data = DATA if name == "rope_append" else (*DATA, *CACHE)  # rope_append writes to the cache: no input for the timer
    given = {n: value for n, value in inputs.items() if n in data}
    weights = {n: value for n, value in inputs.items() if n not in data}
    ordered = weights.get("ordered", True)

    def right(**call: torch.Tensor) -> Any:  # noqa: ANN401
        copies = {n: v.clone() if n in CACHE else v for n, v in weights.items()}
        return module.reference(**call, **copies)

    def want(**call: torch.Tensor) -> Any:  # noqa: ANN401
        return comparable(name, right(**call), ordered)

    def timed(**call: torch.Tensor) -> Any:  # noqa: ANN401
        return comparable(name, launch(**call, **weights), ordered)

    label = " ".join(f"{n} = {value}" for n, value in case.items() if n not in ("dtype", "seed"))
    return Task(
        f"{name}, {label}, {case['dtype']}",
        timed,
        given,
        want,
        tolerance=tolerance(name, dtype),
        hot=tuple(n for n in given if n not in COLD),
        nbytes=moved(name, inputs, right(**given)),
        facts={"kernel": name, "dtype": case["dtype"], "provider": provider},
    )
