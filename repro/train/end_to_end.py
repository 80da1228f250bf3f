"""Train tensors of a whole decoder with a loss that a method gives.

As in `blocks`, a step is a replayed CUDA graph on a GPU, batches are a function of (seed, step), and a run that was
killed continues from its checkpoint, on a CPU with the same bits.
"""

import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from repro.errors import Refused
from repro.files import atomic
from repro.models import graphs
from repro.train.blocks import QUIET, batch_rows, rate_at, steps_per_epoch

SAVE_EVERY = 30.0  # seconds of work that a killed run loses at most
LOOKED_AT = 64  # steps between two looks at the losses, which wait for the GPU


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
    """

    lr: float
    epochs: int
    batch: int
    warmup: float = 0.0
    final: float = 1.0
    clip: float = 0.0
    weight_decay: float = 0.0
    seed: int = 0

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step of `steps`: up in a line, down in half a cosine."""
        rising = round(self.warmup * steps)
        if step < rising:
            return self.lr * (step + 1) / rising
        return rate_at((step - rising) / max(1, steps - rising), self.lr, self.final)


@torch.enable_grad()
def train(
    loss: Callable[[Tensor], Tensor], tensors: Mapping[str, Tensor], ids: Tensor, settings: EndToEndSettings,
    folder: Path, who: str,
) -> list[float]:  # fmt: skip
    """Train `tensors` in place; returns the loss of every step.

    Args:
        loss: of token ids `[batch, L]`, a mean, differentiable in the tensors.
        tensors: by name, float32.
        ids: int64 `[S, L]` on the tensors' device.
        settings: optimizer and batches.
        folder: for the checkpoint; deleted at the end.
        who: for messages.

    Raises:
        UserError: fewer sequences than a batch.
        Refused: a loss is not finite; the message names the step.
    """
    started = saved = time.perf_counter()
    trained = [tensor.requires_grad_() for tensor in tensors.values()]
    optimizer = graphs.adamw(trained, settings.lr, weight_decay=settings.weight_decay)
    path, losses = folder / "end-to-end.safetensors", []
    if path.is_file():
        losses = _load(path, tensors, optimizer)

    def step(rows: Tensor) -> Tensor:
        value = loss(rows)
        for tensor, gradient in zip(trained, torch.autograd.grad(value, trained), strict=True):
            tensor.grad = gradient
        if settings.clip:
            nn.utils.clip_grad_norm_(trained, settings.clip)
        optimizer.step()
        return value.detach()

    replayed, found = graphs.Replayed(step, partial(graphs.changed, optimizer)), []
    steps = settings.epochs * steps_per_epoch(len(ids), settings)
    for number in tqdm(range(len(losses), steps), who, **QUIET):
        graphs.set_rate(optimizer, settings.rate(number, steps))
        found.append(replayed(ids[batch_rows(number, len(ids), settings).to(ids.device)]).float().clone())
        now = time.perf_counter()
        if len(found) == LOOKED_AT or number + 1 == steps or now - saved > SAVE_EVERY:
            losses, found = losses + torch.stack(found).tolist(), []
            if bad := next((i for i, value in enumerate(losses) if not math.isfinite(value)), None):
                raise Refused("diverged", f"{who}: the loss is not finite at step {bad + 1}; lower its learning rate")
            if now - saved > SAVE_EVERY and number + 1 < steps:
                _save(path, tensors, optimizer, losses)
                saved = now
    for tensor in trained:
        tensor.requires_grad_(False).grad = None
    shutil.rmtree(folder, ignore_errors=True)
    tokens = steps * settings.batch * ids.shape[1]
    print(f"{who}: {tokens:,} tokens, {time.perf_counter() - started:.1f} s", file=sys.stderr)
    return losses


def _save(path: Path, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, losses: list[float]) -> None:
    parts = {f"tensor/{name}": tensor for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        parts |= {f"{key}/{name}": value for key, value in optimizer.state[tensor].items()}
    with atomic(path) as temporary:
        save_file(
            {key: part.detach().cpu().contiguous() for key, part in parts.items()},
            temporary,
            {"losses": json.dumps(losses)},
        )


@torch.no_grad()
def _load(path: Path, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> list[float]:
    with safe_open(path, "pt") as file:
        for name, tensor in tensors.items():
            tensor.copy_(file.get_tensor(f"tensor/{name}"))
            device = tensor.device
            optimizer.state[tensor] = {
                key: file.get_tensor(f"{key}/{name}").to(device) for key in ("step", "exp_avg", "exp_avg_sq")
            }
        return json.loads(file.metadata()["losses"])
