"""Layers whose inputs are quantized as they run: groups along the channels, scales and zero points of each token.

Nothing but three numbers is stored for a layer: width, group, and whether every range includes 0.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor, nn

from repro.errors import UserError
from repro.methods.bitbybit.quantizer import GroupGrid, fake_quantize, split
from repro.models.attachments import Attachment


class QuantizedInputs(nn.Linear):
    """A linear layer on quantized inputs; `weight` and `bias` are the layer's."""

    def __init__(self, linear: nn.Linear, grid: GroupGrid) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias, self.linear, self.grid = linear.weight, linear.bias, linear, grid

    def forward(self, x: Tensor) -> Tensor:
        """y `[…, N]` of inputs `[…, K]`."""
        return self.linear(fake_quantize(x, self.grid))


def attachment(step: str, columns: int, grid: GroupGrid) -> Attachment:
    """What `step` stores beside a layer of `columns` inputs; nothing of it is a tensor."""
    numbers = {"bits": grid.bits, "group": grid.group, "include_zero": grid.include_zero, "columns": columns}
    return Attachment(step, {}, numbers)


def attached(linear: nn.Linear, tensors: dict[str, Tensor], numbers: dict[str, float]) -> nn.Linear:
    """`linear` on quantized inputs: the module that `LowBitModel` runs, now and after loading.

    Raises:
        UserError: the numbers belong to a layer with another number of inputs, or the group does not divide them; or
            `linear` has no weight, as where the decode engine asks for what an attachment adds to a layer's output.
    """
    if linear.weight.dim() != 2:
        raise UserError("the engine does not run layers on quantized inputs; leave act_bits at 16")
    if (columns := numbers["columns"]) != linear.in_features:
        raise UserError(
            f"quantized inputs of a layer with {columns} inputs, and this one has {linear.in_features}: "
            "they belong to another model"
        )
    grid = GroupGrid(int(numbers["bits"]), int(numbers["group"]), include_zero=bool(numbers["include_zero"]))
    split(linear.weight, grid.group)
    return QuantizedInputs(linear, grid)


@contextlib.contextmanager
def quantized_inputs(block: nn.Module, widths: Mapping[str, int], grid: GroupGrid) -> Iterator[None]:
    """The named linears of a block run on inputs of their width inside; 16 leaves a layer's as they are."""
    with contextlib.ExitStack() as stack:
        for name, bits in widths.items():
            if bits < 16:
                own = replace(grid, bits=bits)
                hook = lambda _, args, own=own: (fake_quantize(args[0], own), *args[1:])  # noqa: E731
                handle = block.get_submodule(name).register_forward_pre_hook(hook)
                stack.callback(handle.remove)
        yield
