"""BitDistiller (Du et al. 2024, arXiv 2402.10631): self-distillation of a low-bit model from its original.

1. The range of each row and group is cut at both ends (`asymmetric_clip`, section 3.1).
2. The cut weights are trained as the grid rounds them: it is fitted anew to every step's weights. As in the authors'
   code rounding passes gradients straight through, and they run through the clamp of the codes and through the largest
   and the smallest weight of a group, which make its scale. The loss is CAKLD, of the full-precision model P_T and
   this one, P_S, with P_T's mean confidence β, summed over the tokens of a sequence: β KL(P_S ‖ P_T) +
   (1 - β) KL(P_T ‖ P_S).
3. One step of every four is scored on sequences that are not trained on, and the best is kept.

Unlike in the authors' code β is a mean (there one batch more is summed than it divides by), the grid's range includes 0
and its scales are rounded as stored (with the gradient of those that are not), 3-bit weights are integers (there NF3),
and there is no prompt. Activations take dynamic asymmetric ranges of each token and group, as Bit-by-Bit extends this
baseline (section 4.1), but not clipped.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repro.baselines import grid, qat
from repro.baselines.asymmetric_clip import clipped
from repro.core.errors import UserError
from repro.methods.spear.calibration import self_sampled
from repro.models.groups.quantizer import StraightThrough
from repro.models.lowbit import LowBitModel, in_layer
from repro.train import training_cost
from repro.train.blocks import checkpoint_folder, steps_per_epoch, training_ids
from repro.train.end_to_end import Validation, fitting, train
from repro.train.streams import Dtype, computing

VERSION = 2
CALIBRATED = True
READS_FIRST_TOKENS = True  # of the calibration text its first `tokens` tokens, and clipping its first 64 sequences
COST = 50.0  # relative to RTN, for scheduling alone
attached = qat.attached


@dataclass(frozen=True)
class Config(grid.Grid):
    """The grid, and the settings of the authors' 2-bit scripts: a constant rate, batches of 16 on each of 8 GPUs.

    Attributes:
        act_bits: of activations, in the groups of the weights; 16 leaves them alone.
        clip_tokens: that clipping is searched on; 0 does not clip.
        data: what is trained on: sequences that the teacher samples (the paper; Bit-by-Bit's section 4.1), or the
            calibration text, which clipping reads in any case.
        temperature, length: of that sampling (not read; 1 is the teacher's own distribution); tokens of a sequence, at
            most that of the calibration's, which are cut into pieces of it.
        confidence, confidence_batches: the teacher's largest probability (the authors' code), or that of the next
            token (the paper); batches that β is measured on (not read; enough for two digits of a mean).
        held_out, every: share of the sequences, the last ones, that choose the step (not read; EfficientQAT's, 64 of
            4096); steps between two looks at them.
        lr, batch: learning rate of all weights; sequences in a step.
        epochs, tokens: passes over the data, and its tokens, those held out included (Bit-by-Bit, section 4.1).
        max_norm: largest norm of the gradient. Not read; the default of Hugging Face's trainer.
        compute, seed: dtype of both decoders, where what is trained is float32; of sampling and the order of sequences.
    """

    bits: int = 2
    group: int = 128
    act_bits: int = qat.FULL
    clip_tokens: int = 512
    data: Literal["sampled", "text"] = "sampled"
    temperature: float = 1.0
    length: int = 1024
    confidence: Literal["maximum", "label"] = "maximum"
    confidence_batches: int = 10
    held_out: float = 1 / 64
    every: int = 4
    lr: float = 8e-6
    epochs: int = 2
    batch: int = 128
    tokens: int = 4096 * 1024
    max_norm: float = 1.0
    compute: Dtype = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        qat.check("bitdistiller", self, "length", "every", "confidence_batches")
        qat.input_grid("bitdistiller", self.act_bits, self.group)
        if self.symmetric or self.clip != "none":
            raise UserError("bitdistiller clips an asymmetric grid by its own search; it takes neither sym nor clip")
        if not (self.temperature > 0 and self.clip_tokens >= 0 and 0 <= self.held_out < 1):
            raise UserError(
                "bitdistiller takes held_out 0 or more and below 1, clip_tokens 0 or more, temperature above 0"
            )


def sequences(teacher: nn.Module, calibration: Tensor | None, config: Config) -> Tensor:
    """The training sequences, int64 `[S, L]`; UserError if there is no text, or too little of it."""
    if calibration is None or not calibration.numel():
        raise UserError("bitdistiller needs calibration tokens, there are none; name a calibration corpus")
    length = min(config.length, calibration.shape[1])
    if config.data == "sampled" and (count := config.tokens // length):
        steps_per_epoch(count - math.ceil(config.held_out * count), config)  # sampling takes minutes
        return self_sampled(teacher, count, length, config.temperature, config.seed)
    cut = calibration[:, : calibration.shape[1] // length * length]
    return training_ids(cut.reshape(-1, length), config.tokens, "bitdistiller")


@torch.no_grad()
def confidence(teacher: nn.Module, ids: Tensor, kind: str) -> float:
    """β: the mean over tokens of the teacher's largest probability, or of that of the next token."""
    confidences = []
    for rows in ids.split(fitting(teacher, ids.shape[1])):
        p = teacher(rows, use_cache=False).logits.float().softmax(-1)
        confidences.append(p.amax(-1) if kind == "maximum" else p[:, :-1].gather(-1, rows[:, 1:, None]).squeeze(-1))
    return torch.cat(confidences).mean().item()


def cakld(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """β KL(student ‖ teacher) + (1 - β) KL(teacher ‖ student) in nats of logits `[B, L, V]`: sums over L, mean."""
    log_s, log_t = (F.log_softmax(x.float(), -1) for x in (student, teacher))
    return ((beta * log_s.exp() - (1 - beta) * log_t.exp()) * (log_s - log_t)).sum() / len(student)


def fake_quantize(weight: Tensor, config: Config) -> Tensor:
    """The weight `[N, K]` as its own grid rounds it, float32, differentiable in it and in the ends of its groups."""
    groups = grid.split(weight, config)
    levels = 2**config.bits - 1
    with torch.no_grad():
        stored, zero = grid.fit(groups, config)
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    high = groups.amax(-1, keepdim=True).clamp(min=0)
    scale = StraightThrough.apply((high - low) / levels, stored)
    steps = groups / scale
    codes = (StraightThrough.apply(steps, steps.detach().round()) + zero).clamp(0, levels)
    return ((codes - zero) * scale).flatten(1)


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Train and quantize every block linear of `lm`; `calibration` int64 `[sequences, length]` is the text.

    After a step that quantized its weights, those are trained on, and the teacher is the model before that step.

    Raises:
        UserError: fewer tokens than asked for, a group that does not divide a layer's inputs, or NaN in the model.
        NotMeasurable: the training diverged.
    """
    model = lm.model
    teacher = lm.full_precision() if lm.weights else lm.model
    weights = qat.start(model, config.group)
    teacher = computing(teacher, config.compute)
    ids = sequences(teacher, calibration, config).to(model.device)
    weights = clipped(model, weights, calibration.to(model.device), config.clip_tokens, config)
    input_grid = qat.input_grid("bitdistiller", config.act_bits, config.group)
    beta = confidence(teacher, ids[: config.batch * config.confidence_batches], config.confidence)
    held_out = math.ceil(config.held_out * len(ids))
    ids, validation = (
        ids[: len(ids) - held_out],
        Validation(ids[len(ids) - held_out :], config.every) if held_out else None,
    )

    student = qat.student(model, config.compute, input_grid)

    def loss(rows: Tensor) -> Tensor:
        rounded = {f"{name}.weight": fake_quantize(weight, config) for name, weight in weights.items()}
        with torch.no_grad():
            teacher_logits = teacher(rows, use_cache=False).logits
        return cakld(qat.logits(student, rounded, rows), teacher_logits, beta)

    settings = qat.settings(config, 1.0, model, ids.shape[1])
    folder = checkpoint_folder(model, ids, __file__, config)
    losses = train(loss, weights, ids, settings, folder, "bitdistiller", validation)
    for name, weight in weights.items():
        with in_layer(name):
            lm.set_weight(name, grid.rtn(weight, config))
    qat.finish(lm, "bitdistiller", input_grid, losses, ids, settings, validation)
    lm.facts["training/beta"] = [beta]


def work(config: Config, sequences: int, quantized: bool, count: int) -> training_cost.Work:
    """What its training takes: a teacher's pass in each step, and a copy of the best weights."""
    alone = training_cost.end_to_end(config, sequences, quantized, count)
    return replace(alone, passes=config.epochs * (training_cost.TRAINED + 1), latent=2, models=2)
