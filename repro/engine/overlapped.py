"""SPEAR's compensators by phase, for batches that are served: fused for one token, beside the product for more.

More than one token is the paper's semi-fused path (section 4.1, figure 6): the product and the compensators' latent
vectors are computed on two streams, branches of a captured graph, which meet where the corrections are added.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from repro.engine.corrected import Compensated
from repro.engine.step import Decoder
from repro.engine.weights import LAYERS, side_streams
from repro.kernels import compensate
from repro.kernels.compensated_gemv import PackedCompensators


class Dispatched(nn.Module):
    """A product with compensators by phase: one token by the fused kernel, more beside the product."""

    def __init__(self, fused: Compensated) -> None:
        super().__init__()
        self.fused = fused
        self.made = PackedCompensators(fused.down, fused.gates, fused.scales, fused.up, fused.spans)

    @property
    def compensators(self) -> int:
        """How many layers of the product have one."""
        return len(self.made.down)

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(x) if len(x) == 1 else self.overlapped(x)

    __call__ = forward  # a module's own looks for hooks

    def overlapped(self, x: Tensor) -> Tensor:
        """y `[T, N]`, the latent vectors on a stream of their own on a GPU."""
        if not x.is_cuda:
            latent = compensate.latent(x, self.made)
            y = self.fused.product(x)
        else:
            main, (side,) = torch.cuda.current_stream(), side_streams(1)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                latent = compensate.latent(x, self.made)
            y = self.fused.product(x)
            main.wait_stream(side)
        compensate.add(y, latent, self.made)
        return y


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
