"""Milliseconds of a decoded token at a public shape, by weight format and activation sparsity (SpQt's Table 2).

The weights are random: times and bytes are real. Thresholds are quantiles of the inputs that the shape's own products
get, so that lists are uniformly random, the worst case; lists are made in every step. One sequence; times need a GPU,
elsewhere a result is `unsupported`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from repro.engine import q4_k, weights
from repro.engine.core import Core
from repro.engine.random_shape import random_decoder
from repro.engine.shapes import SHAPES
from repro.engine.weights import LAYERS, SparseInputs
from repro.errors import Refused, unknown
from repro.jobs.job import Job, make
from repro.jobs.target import Target
from repro.record import observations
from repro.record.observations import Observations, Series

VERSION = 1
OUTPUTS = (observations.FILE,)
DEFAULT: dict[str, Any] = {}
ZIGZAG = "q4_k(layout=zigzag)"
SPARSITIES = (25, 40, 50, 65)  # percent, as printed
HOW = {  # a recipe, and how inputs are skipped (`q4_k.Q4K.method`)
    "bf16": ("fp16", "listed"),
    "rows": ("q4_k", "listed"),
    "zigzag": (ZIGZAG, "listed"),
    **{f"s{s}": (f"{ZIGZAG} + spqt(sparsity={s / 100})", "listed") for s in SPARSITIES},
    "s50-masked": (f"{ZIGZAG} + spqt(sparsity=0.5)", "masked"),
    "s50-naive": ("q4_k + spqt(sparsity=0.5)", "naive"),
}


@dataclass(frozen=True)
class Ask:
    """Milliseconds of a step, or tokens a second, of one shape in one of `HOW`'s ways."""

    shape: str
    how: str
    show: Literal["tokens/s", "ms"] = "tokens/s"
    unit: str = "tokens/s"

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise unknown("shape", self.shape, SHAPES)
        if self.how not in HOW:
            raise unknown("way to decode", self.how, HOW)


@dataclass(frozen=True)
class Protocol:
    """`new` greedy tokens after `prompt` random ones; a round before the first of `rounds` is dropped."""

    prompt: int = 128
    new: int = 64
    rounds: int = 5


def jobs(ask: Ask, target: Target) -> dict[str, Job] | None:
    """One job times a shape, whatever the target."""
    protocol = target.scale.protocols["shape_decode"]
    if protocol is None:
        return None
    recipe, method = HOW[ask.how]
    rule = vars(protocol) | {"shape": ask.shape, "recipe": recipe, "method": method, "device": target.scale.device}
    return {"rounds": make("shape_decode", f"{ask.shape}/{ask.how}", rule, rule, {}, ())}


def run(job: Job, found: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
    """Time the rounds.

    Raises:
        Refused: there is no GPU, or it has too little memory.
    """
    given = job.given()
    if given["device"] != "cuda":
        raise Refused("unsupported", "times of shapes need a GPU; set the scale's device to cuda")
    prompt, new = given["prompt"], given["new"]
    engine = loaded(given["shape"], given["recipe"], given["method"], prompt + new + 1, torch.device("cuda"))
    rounds = [engine.time(prompt, new).ms_p50 for _ in range(1 + given["rounds"])][1:]
    group = f"{given['shape']}, {new} tokens after {prompt}"
    observations.save(folder / OUTPUTS[0], {"ms": Series(np.asarray(rounds, dtype=float), "items", group)}, origin)


def loaded(shape: str, recipe: str, method: str, context: int, device: torch.device) -> Core:
    """An engine of a shape whose sparse products skip inputs in one way; in bfloat16 on a GPU, else in float32."""
    from transformers import AutoConfig  # takes seconds

    name, dtype = f"shape/{shape}", torch.bfloat16 if device.type == "cuda" else torch.float32
    config = AutoConfig.for_model(**SHAPES[shape])
    slots = weights.check(name, config, context)
    target = Target(None, name, recipe)  # no scale: nothing is calibrated or built
    engine = Core(name, random_decoder(target, config, slots, device, dtype))
    for block in engine.model.blocks:
        for name in LAYERS:
            product = getattr(block, name)
            if isinstance(product, SparseInputs) and isinstance(product.dense, q4_k.Q4K):
                product.dense.method = method
    return engine


def series(ask: Ask, found: Mapping[str, Observations], target: Target) -> dict[str, Series]:
    """The rounds."""
    return {"ms": found["rounds"].series["ms"]}


def value(ask: Ask, mean: Mapping[str, Any]) -> Any:
    """Tokens a second of the mean step, or its milliseconds."""
    return 1e3 / mean["ms"] if ask.show == "tokens/s" else mean["ms"]


def limits(ask: Ask) -> tuple[float, float]:
    """Both are positive."""
    return (0.0, math.inf)
