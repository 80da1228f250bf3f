"""Layers that quantize their inputs at run time: groups along the channels, scale and zero point per token.

Nothing but three numbers is stored for a layer: width, group, and whether every range includes 0. A layer whose weight
has two columns for some channels quantizes inputs in the groups of those columns; copies of an input get one value, so
that the product takes each channel once, with the sum of its columns.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch import Tensor, nn

from repro.core.errors import UserError
from repro.models.attachments import Attachment
from repro.models.groups.columns import Columns
from repro.models.groups.quantizer import GroupGrid, fake_quantize, split


class QuantizedInputs(nn.Linear):
    """A linear layer on quantized inputs; `weight` and `bias` are the layer's."""

    def __init__(self, linear: nn.Linear, grid: GroupGrid, columns: Columns | None = None) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.linear = linear
        self.grid = grid
        self.columns = columns

    def forward(self, x: Tensor) -> Tensor:
        """y `[…, N]` of inputs `[…, K]`."""
        return self.linear(quantized(x, self.grid, self.columns))


@dataclass(frozen=True)
class QuantizedInputsAttachment(Attachment):
    """Width and group of a layer's inputs, and the index list of its columns, whose bits the weight counts."""

    def stored_bits(self) -> int:
        """Zero bits: numbers are not counted, and the list of columns is counted with the weight."""
        return 0


def attachment(step: str, columns: int, grid: GroupGrid, split: Columns | None = None) -> Attachment:
    """What `step` stores beside a layer of `columns` inputs: numbers, and the list of columns where some are split."""
    numbers = {"bits": grid.bits, "group": grid.group, "include_zero": grid.include_zero, "columns": columns}
    return QuantizedInputsAttachment(step, {} if split is None else {"index": split.stored()}, numbers)


def grid_of(numbers: Mapping[str, float]) -> GroupGrid:
    """The grid of an attachment's numbers."""
    return GroupGrid(int(numbers["bits"]), int(numbers["group"]), include_zero=bool(numbers["include_zero"]))


def quantized(x: Tensor, grid: GroupGrid, columns: Columns | None = None) -> Tensor:
    """Inputs `[…, K]` rounded in groups of channels, or in groups of a layer's columns."""
    return fake_quantize(x, grid) if columns is None else columns.taken(fake_quantize(columns.gather(x), grid))


def check_layer(linear: nn.Linear, what: str, columns: float, instead: str) -> None:
    """Raise unless `linear` can run on inputs that are made to be `what` for a layer of so many columns.

    Raises:
        UserError: it has another number of inputs; or no weight, as where the decode engine asks for what an attachment
            adds to a layer's output, and then what to do `instead`.
    """
    if linear.weight.dim() != 2:
        raise UserError(f"the engine does not run layers on {what} inputs; {instead}")
    if columns != linear.in_features:
        raise UserError(
            f"{what} inputs of a layer with {columns} inputs, and this one has {linear.in_features}: "
            "they belong to another model"
        )


def attached(linear: nn.Linear, tensors: dict[str, Tensor], numbers: dict[str, float]) -> nn.Linear:
    """`linear` on quantized inputs: the module that `LowBitModel` runs, now and after loading.

    Raises:
        UserError: the numbers belong to a layer with another number of inputs, or the group does not divide them; or
            `linear` has no weight, as where the decode engine asks for what an attachment adds to a layer's output.
    """
    check_layer(linear, "quantized", numbers["columns"], "leave act_bits at 16")
    grid = grid_of(numbers)
    if "index" in tensors:
        columns = Columns.of(tensors["index"], linear.in_features, grid.group)
        return QuantizedInputs(linear, grid, columns.to(linear.weight.device))
    split(linear.weight, grid.group)
    return QuantizedInputs(linear, grid)


def on_quantized_inputs(
    block: nn.Module, widths: Mapping[str, int], grid: GroupGrid, columns: Mapping[str, Columns] = MappingProxyType({})
) -> nn.Module:
    """A copy of a block, with the same parameters, whose named linears run on inputs of their width; 16 leaves them.

    `columns` are those of the layers that have two for some channels. Where nothing is quantized it is the block.
    """
    if min(widths.values(), default=16) >= 16:
        return block
    copied = copy.deepcopy(block, {id(tensor): tensor for tensor in (*block.parameters(), *block.buffers())})
    for name, bits in widths.items():
        if bits < 16:
            own = replace(grid, bits=bits), columns.get(name)
            copied.get_submodule(name).register_forward_pre_hook(
                lambda _, args, own=own: (quantized(args[0], *own), *args[1:])
            )
    return copied
