"""LoftQ (Li et al. 2023, arXiv 2310.08659, Algorithm 1): alternate quantization and correction, without data.

From B₀A₀ = 0, for t = 1 … T:

    Ŵ_t = q(W - B_{t-1} A_{t-1}),    B_t A_t = the best approximation of W - Ŵ_t of rank r

With one iteration Ŵ is the previous step's weight and B A the plain SVD of its error. With more, q rounds to nearest on
the grid of the recipe's RTN, fitted anew to each W - B A. The error ‖W - Ŵ_t - B_t A_t‖ can grow from one iteration to
the next: rounding W - B A is not bound to be as good as rounding W.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from repro.baselines import grid, low_rank
from repro.core.errors import NotMeasurable, UserError
from repro.models.lowbit import LowBitModel, in_layer
from repro.models.quantized import QuantizedWeight

VERSION = 1
CALIBRATED = False
COST = 2.0  # relative to RTN, for scheduling alone
KIND = low_rank.KIND
attached = low_rank.attached


@dataclass(frozen=True)
class Config(low_rank.Config):
    """Ranks and storage, and how often it turns.

    Attributes:
        iterations: T. The paper has 5; the authors' script and peft have 1. SPEAR compensates "identical backbone
            quantized weights", which only T = 1 leaves as they are, and which works behind any quantizer.
    """

    iterations: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.iterations < 1:
            raise UserError(f"iterations is {self.iterations}; it must be 1 or more")


def alternate(
    W: Tensor, rank: int, iterations: int, quantize: Callable[[Tensor], QuantizedWeight]
) -> tuple[QuantizedWeight, Tensor, Tensor, list[float]]:
    """Algorithm 1 for a weight `[N, K]`: Ŵ_T, A `[r, K]`, B `[N, r]`, and ‖W - Ŵ_t - B_t A_t‖ for every t."""
    residual = W.double()
    errors = []
    for _ in range(iterations):
        weight = quantize(residual)
        E = W.double() - weight.dequantize().double()
        A, B = low_rank.truncated(E, rank)
        residual = W.double() - B @ A
        errors.append(float((E - B @ A).norm()))
    return weight, A, B, errors


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Compensate every quantized layer of `lm`; `calibration` is not used.

    `lm.facts` gets `layers/loftq_error_1` to `_T`: ‖W - Ŵ_t - B_t A_t‖ over ‖W - Ŵ_1‖ of each layer, before factors are
    rounded as they are stored.

    Raises:
        UserError: no quantizer came before, or a rank above a layer's.
        NotMeasurable: the budget does not buy rank 1, or there are several iterations and a quantizer other than RTN.
    """
    for name, rank in low_rank.ranks(lm, config, "loftq").items():
        was = low_rank.error(lm, name)
        rounded = quantizer(lm, name, config)
        with in_layer(name):
            weight, _, _, errors = alternate(lm.full[name], rank, config.iterations, rounded)
        if config.iterations > 1:
            lm.set_weight(name, weight)
        for t, left in enumerate(errors, start=1):
            lm.facts.setdefault(f"layers/loftq_error_{t}", []).append(left / (float(was.norm()) or 1.0))
        low_rank.compensate(lm, "loftq", name, rank, None, config, was)


def quantizer(lm: LowBitModel, name: str, config: Config) -> Callable[[Tensor], QuantizedWeight]:
    """q of a layer: what the previous step made of it, or rounding to nearest on the same kind of grid.

    Raises:
        NotMeasurable: there are several iterations and a quantizer other than RTN.
    """
    full, stored = lm.full[name], lm.weights[name]
    moved = {key: t.to(full.device) for key in stored.TENSORS if (t := getattr(stored, key)) is not None}
    weight = replace(stored, **moved)  # what a file held is on the CPU
    if config.iterations == 1:
        return lambda residual: weight
    own_grid = low_rank.rtn_grid(weight, full)
    if own_grid is None:
        raise NotMeasurable(
            "unsupported",
            f"{name}: loftq rounds weights anew from its second iteration on, which would undo any quantizer but rtn; "
            "put rtn before it, or give iterations=1",
        )
    return lambda residual: grid.rtn(residual, own_grid)
