"""Train a decoder one block at a time, so that each block reproduces what full precision gives (Li et al. 2021, BRECQ).

A method says, for each pass over the blocks, what a block computes under fake quantization, which tensors are trained,
and the loss between its outputs and its teachers': a `BlockTask` for every block and a function. This module does the
rest. Streams hold the hidden states of all training sequences before a block: one of full precision, one for each
student (through the blocks that are trained already), and one of the model as it was before the pass. A step is
replayed as a CUDA graph on a GPU and plainly called on a CPU. Batches are a function of (seed, step).

A block that is trained is written to a checkpoint, so that a run that was killed continues after it; streams are
computed again, on a CPU bit for bit.
"""

import hashlib
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from repro.core.errors import NotMeasurable, UserError
from repro.core.files import atomic, sha256
from repro.models import graphs
from repro.models.lowbit import blocks
from repro.store import job
from repro.train.compiled import compiled
from repro.train.streams import Forward, Stream, embedded

POINTS = 64  # of a block's loss curve in one pass
KEPT = 2**28  # bytes of hidden states after all blocks up to which those of a model are kept from pass to pass
QUIET = {"leave": False, "mininterval": 10, "delay": 10}
Loss = Callable[[Sequence[Tensor], Tensor, Sequence[Tensor | None]], Tensor]


@dataclass(frozen=True)
class BlockSettings:
    """How every block is trained.

    Attributes:
        epochs: passes over the sequences for each block.
        batch: sequences in a step.
        final: the share of a learning rate at which its cosine ends; 1 is a constant rate.
        weight_decay: of AdamW.
        seed: of the order of sequences.
        streams: dtype of the hidden states between blocks.
        place: where they lie: on the model's device, or in pinned host memory, moved a few sequences at a time.
    """

    epochs: int
    batch: int
    final: float = 1.0
    weight_decay: float = 0.0
    seed: int = 0
    streams: Literal["bfloat16", "float32"] = "bfloat16"
    place: Literal["device", "host"] = "device"


@dataclass(frozen=True)
class BlockTask:
    """The work of one block in one pass.

    Attributes:
        students: the block under fake quantization, one for each stream of the pass; differentiable in the tensors.
        seconds: for each student what gives its second target, None for none. It reads the stream of the student
            before, which is one precision higher; the first student's reads the stream that `earlier` advances.
        earlier: the block as it was before this pass, which is how the pass before left its one student; None where no
            second target needs it.
        tensors: what is trained, by name, float32; none where this pass leaves the block alone.
        rates: learning rate of each tensor.
        seconds_are_full: every second target is the full-precision block's output, so that the first block, before
            which all streams are alike, has its first target for them.
    """

    students: Sequence[Forward]
    seconds: Sequence[Forward | None]
    earlier: Forward | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    seconds_are_full: bool = False


def training_ids(calibration: Tensor | None, tokens: int, who: str) -> Tensor:
    """The sequences, int64 `[S, L]`, that hold the first `tokens` tokens, rounded down to whole sequences.

    Raises:
        UserError: there are fewer, or not one sequence was asked for.
    """
    available, length = (0, 1) if calibration is None else (calibration.numel(), calibration.shape[1])
    if calibration is None or available < tokens:
        raise UserError(
            f"{who} trains on {tokens:,} tokens an epoch, the calibration text has {available:,}; "
            f"raise the scale's calibration, or give tokens={available}"
        )
    if tokens < length:
        raise UserError(f"{who}: tokens is {tokens}; one sequence of the calibration text has {length}")
    return calibration[: tokens // calibration.shape[1]]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, sequences: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(sequences)


class Batches(Protocol):
    """The settings that decide the sequences of a step."""

    batch: int
    seed: int


def batch_rows(step: int, sequences: int, settings: Batches) -> Tensor:
    """int64 `[batch]`: the sequences of a step; every epoch is a permutation, whose incomplete batch is left out."""
    epoch, batch = divmod(step, steps_per_epoch(sequences, settings))
    order = _order(settings.seed, epoch, sequences)
    return torch.from_numpy(order[batch * settings.batch : (batch + 1) * settings.batch])


def steps_per_epoch(sequences: int, settings: Batches) -> int:
    """Whole batches of an epoch.

    Raises:
        UserError: there is none.
    """
    if sequences < settings.batch:
        raise UserError(f"a batch of {settings.batch} sequences from {sequences}; lower batch, or give more tokens")
    return sequences // settings.batch


def rate_at(done: float, rate: float, final: float) -> float:
    """The learning rate when a share `done` of the steps is over: half a cosine down to `final` times the rate."""
    return rate * (final + (1 - final) * (1 + math.cos(math.pi * done)) / 2)


@torch.enable_grad()
def fit(task: BlockTask, loss: Loss, streams: Sequence[Stream], settings: BlockSettings, first: int = 0) -> list[float]:
    """Train the tensors of one block; returns the loss of every step.

    Args:
        task: the block and its tensors.
        loss: a sum over elements, from the students' outputs, the first target and the second ones. The gradient of
            the sum is divided by the elements of one output afterwards: that of a mean would underflow in 16 bits.
        streams: each student's inputs, the first target, and the second targets that there are.
        settings: optimizer and batches.
        first: the number of the first step, which continues the order of sequences from pass to pass.

    Raises:
        NotMeasurable: a loss is not finite; the message names the step.
    """
    tensors = list(task.tensors.values())
    by_rate: dict[float, list[Tensor]] = {}
    for name, tensor in task.tensors.items():
        by_rate.setdefault(task.rates[name], []).append(tensor.requires_grad_())
    device = streams[0].device
    decay = settings.weight_decay
    fused = device.type == "cuda"
    optimizers = {
        rate: graphs.adamw(of_rate, rate, weight_decay=decay, fused=fused) for rate, of_rate in by_rate.items()
    }
    count = len(task.students)
    second = [forward is not None for forward in task.seconds]

    def total(*rows: Tensor) -> Tensor:
        wants = iter(rows[count + 1 :])
        outputs = [forward(x) for forward, x in zip(task.students, rows[:count], strict=True)]
        return loss(outputs, rows[count], [next(wants) if is_second else None for is_second in second])

    sequences = len(streams[0].hidden)
    steps = steps_per_epoch(sequences, settings)
    ahead = compiled(total, device, settings.epochs * steps)

    def step(*rows: Tensor) -> Tensor:
        value = ahead(*rows)
        share = 1 / rows[count].numel()  # the target is of an output's shape
        gradients = torch._foreach_mul(torch.autograd.grad(value, tensors), share)
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient
        for optimizer in optimizers.values():
            optimizer.step()
        return value.detach() * share

    def changed() -> list[Tensor]:
        return list(chain(*map(graphs.changed, optimizers.values())))

    replayed = graphs.Replayed(step, changed)
    losses = []
    for epoch in range(settings.epochs):
        batches = [batch_rows(first + epoch * steps + i, sequences, settings) for i in range(steps)]
        step_losses = []
        for i, rows in enumerate(torch.stack(batches).to(streams[0].hidden.device)):
            for rate, optimizer in optimizers.items():
                graphs.set_rate(optimizer, rate_at((epoch + i / steps) / settings.epochs, rate, settings.final))
            step_losses.append(replayed(*(stream.take(rows) for stream in streams)).float().clone())
        losses += torch.stack(step_losses).tolist()
        if bad := next((i for i, value in enumerate(losses, start=1) if not math.isfinite(value)), None):
            raise NotMeasurable("diverged", f"the loss is not finite at step {bad}")
    for tensor in tensors:
        tensor.requires_grad_(False).grad = None
    return losses


def checkpoint_folder(model: nn.Module, ids: Tensor, module: str, *facts: object) -> Path:
    """The folder of one training's blocks, named by a hash of model, tokens, facts and the file `module`."""
    digest = hashlib.sha256(repr((facts, ids.shape, sha256(module))).encode())
    for tensor in (ids, *model.parameters()):
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return job.BUILD / "training" / digest.hexdigest()[:16]


class BlockTrainer:
    """Runs passes over the blocks of a decoder, whose own weights stay those of full precision.

    Attributes:
        losses: the mean losses of `POINTS` stretches of steps, block after block and pass after pass.
        block_tokens: that blocks were trained on so far: sequences by length by epochs, of every block that a pass
            trained.
        seconds: spent in passes, what a checkpoint spared not included.
    """

    def __init__(self, model: nn.Module, ids: Tensor, settings: BlockSettings, folder: Path, who: str) -> None:
        """`ids` int64 `[S, L]`, `folder` for checkpoints, `who` for messages."""
        self.model = model
        self.ids = ids
        self.settings = settings
        self.folder = folder
        self.who = who
        self.losses: list[float] = []
        self.block_tokens = 0
        self.steps = 0
        self.passes = 0
        self.seconds = 0.0
        self.start, self.kwargs = embedded(model, ids, settings.streams, settings.place)
        self._keeps = self.start.hidden.nbytes * len(self.kwargs) <= KEPT
        self._outputs: list[Stream] = []  # of the full-precision blocks, the same in every pass
        self._reached: list[Stream] = []  # of the one student behind each block but the last, as the last pass left it

    @property
    def tokens(self) -> int:
        """Tokens that the model was trained on so far; a pass that trains half of the blocks counts half."""
        return round(self.block_tokens / len(blocks(self.model)))

    def run(self, name: str, tasks: Callable[[nn.Module, dict, int], BlockTask], loss: Loss) -> None:
        """One pass: train block after block.

        Args:
            name: of the pass, for messages.
            tasks: the task of a block, from the block, its keyword arguments and its number.
            loss: see `fit`.

        Raises:
            NotMeasurable: a loss is not finite.
        """
        started = time.perf_counter()
        trained = 0
        stack = blocks(self.model)
        full = self.start.copy()
        earlier = None
        inputs = []
        before, self._reached = self._reached, []
        for index, (prefix, block) in enumerate(tqdm(stack.items(), f"{self.who} {name}", **QUIET)):
            task = tasks(block, self.kwargs[index], index)
            if not index:
                inputs = [self.start.copy() for _ in task.students]
                earlier = self.start.copy() if task.earlier else None
            full = self._output(index, block, full)
            targets = []
            if task.tensors:
                targets = _second_targets(task, None if index else full, [earlier, *inputs])
            last = index == len(stack) - 1  # no block reads what the streams of the others would be after it
            if earlier is not None and index < len(before):
                earlier = before[index]
            elif earlier is not None and not last:
                earlier.advance(task.earlier)
            if task.tensors:
                trained += 1
                self._train(f"{prefix} in {name}", index, task, loss, [*inputs, full, *targets])
            if not last:
                for stream, forward in zip(inputs, task.students, strict=True):
                    stream.advance(forward)
                if self._keeps and len(inputs) == 1:
                    self._reached.append(inputs[0].copy())
        self.passes += 1
        self.steps += self.settings.epochs * steps_per_epoch(len(self.ids), self.settings)
        used = steps_per_epoch(len(self.ids), self.settings) * self.settings.batch
        self.block_tokens += trained * self.settings.epochs * used * self.ids.shape[1]
        self.seconds += time.perf_counter() - started
        curve = " ".join(f"{value:.3g}" for value in self.losses[-POINTS :: POINTS // 4])
        print(f"{self.who}: {name}, {self.tokens:,} tokens, {self.seconds:.1f} s, last block {curve}", file=sys.stderr)

    def _output(self, index: int, block: nn.Module, full: Stream) -> Stream:
        """Full precision's hidden states after a block, from those before it; computed once where all are few."""
        if index < len(self._outputs):
            return self._outputs[index]
        forward = partial(_called, block, self.kwargs[index])
        if not self._keeps:
            full.advance(forward)
            return full
        self._outputs.append(full.mapped(forward))
        return self._outputs[-1]

    def _train(self, where: str, index: int, task: BlockTask, loss: Loss, streams: list[Stream]) -> None:
        """Train a block, or take what it was trained to from its checkpoint."""
        path = self.folder / f"{self.passes}-{index}.safetensors"
        if path.is_file():
            with safe_open(path, "pt") as file:
                for name, tensor in task.tensors.items():
                    tensor.copy_(file.get_tensor(name))
                self.losses += json.loads(file.metadata()["losses"])
            return
        try:
            losses = fit(task, loss, streams, self.settings, self.steps)
        except NotMeasurable as refused:
            raise NotMeasurable(refused.status, f"{self.who}: {refused} of {where}; lower its learning rate") from None
        parts = np.array_split(np.asarray(losses), min(POINTS, len(losses)) or 1)
        curve = [float(part.mean()) for part in parts if len(part)]
        self.losses += curve
        with atomic(path) as temporary:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in task.tensors.items()}
            save_file(tensors, temporary, {"losses": json.dumps(curve)})

    def finish(self) -> None:
        """Delete the checkpoints: what was trained is about to be stored."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _second_targets(task: BlockTask, full: Stream | None, sources: Sequence[Stream | None]) -> list[Stream]:
    """The second targets that a block has.

    Args:
        task: what gives them.
        full: what full precision gives for the sources, where they are all the same; else None.
        sources: what they are computed from, one for each student.
    """
    computed = [(source, forward) for source, forward in zip(sources, task.seconds) if forward is not None]
    if full is not None and task.seconds_are_full:
        return [full for _ in computed]
    return [source.mapped(forward) for source, forward in computed]


def _called(block: nn.Module, kwargs: dict, x: Tensor) -> Tensor:
    return block(x, **kwargs)
