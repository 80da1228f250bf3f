"""What the static error compensators share: a low-rank correction B A of each layer's quantization error, and how it is
stored. LQER, QERA, EoRA, ASER and LoftQ differ in what a small error is.

With E = W - Ŵ `[N, K]`, a norm ‖·S‖ that weighs the layer's inputs, and E S = U D Vᵀ, the rank-r correction with the
least ‖(E - B A) S‖ is (Eckart and Young, as in all of these papers)

    B A = U_r D_r V_rᵀ S⁻¹ = U_r U_rᵀ E

The papers compute the first form; we compute the second, the same product wherever S has an inverse. It needs none, so
that a channel that no token uses, or fewer tokens than channels, leave no division by a rounding error.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repro.baselines import grid
from repro.core.errors import NotMeasurable, UserError
from repro.models.activations import Extra, InputStatistics, statistics
from repro.models.attachments import Attachment, SummedLinear
from repro.models.lowbit import LowBitModel, in_layer
from repro.models.quantized import QuantizedWeight

KIND = "compensator"  # a layer takes one


@dataclass(frozen=True)
class Config:
    """How much a compensator may store; the same fields for all.

    Attributes:
        rank: of every layer's correction. SPEAR's Table 2 prints the megabytes of rank 16 in 16 bits.
        budget: instead of `rank`: bytes of all corrections, scales included, as a share of the quantized layers'
            weights at 4 bits each, whatever their width is, as SPEAR counts its own. 0 uses `rank`.
        remainder: what a budget that is no multiple of one rank in all layers does with the rest. "layers" raises the
            rank by one where that removes the most squared weight error per byte, as long as it fits; "unspent" keeps
            one rank for all layers, as the papers have.
        factor_bits: 16 stores the factors in half precision, as the official code computes; 8 in INT8 with a float32
            scale per latent channel, as SPEAR stores its own. LQER's and QERA's own 8 and 4-bit block formats are not
            used: the papers that compare them count 16 bits.
    """

    rank: int = 16
    budget: float = 0.0
    remainder: Literal["layers", "unspent"] = "layers"
    factor_bits: Literal[16, 8] = 16

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"rank is {self.rank}; a correction has rank 1 or more")
        if not 0 <= self.budget <= 1:
            raise UserError(
                f"budget is {self.budget}; it must be a share of the 4-bit weights, 0 to 1, and 0 uses the rank"
            )


# --- the correction ---------------------------------------------------------------------------------------------------


def truncated(E: Tensor, rank: int, S: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A `[rank, K]` and B `[N, rank]`, float64, of the least ‖(E - B A) S‖ for an error `E` `[N, K]`.

    Args:
        S: `[K, n]`, or the diagonal `[K]` of a diagonal one; None is the identity, the plain SVD of the weight's error.

    Raises:
        UserError: the error is not finite.
    """
    ES = weighted(E.double(), S)
    if not torch.isfinite(ES).all():
        raise UserError("the quantization error holds NaN or Inf; the model or its calibration is damaged")
    U = torch.linalg.svd(ES, full_matrices=False).U[:, :rank]
    return U.T @ E.double(), U


def weighted(E: Tensor, S: Tensor | None) -> Tensor:
    """E S for an S as `truncated` takes it."""
    if S is None:
        return E
    return E * S if S.dim() == 1 else E @ S


def symmetric_root(G: Tensor) -> Tensor:
    """S = G^½, symmetric, of a second moment `[K, K]`; eigenvalues that rounding made negative are 0."""
    L, Q = torch.linalg.eigh(G)
    return (Q * L.clamp(min=0).sqrt()) @ Q.T


def eigenspace(G: Tensor) -> Tensor:
    """S = Q Λ^½ with G = Q Λ Qᵀ; negative eigenvalues become the smallest positive one, as in EoRA's code."""
    L, Q = torch.linalg.eigh(G)
    positive = L[L > 0]
    return Q * L.clamp(min=float(positive.min()) if len(positive) else 0.0).sqrt()


def cholesky(G: Tensor, damping: float) -> Tensor:
    """S with S Sᵀ = G + damping · mean(diag G) · I, lower triangular.

    Raises:
        UserError: the damped G is not positive definite.
    """
    S, failed = torch.linalg.cholesky_ex(G + damping * G.diagonal().mean() * torch.eye(len(G)).to(G))
    if failed or not torch.isfinite(S).all():
        raise UserError(
            f"the {len(G)}x{len(G)} second moment of its inputs is not positive definite with damping {damping}: "
            "its inputs are too few or too much alike; calibrate on more tokens or raise damping"
        )
    return S


# --- ranks ------------------------------------------------------------------------------------------------------------


def stored_bytes(rank: int, shape: tuple[int, int], factor_bits: int) -> int:
    """Bytes of a correction of `rank` for a layer `(N, K)`; INT8 has two float32 scales per latent channel."""
    return rank * (sum(shape) * factor_bits // 8 + (8 if factor_bits == 8 else 0))


def ranks(lm: LowBitModel, config: Config, step: str) -> dict[str, int]:
    """The rank of each quantized layer, by name.

    Raises:
        UserError: nothing is quantized, or `rank` is above a layer's.
        NotMeasurable: the budget does not buy rank 1 in all layers.
    """
    if not lm.weights:
        raise UserError(
            f"{step} compensates quantized layers, there are none; put a quantizer before it: rtn-w4-pc + {step}"
        )
    shapes = {name: tuple(weight.shape) for name, weight in lm.weights.items()}
    if not config.budget:
        for name, shape in shapes.items():
            if config.rank > min(shape):
                raise UserError(
                    f"{name}: {step} of rank {config.rank} for a {shape[0]}x{shape[1]} layer, "
                    f"whose rank is at most {min(shape)}"
                )
        return dict.fromkeys(shapes, config.rank)
    cost = {name: stored_bytes(1, shape, config.factor_bits) for name, shape in shapes.items()}
    budget = int(config.budget * sum(map(math.prod, shapes.values())) / 2)
    highest = min(map(min, shapes.values()))
    rank = min(budget // sum(cost.values()), highest)
    if rank == 0:
        raise NotMeasurable(
            "unsupported",
            f"rank 1 in {len(shapes)} layers takes {sum(cost.values())} bytes, the budget is {budget}; "
            f"raise {step}'s budget",
        )
    ranks_by_name = dict.fromkeys(shapes, rank)
    left = budget - rank * sum(cost.values())
    if config.remainder == "layers" and rank < highest and left >= min(cost.values()):
        gain = {name: float(torch.linalg.svdvals(error(lm, name))[rank] ** 2) / cost[name] for name in shapes}
        for name in sorted(gain, key=lambda name: -gain[name]):
            if cost[name] <= left:
                ranks_by_name[name], left = rank + 1, left - cost[name]
    return ranks_by_name


# --- attaching --------------------------------------------------------------------------------------------------------


def error(lm: LowBitModel, name: str) -> Tensor:
    """E = W - Ŵ of a quantized layer, float64 `[N, K]`.

    Raises:
        UserError: its full-precision weight is not at hand.
    """
    if name not in lm.full:
        raise UserError(f"{name}: its full-precision weight is at hand only after the quantizing step of a recipe")
    return lm.full[name].double() - lm.model.get_submodule(name).weight.data.double()


def tokens(calibration: Tensor | None, step: str) -> Tensor:
    """The calibration tokens int64 `[S, L]`.

    Raises:
        UserError: there are none.
    """
    if calibration is None or not calibration.numel():
        raise UserError(f"{step} needs calibration tokens, there are none; name a calibration corpus in the recipe")
    return calibration


def measured(
    lm: LowBitModel,
    calibration: Tensor | None,
    config: Config,
    step: str,
    extras: Sequence[Extra] = (),
    weights: Tensor | None = None,
) -> Iterator[tuple[str, int, InputStatistics]]:
    """Name and rank of each quantized layer, and statistics of its inputs in the full-precision model.

    Raises:
        UserError: no quantizer came before, no tokens, or a rank above a layer's.
        NotMeasurable: the budget does not buy rank 1.
    """
    ids = tokens(calibration, step)
    rank_of = ranks(lm, config, step)
    inputs = statistics(lm.full_precision(), list(rank_of), ids, extras, weights)
    yield from ((name, rank, inputs[name]) for name, rank in rank_of.items())


def compensate(
    lm: LowBitModel, step: str, name: str, rank: int, S: Tensor | None, config: Config, was: Tensor | None = None
) -> None:
    """Attach the correction of rank `rank` of the least ‖(E - B A) S‖ to layer `name`, and note what it leaves.

    `lm.facts` gets one number a layer: `layers/rank`, and `layers/error`, ‖(E - B A) S‖ / ‖E S‖ with stored factors.

    Args:
        was: the layer's error `[N, K]` before the step, for a step that quantizes anew; `layers/error` is relative to
            it.

    Raises:
        UserError: the error or a factor is not finite, or the layer has a compensator.
    """
    E = error(lm, name)
    with in_layer(name):
        stored = packed(*truncated(E, rank, S), config.factor_bits)
    A, B = unpacked(stored)
    left = E - B.double() @ A.double()
    before, after = (float(weighted(e, S).norm()) for e in (E if was is None else was, left))
    lm.facts.setdefault("layers/rank", []).append(rank)
    lm.facts.setdefault("layers/error", []).append(after / before if before else 0.0)
    lm.attach(name, Attachment(step, stored, {}))


def packed(A: Tensor, B: Tensor, factor_bits: int) -> dict[str, Tensor]:
    """The stored tensors of A `[r, K]` and B `[N, r]`.

    Each latent channel is scaled so that its row of A and its column of B have the same largest magnitude: the product
    is the same, and half precision neither overflows nor underflows.

    Raises:
        UserError: a factor does not fit.
    """
    high = [t.abs().amax(dim, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny) for t, dim in ((A, 1), (B, 0))]
    balance = (high[1].T / high[0]).sqrt()
    A, B = (A * balance).float(), (B / balance.T).float()
    if factor_bits == 16:
        stored = {"A": A.half(), "B": B.half()}
    else:  # as methods/spear/compensator.py stores its own
        scales = [(t.abs().amax(dim, keepdim=True) / 127).clamp(min=2.0**-126) for t, dim in ((A, 1), (B, 0))]
        codes = [(t / scale).round().clamp(-127, 127).to(torch.int8) for t, scale in zip((A, B), scales)]
        stored = {"A": codes[0], "A_scale": scales[0][:, 0], "B": codes[1], "B_scale": scales[1][0]}
    if not all(torch.isfinite(tensor).all() for tensor in (A, B, *stored.values())):
        raise UserError("a factor is not finite: model or calibration holds NaN or Inf")
    return {name: tensor.contiguous() for name, tensor in stored.items()}


def unpacked(stored: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A and B in float32, exactly as stored."""
    A, B = stored["A"].float(), stored["B"].float()
    return (A * stored["A_scale"][:, None], B * stored["B_scale"]) if "A_scale" in stored else (A, B)


class LowRank(nn.Module):
    """B A x in float32; A and B are buffers, so that they are no parameters of the model."""

    def __init__(self, A: Tensor, B: Tensor) -> None:
        super().__init__()
        self.register_buffer("A", A)
        self.register_buffer("B", B)

    def forward(self, x: Tensor) -> Tensor:
        """The correction `[…, N]` for inputs `[…, K]`."""
        return F.linear(F.linear(x.to(self.A.dtype), self.A), self.B)


def attached(linear: nn.Linear, tensors: dict[str, Tensor], numbers: dict[str, float]) -> nn.Linear:
    """`linear` plus the stored correction: the module that `LowBitModel` runs, now and after loading."""
    return SummedLinear(linear, LowRank(*unpacked(tensors)).to(linear.weight.device))


# --- another weight on the same grid ----------------------------------------------------------------------------------


def rtn_grid(weight: QuantizedWeight, full: Tensor) -> grid.Grid | None:
    """The grid of a weight that RTN made of `full` `[N, K]`, to round another weight like it; None if RTN did not."""
    if not isinstance(weight, QuantizedWeight):
        return None
    options = {
        "bits": weight.bits,
        "group": weight.group,
        "symmetric": weight.zero_bits == 0,
        "scale_dtype": f"float{weight.scale_bits}",
    }
    for clip in ("none", "mse") if weight.group_index is None else ():
        rounded = grid.rtn(full, candidate := grid.Grid(clip=clip, **options))
        if torch.equal(rounded.codes, weight.codes) and torch.equal(rounded.scales, weight.scales):
            return candidate
    return None
