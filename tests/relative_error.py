"""How far a kernel's output is from the right one, and may be."""

import torch

ROUNDING = {"float16": 1e-3, "bfloat16": 4e-3}  # relative errors that an output's dtype allows


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """The norm of the difference over the norm of the reference, in float64."""
    reference = reference.double()
    return float((output.double() - reference).norm() / reference.norm())
