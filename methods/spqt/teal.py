"""TEAL's thresholds and search (Liu et al. 2025, arXiv 2408.14690), which SpQt takes its own from.

Calibration text runs densely through the full-precision model; each block has one histogram for each tensor that its
layers read (q, k, v; o; gate, up; down). Read in the official code: it is one of the signed inputs, and the quantile at
0.5 + s/2 is the threshold, as if they were symmetric about 0. So s is no promise: `metrics/sparsity.py` measures what
is zeroed on the scored text. The greedy search is Algorithm 1 there.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from repro.core.errors import UserError
from repro.models.hooks import each_input
from repro.models.lowbit import LowBitModel, block_inputs, block_linears, blocks, in_layer

BINS, TAIL = 10_000, 0.01  # of a histogram; the share of the inputs in each of its two outer bins
LAST = 0.25  # the part of a window whose outputs the search compares
ROUNDING = 1e-9  # steps that add up to a whole layer may give a little less than 1
Sparsities = Mapping[str, float]


class InputHistogram(NamedTuple):
    """Centres of the bins, and how many values lie up to the end of each, float64 `[BINS]`."""

    centres: np.ndarray
    below: np.ndarray

    def threshold(self, s: float) -> float:
        """The quantile at 0.5 + s/2, linear between centres, rounded to float32; never below 0, and 0 for s = 0."""
        rank = (0.5 + s / 2) * self.below[-1]
        i = int(np.clip(np.searchsorted(self.below, rank), 1, BINS - 1))
        t = np.interp(rank, self.below[i - 1 : i + 1], self.centres[i - 1 : i + 1])
        return float(np.float32(max(t, 0.0))) if s else 0.0


def histogram(x: Tensor) -> InputHistogram:
    """The histogram of all entries of `x`, of any shape: BINS bins, whose outer two hold the extreme TAIL on each side.

    UserError if an entry is not finite, or if there are fewer than 1/TAIL.
    """
    x = x.detach().flatten().to(torch.promote_types(x.dtype, torch.float32))
    if not (count := int(TAIL * len(x))):
        raise UserError(f"{len(x)} inputs are too few for a histogram; calibrate on more tokens")
    least, most = (end.item() for end in x.aminmax())
    if not np.isfinite([least, most]).all():
        raise UserError("its inputs hold NaN or Inf: the model is damaged, or an activation overflowed")
    low, high = np.partition(x.cpu().numpy(), [count, -count])[[count, -count]].astype(float)
    inner = np.linspace(low, max(high, np.nextafter(low, np.inf)), BINS - 1)
    counts = torch.cat([(x < low).sum()[None], x.histc(BINS - 2, inner[0], inner[-1]).long()])
    edges = np.concatenate([[least], inner, [most]])
    below = counts.cumsum(0).cpu().numpy()
    return InputHistogram((edges[1:] + edges[:-1]) / 2, np.append(below, len(x)).astype(float))


def greedy(error: Callable[[Sparsities], float], sizes: Mapping[str, int], target: float, step: float) -> Sparsities:
    """The sparsity of each layer of a block: steps go to the layer where the error stays least, up to the target.

    As in the authors' code every layer below 1 takes a step, and the last one may end at 1 or beyond it, whose
    threshold is the middle of the last bin; it counts as it is. Unlike there, of the states before and after reaching
    the target the nearer one is taken, and sizes are those of the model.

    Args:
        error: of the block's output at given sparsities.
        sizes: parameters of the layers by name, q's first.
        target: mean sparsity by parameters, below 1.
        step: sparsity that a layer of q's size gets at a time; others get it divided by their size relative to q's.
    """
    total, first = sum(sizes.values()), next(iter(sizes.values()))
    before = sparsities = dict.fromkeys(sizes, 0.0)
    before_reached = reached = 0.0
    while reached < target:
        tried = {
            name: sparsities[name] + step * first / size
            for name, size in sizes.items()
            if sparsities[name] < 1 - ROUNDING
        }
        errors = {name: error({**sparsities, name: s}) for name, s in tried.items()}
        best = min(errors, key=errors.__getitem__)
        before = sparsities
        sparsities = {**sparsities, best: tried[best]}
        before_reached = reached
        reached = sum(sparsities[name] * size for name, size in sizes.items()) / total
    return before if target - before_reached < reached - target else sparsities


def zeroed(x: Tensor, threshold: float) -> Tensor:
    """x with zeros where |x| is at most the threshold."""
    return x.masked_fill(x.abs().float() <= threshold, 0)


class TealBlock(NamedTuple):
    """A block's layers by the tensor that they read, their sizes and inputs, and its error at given sparsities."""

    readers: list[list[str]]
    sizes: dict[str, int]
    histograms: dict[str, InputHistogram]
    error: Callable[[Sparsities], float]


@torch.no_grad()
def each_block(lm: LowBitModel, ids: Tensor, search: int) -> Iterator[TealBlock]:
    """Run token ids int64 `[S, L]` densely through the full-precision model (the model that is there, where a
    compensator came before); `error` is taken on `search` of the sequences. UserError for inputs that are not finite.
    """  # fmt: skip
    model = lm.full_precision() if lm.full and not lm.attachments else lm.model
    hidden, kwargs = block_inputs(model, ids)
    names = list(lm.weights or block_linears(model))
    for (path, block), words in zip(blocks(model).items(), kwargs):
        layers = {name: model.get_submodule(name) for name in names if name.startswith(f"{path}.")}
        inputs: dict[str, list[Tensor]] = {name: [] for name in layers}  # by layer, of each sequence
        with each_input(layers, lambda name, x: inputs[name].append(x)):  # noqa: B023
            outputs = [block(x, **words) for x in hidden]
        readers: dict[int, list[str]] = {}  # by the tensor that they read
        for name, (tensor, *_) in inputs.items():
            readers.setdefault(id(tensor), []).append(name)
        histograms: dict[str, InputHistogram] = {}
        for group in readers.values():
            with in_layer(group[0]):
                histograms |= dict.fromkeys(group, histogram(torch.cat(inputs[group[0]])))
        sizes = {name: linear.weight.numel() for name, linear in layers.items()}
        error = _error(block, layers, histograms, torch.cat(hidden[:search]), words)
        yield TealBlock(list(readers.values()), sizes, histograms, error)
        hidden = outputs


def _error(
    block: nn.Module, layers: Mapping[str, nn.Linear], histograms: Mapping[str, InputHistogram], x: Tensor, words: Any
) -> Callable[[Sparsities], float]:
    """How much the block's output changes: the norm over the last positions, averaged over channels and sequences.

    The MLP runs on these positions alone, and attention once for all sparsities that leave it as it is.
    """
    attention: dict[tuple[float, ...], Tensor] = {}

    @torch.no_grad()
    def output(sparsities: Sparsities) -> Tensor:
        at = {name: histograms[name].threshold(s) for name, s in sparsities.items() if s}
        with each_input({name: layers[name] for name in at}, lambda name, x: zeroed(x, at[name])):
            key = tuple(s for name, s in sparsities.items() if ".mlp." not in name)
            if key not in attention:
                h = x + block.self_attn(hidden_states=block.input_layernorm(x), **words)[0]
                attention[key] = h[:, int(h.shape[1] * (1 - LAST)) :].clone()
            return attention[key] + block.mlp(block.post_attention_layernorm(attention[key]))

    dense = cache(lambda: output(dict.fromkeys(layers, 0.0)))

    def error(sparsities: Sparsities) -> float:
        try:
            return (output(sparsities) - dense()).norm(dim=1).mean().item()
        except AttributeError as missing:
            raise UserError(f"TEAL's search does not know this block ({missing}); use thresholds=unified") from None

    return error
