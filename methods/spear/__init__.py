"""SPEAR (Liu et al. 2026, arXiv 2606.11244), sections 3.1 and 3.2: compensate the layers that quantization hurts most.

Runs after a quantizer, as in `rtn-w4-pc + spear`. On sequences sampled from the full-precision model it measures what
quantizing each layer alone does to the last hidden states (`selection.damages`), takes few or many layers by how
concentrated that damage is, gives each a low-rank compensator with a gate (`compensator`) of the ranks that a memory
budget allows, trains these to the full-precision model's distributions (`calibration`), and stores them in INT8.
"""

import math
import sys

import torch
from torch import Tensor, nn

from repro.core.errors import UserError
from repro.methods.spear import selection
from repro.methods.spear.calibration import calibrate, self_sampled
from repro.methods.spear.compensator import CompensatedLinear, Compensator, pack, stored_bytes, unpack
from repro.methods.spear.config import Config
from repro.methods.spear.initial import removed_error, start
from repro.models.attachments import Attachment, SummedLinear
from repro.models.lowbit import LowBitModel

VERSION = 1
CALIBRATED = True
COST = 50.0  # relative to RTN, for scheduling alone
KIND = "compensator"  # a layer takes one


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Attach calibrated compensators to the quantized layers of `lm` that need them most (Algorithm 1, section 3.1).

    Args:
        lm: a decoder of Hugging Face form after a quantizing step; edited.
        calibration: int64 token ids `[sequences, length]`; only for `source="corpus"`.
        config: everything else.

    Raises:
        UserError: no quantizer came before, or `source` is "corpus" and there are no tokens.
        NotMeasurable: the budget is too small for rank 1, or calibration diverged.
    """
    if not lm.weights:
        raise UserError(
            "spear compensates quantized layers, there are none; put a quantizer before it: rtn-w4-pc + spear"
        )
    teacher = lm.full_precision()
    ids = sequences(teacher, calibration, config)
    damage: dict[str, float] = {}
    names = place(lm, teacher, ids[: config.cka_samples], config, damage)
    ranks = layer_ranks(lm, names, config)
    ecs = start(lm, ranks, ids[: config.cka_samples], config)

    trained = ids[: config.sequences]
    phases = config.phases
    steps = ", ".join(f"{phase.epochs} x {config.steps} steps at lr {phase.lr:.3g}" for phase in phases)
    size = sum(stored_bytes(r, [tuple(lm.weights[name].shape)], config.hidden) for name, r in ranks.items())
    rank_range = " to ".join(str(r) for r in sorted(set(ranks.values())))  # r, or "r to r + 1"
    say(f"{len(names)} of {len(lm.weights)} layers, rank {rank_range}, {size} bytes")
    say(f"{len(trained)} sequences, {steps}")
    lm.facts["layers/rank"] = [ranks.get(name, 0) for name in lm.weights]
    if damage:
        lm.facts["layers/damage"] = [damage[name] for name in lm.weights]
    plain = {name: lm.model.get_submodule(name) for name in ecs}
    for name, ec in ecs.items():
        lm.model.set_submodule(name, CompensatedLinear(plain[name], ec))
    losses = calibrate(lm.model, teacher, list(ecs.values()), trained, config)
    say("loss by epoch " + " | ".join(" ".join(f"{loss:.5f}" for loss in phase) for phase in losses))
    for name, ec in ecs.items():
        ec.gated = config.gate
        lm.model.set_submodule(name, plain[name])  # `attach` adds the compensator as stored
        lm.attach(name, Attachment("spear", pack(ec), {"alpha": config.alpha}))


def attached(linear: nn.Linear, tensors: dict[str, Tensor], numbers: dict[str, float]) -> nn.Linear:
    """`linear` plus the stored compensator: the module that `LowBitModel` runs, now and after loading."""
    ec = Compensator(unpack(tensors), numbers["alpha"]).to(linear.weight.device)
    return CompensatedLinear(linear, ec) if type(linear) is nn.Linear else SummedLinear(linear, ec)


def sequences(teacher: nn.Module, calibration: Tensor | None, config: Config) -> Tensor:
    """int64 `[sequences, tokens]` to measure damage and train on, on the model's device.

    Raises:
        UserError: `source` is "corpus", and its tokens are absent or too few.
    """
    count = max(config.sequences, config.cka_samples)
    if config.source == "self":
        return self_sampled(teacher, count, config.tokens, config.sampling_temperature, config.seed)
    usable = 0 if calibration is None else calibration.shape[1] // config.tokens * config.tokens
    rows = calibration[:, :usable].reshape(-1, config.tokens) if usable else torch.empty(0, config.tokens)
    if len(rows) < config.sequences:
        raise UserError(f"spear: {config.sequences} sequences of {config.tokens} tokens, the corpus has {len(rows)}")
    return rows[:count].to(teacher.device)


def place(lm: LowBitModel, teacher: nn.Module, ids: Tensor, config: Config, seen: dict[str, float]) -> list[str]:
    """The layers that get a compensator, in model order (Algorithm 1, stages 1 to 3); adds the damage to `seen`."""
    names = list(lm.weights)
    if config.placement == "full":
        return names
    quantized = {name: lm.model.get_submodule(name).weight.data for name in names}
    seen.update(selection.damages(teacher, quantized, ids))
    damage = [seen[name] for name in names]
    adjusted = [max(0.0, d - config.noise_floor) for d in damage]
    h_norm = selection.entropy(damage)
    threshold = selection.tau_eff(h_norm, config.tau, config.entropy_trigger, config.tau_diffuse)
    K = selection.support(adjusted, threshold, config.k_min, config.k_max)
    if config.k_share:
        K = count(config.k_share, len(names))
    say(f"H_norm {h_norm:.3f}, tau_eff {threshold:.3f}, K {K} of {len(names)} ({K / len(names):.1%})")
    if config.placement == "random":
        return at_random(names, K, config.seed)
    cost = [sum(lm.weights[name].shape) for name in names]
    p = math.ceil(config.protected * K)
    return [names[i] for i in selection.select(adjusted, cost, K, p, config.cost_weight)]


def count(share: float, layers: int) -> int:
    """K of a fixed share of the layers, at least 1."""
    return max(1, round(share * layers))


def at_random(names: list[str], K: int, seed: int) -> list[str]:
    """K layers that a seed chooses, in model order (Table 4)."""
    chosen = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))[:K].sort().values
    return [names[i] for i in chosen.tolist()]


def layer_ranks(lm: LowBitModel, names: list[str], config: Config) -> dict[str, int]:
    """The rank of each of the chosen layers `names` (Algorithm 1, stage 4, and what `config.remainder` adds).

    Raises:
        UserError: a layer's error is not finite.
        NotMeasurable: the budget does not buy rank 1 in all of them.
    """
    if config.rank:
        return dict.fromkeys(names, config.rank)
    shapes = [tuple(lm.weights[name].shape) for name in names]
    budget = budget_bytes(lm, config)
    r = selection.rank(budget, shapes, config.hidden)
    if config.remainder == "unspent":
        return dict.fromkeys(names, r)
    left = budget - stored_bytes(r, shapes, config.hidden)
    removed = [removed_error(lm, name, r) for name in names]
    return dict(zip(names, selection.raised(r, left, shapes, config.hidden, removed)))


def budget_bytes(lm: LowBitModel, config: Config) -> int:
    """B in bytes: a share of the quantized layers' weights at 4 bits each, whatever their width is."""
    return int(config.budget * sum(weight.shape.numel() for weight in lm.weights.values()) / 2)


def say(text: str) -> None:
    """One line on standard error."""
    print(f"spear: {text}", file=sys.stderr)
