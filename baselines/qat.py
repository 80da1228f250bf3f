"""Shared parts of the baselines that train a whole decoder: initialization, low-bit inputs, training facts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from torch import Tensor, nn

from repro.baselines import grid
from repro.core.errors import UserError
from repro.models.groups import inputs
from repro.models.groups.quantizer import GroupGrid, Levels
from repro.models.lowbit import LowBitModel, block_linears, in_layer
from repro.train import end_to_end
from repro.train.end_to_end import EndToEndSettings, Validation, fitting, trained_tokens
from repro.train.streams import Dtype, computing

FULL = 16  # bits of activations that are left alone


class TrainingConfig(Protocol):
    """Settings that all of them have; `max_norm` is the largest norm of the gradient, 0 does not clip it."""

    lr: float
    epochs: int
    batch: int
    tokens: int
    max_norm: float
    seed: int


def check(step: str, config: TrainingConfig, *counts: str) -> None:
    """Raise unless the settings are possible; `counts` names further ones that are 1 or more.

    Raises:
        UserError: one is not; the message names it.
    """
    for name in ("lr", "epochs", "max_norm", "seed"):
        if not getattr(config, name) >= 0:
            raise UserError(f"{step}: {name} is {getattr(config, name)}; it must be 0 or more")
    for name in ("batch", "tokens", *counts):
        if getattr(config, name) < 1:
            raise UserError(f"{step}: {name} is {getattr(config, name)}; it must be 1 or more")


def settings(config: TrainingConfig, final: float, model: nn.Module, length: int) -> EndToEndSettings:
    """The trainer's settings: no warm-up, no weight decay, a cosine to `final` times the rate (1: a constant rate)."""
    together = fitting(model, length)
    return EndToEndSettings(
        config.lr, config.epochs, config.batch, 0.0, final, config.max_norm, 0.0, config.seed, together
    )


def start(model: nn.Module, group: int) -> dict[str, Tensor]:
    """float32 copies of the weights of all block linears, by layer; group 0 is a row.

    Raises:
        UserError: the group does not divide a layer's inputs, or a weight holds NaN or Inf; the layer is named.
    """
    copies = {}
    for name, linear in block_linears(model).items():
        with in_layer(name):
            copies[name] = grid.check(linear.weight.detach(), grid.Grid(group=group)).clone()
    return copies


def input_grid(step: str, bits: int, group: int, levels: Levels = "asymmetric") -> GroupGrid | None:
    """How activations are quantized, for each token and group as they are needed; None at 16 bits.

    Raises:
        UserError: another width, or no group.
    """
    if bits == FULL:
        return None
    if not 2 <= bits <= 8 or group < 1:
        raise UserError(f"{step}: act_bits is {bits}; it must be 16, or 2 to 8 with a group above 0")
    return GroupGrid(bits, group, levels)


def attached(linear: nn.Linear, tensors: dict[str, Tensor], numbers: dict[str, float]) -> nn.Linear:
    """`linear` on quantized inputs, after `finish` and after loading; see `inputs.attached`."""
    layer = inputs.attached(linear, tensors, numbers)
    layer.grid = replace(layer.grid, levels="seq" if numbers["seq"] else "asymmetric")
    return layer


def student(model: nn.Module, dtype: Dtype, act_grid: GroupGrid | None = None) -> nn.Module:
    """The decoder that is trained: parameters in a dtype, block linears on inputs that `act_grid` quantizes."""
    model = computing(model, dtype)
    if act_grid is None:
        return model
    return inputs.on_quantized_inputs(model, dict.fromkeys(block_linears(model), act_grid.bits), act_grid)


def logits(model: nn.Module, weights: Mapping[str, Tensor], rows: Tensor) -> Tensor:
    """Logits of token ids with `weights`, cast to the model's dtype, in place of the parameters of their names."""
    return end_to_end.logits(model, {name: weight.to(model.dtype) for name, weight in weights.items()}, rows)


def finish(
    lm: LowBitModel, step: str, act_grid: GroupGrid | None, losses: list[float], ids: Tensor, used: EndToEndSettings,
    validation: Validation | None = None,
) -> None:  # fmt: skip
    """Attach what quantizes the inputs of every layer; note the loss of every step and the tokens that were seen."""
    for name, linear in block_linears(lm.model).items() if act_grid else ():
        plain = inputs.attachment(step, linear.in_features, act_grid)
        lm.attach(name, replace(plain, numbers=plain.numbers | {"seq": act_grid.levels == "seq"}))
    lm.facts |= {"training/loss": losses, "training/tokens": [float(trained_tokens(ids, used))]}
    if validation and validation.losses:
        lm.facts["training/validation loss"] = validation.losses
