"""The error compensator (section 3.1): a low-rank correction added to a quantized layer, gated token by token.

    y = Ŵx + α·B(γ(Ax) ⊙ Ax),    γ(z) = 1 + tanh(W₂ ReLU(W₁z + b₁) + b₂)                                    (3)

A is `[r, d_in]`, B `[d_out, r]`, W₁ `[h·r, r]` and W₂ `[r, h·r]`. It computes in float32 whatever the model's dtype.

Stored are A and B in INT8, symmetric, with a float32 scale per latent channel (row of A, column of B), and the gate in
half precision. The paper says "per-channel" without naming the channel; a scale per latent channel costs 8r bytes, one
per output of B would cost up to a code's worth at the ranks of small models.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repro.core.errors import NotMeasurable

FACTORS, GATE = ("A", "B"), ("W1", "b1", "W2", "b2")


def gate(z: Tensor, W1: Tensor, b1: Tensor, W2: Tensor, b2: Tensor) -> Tensor:
    """γ(z) `[…, r]`, between 0 and 2 (equation 3)."""
    return 1 + torch.tanh(F.linear(F.relu(F.linear(z, W1, b1)), W2, b2))


class Compensator(nn.Module):
    """α·B(γ(Ax) ⊙ Ax); A, B and the gate are buffers, so that they are not parameters of the model.

    Attributes:
        alpha: scale of the correction.
        gated: whether γ is computed; else it is 1, a static low-rank compensator.
    """

    def __init__(self, tensors: dict[str, Tensor], alpha: float) -> None:
        super().__init__()
        self.alpha = alpha
        self.gated = GATE[0] in tensors
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """The correction `[…, d_out]` for inputs `[…, d_in]`."""
        z = F.linear(x.to(self.A.dtype), self.A)
        if self.gated:
            z = gate(z, self.W1, self.b1, self.W2, self.b2) * z
        return self.alpha * F.linear(z, self.B)


class CompensatedLinear(nn.Linear):
    """A linear layer plus a compensator; weight and bias are those of the layer it replaces."""

    def __init__(self, linear: nn.Linear, ec: Compensator) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias, self.ec = linear.weight, linear.bias, ec

    def forward(self, x: Tensor) -> Tensor:
        """y of equation 3, in the layer's dtype."""
        y = super().forward(x)
        return y + self.ec(x).to(y.dtype)


def int8(factor: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Codes in -127 … 127 and float32 scales, one for each index along the axis that is not `dim`.

    Raises:
        NotMeasurable: the factor is not finite: calibration diverged.
    """
    if not torch.isfinite(factor).all():
        raise NotMeasurable("diverged", "a compensator is not finite: calibration diverged; lower its learning rates")
    scale = (factor.abs().amax(dim, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (factor / scale).round().clamp(-127, 127).to(torch.int8), scale.squeeze(dim)


def pack(ec: Compensator) -> dict[str, Tensor]:
    """The stored tensors of `ec`: INT8 factors, their scales, and the gate in half precision.

    Raises:
        NotMeasurable: calibration diverged.
    """
    (A, A_scale), (B, B_scale) = int8(ec.A, 1), int8(ec.B, 0)
    stored = {"A": A, "A_scale": A_scale, "B": B, "B_scale": B_scale}
    if ec.gated:
        stored |= {name: getattr(ec, name).half() for name in GATE}
    if not all(torch.isfinite(tensor).all() for tensor in stored.values()):
        raise NotMeasurable(
            "diverged", "a gate does not fit half precision: calibration diverged; lower its learning rates"
        )
    return {name: tensor.detach().contiguous() for name, tensor in stored.items()}


def unpack(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The float32 tensors of `stored`: exactly the codes times their scales."""
    A = stored["A"].float() * stored["A_scale"][:, None]
    B = stored["B"].float() * stored["B_scale"]
    return {"A": A, "B": B} | {name: stored[name].float() for name in GATE if name in stored}


def stored_bytes(r: int, shapes: list[tuple[int, int]], hidden: int) -> int:
    """Bytes of compensators of rank `r` for layers `(d_out, d_in)`; `hidden` 0 is without gate.

    With a gate of width h·r there are 2hr² + hr + r values besides the factors: 8r² + 5r for h = 4.
    """
    gates = 2 * (2 * hidden * r * r + hidden * r + r) if hidden else 0
    return sum(r * (d_out + d_in) + 8 * r + gates for d_out, d_in in shapes)
