"""Compiled forward and backward passes of a training step on a GPU, where there are enough steps to pay for it.

A step of a small block under fake quantization is 500 to 800 kernels of 2 microseconds, and as much time between them;
compiled, what lies between two matrix products is one. Compiling takes 30 to 75 s a process, so that a short training
captures its plain step as a CUDA graph and is over before. Sums are in another order than without, and on a CPU,
where steps are also what tests compare with slow references, nothing is compiled.
"""

from collections.abc import Callable

import torch

WORTH = 1000  # steps of one call of a trainer; compiling saves 2 to 4 ms in each, in all blocks and passes of a run
VARIANTS = 64  # of one step: a graph for each width and each shape of the columns that split channels have


def compiled(function: Callable, device: torch.device, steps: int) -> Callable:
    """`function` of tensors, compiled where `device` is a GPU and `steps` are many; it must not look at values."""
    if device.type != "cuda" or steps < WORTH:
        return function
    torch._dynamo.config.recompile_limit = VARIANTS
    return torch.compile(function)
