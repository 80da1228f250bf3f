"""What a step computes beside a layer's weight, and the step's module that knows how.

A step that attaches something has `attached(linear, tensors, numbers) -> nn.Linear` in its module. It returns a layer
that calls `linear`, which may have something attached itself, and adds to it; `weight` and `bias` stay those of
`linear`. `KIND` in its module says what it is ("compensator"): a layer takes one attachment of each kind.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor, nn

from repro.core.errors import UserError

REGISTRIES: list[Mapping[str, ModuleType]] = []  # steps by name; steps import this file, so registries add themselves


@dataclass(frozen=True)
class Attachment:
    """What a step puts beside a layer's weight: tensors stored as they are, and numbers needed to compute with them.

    Attributes:
        step: the registry name of the step, whose module has `attached`.
    """

    step: str
    tensors: dict[str, Tensor]
    numbers: dict[str, float]

    def stored_bits(self) -> int:
        """Bits of every tensor at the width of its dtype."""
        return sum(tensor.numel() * tensor.dtype.itemsize * 8 for tensor in self.tensors.values())

    @property
    def kind(self) -> str:
        """The kind that the step's module names; otherwise the step's own name."""
        return getattr(module_of(self.step), "KIND", self.step)

    def build(self, linear: nn.Linear) -> nn.Linear:
        """`linear` with this attachment.

        Raises:
            UserError: no step of that name attaches anything.
        """
        return module_of(self.step).attached(linear, self.tensors, self.numbers)


class SummedLinear(nn.Linear):
    """A linear layer and a module whose output is added to its own; `weight` and `bias` are the layer's."""

    def __init__(self, linear: nn.Linear, extra: nn.Module) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.linear = linear
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        """The sum, in the layer's dtype."""
        y = self.linear(x)
        return y + self.extra(x).to(y.dtype)


def module_of(step: str) -> ModuleType:
    """The module of a step that attaches something."""
    module = next((registry[step] for registry in REGISTRIES if step in registry), None)
    if not hasattr(module, "attached"):
        raise UserError(f"no method {step!r} or baseline of that name attaches anything to a layer")
    return module
