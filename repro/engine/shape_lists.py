"""Lists of inputs for a shape's products from those that a small trained model keeps (SpQt, Table 2).

The weights of a shape are random, and so would be its lists, where those of a trained model have runs, and blocks and
kinds of matrix that skip more than others. So masks of tokens of a trained model follow one another up to the length of
the shape's layer, of the same kind of matrix in the block at the same relative depth; then single inputs, drawn at
random, change until the layer keeps the share that its kind of matrix keeps over all blocks and tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from repro.engine.step import Block, Decoder
from repro.engine.weights import LAYERS, SparseInputs
from repro.kernels import active_inputs
from repro.methods.spqt.sparse_inputs import SparseLinear
from repro.models.hooks import each_input
from repro.models.lowbit import LowBitModel, blocks


@dataclass(frozen=True)
class Masks:
    """Which inputs of a kind of product a model keeps.

    Attributes:
        kept: bool `[T, K]` of each block, tokens in any order.
        share: of the inputs of all blocks and tokens that are kept.
    """

    kept: list[Tensor]
    share: float


class Listed(SparseInputs):
    """A sparse product of a shape that reads a list from elsewhere; its own is made as ever, for its time.

    Args:
        sparse: the product with its threshold.
        active: int32 `[K + 1]`, as of `active_inputs`.
    """

    def __init__(self, sparse: SparseInputs, active: Tensor) -> None:
        super().__init__(sparse.dense, sparse.threshold)
        self.register_buffer("active", active)

    def listed(self, x: Tensor, active: Tensor) -> Tensor:
        """y of one token and the list from elsewhere."""
        return self.dense.listed(x, self.active)


@torch.inference_mode()
def masks_of(lm: LowBitModel, windows: Tensor) -> dict[str, Masks]:
    """The masks of a model under a recipe that ends with `spqt`, by the kinds of `LAYERS`.

    Args:
        lm: every position is sparse, and layers that read one tensor share a threshold.
        windows: token ids int64 `[W, L]`, which run through the model.
    """
    by_kind: dict[str, list[list[Tensor]]] = {}
    layers = {}
    for number, path in enumerate(blocks(lm.model)):
        for kind, (first, *_) in LAYERS.items():
            layer = lm.model.get_submodule(f"{path}.{first}")
            layers[kind, number] = layer.linear if isinstance(layer, SparseLinear) else layer
            by_kind.setdefault(kind, []).append([])

    def note(key: tuple[str, int], x: Tensor) -> None:
        kind, number = key
        by_kind[kind][number].append((x != 0).flatten(0, -2).cpu())

    with each_input(layers, note):
        for window in windows.to(lm.model.device):
            lm.model.base_model(window[None], use_cache=False)
    masks = {}
    for kind, by_block in by_kind.items():
        all_masks = [torch.cat(parts) for parts in by_block]
        shares = [part.float().mean() for part in all_masks]
        masks[kind] = Masks(all_masks, float(torch.stack(shares).mean()))
    return masks


def listed_alike(model: Decoder, masks: Mapping[str, Masks]) -> Decoder:
    """A shape with thresholds whose products all read lists of active inputs that come from recorded masks."""
    generator = torch.Generator().manual_seed(0)
    lists = []
    for number, block in enumerate(model.blocks):
        depth = number / len(model.blocks)
        products = {}
        for kind, masks_of_kind in masks.items():
            mask = masks_of_kind.kept[int(depth * len(masks_of_kind.kept))]
            sparse = getattr(block, kind)
            active = list_of(mask, masks_of_kind.share, inputs_of(block, kind), generator)
            products[kind] = Listed(sparse, active.to(model.device))
        lists.append(replace(block, **products))
    return replace(model, blocks=tuple(lists))


def inputs_of(block: Block, kind: str) -> int:
    """K of a product in zigzag."""
    product: nn.Module = getattr(block, kind).dense
    return product.codes.shape[1]


def list_of(masks: Tensor, share: float, columns: int, generator: torch.Generator) -> Tensor:
    """active int32 `[columns + 1]` of masks of tokens bool `[T, K]`, as many inputs as the share says."""
    tokens = torch.randperm(len(masks), generator=generator)[: -(-columns // masks.shape[1])]
    mask = masks[tokens].flatten()[:columns].clone()
    surplus = int(mask.sum()) - round(share * columns)
    able = (mask if surplus > 0 else ~mask).nonzero()[:, 0]
    changed = able[torch.randperm(len(able), generator=generator)[: abs(surplus)]]
    mask[changed] = surplus < 0
    return active_inputs.reference(mask.float()[None], 0.0)
