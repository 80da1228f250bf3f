"""A Triton kernel that is launched again and again with arguments of the same kind, without binding them each time.

Triton binds, specializes and hashes all arguments of a launch in Python, 5 to 10 us of the host; a call with the same
dtypes, alignments and numbers always finds the same compiled kernel.
"""

from typing import Any

import torch
from torch import Tensor


class Prepared:
    """A kernel with its grid and constants, for arguments that differ in their addresses alone.

    The first launch goes through Triton, which compiles what is missing; later ones pass addresses to what it found.
    The caller answers for what Triton would have looked at: dtypes, addresses modulo 16, and every number.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], **constants: Any) -> None:  # noqa: ANN401
        self._kernel, self._grid, self._constants = kernel, grid, constants
        self._found: tuple[int, Any, tuple] = (-1, None, ())  # a device, what launches there, constants in order

    def __call__(self, *arguments: Any) -> None:  # noqa: ANN401
        """Launch on torch's current stream: tensors, numbers and None for the parameters that are no constants."""
        device, run, rest = self._found  # at once: another thread may launch on another device
        if run is None or torch._C._cuda_getDevice() != device:
            self._first(arguments)
            return
        given = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
        run(*given, *rest, stream=torch._C._cuda_getCurrentRawStream(device))

    def _first(self, arguments: tuple) -> None:
        rest = tuple(self._constants[name] for name in self._kernel.arg_names[len(arguments) :])
        compiled = self._kernel[self._grid](*arguments, **self._constants)
        if compiled is not None:  # as by Triton's interpreter
            self._found = torch.cuda.current_device(), compiled[(*self._grid, 1, 1)[:3]], rest
