"""Launch a Triton kernel repeatedly on arguments of the same kind, without binding them each time.

Triton binds, specializes and hashes all arguments of a launch in Python, 5 to 10 us of the host; a call with the same
dtypes, alignments and numbers always finds the same compiled kernel. `blank` makes outputs as fast.
"""

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NO_DEVICE = -2  # of a PyTorch without CUDA; a tensor on a CPU is on -1


def blank(dtype: torch.dtype, *shape: int) -> Callable[[Tensor], Tensor]:
    """What makes contiguous memory that nobody has written, as `tensor.new_empty`, on the device of a tensor.

    On the current device it goes around the dispatcher and Python's arguments, as code that inductor writes.
    """
    strides = tuple(itertools.accumulate((1, *reversed(shape[1:])), operator.mul))[::-1]
    on_current = torch._C._dynamo.guards._empty_strided_cuda
    current = getattr(torch._C, "_cuda_getDevice", lambda: NO_DEVICE)

    def make(like: Tensor) -> Tensor:
        if like.get_device() == current():
            return on_current(shape, strides, dtype)
        return like.new_empty(shape, dtype=dtype)

    return make


class Prepared:
    """A kernel with its grid and constants, for arguments that differ in their addresses alone.

    The first launch goes through Triton, which compiles what is missing; later ones pass addresses to what it found,
    and call no hooks of profilers, for which Triton would collect facts at every launch. The caller answers for what
    Triton would have looked at: dtypes, addresses modulo 16, and every number.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], **constants: Any) -> None:  # noqa: ANN401
        self._kernel, self._grid, self._constants = kernel, grid, constants
        # a device, what launches there, all that comes before the arguments but the stream, constants in order
        self._found: tuple[int, Any, tuple, tuple, tuple] = (-1, None, (), (), ())

    def __call__(self, *arguments: Any) -> None:  # noqa: ANN401
        """Launch on torch's current stream: tensors, numbers and None for the parameters that are no constants."""
        device, run, grid, what, rest = self._found  # at once: another thread may launch on another device
        if run is None or torch._C._cuda_getDevice() != device:
            self._first(arguments)
            return
        given = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
        run(*grid, torch._C._cuda_getCurrentRawStream(device), *what, *given, *rest)

    def _first(self, arguments: tuple) -> None:
        rest = tuple(self._constants[name] for name in self._kernel.arg_names[len(arguments) :])
        compiled = self._kernel[self._grid](*arguments, **self._constants)
        if compiled is not None:  # as by Triton's interpreter
            what = compiled.function, compiled.packed_metadata, None, None, None  # no metadata for hooks, no hooks
            self._found = torch.cuda.current_device(), compiled.run, (*self._grid, 1, 1)[:3], what, rest
