"""Which layers get a compensator, and of which ranks (section 3.2, Algorithm 1, appendix C.1)."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from repro.core.errors import NotMeasurable
from repro.methods.spear.compensator import stored_bytes

CLOSE = 1e-9  # relative: rounding does not decide whether a threshold is reached
SEEN_TOGETHER = 16  # sequences in one forward pass


def cka(X: Tensor, Y: Tensor) -> float:
    """Linear CKA of hidden states `[tokens, d]` (equation 6), in float64; 1 for two constant matrices.

    With centred columns ‖XᵀCY‖² / (‖XᵀCX‖·‖YᵀCY‖), Frobenius norms.
    """
    X, Y = (H.double() - H.double().mean(0) for H in (X, Y))
    xy, xx, yy = ((P.T @ Q).square().sum().item() for P, Q in ((X, Y), (X, X), (Y, Y)))
    if xx == 0 or yy == 0:
        return float(xx == yy)
    return xy / math.sqrt(xx) / math.sqrt(yy)


@torch.no_grad()
def damages(teacher: nn.Module, quantized: dict[str, Tensor], ids: Tensor) -> dict[str, float]:
    """δ of each layer (equation 7): 1 - CKA of the last hidden states when that layer alone is quantized.

    Args:
        teacher: the full-precision model; restored afterwards.
        quantized: the dequantized weight of each layer, by module path.
        ids: int64 token ids `[sequences, length]`.
    """

    def hidden() -> Tensor:
        return torch.cat(
            [teacher.base_model(b, use_cache=False).last_hidden_state.flatten(0, 1) for b in ids.split(SEEN_TOGETHER)]
        )

    H_fp = hidden()
    damage = {}
    for name, weight in tqdm(quantized.items(), "spear: damage", leave=False, mininterval=10):
        parameter = teacher.get_submodule(name).weight
        full, parameter.data = parameter.data, weight
        damage[name] = max(0.0, 1 - cka(H_fp, hidden()))
        parameter.data = full
    return damage


def entropy(damage: Sequence[float]) -> float:
    """H_norm of δ (equation 8), 0 … 1. 1 without any damage; 0 for a single layer."""
    if len(damage) == 1:
        return 0.0
    total = sum(damage)
    if total == 0:
        return 1.0
    return -sum(d / total * math.log(d / total) for d in damage if d / total > 0) / math.log(len(damage))


def tau_eff(h_norm: float, tau: float, trigger: float, diffuse: float) -> float:
    """τ up to the trigger, then on a straight line down to `diffuse`·τ at H_norm = 1.

    The paper gives no formula. Tables 15 and 16 print K% ≈ τ/2 where damage is diffuse and plain coverage where it is
    not; a line joins both without a jump, and at H_norm ≈ 0.98 it gives the K% of 7B at 3 bits.
    """
    return tau * (1 - (1 - diffuse) * max(0.0, h_norm - trigger) / (1 - trigger))


def support(damage: Sequence[float], threshold: float, k_min: float, k_max: float) -> int:
    """K (equation 9): the fewest layers that hold `threshold` of all damage, within ⌊k_min·N⌋ … ⌊k_max·N⌋, at least 1.

    `damage` is noise-adjusted. Table 7 and appendix B.3 clamp the count, as here; section 3.2 says the threshold.
    """
    covered = np.cumsum(sorted(damage, reverse=True))
    K = 1 + int(np.searchsorted(covered, threshold * covered[-1] * (1 - CLOSE)))
    low, high = (math.floor(share * len(damage) + CLOSE) for share in (k_min, k_max))
    return max(1, low, min(K, high))


def normalized(values: Sequence[float]) -> np.ndarray:
    """Min–max normalization to 0 … 1; equal values become 0."""
    v = np.asarray(values, dtype=np.float64)
    return (v - v.min()) / span if (span := v.max() - v.min()) > 0 else np.zeros_like(v)


def select(damage: Sequence[float], cost: Sequence[float], K: int, p: int, cost_weight: float) -> list[int]:
    """Indices of K layers: the p most damaged, then those with the best δ̃ - λ·t̃ (equation 10); ties in model order."""
    order = sorted(range(len(damage)), key=lambda i: -damage[i])
    protected, others = order[: min(p, K)], order[min(p, K) :]
    score = normalized(damage) - cost_weight * normalized(cost)
    return sorted(protected + sorted(others, key=lambda i: (-score[i], i))[: K - len(protected)])


def rank(budget: int, shapes: list[tuple[int, int]], hidden: int) -> int:
    """The largest rank that all layers can have within `budget` bytes, gates and scales included (stage 4).

    Algorithm 1 divides the budget by the factors' bytes per rank; counting everything that is stored keeps within it.

    Raises:
        NotMeasurable: not even rank 1 fits.
    """
    r = 0
    while r < min(map(min, shapes)) and stored_bytes(r + 1, shapes, hidden) <= budget:
        r += 1
    if r == 0:
        needed = stored_bytes(1, shapes, hidden)
        raise NotMeasurable(
            "unsupported",
            f"rank 1 in {len(shapes)} layers takes {needed} bytes, the budget is {budget}; raise spear's budget",
        )
    return r


def raised(r: int, left: int, shapes: list[tuple[int, int]], hidden: int, removed: Sequence[float]) -> list[int]:
    """The rank of each layer, `r` or `r + 1`, when the bytes that rank `r` in all layers leaves are spent too.

    One pass over the layers, most error removed per extra byte first, ties in model order; a layer whose raise does not
    fit is passed over. A raise costs d_out + d_in + 8 bytes, with a gate the 2(2h(2r + 1) + h + 1) by which that grows.
    After it no layer that is still at `r` can be raised.

    Args:
        r: rank that all layers have.
        left: bytes of the budget above that.
        shapes: `(d_out, d_in)` of the layers.
        hidden: width of the gate as a multiple of the rank; 0 is without gate.
        removed: squared error that rank `r + 1` removes from each layer and `r` does not.
    """
    cost = [stored_bytes(r + 1, [shape], hidden) - stored_bytes(r, [shape], hidden) for shape in shapes]
    ranks = [r] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: -removed[i] / cost[i]):
        if cost[i] <= left and r < min(shapes[i]):
            ranks[i], left = r + 1, left - cost[i]
    return ranks
