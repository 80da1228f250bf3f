"""Statistics of a layer's inputs on calibration text: second moments, means, maxima, kurtosis, quantiles.

One pass over the sequences serves every statistic and every layer, and layers that read the same tensor (q, k, v; gate,
up) share theirs. A result is kept until another model, other weights, tokens or statistics are asked for. Products are
float32 (float64 of a float64 model), as in QERA's code; sums over batches are float64.
"""

import contextlib
import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from repro.core.errors import UserError

TOGETHER, READERS = 4, 4  # sequences in one forward pass; inputs of earlier layers among which a shared one is found
BINS, LOWEST = 64, -40  # of the histogram: bins in a factor of 2, and log2 of where they begin
LARGEST = 2**30  # bytes of a result that is kept
Extra = Literal["second_moment", "kurtosis", "quantiles"]
_kept: dict[str, dict[str, "InputStatistics"]] = {}


@dataclass
class InputStatistics:
    """Statistics of a layer's inputs of K channels, float64; None what was not measured.

    Attributes:
        mean_abs: mean |x| of each sequence, `[S, K]`.
        mean_square: mean x² of each sequence, `[S, K]`.
        max_abs: largest |x| of each sequence, `[S, K]`.
        second_moment: E[x xᵀ] `[K, K]`, every sequence with its weight.
        powers: means of x, x², x³ and x⁴ over all tokens, `[4, K]`, for `kurtosis`.
        histogram: counts of |x| over all tokens and channels by log2 |x|, for `quantiles`.
    """

    mean_abs: Tensor | None
    mean_square: Tensor | None
    max_abs: Tensor | None
    second_moment: Tensor | None = None
    powers: Tensor | None = None
    histogram: Tensor | None = None
    seen: int = field(default=0, repr=False)

    def kurtosis(self) -> Tensor:
        """Excess kurtosis of each channel about its mean, `[K]`; 0 is a normal distribution's, NaN a constant's."""
        m1, m2, m3, m4 = self.powers
        return (m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4) / (m2 - m1**2) ** 2 - 3

    def quantile(self, share: float) -> float:
        """The |x| below which a `share` of all entries is, exact to the width of a bin, 1.1 %."""
        position = min(int((self.histogram.cumsum(0) < share * self.histogram.sum()).sum()), len(self.histogram) - 1)
        return 2.0 ** (LOWEST + (position + 0.5) / BINS) if position else 0.0

    def add(self, x: Tensor, weights: Tensor) -> None:
        """Add inputs `[B, L, K]` of the next B sequences; `weights` `[S]`, on the CPU, add up to 1."""
        x, rows = x.to(torch.promote_types(x.dtype, torch.float32)), slice(self.seen, self.seen + len(x))
        self.seen += len(x)
        if self.mean_abs is not None:
            size = x.abs()
            wide = {"dtype": torch.float64}
            self.mean_abs[rows], self.max_abs[rows] = size.mean(1, **wide), size.amax(1).double()
            self.mean_square[rows] = x.square().mean(1, **wide)
        if self.second_moment is not None:
            ratio = (len(weights) * weights[rows]).sqrt().to(x.dtype)  # exactly 1 where all weigh the same
            flat = (x if (ratio == 1).all() else x * ratio.to(x.device)[:, None, None]).flatten(0, 1)
            self.second_moment.add_(flat.T @ flat, alpha=1 / (len(weights) * x.shape[1]))
        if self.powers is not None:
            powers = torch.stack([x.double().pow(n).mean((0, 1)) for n in (1, 2, 3, 4)])
            self.powers += len(x) / len(weights) * powers
        if self.histogram is not None:
            bin_index = ((x.abs().log2() - LOWEST) * BINS).clamp(0, len(self.histogram) - 1)
            self.histogram += torch.bincount(bin_index.long().flatten(), minlength=len(self.histogram))


def empty(
    sequences: int, channels: int, extras: Sequence[Extra], device: torch.device, sizes: bool = True
) -> InputStatistics:
    """Statistics to add to."""
    zeros = {"dtype": torch.float64, "device": device}
    return InputStatistics(
        *(torch.zeros(sequences, channels, **zeros) if sizes else None for _ in range(3)),
        torch.zeros(channels, channels, **zeros) if "second_moment" in extras else None,
        torch.zeros(4, channels, **zeros) if "kurtosis" in extras else None,
        torch.zeros(-2 * LOWEST * BINS, dtype=torch.int64, device=device) if "quantiles" in extras else None,
    )


@contextlib.contextmanager
def watching(
    layers: Mapping[str, nn.Module],
    sequences: int,
    extras: Sequence[Extra] = (),
    weights: Tensor | None = None,
    sizes: bool = True,
) -> Iterator[dict[str, InputStatistics]]:
    """Statistics of the layers' inputs by name, filled while `sequences` sequences run through them in the block.

    Args:
        layers: modules that are called with one tensor `[B, L, K]`.
        sequences: how many will run, in any batches.
        extras: what is measured besides means and maxima; None in `InputStatistics` if not asked for.
        weights: `[sequences]`, how much each counts in the second moment; only their ratios matter. By default equal.
        sizes: whether means and maxima are measured; they take longer than a small layer's second moment.

    NaN and Inf are not looked for: they show in every statistic of the layer but the histogram.
    """
    stats: dict[str, InputStatistics] = {}
    recent: deque[tuple[Tensor, InputStatistics]] = deque(maxlen=READERS)
    weights = torch.ones(sequences) if weights is None else weights.cpu()
    weights = weights.double() / weights.double().sum()

    def read(name: str, x: Tensor) -> None:
        if shared := next((inputs for earlier, inputs in recent if earlier is x), None):
            stats[name] = shared
            return
        if name not in stats:
            stats[name] = empty(sequences, x.shape[-1], extras, x.device, sizes)
        stats[name].add(x.detach(), weights)
        recent.append((x, stats[name]))

    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            hook = layer.register_forward_pre_hook(lambda _, args, name=name: read(name, args[0]))
            stack.callback(hook.remove)
        yield stats


def tensors_hash(facts: object, tensors: Iterable[Tensor]) -> str:
    """The hash of facts, as `repr` shows them, and of tensors as they are in memory, wherever they are."""
    digest = hashlib.sha256(repr(facts).encode())
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


@torch.no_grad()
def statistics(
    model: nn.Module, names: Sequence[str], ids: Tensor, extras: Sequence[Extra] = (), weights: Tensor | None = None
) -> dict[str, InputStatistics]:
    """Statistics of the inputs of each named layer of a decoder on token ids int64 `[S, L]`; not to be changed.

    `extras` and `weights` are those of `watching`.

    Raises:
        UserError: a layer did not run, or its inputs are not finite.
    """
    request = list(names), sorted(extras), ids.shape, model.device
    key = tensors_hash(
        request, (ids, torch.empty(0) if weights is None else weights, *model.parameters(), *model.buffers())
    )
    if key in _kept:
        return _kept[key]
    with watching({name: model.get_submodule(name) for name in names}, len(ids), extras, weights) as stats:
        for batch in ids.to(model.device).split(TOGETHER):
            model.base_model(batch, use_cache=False)
    if bad := next((name for name, inputs in stats.items() if not inputs.mean_square.isfinite().all()), None):
        raise UserError(f"{bad}: its inputs hold NaN or Inf: the model is damaged, or an activation overflowed")
    if idle := sorted(set(names) - set(stats)):
        raise UserError(f"no calibration token reached {', '.join(idle)}; calibrate on more text")
    _kept.clear()
    tensors = {}
    for inputs in stats.values():
        tensors |= {
            id(accumulated): accumulated for accumulated in vars(inputs).values() if isinstance(accumulated, Tensor)
        }
    if sum(tensor.nbytes for tensor in tensors.values()) <= LARGEST:
        _kept[key] = stats
    return stats
