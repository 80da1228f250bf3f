"""Cost of training a recipe's steps: tokens, GPU and host memory, passes through the model.

Arithmetic on a configuration and a shape, and the time of one block with random weights; no weights are loaded. Bytes
are those of what `blocks`, `streams` and `end_to_end` hold at once, counted up: hidden states exactly, but for what is
kept of a short text (`blocks.KEPT`), what autograd keeps by the tensors of a quantizer.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from repro import models
from repro.core.errors import UserError, shortened
from repro.models.lowbit import block_inputs, block_linears, blocks
from repro.train.end_to_end import LOGITS

CONTEXT = 2**30  # bytes that CUDA and its libraries take of a process
KEPT = 6  # float32 tensors of a weight's (or an input's) size that autograd holds for a fake quantizer
LOSS = 10 * 4 * LOGITS  # bytes of logits and of what a loss makes of them, where a model is trained end to end
SAMPLING = 2 * 2**32  # keys and values of what a teacher samples, and their longer copy (`CACHE_BYTES` of SPEAR's)
PROBES = 3  # passes of one sequence through a block, by which the time of all is guessed
TRAINED = 5.0  # passes that a training step is worth: forward, backward twice that, quantizer and optimizer (CPU: 5)


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes.

    Attributes:
        parameters: of the whole model.
        blocks: how many.
        weights: of the linears of all blocks.
        features: inputs and outputs of the linears of a block, together: values of a token that autograd holds.
        hidden: size of a token between two blocks.
        vocabulary: rows of the head.
    """

    parameters: int
    blocks: int
    weights: int
    features: int
    hidden: int
    vocabulary: int


@dataclass(frozen=True)
class Work:
    """The work of one step of a recipe on a text.

    Attributes:
        sequences: that it trains on.
        tokens: seen in training, a sequence once an epoch.
        passes: of all sequences through all blocks, or what takes as long.
        streams: of hidden states, at once.
        students: block outputs, or models, in a training step.
        latent: float32 copies of the trained weights, gradients and AdamW's averages not among them.
        models: of full precision, in the model's dtype.
        whole: whether all blocks are trained at once.
        trained: passes that train a block, as a mean over the blocks.
    """

    sequences: int = 0
    tokens: int = 0
    passes: float = 0.0
    streams: int = 0
    students: int = 1
    latent: int = 0
    models: int = 1
    whole: bool = False
    trained: float = 1.0


@dataclass(frozen=True)
class Estimate:
    """The cost of a whole recipe: tokens of all steps, bytes of the largest, and passes of sequences through blocks."""

    tokens: int = 0
    gpu: int = 0
    host: int = 0
    streams: int = 0
    token_blocks: float = 0.0


def configuration(name: str, hub: bool = False) -> Any:
    """Transformers' configuration of a model.

    Raises:
        UserError: no such model, or a configuration that does not load.
    """
    from transformers import AutoConfig  # takes seconds

    where = models._source(name, hub)
    try:
        return AutoConfig.from_pretrained(**where)
    except Exception as error:  # what a damaged config.json leads to has many kinds
        reason = shortened(" ".join(str(error).split()), 200)
        raise UserError(f"model {name!r} has no configuration that loads; check its config.json ({reason})") from None


@cache
def shape(name: str, hub: bool = False) -> Shape:
    """The shape of a model by its configuration.

    Raises:
        UserError: as `configuration`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration(name, hub))
    linears = block_linears(model).values()
    count = len(blocks(model))
    features = sum(sum(linear.weight.shape) for linear in linears) // count
    weights = sum(linear.weight.numel() for linear in linears)
    size = model.get_input_embeddings().weight.shape[1]
    head = model.get_output_embeddings().weight.shape[0]
    return Shape(sum(p.numel() for p in model.parameters()), count, weights, features, size, head)


# --- the trained steps ------------------------------------------------------------------------------------------------


def by_blocks(config: Any, sequences: int, quantized: bool, count: int) -> Work:
    """One pass over the blocks, of one student with one teacher: `work` of a step that trains so."""
    return Work(sequences, 0, 2 + config.epochs * TRAINED, 3, 1, 1)


def end_to_end(config: Any, sequences: int, quantized: bool, count: int) -> Work:
    """All weights together: `work` of a step that trains so."""
    return Work(sequences, 0, config.epochs * TRAINED, 0, 1, 1, whole=True)


def work(step: Any, sequences: int, length: int, quantized: bool, count: int) -> Work:
    """What a step does on `sequences` of `length`; `quantized`: after a quantizer; `count` blocks.

    The module of a step that is trained says it by a function `work(config, sequences, quantized, count)`, without the
    tokens, which are counted here.
    """
    config = step.config
    if step.work is None:
        return Work(sequences, 0, 2.0 if step.calibrated else 0.0, 2 if step.calibrated else 0)
    used = max(1, min(sequences, config.tokens // length))
    cost = step.work(config, used, quantized, count)
    tokens_seen = config.epochs * (used // config.batch) * config.batch * length
    return replace(cost, tokens=round(cost.trained * tokens_seen))


# --- bytes ------------------------------------------------------------------------------------------------------------


def stream_bytes(config: Any, sequences: int, length: int, hidden: int) -> int:
    """Of one stream of hidden states: 2 bytes a value, 4 where it is kept in float32."""
    return sequences * length * hidden * (4 if getattr(config, "streams", "bfloat16") == "float32" else 2)


def estimate(
    steps: Sequence[Any], of: Shape, sequences: int, length: int, itemsize: int, device: str, quantized: bool = False
) -> Estimate:
    """The cost of the steps of a recipe on a training text.

    Args:
        steps: of a parsed recipe.
        of: the model's shape.
        sequences, length: of the text.
        itemsize: bytes of a value of the model's dtype.
        device: `cpu`, where everything is the host's, or `cuda`.
        quantized: whether a quantizer came before the first step.
    """
    total = Estimate()
    head = of.vocabulary * of.hidden / of.weights
    for step in steps:
        cost = work(step, sequences, length, quantized, of.blocks)
        streams = cost.streams * stream_bytes(step.config, cost.sequences, length, of.hidden)
        size = {"bfloat16": 2, "float32": 4}.get(getattr(step.config, "compute", ""), itemsize)
        step_bytes = cost.models * of.parameters * itemsize + cost.latent * 4 * of.weights
        step_bytes += of.parameters * size if size != itemsize else 0  # the copy that is computed with
        if cost.latent:
            trained = of.weights if cost.whole else of.weights // of.blocks
            tokens = length * (1 if cost.whole else step.config.batch)
            bytes_per_element = 2 * size + (4 * KEPT if getattr(step.config, "act_bits", 16) < 16 else 0)
            step_bytes += 4 * trained * (4 + KEPT * cost.students)  # two of a gradient, AdamW's two
            step_bytes += cost.students * tokens * of.features * (of.blocks if cost.whole else 1) * bytes_per_element
            step_bytes += LOSS * cost.students if cost.whole else 0
            step_bytes = max(step_bytes, SAMPLING) if getattr(step.config, "data", "") == "sampled" else step_bytes
        away = getattr(step.config, "place", "device") == "host"
        gpu = step_bytes + (0 if away else streams)
        host = of.parameters * itemsize + (streams if away else 0)
        if device == "cpu":
            gpu = 0
            host = step_bytes + streams
        total = Estimate(
            total.tokens + cost.tokens,
            max(total.gpu, gpu + CONTEXT if device != "cpu" else 0),
            max(total.host, host),
            max(total.streams, streams),
            total.token_blocks + cost.passes * cost.sequences * length * of.blocks * (1 + head * cost.whole),
        )
        quantized = True
    return total


# --- time -------------------------------------------------------------------------------------------------------------


def block_seconds(steps: Sequence[Any], name: str, hub: bool, device: str, dtype: str, length: int) -> float:
    """Seconds that a block takes for a token: the least of a few passes of one sequence, with random weights.

    It is computed in the dtype that the last step which names one trains in.

    Args:
        steps: of a recipe, as they run on the device.
        name: the model.
        length: tokens of the sequence.
        hub, device, dtype: as of `models.load`.

    Raises:
        UserError: as `configuration`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("this machine has no CUDA device; choose another scale, or --config device=cpu")
    config = configuration(name, hub)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    named = [step.config.compute for step in steps if hasattr(step.config, "compute")]
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, named[-1] if named else dtype)).eval()
        ids = torch.zeros((1, length), dtype=torch.long)
    (block,) = blocks(model).values()
    times = []
    with torch.no_grad():
        hidden, kwargs = block_inputs(model, ids)
        for _ in range(1 + PROBES):
            started = time.perf_counter()
            block(hidden[0], **kwargs[0])
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
    return min(times[1:]) / length


def report(cost: Estimate, seconds: float, free: int | None) -> str:
    """The cost in a few lines of text; `free` are the GPU's free bytes, if there is one."""
    gpu = f"{cost.gpu / 1e9:.2f} GB" if cost.gpu else "none: it runs on the CPU (--config device=cuda: on a GPU)"
    if free is not None and cost.gpu > free:
        gpu += f", more than the {free / 1e9:.2f} GB that are free: place=host keeps hidden states in host memory"
    took = f"{seconds / 60:,.0f} minutes" if seconds >= 120 else f"{seconds:,.0f} seconds"
    lines = {
        "tokens": f"{cost.tokens:,} in training",
        "GPU memory": gpu,
        "host memory": f"{cost.host / 1e9:.2f} GB",
        "hidden states": f"{cost.streams / 1e9:.2f} GB of it",
        "time": f"about {took}, by the time of one block",
    }
    return "\n".join(f"{key:14} {text}" for key, text in lines.items())
