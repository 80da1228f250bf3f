"""Bit-by-Bit (Xu et al. 2026, arXiv 2604.07888): quantization-aware training that lowers precision step by step.

Stage by stage (`schedule`) and block by block (`repro/train/blocks.py`) the weights of each block are trained so that
the block, on inputs from blocks of the same precision, gives what two teachers give (section 3.2, as we read it):

    L = ‖f(X_b; Ŵ) - f(X_fp; W)‖² + ‖f(X_b; Ŵ) - f(X_b'; W)‖²

X_fp comes through full-precision blocks, X_b' through the blocks as the stage before left them, one precision higher;
the first stage has no such blocks and one term. Biases, norms, embedding and head are not changed.

Before that the most sensitive input channels of each layer are split into two columns (section 3.4, `splitting`); both
have half of a channel's latent weight, and are quantized so that their errors do not add up (`branches`).

With `any_precision` the weights of all widths are shifted codes of one 8-bit master: L is summed over them, X_b' of a
width is the X_b of the next wider one, and what is stored is the master (`sliced` reads it at fewer bits).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from repro.methods.bitbybit import branches, precision_order, splitting
from repro.methods.bitbybit.config import MASTER, Config
from repro.methods.bitbybit.precision_order import FULL, Precision
from repro.models.activations import statistics
from repro.models.groups import inputs
from repro.models.groups.columns import Columns
from repro.models.groups.quantizer import fake_quantize, split
from repro.models.groups.weight import pack
from repro.models.lowbit import LowBitModel, block_linears, blocks, in_layer
from repro.train import training_cost
from repro.train.blocks import BlockTask, BlockTrainer, checkpoint_folder, training_ids
from repro.train.streams import Forward, computing

VERSION = 1
CALIBRATED = True
LATER = {"split_text": ""}  # fields that stored results do not declare, and what they mean there
READS_FIRST_TOKENS = True  # of the calibration text its first `tokens` tokens and no others
COST = 100.0  # relative to RTN, for scheduling alone
DOWN = ("down_proj", "fc2")  # the projections whose inputs have outliers (appendix B.2)
WATCHED = 32  # sequences that kurtosis and the outlier metric are measured on
attached = inputs.attached


@dataclass
class TrainedBlock:
    """A block of the full-precision model, and the weights that are trained in place of its linears'.

    Attributes:
        block: the block itself; not changed.
        latent: float32 weights by the linears' names.
        outliers: names of the linears whose inputs have outliers.
        columns: of the linears by name, if channels are split.
        now: the precision that the block has reached.
    """

    block: nn.Module
    latent: dict[str, Tensor]
    outliers: frozenset[str]
    columns: dict[str, Columns]
    config: Config
    now: Precision = Precision()

    def weights(self, bits: int) -> dict[str, Tensor]:
        """Fake-quantized weights of a width, in the block's dtype, by parameter name."""
        config, fake = self.config, {}
        for name, latent in self.latent.items():
            if bits != FULL:
                master = MASTER if config.any_precision else bits
                if name in self.columns:
                    how = self.columns[name], config.splitting(master)
                    latent = branches.fake_quantize(latent, *how, master - bits, config.delta)
                else:
                    latent = fake_quantize(latent, config.grid(master), master - bits, config.delta)
            fake[f"{name}.weight"] = latent.to(self.block.get_submodule(name).weight.dtype)
        return fake

    def input_bits(self, bits: int) -> dict[str, int]:
        """The width of every linear's inputs where the model's is `bits`."""
        return {name: max(bits, self.config.outlier_bits) if name in self.outliers else bits for name in self.latent}

    def at(self, precision: Precision, kwargs: dict) -> Forward:
        """The block at a precision, a function of hidden states `[B, L, H]`."""
        widths = self.input_bits(precision.activations)
        block = inputs.on_quantized_inputs(self.block, widths, self.config.input_grid(MASTER), self.columns)
        return lambda x: torch.func.functional_call(block, self.weights(precision.weights), (x,), kwargs)


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config, second: Tensor | None = None) -> None:
    """Train and quantize every block linear of `lm`, from the weights that it has now.

    `lm.facts` gets the loss curve, the tokens that were seen, the kurtosis of down-projections' inputs, and how many
    channels of each layer are split.

    Args:
        lm: a decoder of Hugging Face form; edited. After a step that quantized its weights, training continues from
            those, and the teacher is the model before that step.
        calibration: int64 token ids `[sequences, length]`: the training text.
        config: everything else.
        second: likewise, of `config.split_text`; channels are chosen on its first sequences.

    Raises:
        UserError: fewer tokens than asked for, a group that does not divide a layer's inputs, or NaN in the model.
        NotMeasurable: the training diverged.
    """
    ids = training_ids(calibration, config.tokens, "bitbybit")
    watched = (ids if second is None else second.to(ids.device))[:WATCHED]
    for name, linear in block_linears(lm.model).items():
        with in_layer(name):
            split(linear.weight, config.group)
    full = lm.full_precision() if lm.weights else lm.model
    teacher = computing(full, config.compute)
    kurtosis = input_kurtosis(full, ids[:WATCHED]) if config.act_bits != FULL else {}
    with torch.no_grad():
        states = trained_blocks(lm, teacher, kurtosis, config)
        if config.split != "none":
            lm.facts["layers/split"] = split_channels(full, states, watched, config)
    read = torch.cat([ids.flatten(), watched.flatten()])
    folder = checkpoint_folder(lm.model, read, __file__, config)
    trainer = BlockTrainer(teacher, ids, config.settings(), folder, "bitbybit")
    shares = precision_order.coverage(config.stages, config.rho)
    for number, (stage, share) in enumerate(zip(config.stages, shares, strict=True)):
        picked = precision_order.chosen(share, len(states), config.alpha, config.sampling, config.seed, number)
        wider = number > 0 or bool(lm.weights)
        widths = sorted({s.weights for s in config.stages[: number + 1]}, reverse=True)
        stages = [Precision(width) for width in widths] if config.any_precision else [stage]
        lambdas = [config.lambdas.get(precision.weights, 1.0) for precision in stages]

        def task(
            block: nn.Module, kwargs: dict, index: int, picked: set = picked, stages: Sequence[Precision] = stages,
            wider: bool = wider,
        ) -> BlockTask:  # fmt: skip
            return block_task(states[index], kwargs, index in picked, stages, wider)

        trainer.run(str(stage), task, partial(loss, lambdas, config.second))
    finish(lm, states, config)
    trainer.finish()
    lm.facts["training/loss"], lm.facts["training/tokens"] = trainer.losses, [float(trainer.tokens)]
    if kurtosis:
        lm.facts["layers/kurtosis"] = list(kurtosis.values())


def block_task(state: TrainedBlock, kwargs: dict, picked: bool, stages: Sequence[Precision], wider: bool) -> BlockTask:
    """What a block does in a pass; it reaches the last of `stages` where it is picked and stays as it is where not.

    Args:
        state: the block; its precision is set.
        kwargs: its keyword arguments.
        picked: whether this pass trains it.
        stages: the precision of each student: one, or all widths that a master has so far.
        wider: whether there was a pass before, whose model is the second teacher's.
    """
    config, before = state.config, state.now
    state.now = stages[-1] if picked else before
    reached = [state.now]
    if config.any_precision:  # a block that is not there yet takes part at the narrowest width that it has
        reached = [Precision(max(precision.weights, state.now.weights)) for precision in stages]
    students = [state.at(precision, kwargs) for precision in reached]
    earlier = state.at(before, kwargs) if wider and not config.any_precision else None
    full = partial(_full, state.block, kwargs)
    above = [earlier, *students[:-1]]
    seconds = [source and (full if config.teacher == "full" else source) for source in above]
    if not config.second:
        seconds = [None] * len(students)
        earlier = None
    tensors = state.latent if picked else {}
    rates = dict.fromkeys(tensors, config.lr)
    return BlockTask(students, seconds, earlier, tensors, rates, seconds_are_full=config.teacher == "full")


def loss(
    lambdas: Sequence[float], second: float, outputs: Sequence[Tensor], full: Tensor, seconds: Sequence[Tensor | None]
) -> Tensor:
    """Σ_b λ_b (‖y_b - y_fp‖² + second ‖y_b - y_b'‖²), float32."""
    total = torch.zeros((), device=full.device)
    for weight, y, second_output in zip(lambdas, outputs, seconds, strict=True):
        total = total + weight * (y - full).float().square().sum()
        if second_output is not None:
            total = total + weight * second * (y - second_output).float().square().sum()
    return total


def trained_blocks(
    lm: LowBitModel, teacher: nn.Module, kurtosis: dict[str, float], config: Config
) -> list[TrainedBlock]:
    """The teacher's blocks with the weights that `lm` has now."""
    states = []
    for prefix, block in blocks(teacher).items():
        names = [name for name, module in block.named_modules() if isinstance(module, nn.Linear)]
        latent = {name: lm.model.get_submodule(f"{prefix}.{name}").weight.detach().float().clone() for name in names}
        outliers = frozenset(name for name in names if kurtosis.get(f"{prefix}.{name}", 0.0) > config.kurtosis)
        states.append(TrainedBlock(block, latent, outliers, {}, config))
    return states


def split_channels(teacher: nn.Module, states: Sequence[TrainedBlock], ids: Tensor, config: Config) -> list[float]:
    """Fix the columns of every layer of the blocks, from the weights before training; the number split of each layer.

    Args:
        teacher: the full-precision model, whose inputs decide with the weights.
        states: its blocks; edited.
        ids: calibration text, int64 `[S, L]`.
        config: ratio, metric and group.
    """
    extras = ("kurtosis",) if config.split_metric == "kurtosis" else ()
    input_statistics = statistics(teacher, list(block_linears(teacher)), ids, extras)
    for number, (prefix, state) in enumerate(zip(blocks(teacher), states, strict=True)):
        share = splitting.ratio(number, len(states), config.split_first, config.split_last)
        of_block = {name: input_statistics[f"{prefix}.{name}"] for name in state.latent}
        state.columns |= splitting.block_columns(state.latent, of_block, share, config.split_metric, config.group)
    split_counts = []
    for state in states:
        split_counts += [float((columns.sign > 0).sum()) for columns in state.columns.values()]
    return split_counts


def input_kurtosis(model: nn.Module, ids: Tensor) -> dict[str, float]:
    """κ = E(x - μ)⁴ / σ⁴ of the inputs of each down-projection, over all tokens and channels (appendix B.2)."""
    names = [name for name in block_linears(model) if name.endswith(DOWN)]
    kurtosis = {}
    for name, input_statistics in statistics(model, names, ids, ("kurtosis",)).items():
        pooled = replace(input_statistics, powers=input_statistics.powers.mean(1, keepdim=True))
        kurtosis[name] = pooled.kurtosis().item() + 3
    return {name: kurtosis[name] for name in names}


@torch.no_grad()
def finish(lm: LowBitModel, states: Sequence[TrainedBlock], config: Config) -> None:
    """Store what was trained: codes, scales and zero points, and beside them the widths of the inputs."""
    stored = MASTER if config.any_precision else config.bits
    for prefix, state in zip(blocks(lm.model), states, strict=True):
        for name, latent in state.latent.items():
            columns = state.columns.get(name)
            with in_layer(f"{prefix}.{name}"):
                if columns is None:
                    weight = pack(latent, config.grid(stored), config.delta)
                else:
                    weight = branches.pack(latent, columns, config.splitting(stored), config.delta)
                lm.set_weight(f"{prefix}.{name}", weight)
        for name, bits in state.input_bits(config.act_bits).items():
            if bits < FULL:
                width = state.latent[name].shape[1]
                columns = state.columns.get(name)
                lm.attach(f"{prefix}.{name}", inputs.attachment("bitbybit", width, config.input_grid(bits), columns))


def _full(block: nn.Module, kwargs: dict, x: Tensor) -> Tensor:
    return block(x, **kwargs)


def work(config: Config, sequences: int, quantized: bool, count: int) -> training_cost.Work:
    """What its training takes: its passes over the blocks, one by one."""
    whole_batches = max(1, sequences // config.batch) * config.batch / max(1, sequences)
    passes = 0.0
    streams = 0
    most = 1
    trained = 0.0
    widths: set[int] = set()
    for number, (stage, share) in enumerate(
        zip(config.stages, precision_order.coverage(config.stages, config.rho), strict=True)
    ):
        widths |= {stage.weights}
        students = len(widths) if config.any_precision else 1
        earlier = int(bool(config.second) and not config.any_precision and (number > 0 or quantized))
        targets = earlier + (students - 1 if config.second else 0)
        streams = max(streams, 2 + students + earlier + targets)
        most = max(most, students)
        picked = precision_order.lowered_blocks(share, count) / count
        trained += picked
        training = config.epochs * whole_batches * students * training_cost.TRAINED
        passes += 1 + students + earlier + picked * (targets + training)
    return training_cost.Work(sequences, 0, passes, streams, most, 1, 1 + int(quantized), trained=trained)
