"""ParetoQ (Liu et al. 2025, arXiv 2502.02631): all weights and a scale for each row, trained end to end on plain text.

With a learned scale α of each row, at 3 and 4 bits (LSQ, Esser et al. 2020) and at 2 bits (SEQ, section 3.2):

    Ŵ = α ⌊clip(W/α, -2^(b-1), 2^(b-1) - 1)⌉,              α_0 = max|W| / (2^(b-1) - 1)
    Ŵ = α (⌊2 clip(W/α, ±0.99) - 1/2⌉ + 1/2) / 2,          α_0 = max|W|, levels ±1/4 and ±3/4 of α

Rounding passes gradients straight through and the clip does not, which gives the gradient of α, too. As in the authors'
code it is multiplied by 1 / √(numel Q), numel of the whole matrix and Q = 2^(b-1) - 1 (1 at 2 bits, where the highest
level is 3/4). Unlike there α is learned through its rounding to half precision, as it is stored. 1 bit and 1.58 bits
are not here.

The authors' script is plain fine-tuning and, as far as we know, freezes nothing: embedding, norms and head are trained,
too, and stored in full precision (`trained=linears` leaves them alone). Low-bit activations have SEQ levels, as the
Bit-by-Bit paper extends this baseline (section 4.1), with a scale of each token and group, computed as it is needed.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from repro.baselines import qat
from repro.baselines.grid import check_scale
from repro.core.errors import UserError
from repro.models.groups.quantizer import SEQ_CLIP, Levels, StraightThrough
from repro.models.groups.weight import GroupWeight
from repro.models.lowbit import LowBitModel, in_layer
from repro.models.quantized import QuantizedWeight
from repro.train import training_cost
from repro.train.blocks import checkpoint_folder, training_ids
from repro.train.end_to_end import next_token_loss, train
from repro.train.streams import Dtype

VERSION = 1
CALIBRATED = True
work = training_cost.end_to_end  # what its training takes
READS_FIRST_TOKENS = True  # of the calibration text its first `tokens` tokens and no others
COST = 50.0  # relative to RTN, for scheduling alone
attached = qat.attached
LEAST = 1e-5  # of α; the authors' code


@dataclass(frozen=True)
class Config:
    """The authors' script: AdamW at 2e-5, a cosine to 0 without warm-up, no weight decay, one epoch.

    Attributes:
        bits, act_bits: of weights, 2 to 4; of activations, 16 leaves them alone.
        act_group: channels of a token that share a scale. Not given; that of Bit-by-Bit's activations.
        act_levels: SEQ's levels around 0 (Bit-by-Bit, section 4.1), or the asymmetric ones of the other baselines.
        trained: all parameters as in the authors' code, or block linears and their scales alone.
        scale_dtype: how α is stored.
        lr, epochs: learning rate, the same for all tensors; passes over the text.
        batch: sequences in a step: 2 in the script, on each GPU; Bit-by-Bit's baselines ran on one.
        tokens: of an epoch: 4096 sequences of RedPajama and 4096 of Alpaca (Bit-by-Bit, section 4.1), 2048 tokens each.
        max_norm: largest norm of the gradient. Not read in the script; the default of Hugging Face's trainer.
        compute, seed: dtype of the decoder, where what is trained is float32; of the order of sequences.
    """

    bits: int = 2
    act_bits: int = qat.FULL
    act_group: int = 32
    act_levels: Levels = "seq"
    trained: Literal["all", "linears"] = "all"
    scale_dtype: Literal["float16", "float32"] = "float16"
    lr: float = 2e-5
    epochs: int = 1
    batch: int = 2
    tokens: int = 8192 * 2048
    max_norm: float = 1.0
    compute: Dtype = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 4:
            raise UserError(f"paretoq: bits is {self.bits}; it must be 2 (SEQ), or 3 or 4 (LSQ)")
        qat.check("paretoq", self)
        qat.input_grid("paretoq", self.act_bits, self.act_group)


def first_scale(weight: Tensor, bits: int) -> Tensor:
    """α_0 `[N, 1]`."""
    largest = weight.abs().amax(1, keepdim=True)
    return largest if bits == 2 else largest / (2 ** (bits - 1) - 1)


@torch.no_grad()
def stored_scale(a: Tensor, config: Config) -> Tensor:
    """α as it is stored, float32."""
    dtype = getattr(torch, config.scale_dtype)
    return a.clamp(max(LEAST, 2 * torch.finfo(dtype).tiny)).to(dtype).float()


def levels(weight: Tensor, a: Tensor, bits: int) -> Tensor:
    """Ŵ / α `[N, K]`, with the gradient of W/α inside the range."""
    ratio = weight / a
    if bits == 2:
        clipped = ratio.clamp(-SEQ_CLIP, SEQ_CLIP)
        return StraightThrough.apply(clipped, (torch.round(2 * clipped - 0.5) + 0.5) / 2)
    clipped = ratio.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return StraightThrough.apply(clipped, clipped.round())


def fake_quantize(weight: Tensor, a: Tensor, config: Config) -> Tensor:
    """Ŵ `[N, K]` of float32 weights and scales `[N, 1]`, differentiable in both."""
    factor = (weight.numel() * (2 ** (config.bits - 1) - 1)) ** -0.5
    a = stored_scale(a, config) + factor * (a - a.detach())  # α as stored, with the gradient of α times the factor
    return levels(weight, a, config.bits) * a


@torch.no_grad()
def pack(weight: Tensor, a: Tensor, config: Config) -> QuantizedWeight | GroupWeight:
    """The codes of a trained weight, and α: the step of a symmetric grid, or twice the step of SEQ's levels.

    Raises:
        UserError: α does not fit its dtype.
    """
    a = stored_scale(a, config)
    dtype = getattr(torch, config.scale_dtype)
    half = 2 ** (config.bits - 1)
    check_scale(a, weight.shape, config.scale_dtype)
    q = levels(weight, a, config.bits)
    if config.bits == 2:
        return GroupWeight((2 * q + 1.5).to(torch.uint8), (a / 2).to(dtype), None, None, 2, weight.shape[1])
    zeros = torch.full_like(a, half).to(dtype)
    return QuantizedWeight((q + half).to(torch.uint8), a.to(dtype), zeros, config.bits, 0, 0, torch.finfo(dtype).bits)


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Train and quantize every block linear of `lm`; `calibration` int64 `[sequences, length]` is the text.

    Raises:
        UserError: fewer tokens than asked for, or NaN in the model.
        NotMeasurable: the training diverged.
    """
    model = lm.model
    ids = training_ids(calibration, config.tokens, "paretoq").to(model.device)
    input_grid = qat.input_grid("paretoq", config.act_bits, config.act_group, config.act_levels)
    weights = qat.start(model, 0)
    scales = {name: first_scale(weight, config.bits) for name, weight in weights.items()}
    others = {}
    if config.trained == "all":
        names = [name for name, _ in model.named_parameters() if name.removesuffix(".weight") not in weights]
        others = {name: model.get_parameter(name).detach().float().clone() for name in names}

    student = qat.student(model, config.compute, input_grid)

    def loss(rows: Tensor) -> Tensor:
        rounded = {f"{name}.weight": fake_quantize(weight, scales[name], config) for name, weight in weights.items()}
        return next_token_loss(qat.logits(student, rounded | others, rows), rows)

    settings = qat.settings(config, 0.0, model, ids.shape[1])
    folder = checkpoint_folder(model, ids, __file__, config)
    tensors = {f"{name}.weight": w for name, w in weights.items()} | {f"{name}/a": a for name, a in scales.items()}
    losses = train(loss, tensors | others, ids, settings, folder, "paretoq")
    for name, weight in weights.items():
        with in_layer(name):
            lm.set_weight(name, pack(weight, scales[name], config))
    for name, value in others.items():
        lm.set_dense(name, value)
    qat.finish(lm, "paretoq", input_grid, losses, ids, settings)
