"""This project's kernels by name, and what each of them multiplies; a new kernel is listed here.

`KERNELS` are the modules of `kernels/` that `bench` times, imported on first use; `CALLED` are those that only engines
call; `CHECKED` are all that launch something of their own. `OURS` are this project's providers.
"""

import contextlib
import functools
import hashlib
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from repro.bench.peers import Provider, against
from repro.bench.task import Layer
from repro.core.errors import unknown
from repro.core.files import short_hash
from repro.kernels import launches, nvrtc, packing, q4_k_planes
from repro.models.groups import quantizer as group_quantizer
from repro.models.groups import weight as group_weight
from repro.models.groups.weight import GroupWeight
from repro.store.kernel_rows import KERNELS

DISPATCHERS = {"linear": "w4a16_gemm", "w8a8": "w8a8_gemm"}  # no kernel themselves; what they need at least
CALLED = ("compensate", "row_parallel", "vocabulary_argmax")  # no operator, no rows
CHECKED = (*(name for name in KERNELS if name not in DISPATCHERS), *CALLED)  # what compute-sanitizer runs over
SPARSITIES = (25, 40, 50, 65)  # percent of the inputs, as SpQt's Table 2
PROGRAMS = (4, 8, 16, 32, 64)  # n1, the programs that share a band of zigzag (Figure 10)
ZIGZAG = {"n2": 2, "stages": 2, "blocks": 8}  # the rest of the configuration that they are compared in
TWO_BIT = group_quantizer.GroupGrid(bits=2, group=32, include_zero=True, scale="e4m3")  # Bit-by-Bit's weights
QUANTIZED = ("x_codes", "x_scales", "x_zeros")  # activations in 2 bits
EC_RANK, EC_HIDDEN = 26, 4  # of SPEAR's compensators of Llama 3.2 1B and 3B at 4 bits per channel (Table 8)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def load(name: str) -> ModuleType:
    """The module of a kernel.

    Raises:
        UserError: there is no such kernel.
    """
    if name not in KERNELS and name not in CALLED:
        raise unknown("kernel", name, [*KERNELS, *CALLED])
    return importlib.import_module(f"repro.kernels.{name}")


def cannot_run(name: str) -> Callable[[str], str | None]:
    """A function from a device to why a kernel cannot run there (its own `unsupported`, a failed import), or None."""

    def unavailable(device: str) -> str | None:
        try:
            return load(DISPATCHERS.get(name, name)).unsupported(device)
        except ImportError as error:
            return f"cannot be imported here ({error})"

    return unavailable


def machine_code(launch: Callable[[], Any]) -> str:
    """Digest of the machine code of a launch: of all CUDA C++ kernels of ours and all Triton kernels; empty without."""
    import triton.compiler  # not on every platform that imports this module

    seen: set[str] = set()
    cubin = lambda kernel: {hashlib.sha256(kernel.asm["cubin"]).hexdigest()}  # noqa: E731
    with contextlib.ExitStack() as undo:
        for owner, name, digest in (
            (nvrtc.Function, "__call__", lambda function: {function.digest}),
            (launches.Launches, "__call__", lambda several: several.digests),
            (triton.compiler.CompiledKernel, "launch_metadata", cubin),  # called at every launch
        ):
            real = getattr(owner, name)

            def noted(self: Any, *given: Any, real: Any = real, digest: Any = digest) -> Any:  # noqa: ANN401
                seen.update(digest(self))
                return real(self, *given)

            setattr(owner, name, noted)
            undo.callback(setattr, owner, name, real)
        launch()
    return short_hash(" ".join(sorted(seen))) if seen else ""


def function_of(name: str) -> Callable[..., Any]:
    """The function of a kernel's module that calls its operator; by position it is as fast as an engine's call."""
    module = load(name)
    return getattr(module, "OPERATOR", None) or getattr(module, name)


def prepared_once(prepare: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    """A launch of calls that differ in their addresses alone, prepared at the first of them."""
    ready: list[Callable[..., Any]] = []

    def launch(*values: Any) -> Any:  # noqa: ANN401
        if not ready:
            ready.append(prepare(*values))
        return ready[0](*values)

    return launch


def _product(name: str, bits: int, group: int, symmetric: bool, dtype: str) -> Callable[[Layer, int], tuple]:
    """A product with packed weights by one kernel or by `linear`; `dequantize` makes them dense for the library's."""

    def prepare(layer: Layer, count: int) -> tuple:
        def pack() -> packing.PackedWeight:
            codes, scales, zeros = layer.codes(bits, group, symmetric)
            return packing.pack(codes, scales, None if symmetric else zeros, bits, group)

        kernel = load(name)
        packed = layer.once(("packed", bits, group, symmetric), pack)
        x = layer.activations(count, DTYPES[dtype])
        want = against(layer.dequantized(bits, group, symmetric))
        if name == "linear":
            return {"x": x, "packed": packed}, kernel.wna16, want
        inputs = {"x": x, "codes": packed.codes, "scale_zero": packed.scale_zero}
        rest = (bits, group, packed.rows, packed.columns, symmetric)
        op = function_of(name)
        if name == "dequantize":
            return inputs, lambda x, codes, scale_zero: x @ op(codes, scale_zero, *rest, x.dtype).T, want
        return inputs, lambda x, codes, scale_zero: op(x, codes, scale_zero, *rest), want

    return prepare


def linear_way(dtype: str) -> Callable[[Layer, int], str]:
    """The path that the dispatcher takes in a type, as the note of a row."""

    def way(layer: Layer, count: int) -> str:
        return "by " + load("linear").path_of(count, layer.rows, layer.columns, 4, layer.device, DTYPES[dtype])

    return way


def w8a8_way(layer: Layer, count: int) -> str:
    """Which kernel the dispatcher picks, as the note of a row."""
    return "by " + load("w8a8").path(torch.empty(count, layer.columns, device="meta"), layer.int8()[0])


def int8_product(x_q: torch.Tensor, s_x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor) -> torch.Tensor:
    """(x_q w_q^T) s_x s_w in float32 `[M, N]`; float64 holds every integer sum exactly."""
    return ((x_q.double() @ w_q.double().T) * s_x.double()[:, None] * s_w.double()).float()


def _w8a8(name: str, dtype: str) -> Callable[[Layer, int], tuple]:
    """int8 weights per channel; `w8a8_gemm` gets activations quantized beforehand, the others quantize them."""

    def prepare(layer: Layer, count: int) -> tuple:
        kernel, quantizer = load(name), load("quantize_activation")
        w_q, s_w = layer.int8()
        x = layer.activations(count, DTYPES[dtype])
        if name == "w8a8_gemm":
            x_q, s_x = quantizer.reference(x)
            op = function_of(name)
            launch = lambda x_q, s_x, w_q, s_w: op(x_q, s_x, w_q, s_w, DTYPES[dtype])  # noqa: E731
            return {"x_q": x_q, "s_x": s_x, "w_q": w_q, "s_w": s_w}, launch, int8_product
        want = lambda x, w_q, s_w: int8_product(*quantizer.reference(x), w_q, s_w)  # noqa: E731
        launch = kernel.w8a8 if name == "w8a8" else function_of("w8a8_gemv")
        return {"x": x, "w_q": w_q, "s_w": s_w}, lambda x, w_q, s_w: launch(x, w_q, s_w), want

    return prepare


def _q4_k(name: str, share: float = 1.0, config: dict[str, int] | None = None) -> Callable[[Layer, int], tuple]:
    """A random weight in Q4_K times one token: all inputs, or the `share` of largest magnitude, listed beforehand.

    `config` is a launch configuration instead of the device's.
    """

    def prepare(layer: Layer, count: int) -> tuple:
        kernel, zigzag = load(name), name.startswith("zigzag")

        def make() -> dict[str, torch.Tensor]:
            return q4_k_planes.make_planes(layer.rows, layer.columns, zigzag, layer.seed, layer.device)

        planes = layer.once(("q4_k", zigzag), make)
        x = layer.activations(1, torch.bfloat16)
        more: dict[str, Any] = {"rows": layer.rows} if zigzag else {}
        threshold = x.abs().float().quantile(1 - share).item()
        if "active" in inspect.signature(kernel.reference).parameters:
            more["active"] = load("active_inputs").reference(x, threshold)
        elif share < 1:
            more["threshold"] = threshold
        op, rest = function_of(name), tuple(more.values())
        if config is not None and x.is_cuda:  # on a CPU the operator's reference runs, which has no configuration
            op = prepared_once(functools.partial(kernel.prepare, config=config))
        launch = lambda x, codes, headers: op(x, codes, headers, *rest)  # noqa: E731
        return {"x": x, **planes}, launch, functools.partial(kernel.reference, **more)

    return prepare


def _two_bit(layer: Layer) -> GroupWeight:
    """The layer in 2 bits as Bit-by-Bit stores it: groups of 32 whose ranges include 0, scales in E4M3."""
    return layer.once("two bits", lambda: group_weight.pack(layer.weight, TWO_BIT))


def _w2a2(name: str) -> Callable[[Layer, int], tuple]:
    """Weights and activations in 2 bits; `w2a2_ready` gets activations quantized beforehand.

    The right product is float64, of the very codes.
    """

    def prepare(layer: Layer, count: int) -> tuple:
        kernel, quantizer = load(name), load("quantize_2bit")

        def make() -> dict[str, torch.Tensor]:
            weight = _two_bit(layer)
            units = kernel.form.pack(weight.codes, weight.scales, weight.zeros)
            return {"units": units, "factors": weight.factor.expand(layer.rows).contiguous()}

        weights = layer.once("w2a2", make)
        x = layer.activations(count, torch.bfloat16)
        op = function_of(name)
        product = load("w2a2_gemv").product
        if name == "w2a2_ready":

            def of_quantized(
                x_codes: torch.Tensor, x_scales: torch.Tensor, x_zeros: torch.Tensor, units: torch.Tensor,
                factors: torch.Tensor,
            ) -> torch.Tensor:  # fmt: skip
                return op(x_codes, x_scales, x_zeros, units, factors)

            return dict(zip(QUANTIZED, quantizer.reference(x))) | weights, of_quantized, product
        want = lambda x, **weights: product(*quantizer.reference(x), **weights)  # noqa: E731
        return {"x": x} | weights, lambda x, units, factors: op(x, units, factors), want

    return prepare


def _w2a16(layer: Layer, count: int) -> tuple:
    """The same weight times 16-bit activations; its scales are rounded to 16 bits, which the reference has, too."""
    kernel = load("wna16_gemv")

    def pack() -> packing.PackedWeight:
        weight = _two_bit(layer)
        scales = group_quantizer.restored(weight.scales, weight.factor)
        return packing.pack(weight.codes, scales, weight.zeros, weight.bits, weight.group)

    packed = layer.once("w2a16", pack)
    x = layer.activations(count, torch.bfloat16)
    launch = lambda x, packed: kernel.wna16_gemv(x, packed)  # noqa: E731
    want = lambda x, packed: x.double() @ packing.dequantize(packed).double().T  # noqa: E731
    return {"x": x, "packed": packed}, launch, want


def _compensated(layer: Layer, count: int) -> tuple:
    """A 4-bit weight per channel with an error compensator of SPEAR's rank on all outputs, times one token."""
    kernel = load("compensated_gemv")

    def make() -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        codes, scales, zeros = layer.codes(4, 0, False)
        packed = packing.pack(codes, scales, zeros, 4, 0)
        stored = kernel.random_compensator(EC_RANK, layer.rows, layer.columns, EC_HIDDEN, None, layer.device)
        made = kernel.pack([0], [stored], [1.0], EC_HIDDEN)
        tensors = {name: getattr(made, name) for name in ("down", "scales", "up", "gates")}
        form = {"bits": 4, "group": 0, "rows": layer.rows, "columns": layer.columns, "symmetric": False}
        weights = {"codes": packed.codes, "scale_zero": packed.scale_zero, **tensors}
        return weights, form | {"first": 0, "end": layer.rows}

    weights, numbers = layer.once("compensated", make)
    inputs = {"x": layer.activations(1, torch.bfloat16), **weights}
    op, values = function_of("compensated_gemv"), (*numbers.values(), 0, 0, 0, 0)  # of no other compensators

    def launch(
        x: torch.Tensor, codes: torch.Tensor, scale_zero: torch.Tensor, down: torch.Tensor, scales: torch.Tensor,
        up: torch.Tensor, gates: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        return op(x, codes, scale_zero, down, scales, up, *values, gates)

    return inputs, launch, functools.partial(kernel.reference, **numbers)


def _dense(layer: Layer, count: int) -> tuple:
    """A 16-bit product by our kernel, the weight being that of the library's."""
    load("dense_gemv")
    w = layer.once(torch.bfloat16, lambda: layer.weight.to(torch.bfloat16))
    want = lambda x, w: x.double() @ w.double().T  # noqa: E731
    op = function_of("dense_gemv")
    return {"x": layer.activations(1, torch.bfloat16), "w": w}, lambda x, w: op(x, w), want


def _listed(share: float) -> Callable[[Layer], int]:
    """Bytes of the listed columns of a layer in zigzag."""

    def read(layer: Layer) -> int:
        bands = -(-layer.rows // q4_k_planes.SUPER)
        return round(share * layer.columns) * bands * (q4_k_planes.LINE + q4_k_planes.HEADER)

    return read


def _provider(name: str, form: str, prepare: Callable, dtype: str, **more: Any) -> Provider:  # noqa: ANN401
    tolerance = {"fp16": 1e-3, "bf16": 4e-3}[dtype]
    return Provider(name, form, cannot_run(name), prepare, tolerance=tolerance, dtype=dtype, **more)


OURS = {
    provider.label: provider
    for provider in (
        *(_provider("wna16_gemv", "w4-g128", _product("wna16_gemv", 4, 128, False, d), d, most=16) for d in DTYPES),
        _provider("wna16_gemv", "w4-g128-sym", _product("wna16_gemv", 4, 128, True, "fp16"), "fp16", most=16),
        _provider("wna16_gemv", "w4-pc", _product("wna16_gemv", 4, 0, False, "fp16"), "fp16", most=16),
        _provider("wna16_gemv", "w2-g64", _product("wna16_gemv", 2, 64, False, "fp16"), "fp16", most=16),
        _provider("wna16_gemv", "w8-pc", _product("wna16_gemv", 8, 0, True, "fp16"), "fp16", most=16),
        _provider("w8a8_gemv", "w8a8", _w8a8("w8a8_gemv", "fp16"), "fp16", most=8),
        _provider("w8a8_gemm", "w8a8", _w8a8("w8a8_gemm", "bf16"), "bf16", least=16, hot=("x_q", "s_x")),
        # Of few tokens this is the decode kernel in bf16; its own rows are of fp16.
        _provider("w8a8", "w8a8", _w8a8("w8a8", "bf16"), "bf16", note=w8a8_way),
        *(
            _provider("linear", "w4-g128", _product("linear", 4, 128, False, d), d, least=2, note=linear_way(d))
            for d in DTYPES
        ),
        # Two paths of `linear` by themselves, on which its choice is based.
        *(
            _provider(name, "w4-g128", _product(name, 4, 128, False, "fp16"), "fp16", least=128)
            for name in ("w4a16_gemm", "dequantize")
        ),
        # SpQt: Q4_K in rows and in zigzag, of which a share of the inputs is skipped (Figures 8 to 10).
        _provider("q4_k_gemv", "q4_k", _q4_k("q4_k_gemv"), "bf16", most=1),
        _provider("zigzag_gemv", "q4_k-zigzag", _q4_k("zigzag_gemv"), "bf16", most=1),
        *(
            _provider(
                "zigzag_sparse",
                f"q4_k-zigzag-s{s}",
                _q4_k("zigzag_sparse", 1 - s / 100),
                "bf16",
                most=1,
                read=_listed(1 - s / 100),
            )
            for s in SPARSITIES
        ),
        # Bit-by-Bit: Table 7 and Figure 6, and what its kernels are compared with (`bench/two_bit.py`).
        _provider("w2a2_gemv", "w2a2-g32", _w2a2("w2a2_gemv"), "bf16", most=4),
        _provider("w2a2_ready", "w2a2-g32", _w2a2("w2a2_ready"), "bf16", most=4, hot=QUANTIZED),
        _provider("wna16_gemv", "w2-g32", _w2a16, "bf16", most=4),
        # SPEAR: a product with its compensator in two launches beside each other (section 4.1).
        _provider("compensated_gemv", f"w4-pc-r{EC_RANK}", _compensated, "bf16", most=1),
        _provider("dense_gemv", "bf16", _dense, "bf16", most=1),
        _provider("zigzag_masked", "q4_k-zigzag-s50", _q4_k("zigzag_masked", 0.5), "bf16", most=1, read=_listed(0.5)),
        _provider("q4_k_naive_sparse", "q4_k-s50", _q4_k("q4_k_naive_sparse", 0.5), "bf16", most=1),
        *(
            _provider(
                "zigzag_gemv", f"q4_k-zigzag-n{n1}", _q4_k("zigzag_gemv", config=ZIGZAG | {"n1": n1}), "bf16", most=1
            )
            for n1 in PROGRAMS
        ),
    )
}
