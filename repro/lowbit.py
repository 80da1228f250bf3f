"""What a recipe makes of a model: quantized weights with codes and scales, and the model that computes with them.

Accuracy never needs a kernel: a `QuantizedWeight` keeps codes, scales and zeros, and `dequantize` gives the weight that
a quality table evaluates; a speed table hands the same codes to a kernel.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from repro.errors import UserError
from repro.files import atomic

TENSORS = ("codes", "scales", "zeros", "group_index")
NUMBERS = ("bits", "group", "zero_bits", "scale_bits")


@dataclass(frozen=True)
class QuantizedWeight:
    """A linear weight `[N, K]` on a uniform grid: `w = (codes - zeros) * scales`, a scale per row and group of columns.

    Attributes:
        codes: uint8 `[N, K]`, each in `0 … 2^bits - 1`.
        scales: float `[N, G]`, G groups of `group` columns (G = 1 per channel).
        zeros: float `[N, G]`, integer-valued unless the method says otherwise (HQQ keeps them real).
        bits: width of a code.
        group: columns per group; 0 is per channel, one group a row.
        zero_bits: stored bits of one zero point; 0 where the grid is symmetric and the zero is a constant.
        scale_bits: stored bits of one scale.
        group_index: int32 `[K]` group of each column, only where columns were permuted (GPTQ act order), stored.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int
    group: int = 0
    zero_bits: int = 0
    scale_bits: int = 16
    group_index: Tensor | None = None

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        groups = 1 if self.group == 0 else columns // self.group
        if self.group and columns % self.group:
            raise UserError(f"{columns} input columns do not divide into groups of {self.group}")
        for name, tensor in (("scales", self.scales), ("zeros", self.zeros)):
            if tuple(tensor.shape) != (rows, groups):
                raise ValueError(
                    f"{name} is {list(tensor.shape)}, expected {[rows, groups]} for {rows}x{columns} codes"
                )

    @property
    def shape(self) -> torch.Size:
        """`[N, K]`"""
        return self.codes.shape

    def column_group(self) -> Tensor:
        """int64 `[K]`: the group of each column."""
        if self.group_index is not None:
            return self.group_index.long()
        columns = self.codes.shape[1]
        return torch.arange(columns, device=self.codes.device) // (self.group or columns)

    def dequantize(self) -> Tensor:
        """float32 `[N, K]`: the weight that the codes stand for."""
        index = self.column_group()
        return (self.codes.float() - self.zeros.float()[:, index]) * self.scales.float()[:, index]

    def rows(self, start: int, end: int) -> "QuantizedWeight":
        """A copy of the output rows `start … end - 1`."""
        index = None if self.group_index is None else self.group_index.clone()
        codes, scales, zeros = (t[start:end].clone() for t in (self.codes, self.scales, self.zeros))
        return replace(self, codes=codes, scales=scales, zeros=zeros, group_index=index)

    def stored_bits(self) -> dict[str, int]:
        """Bits by kind: codes, scales, zeros, indices."""
        return {
            "codes": self.codes.numel() * self.bits,
            "scales": self.scales.numel() * self.scale_bits,
            "zeros": self.zeros.numel() * self.zero_bits,
            "indices": 0 if self.group_index is None else self.group_index.numel() * 32,
        }


def block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of the transformer blocks by module path, in order; embedding and head are not among them."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in f".{name}."
    }


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The transformer blocks by module path, in order.

    Raises:
        UserError: the model has no `layers`, as every supported architecture has.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.split(".")[-1] == "layers":
            return {f"{name}.{i}": block for i, block in enumerate(module)}
    raise UserError(f"{type(model).__name__} has no transformer blocks under a module named 'layers'")


@torch.no_grad()
def block_inputs(model: nn.Module, calibration: Tensor) -> tuple[list[Tensor], list[dict]]:
    """What the blocks of a Hugging Face decoder are called with: run it with blocks that pass their input on unchanged.

    Args:
        model: the decoder; set to evaluation.
        calibration: int64 token ids `[sequences, length]`.

    Returns:
        The hidden states before the first block, `[1, length, hidden]` for each sequence, and the keyword arguments
        (mask, positions) of each block, which are the same for every sequence.
    """
    hidden, kwargs = [], {}

    def passing(index: int):  # noqa: ANN202
        def forward(x: Tensor, **kw: object) -> Tensor:
            if index == 0:
                hidden.append(x)
            kwargs[index] = kw
            return x

        return forward

    stack = list(blocks(model).values())
    model.eval()
    try:
        for index, block in enumerate(stack):
            block.forward = passing(index)
        for ids in calibration.to(model.device):
            model.base_model(input_ids=ids[None], use_cache=False)
    finally:
        for block in stack:
            vars(block).pop("forward", None)
    return hidden, [kwargs[index] for index in range(len(stack))]


@contextlib.contextmanager
def in_layer(name: str) -> Iterator[None]:
    """Put the layer's name before the message of a `UserError`."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


@dataclass
class LowBitModel:
    """A causal LM whose block linears compute with dequantized weights, and what is stored instead of them.

    A recipe's steps edit it in turn: a quantizer calls `set_weight` for every layer.

    Attributes:
        model: computes with the dequantized weights.
        weights: what is stored for each quantized layer, by module path.
        extra_bits: what a step stores for the blocks that is no parameter of `model` (compensators), in bits by kind.
    """

    model: nn.Module
    weights: dict[str, QuantizedWeight] = field(default_factory=dict)
    extra_bits: dict[str, int] = field(default_factory=dict)

    def set_weight(self, name: str, weight: QuantizedWeight) -> None:
        """Store `weight` for layer `name` and let the model compute with it.

        Raises:
            UserError: the dequantized weight is not finite (a NaN or Inf in the model or in its calibration), or its
                shape is not the layer's.
        """
        linear = self.model.get_submodule(name)
        if weight.shape != linear.weight.shape:
            raise UserError(f"{name}: {list(weight.shape)} codes for a layer of {list(linear.weight.shape)}")
        dense = weight.dequantize()
        if not torch.isfinite(dense).all():
            raise UserError(f"{name}: the quantized weight is not finite; model or calibration holds NaN or Inf")
        linear.weight.data.copy_(dense.to(linear.weight.dtype))
        self.weights[name] = weight

    def save(self, path: Path, meta: dict[str, str]) -> None:
        """Write codes, scales and zeros of every layer to a safetensors file, with `meta` (text) and a SHA-256."""
        tensors, layers = {}, {}
        for name, weight in self.weights.items():
            for key in TENSORS:
                tensor = getattr(weight, key)
                if tensor is not None:
                    tensors[f"{name}/{key}"] = tensor.contiguous()
            layers[name] = {key: getattr(weight, key) for key in NUMBERS}
        facts = {"meta": meta, "layers": layers, "extra_bits": self.extra_bits}
        with atomic(path) as temporary:  # one key only: safetensors writes several in random order
            save_file(tensors, temporary, {"lowbit": json.dumps(facts | {"sha256": _digest(tensors, facts)})})

    def load(self, path: Path) -> dict[str, str]:
        """Replace the model's block weights by those stored at `path`; returns the `meta` that was saved.

        Raises:
            UserError: the file is not a whole safetensors file of this form, its hash does not match, or it belongs to
                another architecture.
        """
        try:
            with safe_open(path, "pt") as file:
                facts = json.loads(file.metadata()["lowbit"])
                tensors = {key: file.get_tensor(key) for key in file.keys()}
            if facts.pop("sha256") != _digest(tensors, facts):
                raise ValueError("its contents do not match its SHA-256")
            for name, numbers in facts["layers"].items():
                parts = {key: tensors[f"{name}/{key}"] for key in TENSORS if f"{name}/{key}" in tensors}
                self.set_weight(name, QuantizedWeight(**parts, **numbers))
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        except Exception as error:
            raise UserError(
                f"{path}: no compressed model that this version reads ({error}); delete and rebuild"
            ) from None
        self.extra_bits = facts["extra_bits"]
        return facts["meta"]


def _digest(tensors: dict[str, Tensor], facts: dict) -> str:
    """SHA-256 of every tensor's name, dtype, shape and bytes, and of `facts`."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
