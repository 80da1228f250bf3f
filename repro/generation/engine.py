"""Engines by name: a model under a recipe, compressed if it is not yet, or a public shape with random weights.

Models are named as everywhere (`pocket-10m`, a folder, `hub-id@revision`), shapes like `shape/Llama-2-7B`, of
`shapes.yaml`: their weights are made on the device and have neither text nor quality.
"""

import contextlib
import sys
from typing import Any

import torch

from repro import models
from repro.core.errors import NotMeasurable, UserError, shortened, unknown
from repro.engine import weights
from repro.engine.core import SHAPE, Core
from repro.engine.random_shape import random_decoder
from repro.engine.shapes import SHAPES
from repro.jobs import compress, compressed_folder
from repro.jobs.target import Target
from repro.models.lowbit import LowBitModel
from repro.specs import scale as scales
from repro.store.job import distinct
from repro.workflow import pool, runner

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
NATIVE = {torch.float16: "_is_mkldnn_fp16_supported", torch.bfloat16: "_is_mkldnn_bf16_supported"}  # of a CPU


class Engine(Core):
    """A model that decodes; `Core` says what it can be asked."""

    @classmethod
    def load(
        cls,
        model: str,
        recipe: str = "fp16",
        context: int | None = None,
        *,
        device: str | None = None,
        dtype: str | None = None,
        scale: str | None = None,
        seed: int = 0,
        build: bool = True,
    ) -> "Engine":
        """A model under a recipe.

        Args:
            model: a pocket model, a local folder (one that `compress` wrote, too), `hub-id@revision`, or
                `shape/Llama-2-7B` (speed and memory only).
            recipe: such as `rtn-w4-g128 + spear`; if it is not built under build/, it is built now.
            context: prompt and new tokens of a sequence; by default the model's, at most 2048.
            device: `cuda` or `cpu`; by default a GPU if there is one.
            dtype: of the activations; by default the checkpoint's, float32 on a CPU that does not compute in it.
            scale: whose calibration text, device and precision a recipe is built with; default $SCALE, else pocket.
            seed: of the recipe.
            build: whether to build a recipe that is not built; else that is an error which names the command.

        UserError for what does not exist or fit; `NotMeasurable` for a context beyond the model's or too little memory.
        """
        model, recipe = compressed_folder.opened(model, recipe)
        target = Target(scales.load(name=scale).here(), model, recipe, seed)
        at = device_of(device)
        for bits in (step.config.bits for step in target.recipe.steps if hasattr(step.config, "group")):
            weights.slot(bits)  # before it is built
        config = configuration(target)
        slots = weights.check(model, config, context)
        kind = activations(config, at, dtype)
        if model.startswith(SHAPE):
            if at.type == "cuda":
                counted = random_decoder(target.recipe, config, slots, torch.device("meta"), kind)
                check_memory(model, counted.read_bytes + counted.embedding.nbytes, config, slots, at, kind)
            return cls(model, random_decoder(target.recipe, config, slots, at, kind))
        lm = compressed(target, kind, build)
        if at.type == "cuda":
            check_memory(model, packed_bytes(lm, kind), config, slots, at, kind)
        return cls(model, weights.decoder(lm, slots, at, kind), target.scale.hub)


def device_of(name: str | None) -> torch.device:
    """A device by name, by default a GPU if there is one; UserError for a GPU that there is not."""
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name!r}: this machine has no CUDA device; load on the device cpu")
    return device


def compressed(target: Target, dtype: torch.dtype, build: bool) -> LowBitModel:
    """The model in Transformers' form on the CPU, under its recipe: built before, or now."""
    options = target.options() | {"device": "cpu", "dtype": str(dtype).removeprefix("torch.")}
    if not target.recipe.steps:
        return compress.load(options, None)
    job = compress.job(target)
    if not runner.done(job):
        words = f"{target.model} --recipe {target.recipe.name!r} --scale {target.scale.name} --seed {target.seed}"
        if not build:
            raise UserError(f"{target.label} is not built here; run python -m repro compress {words}")
        threads = torch.get_num_threads()
        with contextlib.redirect_stdout(sys.stderr):  # its progress is not text of the model
            pool.run_here(distinct([job]))
        torch.set_num_threads(threads)
    runner.check(job.folder)
    return compress.load(options, job.folder)


def configuration(target: Target) -> Any:
    """Transformers' configuration of a model or shape."""
    import transformers.utils

    transformers.utils.is_sklearn_available = lambda: False  # as in `models.load`: a configuration imports it all
    from transformers import AutoConfig

    name = target.model
    if (shape := name.removeprefix(SHAPE)) != name:
        if shape not in SHAPES:
            raise unknown("shape", shape, SHAPES)
        return AutoConfig.for_model(**SHAPES[shape])
    where = models._source(name, target.scale.hub)
    try:
        return AutoConfig.from_pretrained(**where)
    except Exception as error:  # what a damaged config.json leads to has many kinds
        reason = shortened(" ".join(str(error).split()), 200)
        raise UserError(f"model {name!r} has no configuration that loads; check its config.json ({reason})") from None


def activations(config: Any, device: torch.device, name: str | None) -> torch.dtype:
    """Their dtype: the checkpoint's, bfloat16 of a shape; float32 on a CPU that does not compute in it."""
    if name is not None and name not in DTYPES:
        raise unknown("dtype", name, DTYPES)
    dtype = DTYPES[name] if name else config.dtype or torch.bfloat16
    if device.type == "cpu" and dtype in NATIVE and not getattr(torch.ops.mkldnn, NATIVE[dtype])():
        if name is None:
            return torch.float32
        raise UserError(f"dtype {name}: this CPU does not compute in it; load with dtype float32")
    return dtype


def packed_bytes(lm: LowBitModel, dtype: torch.dtype) -> int:
    """About what the weights take on a GPU."""
    sizes = {id(p): p.numel() * dtype.itemsize for p in lm.model.parameters()}
    packed = {} if dtype == torch.float32 else {n: w for n, w in lm.weights.items() if not w.FORMAT}
    for name, weight in packed.items():  # others are dequantized
        slot = weights.SLOTS.get(weight.bits, 8)
        sizes[id(lm.model.get_submodule(name).weight)] = weight.codes.numel() * slot // 8 + 4 * weight.scales.numel()
    for name, weight in lm.weights.items():
        if weight.FORMAT == "q4_k" and dtype != torch.float32:
            sizes[id(lm.model.get_submodule(name).weight)] = sum(weight.stored_bits().values()) // 8
    return sum(sizes.values())


def check_memory(name: str, loaded: int, config: Any, context: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raise where a GPU has too little memory for `loaded` bytes of weights and one sequence."""
    free = torch.cuda.mem_get_info(device)[0]
    size = weights.head_size(config) * dtype.itemsize
    needed = loaded + 2 * config.num_hidden_layers * config.num_key_value_heads * context * size
    if needed > free:
        problem = f"{name} needs {needed:,} bytes for its weights and {context:,} tokens of one sequence"
        raise NotMeasurable("oom", f"{problem}, {device} has {free:,} free; choose fewer bits or a shorter context")
