"""AWQ (Lin et al. 2023, arXiv 2306.00978): scale input channels by their activations, then clip, then round.

A weight column with large activations is scaled up before rounding and its input scaled down, which changes nothing in
full precision and rounds that column more finely (section 3.2). With s_X the mean |x| of each input channel, one scale
is searched for all linears that read the same input (equations 4 and 5):

    L(s) = ‖Q(W·diag(s)) (diag(s)⁻¹·X) - W X‖,    s = s_X^α,    α* = argmin L(s_X^α),    α = 0, 1/20, … 19/20

As in the authors' code s is at least 1e-4 and divided by √(max s · min s), and L compares the outputs of the module
that contains the linears (the attention, the MLP, or a single linear). Inputs are those of the full-precision model.
All scales of a block are searched on its unscaled weights and applied; then, per row and group, the largest |w| to keep
is searched:

    m* = argmin_m E_x[(x·(Q(clamp(w, -m, m)) - w))²],    m = max|w| · (1 - i/20), i = 0 … 9

Query and key are not clipped. diag(s)⁻¹ is folded into the module that produces the input, a norm or the rows of the
preceding linear, so that the architecture does not change; the changed norms and biases are stored with the model. The
grid is the one that all baselines here share: unlike the authors', its range always includes 0 and its scale is rounded
first.

Half-precision scales are rounded down, because a range cut to [-m, m] loses an end code when its scale is rounded up
(see `grid`). The nearest scale does that to about 1 in 4 of the groups cut at both ends. Measured on pocket-5m at 4
bits, on 16 x 512 tokens of WikiText-2 train and with the same s: all 25 clipped layers gain, E[‖ΔW x‖²] falls by 1.0
to 2.9 % per channel and by 0.6 to 1.9 % with group 128.
"""

import contextlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from repro.baselines import grid
from repro.core.errors import UserError, unknown
from repro.models.activations import watching
from repro.models.lowbit import LowBitModel, block_inputs, blocks, in_layer

VERSION = 1
CALIBRATED = True
COST = 5.0  # relative to RTN, for scheduling alone
RESCALES = True
UNCLIPPED = ("q_proj", "k_proj")
SEEN_TOGETHER = 8  # sequences in one forward pass


@dataclass(frozen=True)
class Config(grid.Grid):
    """The grid and both searches; all numbers are those of the authors' code, n_grid the paper's as well.

    Attributes:
        n_grid: how many exponents α = i / n_grid are tried.
        search_clip: clip the scaled weights.
        n_clip: shares of max|w| between two clipping thresholds that are tried.
        max_shrink: thresholds stay above max|w| · (1 - max_shrink).
        clip_tokens: the clipping loss is measured on every (tokens // clip_tokens)-th calibration token.
    """

    SCALE_ROUNDS_DOWN: ClassVar[bool] = True

    n_grid: int = 20
    search_clip: bool = True
    n_clip: int = 20
    max_shrink: float = 0.5
    clip_tokens: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("n_grid", "n_clip", "clip_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be a number of trials or tokens, 1 or more")
        if not 0 < self.max_shrink <= 1:
            raise UserError(f"max_shrink is {self.max_shrink}; it must be a share of max|w|, above 0 and at most 1")


@dataclass(frozen=True)
class Fold:
    """`linears` read the output of `source`, channel by channel, so that s and 1/s cancel; names are inside a block.

    Attributes:
        source: a norm, or a linear whose output reaches `linears` without mixing channels.
        linears: all that read it.
        inspect: the module whose output L(s) compares; "" is the whole block.
    """

    source: str
    linears: tuple[str, ...]
    inspect: str

    def fits(self, block: nn.Module) -> bool:
        """Whether channels match one to one; grouped value heads, each read by several columns of o, do not."""
        source, first = (block.get_submodule(name) for name in (self.source, self.linears[0]))
        return not isinstance(source, nn.Linear) or source.out_features == first.in_features

    def apply(self, block: nn.Module, s: Tensor) -> None:
        """Divide the source by `s` `[K]` and multiply the linears' columns by it, in place."""
        for parameter in block.get_submodule(self.source).parameters():
            parameter.data.div_(s.view(-1, *[1] * (parameter.dim() - 1)))
        for name in self.linears:
            block.get_submodule(name).weight.data.mul_(s)


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATED = (
    Fold("input_layernorm", QKV, "self_attn"),
    Fold("self_attn.v_proj", ("self_attn.o_proj",), "self_attn.o_proj"),
    Fold("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"), "mlp"),
    Fold("mlp.up_proj", ("mlp.down_proj",), "mlp.down_proj"),
)
PARALLEL = (  # attention and MLP in parallel; nothing folds through the GELU before fc2
    Fold("input_layernorm", (*QKV, "mlp.fc1"), ""),
    Fold("self_attn.v_proj", ("self_attn.dense",), "self_attn.dense"),
)
FOLDS = {"llama": GATED, "mistral": GATED, "qwen2": GATED, "phi": PARALLEL}


def scale(s_x: Tensor, alpha: float) -> Tensor:
    """s = s_X^α `[K]`, at least 1e-4, divided by √(max s · min s); `s_x` is the mean |x| of each channel."""
    s = s_x.pow(alpha).clamp(min=1e-4)
    return s / (s.max() * s.min()).sqrt()


@torch.no_grad()
def search_scale(
    module: nn.Module, names: list[str], calls: list[tuple[tuple, dict]], s_x: Tensor, config: Config
) -> tuple[Tensor, float]:
    """The scale with the least L(s) (equation 5), and its α.

    Args:
        module: the inspected module; not changed.
        names: its weights that read the scaled input.
        calls: positional and keyword arguments of the module on each batch of calibration sequences.
        s_x: mean |x| of each input channel, `[K]`.
        config: grid and number of trials.

    Raises:
        UserError: the inputs are not finite, or L(s) is not for any s.
    """
    if not torch.isfinite(s_x).all():
        raise UserError("its inputs hold NaN or Inf: an activation overflowed on the calibration tokens")
    weights = {name: module.get_parameter(name) for name in names}
    wants = [_output(module(*args, **kwargs)) for args, kwargs in calls]
    best, best_scale = torch.inf, None
    for i in range(config.n_grid):
        s = scale(s_x, i / config.n_grid)
        rounded = {name: (grid.rtn(W * s, config).dequantize() / s).to(W.dtype) for name, W in weights.items()}
        loss = torch.zeros((), device=s.device, dtype=torch.float64)
        for (args, kwargs), expected in zip(calls, wants, strict=True):
            output = _output(torch.func.functional_call(module, rounded, args, kwargs))
            loss += (output - expected).float().square().sum()
        if loss.item() < best:
            best = loss.item()
            best_scale = (s, i / config.n_grid)
    if best_scale is None:
        raise UserError("its outputs hold NaN or Inf: an activation overflowed on the calibration tokens")
    return best_scale


@torch.no_grad()
def search_clip(weight: Tensor, x: Tensor, config: Config) -> Tensor:
    """The threshold m* `[N, G, 1]` of each row and group of `weight` `[N, K]` on the inputs `x` `[tokens, K]`."""
    w = grid.split(weight.float(), config)
    x = grid.split(x.float(), config)
    second_moment = torch.einsum("tgi,tgj->gij", x, x) / len(x)  # E[(x·d)²] = dᵀ E[x xᵀ] d
    largest = w.abs().amax(-1, keepdim=True)
    best = torch.full_like(largest, torch.inf)
    threshold = largest
    for i in range(int(config.max_shrink * config.n_clip)):
        m = largest * (1 - i / config.n_clip)
        clipped = w.clamp(-m, m)
        h, z = grid.fit(clipped, config)
        d = grid.dequantize(grid.quantize(clipped, h, z, config.bits), h, z) - w
        error = (torch.einsum("ngi,gij->ngj", d, second_moment) * d).sum(-1, keepdim=True)
        threshold = torch.where(error < best, m, threshold)
        best = torch.minimum(error, best)
    return threshold


@torch.no_grad()
def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Scale, clip and round every block linear of `lm`, block after block, on inputs of the full-precision model.

    Args:
        lm: a decoder of a layout in `FOLDS`; edited, its norms and biases too (`lm.dense`).
        calibration: int64 token ids `[sequences, length]`.
        config: grid and searches.

    Raises:
        UserError: an architecture that is not in `FOLDS`, no calibration, or a layer that cannot be quantized; the
            message names it.
    """
    kind = getattr(getattr(lm.model, "config", None), "model_type", type(lm.model).__name__)
    if kind not in FOLDS:
        raise unknown("architecture for awq, which must know where scales fold into,", kind, FOLDS)
    if calibration is None or not calibration.numel():
        raise UserError("awq needs calibration tokens, there are none; name a calibration corpus in the recipe")
    hidden, kwargs = block_inputs(lm.model, calibration)
    hidden = [torch.cat(hidden[i : i + SEEN_TOGETHER]) for i in range(0, len(hidden), SEEN_TOGETHER)]
    for (prefix, block), kw in zip(tqdm(blocks(lm.model).items(), "awq", leave=False), kwargs, strict=True):
        linears = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
        for name, linear in linears.items():
            with in_layer(f"{prefix}.{name}"):
                grid.check(linear.weight.data, config)
        folds = [fold for fold in FOLDS[kind] if fold.fits(block)]
        first = {fold.linears[0]: linears[fold.linears[0]] for fold in folds}
        with watching(first, len(calibration)) as stats:
            hidden, calls = record(block, [*linears, *(fold.inspect for fold in folds)], hidden, kw)
        s_x = [stats[name].mean_abs.mean(0).float() for name in first]
        scales = [_scale_of(fold, block, s, calls, prefix, config) for fold, s in zip(folds, s_x, strict=True)]
        divisor = {}
        for fold, s in zip(folds, scales, strict=True):
            fold.apply(block, s)
            divisor |= dict.fromkeys(fold.linears, s)
        for name, linear in linears.items():
            W = linear.weight.data
            with in_layer(f"{prefix}.{name}"):
                if config.search_clip and not name.endswith(UNCLIPPED):
                    x = sample([args[0] for args, _ in calls[name]], config.clip_tokens) / divisor.get(name, 1)
                    m = search_clip(W, x, config)
                    W = grid.split(W, config).clamp(-m, m).flatten(1)
                weight = grid.rtn(W, config)
            lm.set_weight(f"{prefix}.{name}", weight)
        for fold in folds:
            for name, parameter in block.get_submodule(fold.source).named_parameters():
                if f"{fold.source}.{name}".removesuffix(".weight") not in linears:
                    lm.set_dense(f"{prefix}.{fold.source}.{name}", parameter.data)


def record(
    block: nn.Module, names: list[str], hidden: list[Tensor], kwargs: dict
) -> tuple[list[Tensor], dict[str, list[tuple[tuple, dict]]]]:
    """Run a block on all sequences: its outputs, and the arguments of each named module inside it."""
    calls: dict[str, list[tuple[tuple, dict]]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        for name, seen in calls.items():
            see = block.get_submodule(name).register_forward_pre_hook(
                lambda _, args, kw, seen=seen: seen.append((args, kw)), with_kwargs=True
            )
            stack.callback(see.remove)
        return [block(h, **kwargs) for h in hidden], calls


def sample(inputs: list[Tensor], tokens: int) -> Tensor:
    """Every (T // tokens)-th of the T tokens in `inputs` `[…, length, K]`, `[about tokens, K]`."""
    x = torch.cat([x.flatten(0, -2) for x in inputs])
    return x[:: max(1, len(x) // tokens)]


def _scale_of(fold: Fold, block: nn.Module, s_x: Tensor, calls: dict, prefix: str, config: Config) -> Tensor:
    """The scale of one fold with mean inputs `s_x`, searched on the recorded calls."""
    names = [f"{name}.weight".removeprefix(f"{fold.inspect}.") for name in fold.linears]
    with in_layer(f"{prefix}.{fold.inspect}".removesuffix(".")):
        return search_scale(block.get_submodule(fold.inspect), names, calls[fold.inspect], s_x, config)[0]


def _output(value: Tensor | tuple) -> Tensor:
    """The hidden states among what a module returns (an attention also returns its weights)."""
    return value if isinstance(value, Tensor) else value[0]
