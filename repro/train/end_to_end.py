"""Train tensors of a whole decoder with the loss of a method.

As in `blocks`, a step is a replayed CUDA graph on a GPU, batches are a function of (seed, step), and a run that was
killed continues from its checkpoint, on a CPU with the same bits. A batch may be computed in parts, whose gradients
are added up: logits of 131,072 tokens and their losses do not fit beside one another. With a `Validation` the tensors
end as they were where its loss was least.
"""

import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from repro.core.errors import NotMeasurable
from repro.core.files import atomic
from repro.models import graphs
from repro.train.blocks import QUIET, batch_rows, rate_at, steps_per_epoch
from repro.train.compiled import compiled

SAVE_EVERY = 30.0  # seconds of work that a killed run loses at most
LOOKED_AT = 64  # steps between two looks at the losses, which wait for the GPU
LOGITS = 2**26  # float32 values, 256 MiB; a loss holds some ten tensors of this size


@dataclass(frozen=True)
class EndToEndSettings:
    """How the tensors are trained.

    Attributes:
        lr: learning rate, the same for all tensors.
        epochs: passes over the sequences.
        batch: sequences in a step.
        warmup: share of the steps in which the rate rises to its height.
        final: the share of the rate at which its cosine ends; 1 is a constant rate.
        clip: largest norm of the gradient; 0 does not clip.
        weight_decay: of AdamW.
        seed: of the order of sequences.
        together: sequences in one forward pass; 0 takes the whole batch. It changes the order of sums alone.
    """

    lr: float
    epochs: int
    batch: int
    warmup: float = 0.0
    final: float = 1.0
    clip: float = 0.0
    weight_decay: float = 0.0
    seed: int = 0
    together: int = 0

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step of `steps`: up in a line, down in half a cosine."""
        rising = round(self.warmup * steps)
        if step < rising:
            return self.lr * (step + 1) / rising
        return rate_at((step - rising) / max(1, steps - rising), self.lr, self.final)


@dataclass
class Validation:
    """Sequences that are not trained on, whose loss chooses the step that is kept: one of every few, and the last.

    Attributes:
        ids: int64 `[S, L]` on the tensors' device.
        every: steps between two looks.
        losses: of every look so far.
        best: the tensors by name as they were at the least of them.
    """

    ids: Tensor
    every: int = 4
    losses: list[float] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def look(self, value: float, tensors: Mapping[str, Tensor]) -> None:
        """Note a loss, and the tensors where it is the least so far."""
        if value < min(self.losses, default=math.inf):
            self.best = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.losses.append(value)


def logits(model: nn.Module, weights: Mapping[str, Tensor], rows: Tensor) -> Tensor:
    """Logits `[B, L, vocabulary]` of token ids `[B, L]`, with `weights` in place of the parameters of their names."""
    return torch.func.functional_call(model, dict(weights), (), {"input_ids": rows, "use_cache": False}).logits


def next_token_loss(logits: Tensor, rows: Tensor) -> Tensor:
    """Mean cross entropy in nats of the logits of `rows` `[B, L]` and the token that follows each."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten())


def fitting(model: nn.Module, length: int) -> int:
    """Sequences of a length whose logits fill `LOGITS`, 1 or more."""
    return max(1, LOGITS // (length * model.get_output_embeddings().weight.shape[0]))


def trained_tokens(ids: Tensor, settings: EndToEndSettings) -> int:
    """Tokens that a whole training on `ids` sees."""
    return settings.epochs * steps_per_epoch(len(ids), settings) * settings.batch * ids.shape[1]


class _Step:
    """A step of the optimizer on a batch, which is computed in parts whose gradients are added up."""

    def __init__(
        self, loss: Callable[[Tensor], Tensor], trained: list[Tensor], optimizer: torch.optim.Optimizer,
        settings: EndToEndSettings,
    ) -> None:  # fmt: skip
        self.loss = loss
        self.trained = trained
        self.optimizer = optimizer
        self.settings = settings

    def __call__(self, rows: Tensor) -> Tensor:
        """Change the tensors; returns the loss before the step, a scalar."""
        total = torch.zeros((), device=rows.device)
        for tensor in self.trained:
            tensor.grad = None
        for part_loss in self._part_losses(rows):
            for tensor, gradient in zip(self.trained, torch.autograd.grad(part_loss, self.trained), strict=True):
                tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient
            total = total + part_loss.detach()
        if self.settings.clip:
            nn.utils.clip_grad_norm_(self.trained, self.settings.clip)
        self.optimizer.step()
        return total

    @torch.no_grad()
    def loss_of(self, rows: Tensor) -> Tensor:
        """The loss of `rows`, a scalar, without a step."""
        return sum(self._part_losses(rows), torch.zeros((), device=rows.device))

    def _part_losses(self, rows: Tensor) -> Iterator[Tensor]:
        """Each part's share of the mean over all rows."""
        for part in rows.split(self.settings.together or len(rows)):
            yield self.loss(part) * (len(part) / len(rows))


@torch.enable_grad()
def train(
    loss: Callable[[Tensor], Tensor], tensors: Mapping[str, Tensor], ids: Tensor, settings: EndToEndSettings,
    folder: Path, who: str, validation: Validation | None = None,
) -> list[float]:  # fmt: skip
    """Train `tensors` in place; returns the loss of every step.

    Args:
        loss: of token ids `[batch, L]`, a mean over sequences, differentiable in the tensors.
        tensors: by name, float32.
        ids: int64 `[S, L]` on the tensors' device.
        settings: optimizer and batches.
        folder: for the checkpoint; deleted at the end.
        who: for messages.
        validation: where given, the tensors end as they were at its best look, and it holds the losses of all.

    Raises:
        UserError: fewer sequences than a batch.
        NotMeasurable: a loss is not finite, whose step the message names, or at the end a tensor is not.
    """
    started = saved = time.perf_counter()
    trained = [tensor.requires_grad_() for tensor in tensors.values()]
    fused = ids.is_cuda
    optimizer = graphs.adamw(trained, settings.lr, weight_decay=settings.weight_decay, fused=fused)
    steps = settings.epochs * steps_per_epoch(len(ids), settings)
    path = folder / "end-to-end.safetensors"
    losses = []
    if path.is_file():
        losses = _load(path, tensors, optimizer, validation)
    step = _Step(compiled(loss, ids.device, steps), trained, optimizer, settings)
    replayed_step = graphs.Replayed(step, partial(graphs.changed, optimizer))
    replayed_loss = graphs.Replayed(step.loss_of, list)
    step_losses = []
    for number in tqdm(range(len(losses), steps), who, **QUIET):
        is_last = number + 1 == steps
        graphs.set_rate(optimizer, settings.rate(number, steps))
        batch = ids[batch_rows(number, len(ids), settings).to(ids.device)]
        step_losses.append(replayed_step(batch).float().clone())
        if validation and (is_last or (number + 1) % validation.every == 0):
            value = replayed_loss(validation.ids).item()
            validation.look(_finite(value, number, f"{who}: the validation loss"), tensors)
        ended = time.perf_counter()
        if is_last or len(step_losses) == LOOKED_AT or ended - saved > SAVE_EVERY:
            for value in torch.stack(step_losses).tolist():
                losses.append(_finite(value, len(losses), f"{who}: the loss"))
            step_losses = []
            if ended - saved > SAVE_EVERY and not is_last:
                _save(path, tensors, optimizer, losses, validation)
                saved = ended
    for name, tensor in tensors.items():
        tensor.requires_grad_(False).grad = None
        if not torch.isfinite(tensor).all():
            raise NotMeasurable("diverged", f"{who}: {name} is not finite after the last step; lower its learning rate")
        if validation and validation.best:
            tensor.copy_(validation.best[name])
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{who}: {trained_tokens(ids, settings):,} tokens, {time.perf_counter() - started:.1f} s", file=sys.stderr)
    return losses


def _finite(value: float, step: int, what: str) -> float:
    if not math.isfinite(value):
        raise NotMeasurable("diverged", f"{what} is not finite at step {step + 1}; lower its learning rate")
    return value


def _save(
    path: Path, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, losses: list[float],
    validation: Validation | None,
) -> None:  # fmt: skip
    parts = {f"tensor/{name}": tensor for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        parts |= {f"{key}/{name}": value for key, value in optimizer.state[tensor].items()}
    if validation:
        parts |= {f"best/{name}": tensor for name, tensor in validation.best.items()}
    with atomic(path) as temporary:
        save_file(
            {key: part.detach().cpu().contiguous() for key, part in parts.items()},
            temporary,
            {"losses": json.dumps([losses, validation.losses if validation else []])},
        )


@torch.no_grad()
def _load(
    path: Path, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, validation: Validation | None
) -> list[float]:
    with safe_open(path, "pt") as file:
        for name, tensor in tensors.items():
            tensor.copy_(file.get_tensor(f"tensor/{name}"))
            device = tensor.device
            optimizer.state[tensor] = {
                key: file.get_tensor(f"{key}/{name}").to(device) for key in ("step", "exp_avg", "exp_avg_sq")
            }
        losses, looked = json.loads(file.metadata()["losses"])
        if validation and looked:
            validation.losses = looked
            validation.best = {name: file.get_tensor(f"best/{name}").to(t.device) for name, t in tensors.items()}
        return losses
