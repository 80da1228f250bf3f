"""Our kernels and their peers for the product of a layer with activations, with one interface.

A provider takes a `Layer` (a random weight and its codes) and gives the `Task` that the timer times: its own
inputs, its launch, and the float32 result of the weights that it really holds. Every provider is optional:
`unavailable(device)` says in a sentence why it cannot run here. `PEERS` are other people's kernels; `OURS`, in
`kernel_list.py`, are ours.
"""

import functools
import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from repro.bench.task import Layer, Task
from repro.core.files import ROOT
from repro.kernels.launch_config import device_slug

GEMLITE = "0.6.0.post2"  # the release that the stored rows measured
LIBRARY = "torch.matmul"  # the library kernel that every run has: rescaled times and regression checks stand on it
LIBRARY_LABEL = f"bf16/bf16/{LIBRARY}"


# ---- the interface


@dataclass(frozen=True)
class Provider:
    """One implementation of a layer's product.

    Attributes:
        name: who: `torch.matmul`, `wna16_gemv`, …
        format: what it holds: `bf16`, `w4-g128`, `w2-g64`, `w8-pc`, `w8a8`, `fp8`.
        unavailable: the sentence that says why it cannot run on a device, or None.
        prepare: from a layer and a number of activation rows to inputs (`x` and `want` among them: activations, and the
            weight that it really holds or a function of the inputs), and the launch.
        least, most: numbers of activation rows that it takes, or is worth asking for.
        tolerance: relative error that its arithmetic and its output type allow.
        dtype: of activations and output.
        hot: names of the inputs that are in cache when a model calls it.
        alone: its first launch tunes itself by the clock, so nothing else may run beside it.
        note: what a row should say of how it was set up, on a layer with so many rows of activations.
        read: bytes of a layer's weight that a launch reads, where it leaves some out.
    """

    name: str
    format: str
    unavailable: Callable[[str], str | None]
    prepare: Callable[[Layer, int], tuple[dict[str, Any], Callable[..., Any], Callable[..., Any]]]
    least: int = 1
    most: int = 1 << 20
    tolerance: float = 6e-3
    dtype: str = "bf16"
    hot: tuple[str, ...] = ("x",)
    alone: bool = False
    note: Callable[[Layer, int], str | None] | None = None
    read: Callable[[Layer], int] | None = None

    @property
    def label(self) -> str:
        """The name of the provider, unique in a run."""
        return f"{self.format}/{self.dtype}/{self.name}"

    def takes(self, count: int) -> bool:
        """Whether it is asked for that many rows of activations."""
        return self.least <= count <= self.most

    def task(self, layer: Layer, count: int) -> Task:
        """The task of multiplying `count` rows of activations."""
        inputs, launch, want = self.prepare(layer, count)
        facts = {"kernel": self.format, "provider": self.name, "dtype": self.dtype}
        facts |= {"N": layer.rows, "K": layer.columns, "M": count}
        if self.note:
            facts["note"] = self.note(layer, count) or ""
        nbytes = self.read(layer) if self.read else None
        return Task(self.label, launch, inputs, want, self.tolerance, self.hot, nbytes, facts=facts)


def against(weight: Tensor) -> Callable[..., Tensor]:
    """The reference of a plain product with the weight that a provider really holds, float32 `[rows, columns]`."""
    return lambda x, **_: x.float() @ weight.float().T


def needs_cuda(device: str, capability: tuple[int, int] = (8, 0)) -> str | None:
    """A sentence where there is no CUDA device of at least that capability."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return "needs a CUDA device"
    if torch.cuda.get_device_capability(device) < capability:
        return f"needs a GPU of compute capability {capability[0]}.{capability[1]} or newer"
    return None


# ---- PyTorch's own


def _matmul(dtype: torch.dtype) -> Callable[[Layer, int], tuple]:
    def prepare(layer: Layer, count: int) -> tuple:
        weight = layer.once(dtype, lambda: layer.weight.to(dtype))
        inputs = {"x": layer.activations(count, dtype), "weight": weight}
        return inputs, lambda x, weight: F.linear(x, weight), against(weight)

    return prepare


def _compiled(layer: Layer, count: int) -> tuple:
    """Coordinate descent makes inductor write its own matrix-vector kernel; plain, it calls cuBLAS and is slower."""
    inputs, launch, want = _matmul(torch.bfloat16)(layer, count)
    return inputs, torch.compile(launch, dynamic=False, options={"coordinate_descent_tuning": True}), want


def _tinygemm(layer: Layer, count: int) -> tuple:
    """Its grid is (code - 8) * scale + zero with bfloat16 scales and zeros, so the float32 reference has those."""

    def make() -> tuple[Tensor, Tensor, Tensor]:
        codes, scales, zeros = layer.codes(4, 128)
        scale = scales.bfloat16()
        zero = ((8 - zeros.float()) * scale.float()).bfloat16()
        packed = torch.ops.aten._convert_weight_to_int4pack((codes[:, ::2] << 4 | codes[:, 1::2]).contiguous(), 8)
        scale_zero = torch.stack([scale, zero], -1).transpose(0, 1).contiguous()
        grouped = codes.view(layer.rows, -1, 128).float().sub_(8)
        weight = grouped.mul_(scale.float()[..., None]).add_(zero.float()[..., None]).view(codes.shape)
        return packed, scale_zero, weight

    packed, scale_zero, weight = layer.once("tinygemm", make)
    launch = lambda x, packed, scale_zero: torch.ops.aten._weight_int4pack_mm(x, packed, 128, scale_zero)  # noqa: E731
    inputs = {"x": layer.activations(count, torch.bfloat16), "packed": packed, "scale_zero": scale_zero}
    return inputs, launch, against(weight)


def _fp8(layer: Layer, count: int) -> tuple:
    """Weights and activations quantized beforehand, one scale each; the time is that of the product alone."""
    x = layer.activations(count, torch.float32)
    scale_x, scale_w = (t.abs().max() / 448 for t in (x, layer.weight))
    inputs = {
        "x": (x / scale_x).to(torch.float8_e4m3fn),
        "weight": layer.once("fp8", lambda: (layer.weight / scale_w).to(torch.float8_e4m3fn)),
        "scale_x": scale_x,
        "scale_w": scale_w,
    }

    def launch(x: Tensor, weight: Tensor, scale_x: Tensor, scale_w: Tensor) -> Tensor:
        return torch._scaled_mm(x, weight.t(), scale_a=scale_x, scale_b=scale_w, out_dtype=torch.bfloat16)

    def want(x: Tensor, weight: Tensor, scale_x: Tensor, scale_w: Tensor) -> Tensor:
        return x.float() @ weight.float().T * (scale_x * scale_w)

    return inputs, launch, want


def _int_mm(layer: Layer, count: int) -> tuple:
    """int8 times int8 to int32, quantized beforehand and not scaled afterwards; exact."""
    x = layer.activations(count, torch.float32)
    inputs = {"x": (x / x.abs().amax(1, keepdim=True) * 127).round().to(torch.int8), "weight": layer.int8()[0]}
    # float64 holds every int32 sum exactly; integer matmul does not exist on the device.
    return inputs, lambda x, weight: torch._int_mm(x, weight.t()), lambda x, weight: x.double() @ weight.double().T


# ---- GemLite


def no_gemlite(device: str) -> str | None:
    """GemLite cannot even be imported without CUDA, so its version is looked up first."""
    if reason := needs_cuda(device):
        return reason
    try:
        version = importlib.metadata.version("gemlite")
    except importlib.metadata.PackageNotFoundError:
        return f"needs the package gemlite=={GEMLITE}"
    return None if version == GEMLITE else f"is compared at gemlite=={GEMLITE}, here is {version}"


def gemlite_file(device: str) -> Path:
    """The file of the configurations that GemLite's own tuner found on a device."""
    return ROOT / "results" / device_slug(device) / "gemlite.json"


@functools.cache
def _gemlite_ready(device: str) -> dict[str, Any]:
    """GemLite at its best: outputs zeroed beforehand, and the best configurations there are; those found on a device.

    It ships configurations for the H100, which it does not look up on other chips of that architecture.
    """
    import gemlite

    gemlite.set_kernel_caching(True)
    if torch.cuda.get_device_capability(device) == (9, 0):
        gemlite.load_config(str(Path(gemlite.__file__).parent / "configs" / "h100.json"))
    own = gemlite_file(device)
    if not own.is_file():
        return {}
    gemlite.load_config(str(own))
    return json.loads(own.read_text(encoding="utf-8"))


def gemlite_kernel(bits: int, count: int) -> str:
    """GemLite's own choice, but for 2 to 4 rows: its vector kernel takes 22 us there, its matrix kernel 16 (4096^2)."""
    from gemlite import core

    return "GEMM_SPLITK" if 1 < count <= 4 else core.get_matmul_type(count, bits)


def gemlite_configuration(bits: int, group: int, layer: Layer, count: int) -> str | None:
    """Where GemLite's configuration for a shape comes from, in words; None where its tuner would run first."""
    from gemlite import core
    from gemlite.triton_kernels.utils import get_closest_m

    ready = _gemlite_ready(layer.device)
    kernel = gemlite_kernel(bits, count)
    shipped = core.GEMLITE_TRITON_CONFIG_CACHE.get(kernel, {})
    tuned_for = str((get_closest_m(count), layer.rows, layer.columns, group, 32 // bits, 100 + bits))  # 100: float16
    if tuned_for in ready.get(kernel, {}):
        return f"{kernel}, tuned by GemLite on this device"
    return f"{kernel}, as GemLite ships it for the H100" if tuned_for in shipped else None


def gemlite_task(bits: int, group: int, layer: Layer, count: int) -> tuple[dict[str, Any], Callable, Callable]:
    """Inputs, launch and reference of GemLite; its tuner runs at the first launch where nothing is tuned."""
    from gemlite.core import GEMLITE_MATMUL_TYPES_MAPPING, forward_functional
    from gemlite.helper import A16Wn

    _gemlite_ready(layer.device)
    kernel = GEMLITE_MATMUL_TYPES_MAPPING[gemlite_kernel(bits, count)]
    make = lambda: A16Wn(device=layer.device).from_weights(*layer.codes(bits, group), bits, group)  # noqa: E731
    linear = layer.once(("gemlite", bits, group), make)
    packed, meta = linear.get_tensor_args(), linear.get_meta_args()
    inputs = {"x": layer.activations(count, torch.float16), "packed": packed}
    return (
        inputs,
        lambda x, packed: forward_functional(x, None, packed, meta, kernel),
        against(layer.dequantized(bits, group)),
    )


def _gemlite(bits: int, group: int, most: int) -> Provider:
    def prepare(layer: Layer, count: int) -> tuple:
        if not gemlite_configuration(bits, group, layer, count):
            raise ValueError("no configuration of GemLite is tuned here; python -m repro tune gemlite finds one")
        return gemlite_task(bits, group, layer, count)

    more = {"note": partial(gemlite_configuration, bits, group), "dtype": "fp16"}
    return Provider("gemlite", f"w{bits}-g{group}", no_gemlite, prepare, most=most, **more)


PEERS = {
    provider.label: provider
    for provider in (
        Provider(LIBRARY, "bf16", needs_cuda, _matmul(torch.bfloat16)),
        Provider(LIBRARY, "fp16", needs_cuda, _matmul(torch.float16), dtype="fp16", tolerance=1e-3, most=256),
        Provider("torch.compile", "bf16", needs_cuda, _compiled, most=1, alone=True),
        Provider("tinygemm", "w4-g128", needs_cuda, _tinygemm, most=256),
        _gemlite(4, 128, most=256),
        _gemlite(2, 64, most=1),
        Provider("torch._scaled_mm", "fp8", lambda device: needs_cuda(device, (8, 9)), _fp8),
        Provider("torch._int_mm", "int8", needs_cuda, _int_mm, least=17, tolerance=0.0, dtype="int32"),
    )
}  # fmt: skip
