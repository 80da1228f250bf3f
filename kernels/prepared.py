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
        self._run: Any = None
        self._device = -1  # whose kernel `_run` launches
        self._rest: tuple = ()  # values of the kernel's last parameters, which are constants

    def __call__(self, *arguments: Any) -> None:  # noqa: ANN401
        """Launch on torch's current stream: tensors, numbers and None for the parameters that are no constants."""
        if self._run is None or torch._C._cuda_getDevice() != self._device:
            self._first(arguments)
            return
        given = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
        self._run(*given, *self._rest, stream=torch._C._cuda_getCurrentRawStream(self._device))

    def _first(self, arguments: tuple) -> None:
        self._rest = tuple(self._constants[name] for name in self._kernel.arg_names[len(arguments) :])
        compiled = self._kernel[self._grid](*arguments, **self._constants)
        if compiled is None:  # by Triton's interpreter
            return
        self._run = compiled[(*self._grid, 1, 1)[:3]]
        self._device = torch.cuda.current_device()
