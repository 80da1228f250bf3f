"""SpQt (arXiv 2511.04477), sections 2 and 5: small inputs of a layer count as zero and their columns are skipped.

    y ≈ Σ W[:, i] x_i over |x_i| > θ

θ is a quantile of the layer's inputs on calibration text (`teal.py`). "unified" gives all layers one sparsity,
"teal" what TEAL's greedy search gives them, averaged among those that read one tensor, (q, k, v) and (gate, up), which
so share one threshold and one list of indices. Comes last in a recipe: `q4_k(layout=zigzag) + spqt(sparsity=0.5)`.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from repro.core.errors import UserError
from repro.data import alpaca  # noqa: F401  TEAL's calibration text gets its name
from repro.methods.spqt.teal import each_block, greedy, zeroed
from repro.models.attachments import Attachment
from repro.models.lowbit import LowBitModel

VERSION = 2
CALIBRATED = True
COST = 10.0  # relative to RTN, for scheduling alone
KIND = "sparsity"  # a layer takes one


@dataclass(frozen=True)
class Config:
    """The target and how it is reached.

    Attributes:
        sparsity: share of the inputs to zero, over a block's layers by their parameters; 0 is dense.
        thresholds: "unified", or "teal" with `search`, `step` and `shared`.
        positions: which inputs become sparse; the paper keeps prefill dense and does not say how its Table 3 was
            scored. "all": those of every position. "second_half": not in the first half of what runs through the
            model at once, as TEAL evaluates; a token that is decoded alone is sparse in both.
        tokens: calibration tokens, the first ones; TEAL takes 10 windows of 2048, our smallest scale draws 16,384.
        search: tokens, from the first sequences, on which the search compares outputs; one window of TEAL's.
        step: sparsity that a step of the search adds to a layer of q's size; TEAL's default, its script has half.
        shared: average within the groups, weighted by parameters, which keeps the target where k and v are smaller
            than q; False is TEAL itself.
    """

    sparsity: float = 0.5
    thresholds: Literal["unified", "teal"] = "unified"
    positions: Literal["all", "second_half"] = "all"
    tokens: int = 16384
    search: int = 2048
    step: float = 0.05
    shared: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.sparsity < 1:
            raise UserError(
                f"spqt: sparsity is {self.sparsity}; it must be a share of the inputs, 0 or more and below 1"
            )
        if not 0 < self.step <= 0.5:
            raise UserError(f"spqt: step is {self.step}; it must be above 0 and at most 0.5")
        if min(self.tokens, self.search) < 4:
            raise UserError(f"spqt: tokens is {self.tokens} and search {self.search}; they are 4 or more")


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Make every quantized layer of `lm`, a decoder of Hugging Face form, sparse; every block linear where none is.

    Thresholds come from `calibration`, int64 token ids `[sequences, length]`. `lm.facts` gets the target and threshold
    of each layer, `layers/sparsity` and `layers/threshold`.

    UserError for too few tokens, inputs that are not finite, or a block that the search does not know.
    """
    available = 0 if calibration is None else calibration.numel()
    if available < config.tokens:
        raise UserError(
            f"spqt takes its thresholds from {config.tokens} calibration tokens and got {available}; "
            "raise the scale's calibration, or lower `tokens`"
        )
    length = calibration.shape[1]
    for block in each_block(lm, calibration[: -(-config.tokens // length)], -(-config.search // length)):
        sparsities = dict.fromkeys(block.sizes, config.sparsity)
        if config.thresholds == "teal":
            sparsities = greedy(block.error, block.sizes, config.sparsity, config.step)
            for group in block.readers if config.shared else ():
                zeros = sum(sparsities[name] * block.sizes[name] for name in group)
                sparsities |= dict.fromkeys(group, zeros / sum(block.sizes[name] for name in group))
        for name, s in sparsities.items():
            t = block.histograms[name].threshold(s)
            lm.facts.setdefault("layers/sparsity", []).append(s)
            lm.facts.setdefault("layers/threshold", []).append(t)
            numbers = {"columns": lm.model.get_submodule(name).in_features, "half": config.positions == "second_half"}
            lm.attach(name, Attachment("spqt", {"threshold": torch.tensor(t)}, numbers))


class SparseLinear(nn.Linear):
    """A linear layer whose inputs up to `threshold` (θ) are zero; `weight` and `bias` are the layer's.

    With `half`, the first half of the positions stays dense.
    """

    def __init__(self, linear: nn.Linear, threshold: float, half: bool) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias, self.linear = linear.weight, linear.bias, linear
        self.threshold, self.half = threshold, half

    def first(self, length: int) -> int:
        """The first sparse position of `length`."""
        return length // 2 if self.half else 0

    def forward(self, x: Tensor) -> Tensor:
        """y `[…, L, N]` of inputs `[…, L, K]`."""
        dense, later = x.tensor_split([self.first(x.shape[-2])], -2)
        return self.linear(torch.cat([dense, zeroed(later, self.threshold)], -2))


def attached(linear: nn.Linear, tensors: dict[str, Tensor], numbers: dict[str, float]) -> nn.Linear:
    """`linear` on sparse inputs: the module that `LowBitModel` runs, now and after loading.

    UserError if the threshold belongs to a layer with another number of inputs, as another model has.
    """
    if (columns := numbers["columns"]) != linear.in_features:
        raise UserError(
            f"its threshold is that of a layer with {columns} inputs, and this one has {linear.in_features}: "
            "the thresholds belong to another model"
        )
    return SparseLinear(linear, tensors["threshold"].item(), bool(numbers["half"]))
