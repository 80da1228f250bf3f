"""A model under a recipe: it computes with dequantized weights, and is stored as codes and scales.

Accuracy never needs a kernel: a `QuantizedWeight` keeps codes, scales and zeros, and `dequantize` gives the weight that
a quality table evaluates; a speed table hands the same codes to a kernel.
"""

import contextlib
import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from repro.core.errors import UserError
from repro.core.files import atomic
from repro.models.attachments import Attachment
from repro.models.quantized import FORMATS, QuantizedWeight


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

    A recipe's steps edit it in turn: a quantizer calls `set_weight` for every layer, and `set_dense` for a norm or bias
    that it changes; a compensator calls `attach`.

    Attributes:
        model: computes with the dequantized weights.
        weights: what is stored for each quantized layer, by module path.
        dense: parameters that a step replaced in full precision, by name; stored with the weights.
        extra_bits: what a step stores for the blocks that is no parameter of `model` (compensators), in bits by kind.
        attachments: what is computed beside a layer's weight, by module path and in order; counted in `extra_bits`.
        full: each layer's weight before it was quantized; none of a model that was loaded from a file without
            `keep_full`. A step that rescales the model (`RESCALES`: AWQ) does so in place before it quantizes, so that
            these weights fit the norms.
        meta: what the file says of itself that the model was loaded from.
        facts: what steps say of themselves, one number a layer by name (`layers/damage`); kept as observations.
    """

    model: nn.Module
    weights: dict[str, QuantizedWeight] = field(default_factory=dict)
    dense: dict[str, Tensor] = field(default_factory=dict)
    extra_bits: dict[str, int] = field(default_factory=dict)
    attachments: dict[str, list[Attachment]] = field(default_factory=dict)
    full: dict[str, Tensor] = field(default_factory=dict, repr=False)
    meta: dict[str, str] = field(default_factory=dict)
    facts: dict[str, list[float]] = field(default_factory=dict)

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
        self.full.setdefault(name, linear.weight.data)
        linear.weight.data = dense.to(linear.weight)
        self.weights[name] = weight

    def set_weights(self, names: Sequence[str], tall: QuantizedWeight) -> None:
        """`set_weight` for several layers, whose rows `tall` holds one after the other.

        Raises:
            UserError: as `set_weight`.
        """
        end = 0
        for name in names:
            start = end
            end = end + self.model.get_submodule(name).out_features
            self.set_weight(name, tall.rows(start, end))

    def set_dense(self, name: str, value: Tensor) -> None:
        """Let the model compute with `value` as its parameter `name`, in the parameter's own dtype, and store it.

        Raises:
            UserError: the value is not finite, or its shape is not the parameter's.
        """
        parameter = self.model.get_parameter(name)
        if value.shape != parameter.shape:
            raise UserError(f"{name}: {list(value.shape)} values for a parameter of {list(parameter.shape)}")
        if not torch.isfinite(value.to(parameter.dtype)).all():
            raise UserError(f"{name}: the new value is not finite in {parameter.dtype}")
        parameter.data.copy_(value)
        self.dense[name] = parameter.data.clone()

    def attach(self, name: str, attachment: Attachment) -> None:
        """Let layer `name` compute with `attachment` beside its weight and what is attached already, and store it.

        Raises:
            UserError: no step of that name attaches anything, or the layer has an attachment of this kind.
        """
        present = self.attachments.get(name, [])
        with in_layer(name):
            if earlier := next((a for a in present if a.kind == attachment.kind), None):
                raise UserError(
                    f"a second {attachment.kind} is refused ({attachment.step} after {earlier.step}); "
                    "a layer takes one attachment of each kind"
                )
            layer = attachment.build(self.model.get_submodule(name))
        self.model.set_submodule(name, layer)
        self.attachments[name] = [*present, attachment]
        self.extra_bits[attachment.step] = self.extra_bits.get(attachment.step, 0) + attachment.stored_bits()

    def full_precision(self) -> nn.Module:
        """A copy of the model with each layer's weight from before it was quantized, and nothing attached.

        Raises:
            UserError: no layer is quantized, the model was loaded from a file, or something is attached already.
        """
        if not self.full or self.attachments:
            raise UserError("full-precision weights are at hand only right after the quantizing step of a recipe")
        model = copy.deepcopy(self.model)
        for name, weight in self.full.items():
            model.get_submodule(name).weight.data = weight
        return model

    def save(self, path: Path, meta: dict[str, str]) -> None:
        """Write every layer's codes, scales and zeros and the dense parameters to a safetensors file.

        `meta` (text) and a SHA-256 of everything go into its header.
        """
        tensors = {name: value.contiguous() for name, value in self.dense.items()}
        layers = {}
        for name, weight in self.weights.items():
            for key in weight.TENSORS:
                tensor = getattr(weight, key)
                if tensor is not None:
                    tensors[f"{name}/{key}"] = tensor.contiguous()
            layers[name] = {key: getattr(weight, key) for key in weight.NUMBERS}
            layers[name] |= {"format": weight.FORMAT} if weight.FORMAT else {}
        for name, present in self.attachments.items():
            for a in present:  # each of another kind, so of another step: their keys differ
                tensors |= {f"{name}/{a.step}.{key}": tensor.contiguous() for key, tensor in a.tensors.items()}
        attachments = {}
        for name, present in self.attachments.items():
            attachments[name] = [{"step": a.step, "numbers": a.numbers} for a in present]
        facts = {
            "meta": meta,
            "layers": layers,
            "dense": list(self.dense),
            "attachments": attachments,
            "extra_bits": self.extra_bits,
        }
        with atomic(path) as temporary:  # one key only: safetensors writes several in random order
            save_file(tensors, temporary, {"lowbit": json.dumps(facts | {"sha256": _digest(tensors, facts)})})

    def load(self, path: Path, keep_full: bool = False) -> dict[str, str]:
        """Replace the model's weights and dense parameters by those stored at `path`; returns the `meta` saved there.

        Args:
            keep_full: the weights that the model has now are those that were quantized: keep them in `full`.

        Raises:
            UserError: the file is incomplete, damaged or of another form, its hash does not match, or it belongs to
                another architecture.
        """
        try:
            with safe_open(path, "pt") as file:
                facts = json.loads(file.metadata()["lowbit"])
                tensors = {key: file.get_tensor(key) for key in file.keys()}
            if facts.pop("sha256") != _digest(tensors, facts):
                raise ValueError("its contents do not match its SHA-256")
            for name, numbers in facts["layers"].items():
                form = FORMATS[numbers.pop("format", "")]
                parts = {key: tensors[f"{name}/{key}"] for key in form.TENSORS if f"{name}/{key}" in tensors}
                self.set_weight(name, form.restored(parts, numbers, self.weights))
                if not keep_full:
                    del self.full[name]
            for name in facts["dense"]:
                self.set_dense(name, tensors[name])
            for name, present in facts["attachments"].items():
                for attachment in present:
                    prefix = f"{name}/{attachment['step']}."
                    parts = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
                    self.attach(name, Attachment(tensors=parts, **attachment))
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        except Exception as error:
            raise UserError(
                f"{path}: not a compressed model that this version reads ({error}); delete and rebuild"
            ) from None
        self.extra_bits, self.meta = facts["extra_bits"], facts["meta"]
        return self.meta


def is_compressed_file(path: Path) -> bool:
    """Whether a file is one that `LowBitModel.save` wrote, by its header."""
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads((file.metadata() or {})["lowbit"])
            return "recipe" in facts["meta"]
    except Exception:  # safetensors has its own kinds
        return False


def _digest(tensors: dict[str, Tensor], facts: dict) -> str:
    """SHA-256 of every tensor's name, dtype, shape and bytes, and of `facts`."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
