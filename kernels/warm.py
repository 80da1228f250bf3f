"""Compile and load the kernels behind packed weights before their first call is in a CUDA graph capture."""

from collections.abc import Iterable, Sequence

import torch

from repro.kernels import linear
from repro.kernels.packing import PackedWeight

COUNTS = (1, 8, 16, 32, 64, 128, 256)  # tokens: every one that a launch configuration is tuned for


def warm(
    weights: PackedWeight | Iterable[PackedWeight],
    counts: Sequence[int] = COUNTS,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Launch `linear.wna16` once for every weight and number of tokens, and wait for it.

    Args:
        weights: one, or some, each on its device; weights of one form and shape are launched once.
        counts: numbers of tokens that will be asked for.
        dtype: of the activations, float16 or bfloat16.

    Raises:
        ValueError: another dtype.
    """
    known = set()
    for packed in [weights] if isinstance(weights, PackedWeight) else weights:
        form = (packed.rows, packed.columns, packed.bits, packed.group, packed.symmetric, packed.codes.device)
        if form in known:
            continue
        known.add(form)
        for count in counts:
            linear.wna16(torch.zeros(count, packed.columns, dtype=dtype, device=packed.codes.device), packed)
    if any(device.type == "cuda" for *_, device in known):
        torch.cuda.synchronize()
