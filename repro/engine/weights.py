"""Convert a Transformers model to a `Decoder`: its layers as products `y = x W^T + b`, in one launch if possible.

Layers that share their input are one product. A compressed weight is packed once for `kernels.linear`. Where no kernel
takes it (a CPU, float32, a format that is no uniform grid), it is dequantized once and the library multiplies: the same
numbers, more bytes. Inputs that are quantized in groups are so here, too (`two_bit.py`). Inputs that a layer takes as
zero (SpQt) are skipped where a kernel does so, for one token on Q4_K in zigzag, and multiplied like others elsewhere.
"""

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repro.core.errors import NotMeasurable, UserError
from repro.engine import q4_k, two_bit
from repro.engine.corrected import corrected, expanded
from repro.engine.step import Block, Decoder
from repro.kernels import linear as kernel
from repro.kernels import packing, w2a2_gemv, zigzag_gemv
from repro.kernels.active_inputs import active_inputs
from repro.kernels.dequantize import dequantize
from repro.kernels.packing import PackedWeight
from repro.kernels.w2a2_format import MOST_TOKENS
from repro.methods.spqt.teal import zeroed
from repro.models import bits as counting
from repro.models.lowbit import LowBitModel, blocks, in_layer
from repro.models.quantized import QuantizedWeight

SLOTS = {2: 2, 3: 4, 4: 4, 8: 8}  # bits of a code to those of its slot
ARCHITECTURES = ("llama", "mistral", "qwen2")
HEADS = (64, 128)  # sizes that the attention kernel takes
ROPE = ("default", "linear", "llama3", "yarn")  # whose frequencies do not depend on a prompt's length
LAYERS = {  # product of a block to the layers of Transformers that share its input
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
Product = Callable[[Sequence[str]], nn.Module]  # from the names of layers that share their input


class Dense(nn.Module):
    """A product, x `[T, K]` to y `[T, N]` as all here, with a weight `[N, K]` in the dtype of the activations."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        if weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.shape[0] > weight.shape[1]:
            weight = weight.mT.contiguous().mT  # in memory by columns: one token takes about half the time
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    __call__ = forward  # a module's own looks for hooks, which takes longer than many a product of one token

    @property
    def outputs(self) -> int:
        """N."""
        return self.weight.shape[0]

    def into(self, x: Tensor, y: Tensor) -> None:
        """Write the product of one token into y `[1, N]`, a slice of a longer row."""
        if self.bias is None:
            torch.mm(x, self.weight.T, out=y)
        else:
            torch.addmm(self.bias, x, self.weight.T, out=y)


class Packed(nn.Module):
    """A product with a packed weight on a GPU, of columns of x in the order of the weight's (GPTQ's act order)."""

    def __init__(self, packed: PackedWeight, bias: Tensor | None, order: Tensor | None) -> None:
        super().__init__()
        self.packed = packed
        self.register_buffer("codes", packed.codes)
        self.register_buffer("scale_zero", packed.scale_zero)
        self.register_buffer("bias", bias)
        self.register_buffer("order", order)

    def forward(self, x: Tensor) -> Tensor:
        y = kernel.wna16(x if self.order is None else x[:, self.order], self.packed)
        return y if self.bias is None else y + self.bias

    @property
    def outputs(self) -> int:
        """N."""
        return self.packed.rows

    def into(self, x: Tensor, y: Tensor) -> None:
        """Write the product of one token into y `[1, N]`, a slice of a longer row."""
        kernel.into(x if self.order is None else x[:, self.order], self.packed, y)
        if self.bias is not None:
            y += self.bias

    def expanded(self, tokens: int, dtype: torch.dtype) -> nn.Module:
        """The product with its weight dequantized, if a call with so many tokens would do that each time."""
        packed = self.packed
        layer = packed.rows, packed.columns, packed.bits, packed.codes.device
        if kernel.path_of(tokens, *layer, dtype) != "dequantize":
            return self
        form = packed.bits, packed.group, packed.rows, packed.columns, packed.symmetric
        weight = dequantize(packed.codes, packed.scale_zero, *form, dtype)
        return Dense(weight if self.order is None else weight[:, self.order.argsort()], self.bias)


class Joined(nn.ModuleList):
    """Products of one input whose formats or thresholds differ, so that they stay several launches.

    Layers that are neighbours and alike are one of them. One token's outputs are written side by side on a GPU, without
    a copy after them.

    Attributes:
        branches: whether products are branches of a graph that is captured, beside one another: short ones leave most
            of a GPU idle.
    """

    branches = False

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1 and x.is_cuda and all(hasattr(product, "into") for product in self):
            return self.side_by_side(x)
        return torch.cat([product(x) for product in self], 1)

    def side_by_side(self, x: Tensor) -> Tensor:
        """y `[1, N]` of one token, each product writing its own part."""
        y = x.new_empty(1, sum(product.outputs for product in self))
        parts = y.split([product.outputs for product in self], dim=1)
        if not (self.branches and captured(x)):
            for product, part in zip(self, parts):
                product.into(x, part)
            return y
        main = torch.cuda.current_stream()
        sides = side_streams(len(self) - 1)
        for side, product, part in zip(sides, list(self)[1:], parts[1:]):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                product.into(x, part)
        self[0].into(x, parts[0])
        for side in sides:
            main.wait_stream(side)
        return y

    @property
    def dense(self) -> "Joined":
        """The product without thresholds."""
        return Joined(getattr(product, "dense", product) for product in self)

    def expanded(self, tokens: int, dtype: torch.dtype) -> "Joined":
        """The same with dense weights where they would be dequantized."""
        return Joined(expanded(product, tokens, dtype) for product in self)


class JoinedColumns(Joined):
    """2-bit products of one input whose split channels differ: one launch for as few tokens as the kernel takes.

    Its products' weights are parts of one.

    Args:
        products: that `can_join`.
    """

    def __init__(self, products: Sequence[two_bit.W2A2]) -> None:
        super().__init__(products)
        self.layers = tuple(product.outputs for product in products)
        self.units, self.factors, self.index = (
            two_bit.merged_buffer(products, name) for name in ("units", "factors", "index")
        )
        biased = products[0].bias is not None
        self.bias = two_bit.merged_buffer(products, "bias") if biased else None

    def forward(self, x: Tensor) -> Tensor:
        return self.together(x) if x.is_cuda and len(x) <= MOST_TOKENS else super().forward(x)

    def together(self, x: Tensor) -> Tensor:
        """y `[T, N]` by one launch."""
        y = w2a2_gemv.launch(x, self.units, self.factors, self.index, layers=self.layers)
        return y if self.bias is None else y + self.bias

    def expanded(self, tokens: int, dtype: torch.dtype) -> Joined:
        """The same with dense weights where they would be dequantized."""
        return self if tokens <= MOST_TOKENS else super().expanded(tokens, dtype)


def joined(products: Sequence[nn.Module]) -> Joined:
    """Products of one input, in one launch where that is possible."""
    return JoinedColumns(products) if two_bit.can_join(products) else Joined(products)


def captured(x: Tensor) -> bool:
    """Whether what reads a tensor now is captured in a graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


_sides = threading.local()  # a capture is one thread's, and so are the streams that join it


def side_streams(count: int) -> list["torch.cuda.Stream"]:
    """Streams of this thread for products that run at the same time as the current stream."""
    streams = _sides.__dict__.setdefault("streams", [])
    while len(streams) < count:
        streams.append(torch.cuda.Stream())
    return streams[:count]


class SparseInputs(nn.Module):
    """A product that takes inputs up to a threshold as zero (SpQt), and the dense product, which a prefill runs."""

    def __init__(self, dense: nn.Module, threshold: float) -> None:
        super().__init__()
        self.dense, self.threshold = dense, threshold

    def forward(self, x: Tensor) -> Tensor:
        if self.takes_list(x):
            return self.listed(x, active_inputs(x, self.threshold))
        if isinstance(self.dense, q4_k.Q4K) and self.dense.takes_thresholds(x):
            return self.dense.thresholded(x, self.threshold)
        return self.dense(zeroed(x, self.threshold))

    def takes_list(self, x: Tensor) -> bool:
        """Whether the product of as many tokens as x has reads a list of its inputs, which their producer can make."""
        return isinstance(self.dense, q4_k.Q4K) and self.dense.method == "listed" and self.dense.takes_thresholds(x)

    def listed(self, x: Tensor, active: Tensor) -> Tensor:
        """y of one token and the list of its inputs above the threshold."""
        return self.dense.listed(x, active)


def packed_product(
    packed: PackedWeight, bias: Tensor | None, dtype: torch.dtype, order: Tensor | None = None
) -> nn.Module:
    """The product with a packed weight on its device, its columns in an order; UserError if no kernel runs there."""
    device = packed.codes.device
    if device.type == "cpu" or dtype == torch.float32:
        weight = packing.dequantize(packed).to(dtype)
        return Dense(weight if order is None else weight[:, order.argsort()], bias)
    if device.type == "cuda" and (why := kernel.unsupported(device)):
        raise UserError(f"{why} Load with dtype float32, or with device cpu")
    return Packed(packed, bias, order)


def slot(bits: int) -> int:
    """Bits in which a code is packed; UserError for a width that has no packed format."""
    if bits not in SLOTS:
        raise UserError(f"codes of {bits} bits have no packed format; choose 2, 3 (in 4-bit slots), 4 or 8 bits")
    return SLOTS[bits]


def product(lm: LowBitModel, names: Sequence[str], device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The product of layers that share their input; UserError, with the layer, for one that cannot be packed or run."""
    linears = [lm.model.get_submodule(name) for name in names]
    weights = [lm.weights.get(name) for name in names]
    attachments = []
    thresholds = []
    for name in names:
        attached = {attachment.kind: attachment for attachment in lm.attachments.get(name, [])}
        sparsity = attached.pop("sparsity", None)
        thresholds.append(None if sparsity is None else sparsity.tensors["threshold"].item())
        attachments.append(attached)
    quantized_inputs = [two_bit.taken_by(attached, linear) for attached, linear in zip(attachments, linears)]
    with in_layer(names[0]):
        keys = [None if of_linear is None else of_linear.key for of_linear in quantized_inputs]
        formats = list(zip(map(_format, weights), map(two_bit.key_of, weights), thresholds, keys))
        if len(set(formats)) > 1:
            return joined([product(lm, names[first:end], device, dtype) for first, end in runs(formats)])
        layer = _product(linears, weights, quantized_inputs[0], device, dtype)
    compensators, start = [], 0
    for linear, attached in zip(linears, attachments):
        compensators += [(start, linear, attachment) for attachment in attached.values()]
        start += linear.out_features
    layer = corrected(layer, compensators, device)  # on sparse inputs too: sparsity is the last step
    return layer if thresholds[0] is None else SparseInputs(layer, thresholds[0])


def runs(values: Sequence[Any]) -> list[tuple[int, int]]:
    """(first, end) of each run of equal neighbours: layers that are one launch."""
    spans, first = [], 0
    for _, run in groupby(values):
        end = first + len(list(run))
        spans.append((first, end))
        first = end
    return spans


def _product(
    linears: list[nn.Linear],
    weights: list[QuantizedWeight | None],
    quantized_inputs: two_bit.Inputs | None,
    device: torch.device,
    dtype: torch.dtype,
) -> nn.Module:
    biased = linears[0].bias is not None  # then all of them are
    bias = torch.cat([linear.bias.data for linear in linears]).to(device, dtype) if biased else None
    if (fitting := two_bit.product_of(weights, quantized_inputs, bias, device, dtype)) is not None:
        return fitting
    if quantized_inputs is not None:
        if quantized_inputs.columns is not None:
            quantized_inputs = two_bit.Inputs(quantized_inputs.grid, quantized_inputs.columns.to(device))
        return two_bit.OnQuantized(_product(linears, weights, None, device, dtype), quantized_inputs)
    if runs_q4_k(device, dtype) and all(weight is not None and weight.FORMAT == "q4_k" for weight in weights):
        if (packed := q4_k.product_of(weights, bias, device)) is not None:
            return packed
    if _format(weights[0]) is None:  # the layer has the weight in full precision or dequantized
        return Dense(torch.cat([linear.weight.data for linear in linears]).to(device, dtype), bias)
    keys = "codes", "scales", "zeros"
    codes, scales, zeros = (torch.cat([getattr(weight, key) for weight in weights]).to(device) for key in keys)
    bits, group, symmetric, _ = _format(weights[0])
    order = None
    if weights[0].group_index is not None:
        index, order = weights[0].column_group().to(device).sort(stable=True)
        if not torch.equal(index, torch.arange(len(index), device=device) // (group or len(index))):
            raise UserError("its columns do not divide into groups of equal size; quantize it without act_order")
        codes = codes[:, order]
    try:
        packed = packing.pack(codes, scales, None if symmetric else zeros, bits, group)
    except ValueError as error:
        raise UserError(f"{error}; quantize it on such a grid") from None
    return packed_product(packed, bias, dtype, order)


def runs_q4_k(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products with Q4_K run by its kernels: on a GPU, in 16 bits, as those of other formats."""
    return device.type == "cuda" and dtype != torch.float32 and zigzag_gemv.unsupported(device) is None


def _format(weight: QuantizedWeight | None) -> tuple | None:
    """(bits of a slot, group, whether zeros are the constant of a symmetric grid, column order) of a packed weight."""
    if weight is None or weight.FORMAT:
        return None
    bits = slot(weight.bits)
    columns = weight.codes.shape[1]
    index = None if weight.group_index is None else weight.group_index.cpu().numpy().tobytes()
    return bits, weight.group % columns, bool((weight.zeros == 1 << (bits - 1)).all()), index


def check(name: str, config: Any, context: int | None) -> int:
    """The context of a model that the engine runs: what is asked for, or the model's, at most 2048.

    UserError for a model that it does not run, `NotMeasurable` for a context beyond the model's.
    """
    if config.model_type not in ARCHITECTURES:
        raise UserError(f"model {name!r}: the engine does not run {config.model_type}; choose Llama, Mistral or Qwen2")
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if head_size(config) not in HEADS or heads % groups:
        has = f"{heads} heads of size {head_size(config)} over {groups} key-value heads"
        raise UserError(f"model {name!r}: {has}; the attention takes heads of 64 or 128, each group of the same number")
    if config.hidden_act != "silu" or config.rope_parameters["rope_type"] not in ROPE:
        has = f"activation {config.hidden_act}, rotary embedding {config.rope_parameters['rope_type']}"
        raise UserError(f"model {name!r}: {has}; the engine runs silu with one of {', '.join(ROPE)}")
    most = min(config.max_position_embeddings, getattr(config, "sliding_window", None) or sys.maxsize)
    if not 1 <= (context or 1) <= most:
        raise NotMeasurable("too_long", f"context {context}: {name} has 1 to {most:,} tokens")
    return context or min(most, 2048)


def layer_sizes(config: Any) -> dict[str, tuple[list[int], int]]:
    """The outputs N of each layer of a product, and the inputs K that they share; keys as of `LAYERS`."""
    size = head_size(config)
    hidden = config.hidden_size
    ffn = config.intermediate_size
    query, key = config.num_attention_heads * size, config.num_key_value_heads * size
    return {
        "qkv": ([query, key, key], hidden),
        "out": ([hidden], query),
        "gate_up": ([ffn, ffn], hidden),
        "down": ([hidden], ffn),
    }


def head_size(config: Any) -> int:
    """D of a configuration."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def assemble(model: nn.Module, context: int, product: Product, dense: Callable[[Tensor], Tensor]) -> Decoder:
    """A decoder from the modules of Transformers' model, whose weights go through `product` and `dense`."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # takes seconds

    assembled_blocks = []
    for name, block in blocks(model).items():
        norms = dense(block.input_layernorm.weight), dense(block.post_attention_layernorm.weight)
        products = {}
        for kind, layers in LAYERS.items():
            products[kind] = product([f"{name}.{layer}" for layer in layers])
        assembled_blocks.append(Block.make(*norms, **products))
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    norm = dense(model.base_model.norm.weight)
    output_head = Dense(dense(head.weight))
    embedding = output_head.weight if head.weight is table else dense(table)
    rotary = LlamaRotaryEmbedding(model.config)  # its formula is that of all three layouts
    cos, sin = (t[0].to(norm.device) for t in rotary(torch.empty(0), torch.arange(context)[None]))
    return Decoder(model.config, embedding, tuple(assembled_blocks), norm, output_head, cos, sin)


def decoder(lm: LowBitModel, context: int, device: torch.device, dtype: torch.dtype) -> Decoder:
    """The decoder of a model on the CPU, compressed or not; UserError as `product`."""
    stored = counting.report(lm, float_bits=16)["bytes"]  # as everywhere, whatever it is computed in
    products = functools.partial(product, lm, device=device, dtype=dtype)
    return replace(assemble(lm.model, context, products, lambda w: w.data.to(device, dtype)), stored_bytes=stored)
