"""DNS: dense-and-sparse decomposition (SqueezeLLM, Kim et al. 2024, section 4.2), a row of FlexQuant's Table 1.

W = D + S. The weights of a layer that are largest in absolute value are kept in S, a sparse matrix in 16 bits; D has
zeros in their places, and so a narrower range for its few bits. SqueezeLLM keeps 0.45 % of the weights as outliers, and
0.05 % more that its gradients call sensitive; these are left out here. It quantizes D by k-means with weights of
sensitivity; ours is quantized by GPTQ on a uniform grid, as the other rows of that table are: they differ by the
decomposition alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repro.baselines import gptq, grid
from repro.core.errors import UserError
from repro.models.attachments import Attachment, SummedLinear
from repro.models.lowbit import LowBitModel, in_layer

VERSION = 1
CALIBRATED = True
COST = 2.2  # relative to RTN, for scheduling alone
SHORT = 2**15  # columns whose numbers fit 16 bits


@dataclass(frozen=True)
class Config(gptq.Config):
    """Grid and solver of the dense part.

    Attributes:
        share: of a layer's weights that are kept apart in 16 bits.
    """

    share: float = 0.0045

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share < 1:
            raise UserError(f"share is {self.share}; it must be a share of the weights, above 0 and below 1")


def outliers(weight: Tensor, share: float) -> Tensor:
    """The sparse part of a weight `[N, K]`: the given share of its values, at least one, largest in absolute value."""
    count = max(1, round(share * weight.numel()))
    largest = weight.abs().flatten().topk(count).indices
    sparse = torch.zeros_like(weight).flatten()
    sparse[largest] = weight.flatten()[largest].half().to(weight.dtype)  # as it is stored
    return sparse.view_as(weight)


@torch.no_grad()
def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Quantize the dense part of every block linear of `lm` as GPTQ does, on inputs from blocks that have both parts.

    Args:
        lm: any decoder of Hugging Face form; edited.
        calibration: int64 token ids `[sequences, length]`.
        config: grid, solver and share.

    Raises:
        UserError: there is no calibration, or a layer cannot be quantized; the message names it.
    """
    sparse: dict[str, Tensor] = {}

    def quantize(lm: LowBitModel, names: list[str], H: Tensor, config: Config) -> None:
        sparse.update(_without_outliers(lm, names, config))
        gptq.quantize_family(lm, names, H, config)
        for name in names:  # later blocks read what both parts give
            linear = lm.model.get_submodule(name)
            linear.weight.data = linear.weight.data + sparse[name]

    gptq.in_order(lm, calibration, config, "dns", quantize)
    for name, part in sparse.items():
        lm.set_weight(name, lm.weights[name])  # the dense part alone
        lm.attach(name, Attachment("dns", stored(part), {}))


def _without_outliers(lm: LowBitModel, names: list[str], config: Config) -> dict[str, Tensor]:
    """Leave their dense parts in layers; the sparse parts by name."""
    sparse = {}
    for name in names:
        linear = lm.model.get_submodule(name)
        with in_layer(name):
            grid.check(linear.weight.data, config)  # NaN and Inf would be outliers
        lm.full.setdefault(name, linear.weight.data)
        sparse[name] = outliers(linear.weight.data, config.share)
        linear.weight.data = torch.where(sparse[name] == 0, linear.weight.data, 0)
    return sparse


# --- the sparse part --------------------------------------------------------------------------------------------------


def stored(sparse: Tensor) -> dict[str, Tensor]:
    """Row by row the values in 16 bits and their columns, and where each row begins (CSR)."""
    rows, columns = sparse.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(sparse))
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    narrow = torch.int16 if sparse.shape[1] <= SHORT else torch.int32
    return {"values": sparse[rows, columns].half(), "columns": columns.to(narrow), "starts": starts}


def attached(linear: nn.Linear, tensors: dict[str, Tensor], numbers: dict[str, float]) -> nn.Linear:
    """`linear` with the sparse part beside it."""
    return SummedLinear(linear, SparsePart(linear, tensors))


class SparsePart(nn.Module):
    """The product with a sparse part, which is computed with zeros in place: its speed is that of no sparse kernel."""

    def __init__(self, linear: nn.Linear, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        starts = tensors["starts"].long()
        rows = torch.repeat_interleave(torch.arange(linear.out_features, device=starts.device), starts.diff())
        dense = torch.zeros(linear.out_features, linear.in_features, dtype=linear.weight.dtype, device=starts.device)
        dense[rows, tensors["columns"].long()] = tensors["values"].to(dense.dtype)
        self.register_buffer("weight", dense.to(linear.weight.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs `[..., N]` of inputs `[..., K]`, in their dtype."""
        return F.linear(x, self.weight.to(x.dtype))
