"""How far a kernel's output is from the right one."""

import torch


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """The norm of the difference over the norm of the reference, in float64."""
    reference = reference.double()
    return float((output.double() - reference).norm() / reference.norm())
