"""OmniQuant (Shao et al. 2023, arXiv 2308.13137), weight-only: learnable weight clipping (LWC), block by block.

Each row and group has two clipping strengths γ and β in (0, 1), sigmoids of learned logits (equation 2):

    Ŵ = (clamp(⌊W/h⌉ + z, 0, 2^b - 1) - z)·h,    h = (γ max(W) - β min(W)) / (2^b - 1),    z = -⌊β min(W) / h⌉

Only these are learned, one block after the other, so that the block with Ŵ, on inputs from already quantized blocks,
reproduces the output of the full-precision block on full-precision inputs (equation 1). Rounding passes gradients
straight through, and z is a constant in the backward pass, as in the authors' code. At 2 bits a second target, the
full-precision block on the quantized inputs, is added.

Stored are codes, h and z as of any asymmetric grid. Unlike in the authors' code the range always includes 0, so that z
is a code and takes `bits` bits (no difference for a group with both signs), a symmetric grid is that of `grid`,
h is learned through its rounding to half precision, and blocks run in the model's own precision without AMP. The
learnable equivalent transformation (LET) is off in the paper's weight-only Llama runs, and is not here.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from tqdm import tqdm

from repro.baselines import grid
from repro.core.errors import UserError
from repro.models import graphs
from repro.models.lowbit import LowBitModel, block_inputs, blocks, in_layer
from repro.models.quantized import QuantizedWeight

VERSION = 1
CALIBRATED = True
COST = 20.0  # relative to RTN, for scheduling alone
INITIAL_LOGIT = 4.0  # sigmoid 0.982; the authors' code


@dataclass(frozen=True)
class Config(grid.Grid):
    """The grid and the training; epochs are those of section 4.1, lwc_lr and aug_loss those of the authors' scripts.

    Attributes:
        lwc_lr: learning rate of γ and β (AdamW without weight decay, one sequence a step).
        epochs: passes over the calibration sequences; None is the paper's 20, and 40 at 2 bits; 0 does not train.
        aug_loss: add the second target at more than 2 bits, too; at 2 bits it is always added.
    """

    lwc_lr: float = 1e-2
    epochs: int | None = None
    aug_loss: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip != "none":
            raise UserError(f"clip is {self.clip!r}; omniquant learns its clipping and takes none")
        if self.lwc_lr <= 0:
            raise UserError(f"lwc_lr is {self.lwc_lr}; a learning rate is above 0")
        if self.epochs is not None and self.epochs < 0:
            raise UserError(f"epochs is {self.epochs}; it must be 0 or more, or none for the paper's")

    @property
    def passes(self) -> int:
        """Epochs that are run."""
        if self.epochs is not None:
            return self.epochs
        return 40 if self.bits == 2 else 20

    @property
    def two_targets(self) -> bool:
        """Whether the second target is added."""
        return self.aug_loss or self.bits == 2


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """`rounded`, with the gradient of `x`."""
    return x + (rounded - x).detach()


class Clipping:
    """The learned grid of one weight `[N, K]`, or of several with the same K as one tall one: rows are independent.

    `logits` `[2, N, G, 1]` are those of γ and β.
    """

    def __init__(self, weight: Tensor, config: Config) -> None:
        """Start at γ = β = sigmoid(4).

        Raises:
            UserError: the group does not divide K, the weight holds NaN or Inf, or a scale does not fit its dtype.
        """
        self.config = config
        self.W = grid.split(grid.check(weight, config), config)
        self.low = self.W.amin(-1, keepdim=True).clamp(max=0)
        self.high = self.W.amax(-1, keepdim=True).clamp(min=0)
        width = 2 * torch.maximum(-self.low, self.high) if config.symmetric else self.high - self.low
        largest = width / (2**config.bits - 1)  # nothing clipped; the authors cut it to 1e4
        grid.check_scale(largest.to(getattr(torch, config.scale_dtype)), weight.shape, config.scale_dtype)
        start = torch.full_like(self.low, INITIAL_LOGIT)
        self.logits = torch.stack([start, start]).requires_grad_()

    def steps(self) -> tuple[Tensor, Tensor]:
        """h as stored and z, each `[N, G, 1]`."""
        gamma, beta = self.logits.sigmoid()
        low = beta * self.low
        high = gamma * self.high
        levels = 2**self.config.bits - 1
        if self.config.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        stored = getattr(torch, self.config.scale_dtype)
        h = ((high - low) / levels).clamp(max(1e-5, torch.finfo(stored).tiny))
        h = straight_through(h, h.to(stored).float())
        middle = torch.full_like(h, 2 ** (self.config.bits - 1))
        return h, middle if self.config.symmetric else torch.round(-low / h).clamp(0, levels).detach()

    def fake_quantize(self) -> Tensor:
        """Ŵ `[N, K]`, differentiable in the logits."""
        h, z = self.steps()
        w = self.W / h
        return (((straight_through(w, w.round()) + z).clamp(0, 2**self.config.bits - 1) - z) * h).flatten(1)

    @torch.no_grad()
    def quantize(self) -> QuantizedWeight:
        """Codes, h and z of the logits as they are now.

        Raises:
            UserError: training has made a logit NaN.
        """
        if not torch.isfinite(self.logits).all():
            raise UserError("its clipping diverged; model or calibration holds NaN or Inf, or lwc_lr is too high")
        h, z = self.steps()
        return grid.pack(grid.quantize(self.W, h, z, self.config.bits).flatten(1), h, z, self.config)


@torch.enable_grad()
def learn(
    block: nn.Module,
    clippings: dict[tuple[str, ...], Clipping],
    inputs: list[Tensor],
    targets: list[tuple[Tensor, ...]],
    kwargs: dict,
    config: Config,
) -> list[float]:
    """Train the logits of `clippings` (equation 1) and return each epoch's mean loss; the block is not changed.

    Args:
        block: the full-precision block.
        clippings: by the names of the linears inside the block whose rows, in this order, one clipping holds.
        inputs: the block's inputs from quantized blocks, one sequence each.
        targets: the outputs it should reproduce, one or two tensors for each sequence.
        kwargs: the block's keyword arguments.
        config: learning rate and epochs.
    """
    logits = [clipping.logits for clipping in clippings.values()]
    optimizer = graphs.adamw(logits, config.lwc_lr, weight_decay=0)

    def step(x: Tensor, *wants: Tensor) -> Tensor:
        weights = {}
        for names, clipping in clippings.items():
            linears = [block.get_submodule(name) for name in names]
            parts = clipping.fake_quantize().split([linear.out_features for linear in linears])
            for name, linear, part in zip(names, linears, parts, strict=True):
                weights[f"{name}.weight"] = part.to(linear.weight.dtype)
        output = torch.func.functional_call(block, weights, (x,), kwargs)
        squares = sum((output - expected).float().square().sum() for expected in wants)
        # The gradient of the sum, divided afterwards: that of the mean would underflow in half precision.
        for parameter, gradient in zip(logits, torch.autograd.grad(squares, logits), strict=True):
            parameter.grad = gradient / output.numel()
        optimizer.step()
        return squares.detach() / output.numel()

    replayed = graphs.Replayed(step, partial(graphs.changed, optimizer))
    losses = []
    for _ in range(config.passes):
        total = torch.zeros((), device=inputs[0].device)
        for x, wants in zip(inputs, targets, strict=True):
            total += replayed(x, *wants)
        losses.append(total.item() / len(inputs))
    return losses


def same_columns(block: nn.Module) -> list[tuple[str, ...]]:
    """Names of the linears of a block, grouped by their number of inputs: one clipping serves a group."""
    by_columns: dict[int, list[str]] = {}
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            by_columns.setdefault(module.in_features, []).append(name)
    return [tuple(names) for names in by_columns.values()]


@torch.no_grad()
def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Learn the clipping of every block linear of `lm` and round it, block after block (section 3.1).

    Args:
        lm: any decoder of Hugging Face form; edited.
        calibration: int64 token ids `[sequences, length]`.
        config: grid and training.

    Raises:
        UserError: there is no calibration, or a layer cannot be quantized; the message names it.
    """
    if calibration is None or not calibration.numel():
        raise UserError("omniquant needs calibration tokens, there are none; name a calibration corpus in the recipe")
    full, kwargs = block_inputs(lm.model, calibration)
    quantized = full
    for (prefix, block), kw in zip(tqdm(blocks(lm.model).items(), "omniquant", leave=False), kwargs, strict=True):
        clippings = {}
        for names in same_columns(block):
            weights = [block.get_submodule(name).weight.data for name in names]
            tall = grid.stack([f"{prefix}.{name}" for name in names], weights, config)
            clippings[names] = Clipping(tall, config)
        full = [block(h, **kw) for h in full]
        second = [[block(h, **kw) for h in quantized]] if config.two_targets else []
        learn(block, clippings, quantized, list(zip(full, *second, strict=True)), kw, config)
        for names, clipping in clippings.items():
            layers = [f"{prefix}.{name}" for name in names]
            with in_layer(", ".join(layers)):
                tall = clipping.quantize()
            lm.set_weights(layers, tall)
        quantized = [block(h, **kw) for h in quantized]
