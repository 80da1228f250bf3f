"""Hidden states of many sequences between two blocks of a decoder, on its device or in host memory."""

import copy
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from repro.models.lowbit import block_inputs

TOGETHER = 8  # sequences that are moved, or run through a block, at once
Forward = Callable[[Tensor], Tensor]  # a block on hidden states [B, L, H]
Dtype = Literal["bfloat16", "float32"]
Place = Literal["device", "host"]


class Stream:
    """Hidden states `[S, L, H]` of all training sequences before a block."""

    def __init__(self, hidden: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        """`device` and `dtype` are those that the blocks compute with."""
        self.hidden, self.device, self.dtype = hidden, device, dtype

    def take(self, rows: Tensor | slice) -> Tensor:
        """The hidden states of some sequences, `[B, L, H]`, as a block takes them."""
        if isinstance(rows, Tensor):
            rows = rows.to(self.hidden.device)
        return self.hidden[rows].to(self.device, self.dtype)

    @torch.no_grad()
    def mapped(self, forward: Forward, into: "Stream | None" = None) -> "Stream":
        """The outputs of `forward` for every sequence, in a new stream or in `into`."""
        if into is None:
            pinned = self.hidden.is_pinned()
            into = Stream(torch.empty_like(self.hidden, pin_memory=pinned), self.device, self.dtype)
        for start in range(0, len(self.hidden), TOGETHER):
            rows = slice(start, start + TOGETHER)
            into.hidden[rows] = forward(self.take(rows)).to(into.hidden.dtype)
        return into

    def copy(self) -> "Stream":
        """Another stream with these hidden states."""
        return self.mapped(lambda x: x)

    def advance(self, forward: Forward) -> None:
        """Put what `forward` gives in the place of the hidden states."""
        self.mapped(forward, into=self)


def computing(model: nn.Module, dtype: Dtype) -> nn.Module:
    """`model` with parameters of a dtype: itself where it has it, else a copy; buffers (of RoPE) stay as they are."""
    compute_dtype = getattr(torch, dtype)
    if all(parameter.dtype == compute_dtype for parameter in model.parameters()):
        return model
    memo = {
        id(parameter): nn.Parameter(parameter.detach().to(compute_dtype), False) for parameter in model.parameters()
    }
    return copy.deepcopy(model, memo)


def embedded(model: nn.Module, ids: Tensor, dtype: Dtype, place: Place) -> tuple[Stream, list[dict]]:
    """The hidden states of `ids` int64 `[S, L]` before the first block, and the keyword arguments of every block.

    Args:
        model: a decoder of Hugging Face form.
        ids: token ids.
        dtype: of the stream; the blocks compute in the model's.
        place: the model's device, or host memory, pinned where the model is on a GPU.
    """
    parameter = next(model.parameters())
    device = torch.device("cpu") if place == "host" else parameter.device
    stream, kwargs = None, []
    for start in range(0, len(ids), TOGETHER):
        hidden, kwargs = block_inputs(model, ids[start : start + TOGETHER])
        if stream is None:
            shape = (len(ids), *hidden[0].shape[1:])
            pinned = place == "host" and parameter.is_cuda
            stream = torch.empty(shape, dtype=getattr(torch, dtype), device=device, pin_memory=pinned)
        stream[start : start + TOGETHER] = torch.cat(hidden).to(stream.dtype)
    return Stream(stream, parameter.device, parameter.dtype), kwargs
