"""SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): move the range of activations into weights, then round both.

Channel j of a norm's output is divided by s_j, and column j of all linears that read it multiplied, which changes
nothing in full precision (section 4, equation 4):

    s_j = max|x_j|^α / max|w_j|^(1-α)

over all calibration tokens, of the full-precision model, and over the rows of all those linears. As in the authors'
code max|w_j| and s_j are at least 1e-5, and only norms are divided: before q, k and v, and before gate and up.

Then weights are rounded to nearest and, as the model runs, the inputs of all block linears: symmetric, with scales
max|·| / (2^(b-1) - 1) of each row and of each token, in 8 bits. Bit-by-Bit's Table 1 has w2a2 in groups of 32 for both,
`smoothquant(w=2, a=2, g=32)`, where every code is -1, 0 or 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from repro.baselines import awq, grid
from repro.core.errors import UserError, unknown
from repro.models.activations import statistics
from repro.models.attachments import Attachment
from repro.models.groups.inputs import check_layer
from repro.models.lowbit import LowBitModel, block_linears, blocks, in_layer
from repro.models.quantized import QuantizedWeight

VERSION = 1
CALIBRATED = True
COST = 2.0  # relative to RTN, for scheduling alone
RESCALES = True
FULL = 16  # bits of activations that are left alone
LEAST = 1e-5  # of maxima and of s; the authors' code


@dataclass(frozen=True)
class Config(grid.Grid):
    """The grids and α.

    Attributes:
        bits, group: of weights; a group of 0 is one scale a row, and one a token of activations.
        act_bits: of the inputs of all block linears; 16 leaves them alone.
        alpha: what the authors' README has for Llama-2 and Llama-3, since all models here are Llamas or close to them;
            it has 0.8 for Mistral, paper and code 0.5. On held-out text pocket-5m has perplexity 35.3 at w4a4 per
            channel and token, 39.9 with 0.5, 50.4 without smoothing, and 21.9 at w8a8 with all three.
    """

    bits: int = 8
    symmetric: bool = True
    act_bits: int = 8
    alpha: float = 0.85

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.symmetric or self.clip != "none":
            raise UserError("smoothquant rounds on a symmetric grid up to the largest weight; it takes no asym or clip")
        if self.act_bits != FULL and not 2 <= self.act_bits <= 8:
            raise UserError(f"act_bits is {self.act_bits}; it must be 16, or 2 to 8")
        if not 0 <= self.alpha <= 1:
            raise UserError(f"alpha is {self.alpha}; it must be 0 to 1")


def scale(x: Tensor, weights: list[Tensor], alpha: float) -> Tensor:
    """s `[K]` of inputs with the largest |x_j| `x` `[K]`, read by `weights` `[N, K]`."""
    w = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).to(x).clamp(min=LEAST)
    return (x.pow(alpha) / w.pow(1 - alpha)).clamp(min=LEAST)


def steps(groups: Tensor, bits: int) -> Tensor:
    """Scales `[…, 1]` of each row of `groups` `[…, n]`."""
    return groups.abs().amax(-1, keepdim=True).clamp(min=LEAST) / (2 ** (bits - 1) - 1)


def rounded(weight: Tensor, config: Config) -> QuantizedWeight:
    """`weight` `[N, K]` rounded to nearest; UserError as `grid.check`."""
    groups = grid.split(grid.check(weight, config), config)
    stored = getattr(torch, config.scale_dtype)
    s = steps(groups, config.bits).clamp(min=torch.finfo(stored).tiny).to(stored).float()
    zero = torch.full_like(s, 2 ** (config.bits - 1))
    return grid.pack(grid.quantize(groups, s, zero, config.bits).flatten(1), s, zero, config)


def fake_quantize(x: Tensor, bits: int, group: int) -> Tensor:
    """Inputs `[…, K]` rounded to nearest, in the dtype of x; a group of 0 is a token."""
    groups = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, group or x.shape[-1]))
    s = steps(groups, bits)
    return ((groups / s).round() * s).flatten(-2).to(x.dtype)


class TokenQuantizedInputs(nn.Linear):
    """A linear layer on symmetrically quantized inputs; `weight` and `bias` are the layer's."""

    def __init__(self, linear: nn.Linear, bits: int, group: int) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.linear = linear
        self.bits = bits
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """y `[…, N]` of inputs `[…, K]`."""
        return self.linear(fake_quantize(x, self.bits, self.group))


def attached(linear: nn.Linear, tensors: dict[str, Tensor], numbers: dict[str, float]) -> nn.Linear:
    """`linear` on quantized inputs: what `LowBitModel` runs, now and after loading.

    Raises:
        UserError: the numbers belong to another layer; or the decode engine asks for what is added to its output.
    """
    check_layer(linear, "quantized", numbers["columns"], "leave act_bits at 16")
    return TokenQuantizedInputs(linear, int(numbers["bits"]), int(numbers["group"]))


@torch.no_grad()
def smooth(lm: LowBitModel, calibration: Tensor, alpha: float) -> None:
    """Divide the norms of `lm` by s and multiply what reads them, in place; UserError as `apply`."""
    kind = getattr(getattr(lm.model, "config", None), "model_type", type(lm.model).__name__)
    if kind not in awq.FOLDS:
        raise unknown("architecture for smoothquant, which must know what reads each norm,", kind, awq.FOLDS)
    folds = []
    for prefix, block in blocks(lm.model).items():
        folds += [(prefix, block, fold) for fold in awq.FOLDS[kind] if "norm" in fold.source]
    stats = statistics(lm.model, [f"{prefix}.{fold.linears[0]}" for prefix, _, fold in folds], calibration)
    for prefix, block, fold in folds:
        x = stats[f"{prefix}.{fold.linears[0]}"].max_abs.amax(0)
        fold.apply(block, scale(x, [block.get_submodule(name).weight for name in fold.linears], alpha).float())
        for name, parameter in block.get_submodule(fold.source).named_parameters():
            lm.set_dense(f"{prefix}.{fold.source}.{name}", parameter.data)


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Smooth `lm`, a decoder of a layout in `awq.FOLDS`, round its block linears, and let it round their inputs.

    Raises:
        UserError: no `calibration`, int64 token ids `[sequences, length]`, an unknown architecture, or a layer that
            cannot be quantized; the message names it.
    """
    if calibration is None or not calibration.numel():
        raise UserError("smoothquant needs calibration tokens, there are none; name a calibration corpus in the recipe")
    for name, linear in block_linears(lm.model).items():
        with in_layer(name):
            grid.check(linear.weight.data, config)
    smooth(lm, calibration, config.alpha)
    for name, linear in block_linears(lm.model).items():
        with in_layer(name):
            weight = rounded(linear.weight.data, config)
        lm.set_weight(name, weight)
        if config.act_bits < FULL:
            numbers = {"bits": config.act_bits, "group": config.group, "columns": linear.in_features}
            lm.attach(name, Attachment("smoothquant", {}, numbers))
