"""SPEAR's compensator and selection a second time: plain loops over the equations, float64, slow on purpose.

Nothing of `repro.methods.spear` is used here. A matrix is a list of rows.
"""

import math
from fractions import Fraction

Matrix = list[list[float]]


def times(M: Matrix, v: list[float]) -> list[float]:
    return [sum(m * x for m, x in zip(row, v, strict=True)) for row in M]


def multiply(P: Matrix, Q: Matrix) -> Matrix:
    columns = list(zip(*Q))
    rows = []
    for row in P:
        rows.append(times(columns, row))
    return rows


def gate(z: list[float], W1: Matrix, b1: list[float], W2: Matrix, b2: list[float]) -> list[float]:
    """γ(z) = 1 + tanh(W₂ ReLU(W₁z + b₁) + b₂), equation 3."""
    hidden = [max(0.0, u + b) for u, b in zip(times(W1, z), b1)]
    return [1 + math.tanh(u + b) for u, b in zip(times(W2, hidden), b2)]


def layer(x: list[float], W: Matrix, A: Matrix, B: Matrix, alpha: float, mlp: tuple | None) -> list[float]:
    """y = Ŵx + α·B(γ(Ax) ⊙ Ax), equation 3, of one token; without `mlp` γ is 1."""
    z = times(A, x)
    gamma = gate(z, *mlp) if mlp else [1.0] * len(z)
    correction = times(B, [g * u for g, u in zip(gamma, z)])
    return [y + alpha * c for y, c in zip(times(W, x), correction)]


def int8(row: list[float]) -> tuple[list[int], float]:
    """Symmetric codes and scale of one channel; halves round to even, as IEEE arithmetic does."""
    scale = max(abs(v) for v in row) / 127
    return [0 if scale == 0 else round(v / scale) for v in row], scale


def cka(X: Matrix, Y: Matrix) -> float:
    """Equation 6 with the centering matrix C = I - 11ᵀ/n written out; 1 where both are constant, 0 where one is."""
    n = len(X)
    C = []
    for i in range(n):
        C.append([-1 / n] * n)
        C[i][i] = 1.0 - 1 / n

    def norm(P: Matrix, Q: Matrix) -> float:  # ‖PᵀCQ‖_F
        P_transposed = [list(column) for column in zip(*P)]
        squares = 0.0
        for row in multiply(P_transposed, multiply(C, Q)):
            squares += sum(value**2 for value in row)
        return math.sqrt(squares)

    def constant(P: Matrix) -> bool:
        return all(row == P[0] for row in P)

    if constant(X) or constant(Y):
        return float(constant(X) and constant(Y))
    return norm(X, Y) ** 2 / (norm(X, X) * norm(Y, Y))


def entropy(delta: list[float]) -> float:
    """H_norm, equation 8; 0 log 0 = 0. Undefined without damage (1 here) and for one module (0 here)."""
    M, Delta = len(delta), math.fsum(delta)
    if M == 1:
        return 0.0
    if Delta == 0:
        return 1.0
    H = 0.0
    for d in delta:
        share = d / Delta
        if share > 0:
            H -= share * math.log(share)
    return H / math.log(M)


def tau_eff(H: float, tau: float, trigger: float, diffuse: float) -> float:
    """tau below the trigger; above it the straight line through (trigger, tau) and (1, diffuse·tau)."""
    if H <= trigger:
        return tau
    return tau + (H - trigger) / (1 - trigger) * (diffuse * tau - tau)


def support(delta: list[float], threshold: float, low: str, high: str) -> int:
    """K of equation 9 on adjusted damage, clamped as in the footnote of appendix B.3; at least one module."""
    N, total = len(delta), math.fsum(delta)
    ranked = sorted(delta, reverse=True)
    k = next(k for k in range(1, N + 1) if math.fsum(ranked[:k]) >= threshold * total * (1 - 1e-9))
    k = max(math.floor(Fraction(low) * N), min(k, math.floor(Fraction(high) * N)))
    return max(1, k)


def select(delta: list[float], cost: list[float], K: int, p: int, lam: float) -> list[int]:
    """Algorithm 1, stage 3, one module at a time; among equals the first in model order."""

    def normalized(values: list[float], i: int) -> float:
        low, high = min(values), max(values)
        return (values[i] - low) / (high - low) if high > low else 0.0

    chosen: list[int] = []
    while len(chosen) < min(K, len(delta)):
        free = [i for i in range(len(delta)) if i not in chosen]
        if len(chosen) < p:
            best = max(free, key=lambda i: (delta[i], -i))
        else:
            best = max(free, key=lambda i: (normalized(delta, i) - lam * normalized(cost, i), -i))
        chosen.append(best)
    return sorted(chosen)


def memory(r: int, shapes: list[tuple[int, int]], h: int) -> int:
    """Bytes: every INT8 code, every float32 scale, every half-precision number of a gate of hidden width h·r."""
    total = 0
    for d_out, d_in in shapes:
        total += r * d_in + 4 * r  # A and a scale for each of its rows
        total += d_out * r + 4 * r  # B and a scale for each of its columns
        if h:
            total += 2 * (h * r * r + h * r + r * h * r + r)  # W1, b1, W2, b2
    return total


def rank(budget: int, shapes: list[tuple[int, int]], h: int) -> int:
    """The largest r that fits, by trying all; 0 if none does."""
    full = min(min(shape) for shape in shapes)
    return max([r for r in range(1, full + 1) if memory(r, shapes, h) <= budget], default=0)
