"""BitDistiller's asymmetric clipping (Du et al. 2024, section 3.1): search both ends of a group's range separately.

Per row and group the largest and the smallest weight are shrunk independently, each to one of ten shares 1, 0.95 …
0.55, so that the layer's output on calibration inputs changes least under rounding. Query and key are not clipped. All
numbers are those of the authors' code, whose search is AWQ's with two ends.
"""

import torch
from torch import Tensor, nn

from repro.baselines import grid
from repro.baselines.awq import UNCLIPPED
from repro.models.hooks import each_input
from repro.models.lowbit import block_linears

SHARES = [1 - i / 20 for i in range(10)]
SEQUENCES = 64  # the first of the calibration text, among whose tokens those of the search are spread evenly


@torch.no_grad()
def round_to_grid(weight: Tensor, config: grid.Grid) -> Tensor:
    """RTN's weight `[N, K]` of a float32 weight."""
    groups = grid.split(weight, config)
    s, z = grid.fit(groups, config)
    return grid.dequantize(grid.quantize(groups, s, z, config.bits), s, z).flatten(1)


@torch.no_grad()
def clip(weight: Tensor, x: Tensor, config: grid.Grid) -> Tensor:
    """`weight` `[N, K]`, float32, cut where its rounded output on inputs `x` `[tokens, K]` changes least."""
    w, x = grid.split(weight, config), grid.split(x.float(), config)
    second_moment = torch.einsum("tgi,tgj->gij", x, x) / len(x)  # E[(x·d)²] = dᵀ E[x xᵀ] d
    least = torch.full_like(w[..., :1], torch.inf)
    best = w
    for high in SHARES:
        for low in SHARES:
            cut = w.clamp(low * w.amin(-1, keepdim=True), high * w.amax(-1, keepdim=True))
            d = grid.split(round_to_grid(cut.flatten(1), config), config) - w
            error = (torch.einsum("ngi,gij->ngj", d, second_moment) * d).sum(-1, keepdim=True)
            best = torch.where(error < least, cut, best)
            least = torch.minimum(error, least)
    return best.flatten(1)


@torch.no_grad()
def clipped(
    model: nn.Module, weights: dict[str, Tensor], ids: Tensor, tokens: int, config: grid.Grid
) -> dict[str, Tensor]:
    """`weights` by layer, those cut that are searched, on the inputs that the layers of `model` get.

    Args:
        model: the decoder.
        weights: float32 `[N, K]` of its block linears.
        ids: int64 `[S, L]` on the model's device.
        tokens: about how many inputs of a layer the search sees; 0 cuts nothing.
        config: the grid.
    """
    if not tokens:
        return weights
    sequences = ids[:SEQUENCES]
    searched = {n: x for n, x in block_linears(model).items() if not n.endswith(UNCLIPPED)}
    inputs: dict[str, list[Tensor]] = {name: [] for name in searched}
    stride = max(1, sequences.numel() // tokens)
    with each_input(searched, lambda name, x: inputs[name].append(x.flatten(0, -2)[::stride])):
        for rows in sequences.split(8):
            model.base_model(rows, use_cache=False)
    return weights | {name: clip(weights[name], torch.cat(x), config) for name, x in inputs.items()}
