"""This project's kernels by name, and what each of them multiplies: a file appears here because somebody listed it.

`KERNELS` are the modules of `kernels/`, imported on first use; `OURS` are this project's providers.
"""

import contextlib
import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from repro.bench import timing
from repro.bench.kernel_rows import KERNELS
from repro.bench.peers import Provider, against
from repro.bench.recorded import shapes
from repro.bench.task import Layer
from repro.bench.tune import Tunable
from repro.errors import UserError, unknown
from repro.files import short_hash
from repro.kernels import nvrtc

DISPATCHERS = {"linear": "w4a16_gemm", "w8a8": "w8a8_gemm"}  # no kernel themselves; what they need at least
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def load(name: str) -> ModuleType:
    """The module of a kernel.

    Raises:
        UserError: there is no such kernel.
    """
    if name not in KERNELS:
        raise unknown("kernel", name, KERNELS)
    return importlib.import_module(f"repro.kernels.{name}")


def cannot_run(name: str) -> Callable[[str], str | None]:
    """What a kernel's own `unsupported` says, or that it cannot even be imported here."""

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
    cubin = lambda kernel: hashlib.sha256(kernel.asm["cubin"]).hexdigest()  # noqa: E731
    with contextlib.ExitStack() as undo:
        for owner, name, digest in (
            (nvrtc.Function, "__call__", lambda function: function.digest),
            (triton.compiler.CompiledKernel, "launch_metadata", cubin),  # called at every launch
        ):
            real = getattr(owner, name)

            def noted(self: Any, *given: Any, real: Any = real, digest: Any = digest) -> Any:  # noqa: ANN401
                seen.add(digest(self))
                return real(self, *given)

            setattr(owner, name, noted)
            undo.callback(setattr, owner, name, real)
        launch()
    return short_hash(" ".join(sorted(seen))) if seen else ""


def _packed(layer: Layer, bits: int, group: int, symmetric: bool) -> tuple[Any, torch.Tensor]:
    """The packed weight and the float32 weight that it stands for."""
    from repro.kernels import packing

    def make() -> Any:  # noqa: ANN401
        codes, scales, zeros = layer.codes(bits, group, symmetric)
        return packing.pack(codes, scales, None if symmetric else zeros, bits, group)

    return layer.once(("packed", bits, group, symmetric), make), layer.held(bits, group, symmetric)


def _product(name: str, bits: int, group: int, symmetric: bool, dtype: str) -> Callable[[Layer, int], tuple]:
    """A product with packed weights by one kernel; `dequantize` makes them dense for the library's."""

    def prepare(layer: Layer, count: int) -> tuple:
        load(name)
        packed, weight = _packed(layer, bits, group, symmetric)
        inputs = {"x": layer.activations(count, DTYPES[dtype]), "codes": packed.codes, "scale_zero": packed.scale_zero}
        rest, op = (bits, group, packed.rows, packed.columns, symmetric), getattr(torch.ops.lowbit, name)
        if name == "dequantize":
            return inputs, lambda x, codes, scale_zero: x @ op(codes, scale_zero, *rest, x.dtype).T, against(weight)
        return inputs, lambda x, codes, scale_zero: op(x, codes, scale_zero, *rest), against(weight)

    return prepare


def _linear(dtype: str) -> Callable[[Layer, int], tuple]:
    def prepare(layer: Layer, count: int) -> tuple:
        linear = load("linear")
        packed, weight = _packed(layer, 4, 128, False)
        inputs = {"x": layer.activations(count, DTYPES[dtype]), "packed": packed}
        return inputs, lambda x, packed: linear.w4a16(x, packed), against(weight)

    return prepare


def linear_way(layer: Layer, count: int) -> str:
    """Which of its ways the dispatcher takes, as the note of a row."""
    return "by " + load("linear").path_of(count, layer.rows, layer.columns, layer.device)


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
            launch = lambda x_q, s_x, w_q, s_w: kernel.w8a8_gemm(x_q, s_x, w_q, s_w, DTYPES[dtype])  # noqa: E731
            return {"x_q": x_q, "s_x": s_x, "w_q": w_q, "s_w": s_w}, launch, int8_product
        want = lambda x, w_q, s_w: int8_product(*quantizer.reference(x), w_q, s_w)  # noqa: E731
        launch = kernel.w8a8 if name == "w8a8" else torch.ops.lowbit.w8a8_gemv
        return {"x": x, "w_q": w_q, "s_w": s_w}, lambda x, w_q, s_w: launch(x, w_q, s_w), want

    return prepare


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
        *(_provider("linear", "w4-g128", _linear(d), d, least=2, note=linear_way) for d in DTYPES),
        # Two of the ways of `linear` by themselves: what its choice stands on.
        *(
            _provider(name, "w4-g128", _product(name, 4, 128, False, "fp16"), "fp16", least=128)
            for name in ("w4a16_gemm", "dequantize")
        ),
    )
}


# ---- what `python -m repro tune` sweeps


def _tune_read_floor() -> Tunable:
    """Sizes from a small 2-bit layer to a large bf16 one."""
    return Tunable(
        space=lambda nbytes: load("read_floor").SPACE,
        places=[1 << n for n in range(18, 30)],
        key=str,
        make=lambda nbytes: None,
        task=lambda nbytes, _, config: timing.read_floor(nbytes, config=config),
    )


def _by_case(
    name: str,
    cases: Sequence[Mapping[str, Any]],
    hot: tuple[str, ...] = ("x",),
    key: Callable[[Mapping[str, Any]], str] | None = None,
    space: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]] | None = None,
) -> Tunable:
    """A kernel whose `launch(*inputs, config)` takes what its `make_inputs` gives and returns the output, at cases."""
    module = load(name)
    if not hasattr(module, "SPACE"):
        raise UserError(f"tune: {name} has no SPACE of configurations")
    parameters = list(inspect.signature(module.launch).parameters)

    def task(case: Mapping[str, Any], made: tuple, config: Mapping[str, Any]) -> timing.Task:
        launch = lambda **given: module.launch(**given, config=dict(config))  # noqa: E731
        want = lambda **given: module.reference(*given.values())  # noqa: E731
        return timing.Task(name, launch, dict(zip(parameters, made)), want, 4e-3, hot)

    return Tunable(
        space=space or (lambda case: module.SPACE),
        places=cases,
        key=key or module.tuning_key,
        make=lambda case: module.make_inputs(case, "cuda"),
        task=task,
    )


def _cases(counts: Sequence[int], **more: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """Every layer shape with every number of activation rows."""
    return [{"M": m, "N": n, "K": k, "seed": 0, "dtype": "bfloat16", **more} for n, k in shapes() for m in counts]


def _tune_wna16_gemv() -> Tunable:
    cases = [
        {"rows": n, "columns": k, "bits": bits, "group": group, "symmetric": symmetric, "m": m, "seed": 0}
        for bits, group, symmetric in ((4, 128, False), (2, 64, False), (8, 0, True))
        for n, k in shapes()
        for m in (1, 8, 16)
    ]
    return _by_case("wna16_gemv", cases, key=lambda c: f"w{c['bits']} m{c['m']} {c['rows']}x{c['columns']}")


def _tune_w4a16_gemm() -> Tunable:
    cases = _cases((16, 32, 64, 128, 256), bits=4, group=128, symmetric=False)
    tokens = lambda config: config["MT"] if "MT" in config else 64 * config["MB"]  # noqa: E731
    fits = lambda case: [c for c in load("w4a16_gemm").SPACE if tokens(c) <= max(16, case["M"])]  # noqa: E731
    return _by_case("w4a16_gemm", cases, space=fits)


def _tune_w8a8_gemv() -> Tunable:
    return _by_case("w8a8_gemv", _cases((1, 2, 4, 8)))


def _tune_w8a8_gemm() -> Tunable:
    return _by_case("w8a8_gemm", _cases((16, 32, 64, 128, 256, 512, 1024, 2048)), hot=("x_q", "s_x"))


TUNABLE: dict[str, Callable[[], Tunable]] = {
    "read_floor": _tune_read_floor,
    "wna16_gemv": _tune_wna16_gemv,
    "w4a16_gemm": _tune_w4a16_gemm,
    "w8a8_gemv": _tune_w8a8_gemv,
    "w8a8_gemm": _tune_w8a8_gemm,
}
