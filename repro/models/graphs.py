"""Training steps of small models as CUDA graphs: a thousand launches of a few microseconds are replayed as one.

The same kernels run in the same order, so that the numbers are those of plain calls. On a CPU a step is simply called.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

WARMUP = 2  # calls before a capture, in which libraries set themselves up; what they change is put back


class Replayed:
    """`step(*inputs) -> Tensor` as a CUDA graph, one for each combination of input shapes."""

    def __init__(self, step: Callable[..., Tensor], state: Callable[[], Iterable[Tensor]]) -> None:
        """Nothing is captured yet.

        Args:
            step: changes tensors in place and returns one; what it allocates, it allocates anew in every call.
            state: all tensors that `step` changes; those that only a first call makes start as zeros.
        """
        self.step, self.state = step, state
        self.captured: dict[tuple, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]] = {}

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Run the step once; what it returned is overwritten by the next call with the same shapes."""
        if not inputs[0].is_cuda:
            return self.step(*inputs)
        shapes = tuple(x.shape for x in inputs)
        if shapes not in self.captured:
            self.captured[shapes] = self._capture(inputs)
        graph, static_inputs, result = self.captured[shapes]
        for static_input, x in zip(static_inputs, inputs, strict=True):
            static_input.copy_(x)
        graph.replay()
        return result

    def _capture(self, inputs: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]:
        static_inputs = tuple(x.clone() for x in inputs)
        before = {id(tensor): tensor.detach().clone() for tensor in self.state()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP):
                self.step(*static_inputs)
        torch.cuda.current_stream().wait_stream(side)
        with torch.no_grad():
            for tensor in self.state():
                old = before.get(id(tensor))
                tensor.zero_() if old is None else tensor.copy_(old)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = self.step(*static_inputs)
        return graph, static_inputs, result


def adamw(parameters: list[Tensor], lr: float, **options: float | tuple[float, float]) -> torch.optim.AdamW:
    """AdamW whose step can be captured where `parameters` are on a GPU; its rate is then a tensor: see `set_rate`."""
    cuda = parameters[0].is_cuda
    rate = torch.tensor(lr, device=parameters[0].device) if cuda else lr
    return torch.optim.AdamW(parameters, lr=rate, capturable=cuda, **options)


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Change the learning rate of an optimizer that `adamw` made."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def changed(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every tensor that a step of the optimizer changes."""
    tensors = []
    for group in optimizer.param_groups:
        tensors += group["params"]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return tensors
