"""SPEAR's compensators by phase, for batches that are served: fused for one token, beside the product for more.

More than one token is the paper's semi-fused path (section 4.1, figure 6): product and compensators run on streams of
their own, which are branches of a captured graph, and meet where the corrections are added. Each compensator is still
the method's own launches, in float32; the paper has one kernel.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from repro.engine.corrected import Compensated, Corrected
from repro.engine.step import Decoder
from repro.engine.weights import LAYERS, side_streams


class Overlapped(Corrected):
    """A product and corrections, each of these on a stream of its own on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return super().forward(x)
        main, sides, corrections = torch.cuda.current_stream(), side_streams(len(self.layers)), []
        for side, layer in zip(sides, self.layers):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                corrections.append(layer(x))
        y = self.product(x)
        for side in sides:
            main.wait_stream(side)
        for start, correction in zip(self.starts, corrections):
            y[:, start : start + correction.shape[1]] += correction.to(y.dtype)
        return y


class Dispatched(nn.Module):
    """A compensated product by phase: one token by the fused kernel, more by `Overlapped`."""

    def __init__(self, fused: Compensated) -> None:
        super().__init__()
        separate = fused.separate(fused.product)
        self.fused, self.overlapped = fused, Overlapped(fused.product, list(zip(separate.starts, separate.layers)))

    @property
    def compensators(self) -> int:
        """How many layers of the product have one."""
        return len(self.overlapped.layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(x) if len(x) == 1 else self.overlapped(x)

    __call__ = forward  # a module's own looks for hooks


def dispatched(model: Decoder) -> Decoder:
    """A decoder whose compensated products are dispatched by phase, where the fused kernel takes them."""
    blocks = []
    for block in model.blocks:
        products = {}
        for name in LAYERS:
            product = getattr(block, name)
            if isinstance(product, Compensated):
                products[name] = Dispatched(product)
        blocks.append(replace(block, **products))
    return replace(model, blocks=tuple(blocks))
