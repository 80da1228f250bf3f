"""Triton as `triton`, `tl` and `TensorDescriptor`; where it is not installed, names that kernels can be defined with.

The operators of a decode step are imported wherever the engine is, also where only their references run: on macOS, on
Arm, with PyTorch for CPUs alone. `launch_config.lacks` says what is missing before anything is launched.
"""

from collections.abc import Callable
from typing import Any

__all__ = ["TensorDescriptor", "tl", "triton"]

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:

    class Constant:
        """A compile-time constant: its value."""

        def __init__(self, value: Any) -> None:  # noqa: ANN401
            self.value = value

    class Absent:
        """Whatever a kernel's signature and decorators name."""

        constexpr = Constant

        def jit(self, kernel: Callable | None = None, **_: Any) -> Callable:  # noqa: ANN401
            """The function as it is."""
            return kernel or (lambda kernel: kernel)

        def __getattr__(self, name: str) -> "Absent":
            if name.startswith("__"):
                raise AttributeError(name)
            return self

    triton = tl = TensorDescriptor = Absent()
