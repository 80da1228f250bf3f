"""A decoder in a rotated basis: other weights, the same function (SpinQuant, Liu et al. 2024, arXiv 2405.16406, 3.1).

A row of hidden states x becomes x R1, and the values of each head v become v R2, with orthogonal R1 `[H, H]` for the
model and R2 `[D, D]` for each block. What reads x has R1 on its columns, what writes x has R1ᵀ on its rows:

    W_q R1, W_k R1, W_gate R1, W_up R1, W_head R1;    R1ᵀ W_down, E R1;    R2ᵀ W_v R1 and R1ᵀ W_o R2, head by head

RMSNorm commutes with a rotation once its gains are 1, so they go into the columns of what reads the norm (section 3.1,
and QuaRot). The gain of the last norm goes into the head, which is then no longer the embedding: a tied head becomes a
weight of its own, as in the authors' code, and is counted as one.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repro.baselines import cayley, hadamard
from repro.baselines.grid import Grid, dequantize, fit, quantize, split
from repro.core.errors import unknown
from repro.models.attachments import Attachment
from repro.models.lowbit import LowBitModel, block_linears, blocks, in_layer

ARCHITECTURES = ("llama", "mistral", "qwen2")  # RMSNorms before attention and MLP, nothing else between them
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATED = ("mlp.gate_proj", "mlp.up_proj")
READERS = {"input_layernorm": QKV, "post_attention_layernorm": GATED}  # of each norm's output
VALUE, OUT, DOWN = "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm", "lm_head"


class Untied(nn.Linear):
    """A head that has a weight of its own, where the checkpoint's is the embedding."""

    def __init__(self, linear: nn.Linear, weight: Tensor) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight = nn.Parameter(weight.to(linear.weight))
        self.bias = linear.bias


def check(model: Any, online: bool) -> tuple[int, int]:
    """Hidden size H and head size D of a model that can be rotated, its MLPs' inner states too where `online`.

    Raises:
        UserError: another architecture, or a size without a Hadamard matrix.
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in ARCHITECTURES:
        raise unknown(
            "architecture to rotate, which needs RMSNorms whose gains fold into linears,", kind, ARCHITECTURES
        )
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = {"hidden size": config.hidden_size, "head size": head}
    for name, size in (sizes | ({"MLP size": config.intermediate_size} if online else {})).items():
        with in_layer(name):
            hadamard.factors(size)
    return config.hidden_size, head


@torch.no_grad()
def fold(model: Any, turned: Collection[str] = ()) -> bool:
    """Make every norm's gains 1 and give a tied head a weight of its own; says whether the head was tied.

    Args:
        model: edited in place; products are float64.
        turned: layers whose inputs are rotated by their Hadamard matrix from now on; it goes into their columns.
    """
    head = model.get_output_embeddings()
    if tied := head.weight is model.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.detach().clone())
    for block in blocks(model).values():
        for norm, readers in READERS.items():
            _fold(block.get_submodule(norm), [block.get_submodule(name) for name in readers])
    _fold(model.get_submodule(NORM), [head])
    for name in turned:
        weight = model.get_submodule(name).weight
        by = [factor.to(weight.device) for factor in hadamard.factors(weight.shape[1])]
        weight.copy_(hadamard.rotated(weight.double(), by))
    return tied


def _fold(norm: nn.Module, readers: list[nn.Linear]) -> None:
    for linear in readers:
        linear.weight.copy_(linear.weight.double() * norm.weight.double())
    norm.weight.fill_(1)


def weights(model: Any, R1: Tensor, R2: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each weight and bias of a folded model that is another in the rotated basis.

    Args:
        model: not changed.
        R1: `[H, H]`.
        R2: `[L, D, D]`; the values have its dtype and are differentiable in both.
    """

    def wide(name: str) -> Tensor:
        return model.get_parameter(name).detach().to(R1.dtype)

    parameter_names = {name for name, _ in model.named_parameters()}
    yield from ((name, wide(name) @ R1) for name in (EMBEDDING, f"{HEAD}.weight"))
    for r2, prefix in zip(R2, blocks(model), strict=True):
        for name in (*QKV, *GATED):
            value = wide(f"{prefix}.{name}.weight") @ R1
            yield f"{prefix}.{name}.weight", _rows(value, r2) if name == VALUE else value
        if f"{prefix}.{VALUE}.bias" in parameter_names:
            yield f"{prefix}.{VALUE}.bias", _rows(wide(f"{prefix}.{VALUE}.bias"), r2)
        by_head = wide(f"{prefix}.{OUT}.weight").unflatten(1, (-1, len(r2)))
        yield f"{prefix}.{OUT}.weight", R1.T @ (by_head @ r2).flatten(1)
        yield f"{prefix}.{DOWN}.weight", R1.T @ wide(f"{prefix}.{DOWN}.weight")
        for key in (f"{prefix}.{OUT}.bias", f"{prefix}.{DOWN}.bias"):
            if key in parameter_names:
                yield key, wide(key) @ R1


def _rows(value: Tensor, r2: Tensor) -> Tensor:
    """R2ᵀ on the rows `[N, …]` of each head."""
    by_head = value.unflatten(0, (-1, len(r2)))
    return torch.einsum("hd...,de->he...", by_head, r2).flatten(0, 1)


def learn(
    model: Any, ids: Tensor | None, settings: cayley.CayleySettings, grid: Grid | None
) -> tuple[Tensor, Tensor, list[float]]:
    """R1 `[H, H]` and R2 `[L, D, D]`, float64, that make a folded model predict best, and the loss of every step.

    They start as Hadamard matrices with random signs (section 3.2).

    Args:
        model: not changed; as it runs now, with whatever hooks rotate and quantize the inputs of its layers.
        ids: int64 `[S, L]` on its device; not used by 0 epochs.
        settings: of the training.
        grid: weights of block linears are rounded on it, and gradients pass straight through; None leaves them alone.
    """
    random = torch.Generator().manual_seed(settings.seed)
    count = len(blocks(model))
    hidden, head = check(model, online=False)
    R1 = hadamard.random(hidden, random)[None].to(model.device)
    R2 = torch.stack([hadamard.random(head, random) for _ in range(count)]).to(model.device)
    R1.grad, R2.grad = torch.zeros_like(R1), torch.zeros_like(R2)
    linears = {f"{name}.weight" for name in block_linears(model)}

    @torch.enable_grad()
    def gradients(rows: Tensor) -> Tensor:
        leaves = [R.float().requires_grad_() for R in (R1, R2)]
        turned = dict(weights(model, leaves[0][0], leaves[1]))
        used = {name: value.detach().to(model.dtype) for name, value in turned.items()}
        used |= {name: rounded(used[name], grid) for name in linears if grid}
        values = [value.requires_grad_() for value in used.values()]
        slopes = [torch.zeros_like(value) for value in turned.values()]
        total = torch.zeros((), device=rows.device)
        for row in rows:  # one after the other: the authors' GPUs have one each
            logits = torch.func.functional_call(model, used, (), {"input_ids": row[None], "use_cache": False}).logits
            loss = F.cross_entropy(logits[0, :-1].float(), row[1:]) / len(rows)
            for slope, gradient in zip(slopes, torch.autograd.grad(loss, values), strict=True):
                slope += gradient
            total += loss.detach()
        for R, gradient in zip((R1, R2), torch.autograd.grad(list(turned.values()), leaves, slopes), strict=True):
            R.grad.copy_(gradient)
        return total

    losses = cayley.train(gradients, (R1, R2), ids, settings, "spinquant")
    return R1[0], R2, losses


@torch.no_grad()
def rotate(model: Any, R1: Tensor, R2: Tensor) -> None:
    """Put a folded model into the rotated basis, in place."""
    for name, value in weights(model, R1, R2):
        model.get_parameter(name).copy_(value)


def rounded(weight: Tensor, grid: Grid) -> Tensor:
    """`weight` `[N, K]` rounded to nearest, without a look at a value, which a CUDA graph could not have."""
    groups = split(weight.float(), grid)
    scale, zero = fit(groups, grid)
    return dequantize(quantize(groups, scale, zero, grid.bits), scale, zero).flatten(1).to(weight.dtype)


def keep(lm: LowBitModel, tied: bool) -> None:
    """Let `lm` store what `fold` and `rotate` changed and no quantizer stores: norms, embedding, head and biases.

    Not a head that was `tied`: a checkpoint has no parameter of that name, so that its step attaches it.

    Raises:
        UserError: a value is not finite in the model's dtype.
    """
    for name, parameter in lm.model.named_parameters():
        if name.removesuffix(".weight") not in lm.weights and not (tied and name.startswith(HEAD)):
            lm.set_dense(name, parameter.data)


class OwnHead(Attachment):
    """The weight of a head that was tied: a parameter of the model, counted as one and not beside the blocks."""

    def stored_bits(self) -> int:
        """None of the blocks'."""
        return 0
