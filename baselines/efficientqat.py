"""EfficientQAT (Chen et al. 2024, arXiv 2407.11062), its first phase: block-wise training of all parameters (Block-AP).

Weights W and, per row and group, step s and zero point z are learned, block after block, so that the block on inputs
from quantized blocks gives what the full-precision block gives on full-precision inputs (mean squared error):

    Ŵ = (clip(⌊W/s⌉ + ⌊z⌉, 0, 2^b - 1) - ⌊z⌉) s,    s in [1e-4, 1e4],    ⌊z⌉ in [0, 2^b - 1]

Both bounds and all roundings pass gradients straight through; the clip of codes does not. s and z start as the min-max
grid's. Unlike in the authors' code

- that grid includes 0 from the start (no difference for a group with both signs);
- blocks run in a dtype of their own (`compute`) without AMP;
- norms stay those of full precision, so that a step that comes after finds its teacher; there they are trained, too;
- a step has the rate of its place on the cosine; there, from the second step on, that of the step after it.

The second phase (the scales alone, end to end) is the step `e2e_qp`. Low-bit activations are quantized as the
Bit-by-Bit paper extends this baseline (section 4.1): scales of each token and group, computed as they are needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from repro.baselines import grid
from repro.baselines.omniquant import straight_through
from repro.core.errors import UserError
from repro.models.groups import inputs
from repro.models.groups.quantizer import GroupGrid
from repro.models.lowbit import LowBitModel, blocks, in_layer
from repro.train import training_cost
from repro.train.blocks import BlockSettings, BlockTask, BlockTrainer, checkpoint_folder, training_ids
from repro.train.streams import Dtype, Forward, Place, computing

VERSION = 1
CALIBRATED = True
work = training_cost.by_blocks  # what its training takes
READS_FIRST_TOKENS = True  # of the calibration text its first `tokens` tokens and no others
COST = 50.0  # relative to RTN, for scheduling alone
FULL = 16  # bits of activations that are left alone
attached = inputs.attached


@dataclass(frozen=True)
class Config(grid.Grid):
    """The grid, and Block-AP's settings, those of the authors' 2-bit scripts: 4096 sequences of 2048 tokens.

    Attributes:
        act_bits: of activations; 16 leaves them alone.
        lr: learning rate of weights; the scripts of 3 and 4 bits have 1e-5.
        quant_lr: learning rate of s and z.
        lr_final: the share of both at which their cosine ends.
        epochs, batch, tokens: of each block; sequences in a step; tokens of an epoch.
        compute, streams: dtype of blocks, where trained tensors are float32 (AMP there); of hidden states.
        place, seed: where those lie; of the order of sequences.
    """

    bits: int = 2
    group: int = 64
    act_bits: int = FULL
    lr: float = 2e-5
    quant_lr: float = 1e-4
    lr_final: float = 0.05
    epochs: int = 2
    batch: int = 2
    tokens: int = 4096 * 2048
    compute: Dtype = "bfloat16"
    streams: Dtype = "bfloat16"
    place: Place = "device"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.symmetric or self.clip != "none":
            raise UserError("efficientqat learns an asymmetric grid; it takes neither sym nor clip")
        if min(self.lr, self.quant_lr, self.epochs, self.seed) < 0 or min(self.batch, self.tokens) < 1:
            raise UserError("efficientqat: lr, quant_lr, epochs and seed are 0 or more, batch and tokens 1 or more")
        if not 0 <= self.lr_final <= 1 or not (self.act_bits == FULL or (2 <= self.act_bits <= 8 and self.group)):
            raise UserError("efficientqat: lr_final is a share, 0 to 1; act_bits is 16, or 2 to 8 with a group above 0")


def steps(s: Tensor, z: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """s within its bounds and as it is stored, and z as a code."""
    stored = getattr(torch, config.scale_dtype)
    bounded = s.clamp(max(1e-4, torch.finfo(stored).tiny), 1e4).to(stored).float()
    return straight_through(s, bounded), straight_through(z, z.round().clamp(0, 2**config.bits - 1))


def fake_quantize(weight: Tensor, s: Tensor, z: Tensor, config: Config) -> Tensor:
    """Ŵ `[N, K]` of a float32 weight, differentiable in it, in s and in z `[N, G, 1]`."""
    s, z = steps(s, z, config)
    u = grid.split(weight, config) / s
    return (((straight_through(u, u.round()) + z).clamp(0, 2**config.bits - 1) - z) * s).flatten(1)


@torch.no_grad()
def start(block: nn.Module, prefix: str, config: Config) -> dict[str, Tensor]:
    """The trained tensors of a block: `NAME.weight`, `NAME/s` and `NAME/z` of each linear."""
    tensors = {}
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            with in_layer(f"{prefix}.{name}"):
                weight = grid.check(module.weight.data, config)
            tensors[f"{name}.weight"] = weight.clone()
            tensors[f"{name}/s"], tensors[f"{name}/z"] = grid.fit(grid.split(weight, config), config)
    return tensors


def linears(tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """W, s and z of each linear of a block."""
    names = [key.removesuffix("/s") for key in tensors if key.endswith("/s")]
    return {name: (tensors[f"{name}.weight"], tensors[f"{name}/s"], tensors[f"{name}/z"]) for name in names}


def quantized(block: nn.Module, tensors: dict[str, Tensor], config: Config, kwargs: dict) -> Forward:
    """The block with its trained tensors, fake-quantized, a function of hidden states `[B, L, H]`."""
    parts = linears(tensors)
    block = inputs.on_quantized_inputs(block, dict.fromkeys(parts, config.act_bits), GroupGrid(group=config.group or 1))

    def run(x: Tensor) -> Tensor:
        rounded = {f"{name}.weight": fake_quantize(*part, config).to(x.dtype) for name, part in parts.items()}
        return torch.func.functional_call(block, rounded, (x,), kwargs)

    return run


@torch.no_grad()
def refit(tensors: dict[str, Tensor], config: Config) -> None:
    """Put s and z of the min-max grid of a block's weights, as they are now, in the place of those that it has."""
    for name, (weight, *_) in linears(tensors).items():
        tensors[f"{name}/s"], tensors[f"{name}/z"] = grid.fit(grid.split(weight, config), config)


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Train and quantize every block of `lm`; `calibration` int64 `[sequences, length]` is the training text.

    Raises:
        UserError: fewer tokens than asked for, a group that does not divide a layer's inputs, or NaN in the model.
        NotMeasurable: the training diverged.
    """
    train(lm, calibration, [config], "efficientqat")


def train(lm: LowBitModel, calibration: Tensor | None, stages: Sequence[Config], who: str) -> None:
    """The same in stages whose widths differ: each trains the weights of the one before on a grid of its own.

    Args:
        lm: the decoder; edited.
        calibration: int64 token ids `[sequences, length]`.
        stages: settings of each pass over the blocks; the last one's grid is stored.
        who: the step, for messages and for what is attached.

    Raises:
        UserError: as `apply`.
        NotMeasurable: likewise.
    """
    config = stages[-1]
    ids = training_ids(calibration, config.tokens, who)
    settings = BlockSettings(
        config.epochs, config.batch, config.lr_final, 0.0, config.seed, config.streams, config.place
    )
    states = [start(block, prefix, stages[0]) for prefix, block in blocks(lm.model).items()]
    teacher = computing(lm.model, config.compute)
    trainer = BlockTrainer(teacher, ids, settings, checkpoint_folder(lm.model, ids, __file__, *stages), who)
    for number, stage in enumerate(stages):

        def task(
            block: nn.Module, kwargs: dict, index: int, stage: Config = stage, again: bool = number > 0
        ) -> BlockTask:
            if again:
                refit(states[index], stage)
            rates = {name: stage.quant_lr if "/" in name else stage.lr for name in states[index]}
            return BlockTask([quantized(block, states[index], stage, kwargs)], [None], None, states[index], rates)

        trainer.run(
            f"Block-AP w{stage.bits}", task, lambda outputs, full, _: (outputs[0] - full).float().square().sum()
        )
    for prefix, tensors in zip(blocks(lm.model), states, strict=True):
        for name, (weight, s, z) in linears(tensors).items():
            s, z = steps(s, z, config)
            codes = grid.quantize(grid.split(weight, config), s, z, config.bits).flatten(1)
            with in_layer(f"{prefix}.{name}"):
                lm.set_weight(f"{prefix}.{name}", grid.pack(codes, s, z, config))
            if config.act_bits < FULL:
                input_grid = GroupGrid(config.act_bits, config.group)
                lm.attach(f"{prefix}.{name}", inputs.attachment(who, codes.shape[1], input_grid))
    trainer.finish()
    lm.facts |= {"training/loss": trainer.losses, "training/tokens": [float(trainer.tokens)]}
