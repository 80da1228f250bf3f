"""Self-sampled sequences, and the two phases that fit compensators to the full-precision model on them (section 3.1).

    L(θ) = E KL(P_fp(·|x) ‖ P_θ(·|x))                                                                         (5)

Phase 1 trains A and B with γ = 1, phase 2 the gate alone. At temperature T both distributions are softened and L is
multiplied by T², as in distillation; the mean is over all positions.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from tqdm import tqdm

from repro.core.errors import NotMeasurable
from repro.methods.spear.compensator import GATE, Compensator
from repro.methods.spear.config import Config
from repro.models import graphs
from repro.models.sampling import sample

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda t: 1.0,
    "linear": lambda t: 1 - t,
    "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
}
QUIET = {"leave": False, "mininterval": 10, "delay": 10}
CACHE_BYTES = 2**32  # of keys and values while sampling: bounds the sequences that are sampled together


def self_sampled(model: nn.Module, count: int, length: int, temperature: float, seed: int) -> Tensor:
    """int64 `[count, length]` token ids sampled from the full-precision model, BOS first."""
    c = model.config
    width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    bytes_per_sequence = 2 * c.num_hidden_layers * c.num_key_value_heads * width * model.dtype.itemsize * length
    together = max(1, CACHE_BYTES // bytes_per_sequence)
    sizes = [min(together, count - start) for start in range(0, count, together)]
    return torch.cat([sample(model, n, length, (seed << 20) + i, temperature) for i, n in enumerate(sizes)])


def kl(full: Tensor, quantized: Tensor, temperature: float) -> Tensor:
    """T²·KL(P_fp ‖ P_θ) in nats, the mean over positions; logits `[…, vocabulary]` (equation 5)."""
    log_p, log_q = (F.log_softmax(logits.float() / temperature, -1) for logits in (full, quantized))
    return temperature**2 * F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).mean()


@torch.no_grad()
def teacher_logits(teacher: nn.Module, ids: Tensor, batch: int, cache_gib: float) -> Callable[[Tensor], Tensor]:
    """A function from sequence numbers to the teacher's logits: looked up if all fit in `cache_gib`, else computed."""
    vocabulary = teacher.get_output_embeddings().weight.shape[0]
    if ids.numel() * vocabulary * teacher.dtype.itemsize > cache_gib * 2**30:
        return torch.no_grad()(lambda rows: teacher(ids[rows], use_cache=False).logits)
    return torch.cat([teacher(part, use_cache=False).logits for part in ids.split(batch)]).__getitem__


def calibrate(
    model: nn.Module, teacher: nn.Module, ecs: list[Compensator], ids: Tensor, config: Config
) -> list[list[float]]:
    """Train the compensators in `model`, phase after phase; nothing else of it changes.

    Args:
        model: the quantized model.
        teacher: the full-precision model.
        ecs: the compensators; a phase that trains the gate leaves it on.
        ids: int64 token ids `[sequences, length]` on the models' device.
        config: phases, optimizer and batch size.

    Returns:
        The mean loss of each epoch, for each phase.

    Raises:
        NotMeasurable: the loss is not finite.
    """
    logits = teacher_logits(teacher, ids, config.batch, config.teacher_cache)
    generator = torch.Generator().manual_seed(config.seed)
    history = []
    with frozen(model):
        for phase in config.phases:
            trained = []
            for ec in ecs:
                ec.gated = phase.trained == GATE
                trained += [tensor for name, tensor in ec.named_buffers() if name in phase.trained]
            for tensor in trained:
                tensor.requires_grad_(True)
            optimizer = graphs.adamw(
                trained, phase.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay
            )

            def step(rows: Tensor, trained: list[Tensor] = trained, optimizer: Optimizer = optimizer) -> Tensor:
                loss = kl(logits(rows), model(ids[rows], use_cache=False).logits, config.temperature)
                for tensor, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                    tensor.grad = gradient
                nn.utils.clip_grad_norm_(trained, config.clip)
                optimizer.step()
                return loss.detach()

            replayed = graphs.Replayed(step, partial(graphs.changed, optimizer))
            means = []
            for epoch in range(phase.epochs):
                steps = torch.randperm(len(ids), generator=generator).to(ids.device).split(config.batch)
                losses = []
                for i, rows in enumerate(tqdm(steps, f"spear: {'/'.join(phase.trained)}", **QUIET)):
                    done = (epoch + i / len(steps)) / phase.epochs
                    graphs.set_rate(optimizer, phase.lr * SCHEDULES[config.schedule](done))
                    losses.append(replayed(rows).clone())
                means.append(torch.stack(losses).mean().item())
                if not math.isfinite(means[-1]):
                    raise NotMeasurable(
                        "diverged", "spear's calibration diverged: the loss is not finite; lower its learning rates"
                    )
            history.append(means)
            for tensor in trained:
                tensor.requires_grad_(False).grad = None
    return history


@contextlib.contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter of `model` requires a gradient, it is in evaluation mode, and attention is plain matrix products:
    the gradients of the fused kernels are summed in an order that changes from run to run on CUDA."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.eval()
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
