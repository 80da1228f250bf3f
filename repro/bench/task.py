"""Inputs and outputs of the timer: a random layer, a task (launch, inputs, reference), and its timing.

And the tensors in inputs and outputs: copies that no cache holds, outputs overwritten with NaN, checked inputs.
"""

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layer:
    """A random linear layer `[rows, columns]`; `codes` quantizes its weight to nearest on first use, per format.

    The weight is normal with variance 1 / columns, so that outputs have about the size of the activations.
    """

    rows: int
    columns: int
    seed: int = 0
    device: str = "cuda"
    made: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def once(self, what: Hashable, make: Callable[[], Any]) -> Any:  # noqa: ANN401
        """The result of `make`, cached for the layer: providers of one format, and all numbers of rows, share it."""
        if what not in self.made:
            self.made[what] = make()
        return self.made[what]

    @cached_property
    def weight(self) -> Tensor:
        """float32 `[rows, columns]`."""
        generator = torch.Generator(self.device).manual_seed(self.seed)
        weight = torch.randn(self.rows, self.columns, generator=generator, device=self.device)
        return weight / self.columns**0.5

    def activations(self, count: int, dtype: torch.dtype) -> Tensor:
        """Normal `[count, columns]`."""
        generator = torch.Generator(self.device).manual_seed(self.seed + 1)
        return torch.randn(count, self.columns, generator=generator, device=self.device).to(dtype)

    def codes(self, bits: int, group: int, symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Codes uint8 `[rows, columns]`, scales and integer zeros float16 `[rows, groups]`; group 0 is a whole row."""

        def make() -> tuple[Tensor, Tensor, Tensor]:
            w = self.weight.view(self.rows, -1, group or self.columns)
            top = 2**bits - 1
            if symmetric:
                scale = (w.abs().amax(-1) / (2 ** (bits - 1) - 0.5)).half()
                zero = torch.full_like(scale, 2 ** (bits - 1))
            else:
                low, high = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)
                scale = ((high - low) / top).half()
                zero = (-low / scale.float()).round().clamp(0, top).half()
            q = (w / scale.float()[..., None]).round_().add_(zero.float()[..., None]).clamp_(0, top).to(torch.uint8)
            return q.view(self.rows, self.columns), scale, zero

        return self.once(("codes", bits, group, symmetric), make)

    def dequantized(self, bits: int, group: int, symmetric: bool = False) -> Tensor:
        """float32 `[rows, columns]`: the weight that those codes stand for."""
        return self.once(("dequantized", bits, group, symmetric), lambda: dense(*self.codes(bits, group, symmetric)))

    def int8(self) -> tuple[Tensor, Tensor]:
        """int8 `[rows, columns]` and scales float32 `[rows]`: symmetric, one scale a row."""

        def make() -> tuple[Tensor, Tensor]:
            scale = self.weight.abs().amax(1) / 127
            return (self.weight / scale[:, None]).round().to(torch.int8), scale

        return self.once("int8", make)


def dense(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """float32 `[rows, columns]`: (codes - zeros) * scales by group."""
    rows, groups = scales.shape
    grouped = codes.view(rows, groups, -1).float()
    return grouped.sub_(zeros.float()[..., None]).mul_(scales.float()[..., None]).view(codes.shape)


class Unsound(Exception):
    """A task that must not get a time: its output is wrong, or it does not do its work where the timer sees it."""


@dataclass(frozen=True)
class Task:
    """One launch to time, on given inputs, and what it should give.

    Attributes:
        name: of the kernel or peer.
        launch: called with `inputs` as keywords; returns its output tensor, or a tuple of them.
        inputs: tensors, dataclasses and tuples of tensors, and plain values.
        want: called with the same keywords; the right output in float32 (or integers), slow on purpose.
        tolerance: allowed ||got - want|| / ||want||.
        hot: names of inputs that are in cache when a model calls this (activations); all others are rotated.
        nbytes: bytes that a launch must read from memory; those of the rotated tensors when not given.
        launches: launches in one graph; enough for all copies and a long replay when not given.
        facts: what a row of results should say besides (shape, provider, …); the timer does not look at it.
    """

    name: str
    launch: Callable[..., Any]
    inputs: Mapping[str, Any]
    want: Callable[..., Any]
    tolerance: float = 1e-3
    hot: tuple[str, ...] = ("x",)
    nbytes: int | None = None
    launches: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cold_bytes(self) -> int:
        """Bytes of a launch that come from memory."""
        cold = [value for name, value in self.inputs.items() if name not in self.hot]
        return sum(t.nbytes for t in tensors(cold)) if self.nbytes is None else self.nbytes


@dataclass(frozen=True)
class Timing:
    """A timing: microseconds a launch (median, 20th and 80th percentile), and how it was measured.

    `floor_us` is the read floor of `nbytes`, timed in the same process, interleaved; `relerr` the largest error of all
    launches that were checked; `clock_mhz`, `throttle` and `joule` (a launch) are None where NVML cannot be read.
    """

    name: str
    mode: str
    us: float
    p20: float
    p80: float
    samples: tuple[float, ...]
    nbytes: int
    copies: int
    launches: int
    relerr: float
    floor_us: float | None = None
    clock_mhz: int | None = None
    throttle: str | None = None
    joule: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fraction(self) -> float | None:
        """Read floor over time: 1 is as fast as reading the bytes."""
        return self.floor_us / self.us if self.floor_us else None

    @property
    def watts(self) -> float | None:
        """Mean power while it runs back to back."""
        return self.joule / self.us * 1e6 if self.joule else None

    @property
    def gb_per_s(self) -> float:
        """Bytes that the launch must read over its time, in 10^9 bytes a second."""
        return self.nbytes / self.us / 1e3


# ---- tensors in inputs and outputs


def tensors(value: Any) -> list[Tensor]:  # noqa: ANN401
    """All tensors in a value: itself, or in its dict, sequence or dataclass."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        members = list(value.values())
    elif isinstance(value, list | tuple):
        members = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        members = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        return []
    return list(itertools.chain.from_iterable(map(tensors, members)))


def copies_in_a_row(value: Any, count: int) -> list[Any]:  # noqa: ANN401
    """Copies of a value whose tensors lie one after the other in one allocation, as the layers of a model do.

    Where else they would lie depends on what a process did before, and that alone has moved times by 6 %.
    """
    originals = tensors(value)
    step = 512  # bytes; what an allocator aligns to
    room = [-(-t.nbytes // step) * step for t in originals]
    device = originals[0].device if originals else None
    arena = torch.empty(sum(room) * count, dtype=torch.uint8, device=device)
    copies, place = [], 0
    for _ in range(count):
        moved: dict[int, Any] = {}
        for tensor, taken in zip(originals, room):
            here = arena[place : place + tensor.nbytes].view(tensor.dtype)
            mine = here.view(tensor.shape)
            # A dense tensor keeps its order in memory, transposed ones too; others are laid out in order.
            extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
            if extent == tensor.numel():
                mine = here.as_strided(tensor.shape, tensor.stride(), here.storage_offset())
            bits(mine).copy_(bits(tensor))
            moved[id(tensor)] = mine
            place += taken
        copies.append(copy.deepcopy(value, moved))  # `moved` says what stands for each tensor
    return copies


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers of the same width: equality on them also holds for NaN and for fp8."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def poison(outputs: Any) -> None:  # noqa: ANN401
    """Overwrite outputs with NaN, or with the least integer: what nobody writes cannot pass for a result."""
    for tensor in tensors(outputs):
        if tensor.dtype.is_floating_point and tensor.element_size() > 1:
            tensor.fill_(math.nan)
        elif tensor.dtype.is_floating_point:
            bits(tensor).fill_(0x7F)  # NaN in both kinds of fp8
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).min)


def check_inputs(task: Task) -> None:
    """Raise `Unsound` for inputs that let a wrong kernel pass: zeros, or one value throughout."""
    every = []
    for name, value in task.inputs.items():
        every += [(name, tensor) for tensor in tensors(value) if tensor.numel() > 1]
    if not every:
        raise Unsound(f"{task.name}: no tensor among its inputs {', '.join(task.inputs)}")
    widest = max(t.nbytes for _, t in every)
    for name, tensor in every:
        flat = bits(tensor)
        if not bool(flat.any()):
            raise Unsound(f"{task.name}: input {name} {list(tensor.shape)} is all zeros; time random inputs")
        if (name in task.hot or tensor.nbytes == widest) and bool((flat == flat.flatten()[0]).all()):
            raise Unsound(f"{task.name}: input {name} {list(tensor.shape)} holds one value only; time random inputs")
