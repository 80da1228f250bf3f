"""Q4_K products on a GPU: kernels for one token, the dequantized weight for several and for a prefill (SpQt).

The paper keeps prefill dense and decodes one token at a time; there are no kernels for a batch, which dequantizes.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repro.kernels import q4_k_planes as planes
from repro.kernels import zigzag_gemv
from repro.kernels.active_inputs import active_inputs
from repro.kernels.q4_k_gemv import q4_k_gemv
from repro.kernels.q4_k_naive_sparse import q4_k_naive_sparse
from repro.kernels.zigzag_masked import zigzag_masked
from repro.kernels.zigzag_sparse import zigzag_sparse
from repro.methods.spqt import layout
from repro.methods.spqt.q4_k_weight import Q4KWeight


class Q4K(nn.Module):
    """A product, x `[T, K]` to y `[T, N]`, with a weight in Q4_K in two planes.

    Args:
        codes: uint8 `[A, B, 128]`, headers uint8 `[A, B, 16]`, as of `q4_k_planes`.
        start, end: its rows in zigzag, of which bands before and after may hold others; in rows 0 and N.
        zigzag: whether the planes are in zigzag.

    Attributes:
        method: how inputs are skipped: by their list, as many for every program; in zigzag without load balance
            ("masked"); by their list in rows ("naive"). The last two are SpQt's baselines, for measurements.
    """

    method: Literal["listed", "masked", "naive"] = "listed"

    def __init__(
        self, codes: Tensor, headers: Tensor, start: int, end: int, zigzag: bool, bias: Tensor | None = None
    ) -> None:
        super().__init__()
        self.start, self.end, self.zigzag = start, end, zigzag
        self.register_buffer("codes", codes)
        self.register_buffer("headers", headers)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 1:
            return F.linear(x, self.weight(x.dtype), self.bias)
        if self.zigzag:
            y = zigzag_gemv.zigzag_gemv(x, self.codes, self.headers, self.end)
        else:
            y = q4_k_gemv(x, self.codes, self.headers)
        return self._finished(y)

    __call__ = forward  # a module's own looks for hooks

    def thresholded(self, x: Tensor, threshold: float) -> Tensor:
        """y of one token whose inputs up to a threshold are skipped, by one of the methods that are not "listed"."""
        if self.method == "masked":
            return self._finished(zigzag_masked(x, self.codes, self.headers, self.end, threshold))
        return self._finished(q4_k_naive_sparse(x, self.codes, self.headers, active_inputs(x, threshold)))

    def listed(self, x: Tensor, active: Tensor) -> Tensor:
        """y of one token, computed from the listed inputs alone, in the zigzag layout."""
        return self._finished(zigzag_sparse(x, self.codes, self.headers, self.end, active))

    def takes_thresholds(self, x: Tensor) -> bool:
        """Whether inputs can be skipped: of one token, by a kernel of the weight's layout."""
        return len(x) == 1 and self.zigzag == (self.method != "naive")

    def weight(self, dtype: torch.dtype) -> Tensor:
        """`[N, K]`, dequantized."""
        dense = planes.dense(self.codes, self.headers, self.zigzag, torch.float32)
        return dense[self.start : self.end].to(dtype)

    def expanded(self, tokens: int, dtype: torch.dtype) -> nn.Module:
        """The product for many calls of so many tokens, without dequantizing at each."""
        if tokens == 1:
            return self
        from repro.engine.weights import Dense  # which imports this module

        return Dense(self.weight(dtype), self.bias)

    def _finished(self, y: Tensor) -> Tensor:
        y = y[:, self.start :].contiguous() if self.start else y
        return y if self.bias is None else y + self.bias


def product_of(weights: Sequence[Q4KWeight], bias: Tensor | None, device: torch.device) -> Q4K | None:
    """The product of layers that share their input; None where their rows do not lie one after the other in planes."""
    in_rows = weights[0].layout == "row"
    if in_rows:
        rows = torch.cat([weight.blocks for weight in weights])
        codes, headers = layout.to_planes(rows.view(len(rows), -1, layout.HEAD + planes.LINE))
        return Q4K(codes.to(device), headers.to(device), 0, len(rows), False, bias)
    owners = {id(weight.owner or weight) for weight in weights}
    if len(weights) > 1 and len(owners) == 1:
        follow = all(first_weight.end == next_weight.start for first_weight, next_weight in zip(weights, weights[1:]))
        if not follow:
            return None
        parts = [weights[0]]
        start = weights[0].start
        end = weights[-1].end
    else:
        parts = [weight.rows(0, weight.shape[0]) for weight in weights]
        if len(parts) > 1 and any(part.start or part.end % layout.BAND for part in parts):
            return None
        start = parts[0].start
        end = parts[0].end if len(parts) == 1 else sum(part.end for part in parts)
    stored = [in_planes(part) for part in parts]
    codes = torch.cat([codes for codes, _ in stored]).to(device)
    headers = torch.cat([headers for _, headers in stored]).to(device)
    return Q4K(codes, headers, start, end, True, bias)


def in_planes(weight: Q4KWeight) -> tuple[Tensor, Tensor]:
    """Codes and headers of the stack of a zigzag weight."""
    stack = weight.stack
    return (stack[0], stack[1]) if weight.layout == "zigzag-planes" else layout.to_planes(stack[0])


def random(rows: int, columns: int, zigzag: bool, bias: Tensor | None, device: torch.device) -> Q4K:
    """A product of a shape, with random planes on a device, which can be `meta`."""
    if device.type == "meta":
        shape = (-(-rows // planes.SUPER), columns) if zigzag else (rows, columns // planes.SUPER)
        sizes = {"codes": planes.LINE, "headers": planes.HEADER}
        made_here = {n: torch.empty(*shape, size, dtype=torch.uint8, device=device) for n, size in sizes.items()}
    else:
        made_here = planes.make_planes(rows, columns, zigzag, 0, device)
    return Q4K(made_here["codes"], made_here["headers"], 0, rows, zigzag, bias)
