"""Milliseconds of a decoded token at a public shape, by weight format and activation sparsity.

SpQt's Table 2 and SPEAR's Figure 8 ask for them after one prompt, Bit-by-Bit's Table 8 after prompts of several
lengths, and for those of Transformers as well.

The weights are random: times and bytes are real. Thresholds are quantiles of the inputs that the shape's own products
get, so that lists are uniformly random, the worst case; or products read lists that are made of what the target's model
keeps on a text (`engine/shape_lists.py`), with SpQt's unified thresholds or TEAL's. Lists are made in every step either
way: with the vector by RMSNorm and SiLU, by a launch of their own after attention. One sequence; times need a GPU,
elsewhere a result is `unsupported`.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from repro.core.errors import unknown
from repro.data import corpora
from repro.engine import q4_k, shape_lists, weights
from repro.engine.core import Core
from repro.engine.corrected import Compensated
from repro.engine.random_shape import random_decoder
from repro.engine.shapes import SHAPES
from repro.engine.step import Decoder
from repro.engine.weights import LAYERS, SparseInputs
from repro.jobs import compress, on_text, tokens
from repro.jobs.target import Target
from repro.metrics.metric import Metric, check_gpu
from repro.models import perplexity as scoring
from repro.store import observations
from repro.store.job import Job, make
from repro.store.observations import Observations, Series

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
LENGTHS = (64, 128, 256, 512)  # tokens of a prompt (Bit-by-Bit, Table 8)
AT_LENGTHS = {  # ways that are timed after prompts of all these lengths, in one job
    "bf16-lengths": ("fp16", "listed"),
    "transformers": ("fp16", "transformers"),
    "w2a2": ("bitbybit(w2a2, split=none)", "listed"),
    "w2a2-split": ("bitbybit(w2a2)", "listed"),
    "w2a16": ("bitbybit(w2a16, split=none)", "listed"),
}
W4 = "rtn-w4-pc"
COMPENSATED = {  # SPEAR's Figure 8; of a shape as many layers, and of the rank, as `PLACED` says
    "w4": (W4, "listed"),
    "w4-launched": (W4, "launched"),
    "spear": (f"{W4} + spear(placement=random, k_share={{k_share}}, rank={{rank}})", "fused"),
    "spear-naive": (f"{W4} + spear(placement=random, k_share={{k_share}}, rank={{rank}})", "separate"),
    "spear-launched": (f"{W4} + spear(placement=random, k_share={{k_share}}, rank={{rank}})", "separate, launched"),
}
# Share of the layers and rank on RTN at 4 bits per channel (SPEAR, Table 8). Figure 8 names no setting; this is that of
# Table 2, whose bytes the text quotes. A seed chooses the layers, since random weights have no damage.
PLACED = {"Llama-3.2-1B": (0.41, 26), "Llama-3.2-3B": (0.40, 26), "Llama-2-7B": (0.39, 24)}
AS_TRAINED = {  # lists as the target's model has them, by how thresholds are chosen
    f"{thresholds}{s}": (f"{ZIGZAG} + spqt(sparsity={s / 100}, thresholds={thresholds})", "listed")
    for thresholds, s in itertools.product(("unified", "teal"), SPARSITIES)
}
CORPUS, TEXT_LENGTH, WINDOWS = "wikitext2", 2048, 1  # the text whose tokens give these lists: enough for 28,672 inputs
EVERY = HOW | AS_TRAINED | AT_LENGTHS | COMPENSATED


def recipe_and_method(shape: str, how: str) -> tuple[str, str]:
    """The recipe of a way to decode a shape, and how its products are launched."""
    recipe, method = EVERY[how]
    if "{rank}" not in recipe:
        return recipe, method
    k_share, rank = PLACED[shape]
    return recipe.format(k_share=k_share, rank=rank), method


@dataclass(frozen=True)
class Protocol:
    """`new` greedy tokens after `prompt` random ones; a round before the first of `rounds` is dropped."""

    prompt: int = 128
    new: int = 64
    rounds: int = 5


@dataclass(frozen=True)
class ShapeDecode(Metric):
    """Milliseconds of a step, or tokens a second, of one shape in one of `EVERY` ways.

    Attributes:
        length: tokens of the prompt, one of `LENGTHS`, of a way of `AT_LENGTHS`; 0 is the protocol's.
    """

    VERSION = 1
    TIMES = True
    SHAPED = True
    DEFAULT = {}
    PROTOCOL = Protocol

    shape: str
    how: str
    show: Literal["tokens/s", "ms"] = "tokens/s"
    unit: str = "tokens/s"
    length: int = 0

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise unknown("shape", self.shape, SHAPES)
        if self.how not in EVERY:
            raise unknown("way to decode", self.how, EVERY)
        if self.how in COMPENSATED and self.shape not in PLACED:
            raise unknown(f"shape of {self.how}", self.shape, PLACED)
        lengths = LENGTHS if self.how in AT_LENGTHS else (0,)
        if self.length not in lengths:
            raise unknown(f"prompt of {self.how}, in tokens", str(self.length), map(str, lengths))

    @property
    def timed_shape(self) -> str:
        """Its shape, but where lists are those of a model."""
        return "" if self.how in AS_TRAINED else self.shape

    @property
    def column(self) -> str:
        """The name of the times after its prompt."""
        return f"ms {self.length}" if self.length else "ms"

    def jobs(self, target: Target) -> dict[str, Job] | None:
        """One job times a shape, whatever the target, but where lists are those of its model."""
        protocol = target.scale.protocols["shape_decode"]
        if protocol is None:
            return None
        recipe, method = recipe_and_method(self.shape, self.how)
        rule = vars(protocol) | {"shape": self.shape, "recipe": recipe, "method": method, "device": target.scale.device}
        if self.length:
            rule |= {"lengths": list(LENGTHS)}
        if self.how in AS_TRAINED:
            text = rule | {"length": TEXT_LENGTH, "windows": WINDOWS}
            return {"rounds": on_text.job("shape_decode", target.under(recipe), target.scale.text(CORPUS), text, text)}
        return {"rounds": make("shape_decode", f"{self.shape}/{self.how}", rule, rule, {}, ())}

    @staticmethod
    def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
        """Time the rounds.

        Raises:
            NotMeasurable: there is no GPU, or it has too little memory.
        """
        options = job.parsed_options()
        check_gpu(options["device"], "times of shapes")
        lengths = options.get("lengths", [options["prompt"]])
        new = options["new"]
        device = torch.device("cuda")
        if options["method"] == "transformers":
            timed = transformers_steps(options["shape"], device)
        else:
            masks = trained_masks(options, folders) if "weights" in folders else None
            engine = loaded(
                options["shape"], options["recipe"], options["method"], max(lengths) + new + 1, device, masks
            )
            timed = lambda prompt, new: engine.time(prompt, new).ms_p50  # noqa: E731
        series = {}
        for prompt in lengths:
            rounds = [timed(prompt, new) for _ in range(1 + options["rounds"])][1:]
            name = f"ms {prompt}" if "lengths" in options else "ms"
            group = f"{options['shape']}, {new} tokens after {prompt}"
            series[name] = Series(np.asarray(rounds, dtype=float), "items", group)
        observations.save(folder / observations.FILE, series, origin)

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The rounds."""
        return {"ms": observed["rounds"].series[self.column]}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """Tokens a second of the mean step, or its milliseconds."""
        return 1e3 / mean["ms"] if self.show == "tokens/s" else mean["ms"]

    @property
    def limits(self) -> tuple[float, float]:
        """Both are positive."""
        return (0.0, math.inf)


def trained_masks(options: Mapping[str, Any], folders: Mapping[str, Path]) -> dict[str, shape_lists.Masks]:
    """The masks of the inputs that a job's compressed model keeps on the job's text."""
    lm = compress.load(options, folders["weights"])
    ids, _ = corpora.load_tokens(folders["text"] / tokens.OUTPUTS[0])
    return shape_lists.masks_of(lm, scoring.windows(ids, options["length"], options["windows"]))


def transformers_steps(shape: str, device: torch.device) -> Callable[[int, int], float]:
    """A shape in Transformers, in bfloat16 on a GPU: from prompt and new tokens to the median milliseconds of a step.

    It is called as users call it, `generate` without compilation; every token is waited for, as a text stream does.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[shape]), dtype=dtype).eval()

    def timed(prompt: int, new: int) -> float:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(model.config.vocab_size, (1, prompt), generator=generator).to(device)
        clock = Clock()
        options = {"max_new_tokens": new + 1, "min_new_tokens": new + 1, "do_sample": False}
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, streamer=clock, pad_token_id=0, **options)
        return 1e3 * statistics.median(after - before for before, after in itertools.pairwise(clock.seconds[1:]))

    return timed


class Clock:
    """A streamer of Transformers that notes when each token came; the first call gives the prompt."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def put(self, ids: torch.Tensor) -> None:
        """A token, which has been copied to the host."""
        self.seconds.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left over."""


def loaded(
    shape: str,
    recipe: str,
    method: str,
    context: int,
    device: torch.device,
    masks: Mapping[str, shape_lists.Masks] | None = None,
) -> Core:
    """An engine of a shape whose products are launched in one way; in bfloat16 on a GPU, else in float32.

    Args:
        method: how sparse products skip inputs (`q4_k.Q4K.method`); "separate", compensators in launches of their own;
            "launched", every launch by the host instead of one CUDA graph a step.
        masks: of a trained model, which then choose the inputs.
    """
    from transformers import AutoConfig  # takes seconds

    name = f"shape/{shape}"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = AutoConfig.for_model(**SHAPES[shape])
    slots = weights.check(name, config, context)
    target = Target(None, name, recipe)  # no scale: nothing is calibrated or built
    decoder = random_decoder(target.recipe, config, slots, device, dtype)
    engine = Core(name, decoder if masks is None else shape_lists.listed_alike(decoder, masks))
    if "separate" in method:
        engine = Core(name, with_separate_launches(engine.model))
    if "launched" in method:
        engine.steps.graphed = False
    for block in engine.model.blocks:
        for name in LAYERS:
            product = getattr(block, name)
            if isinstance(product, SparseInputs) and isinstance(product.dense, q4_k.Q4K):
                product.dense.method = method
    return engine


def with_separate_launches(model: Decoder) -> Decoder:
    """A decoder whose compensators are computed in launches of their own, SPEAR's naive baseline (section 4.1)."""
    blocks = []
    for block in model.blocks:
        products = {name: getattr(block, name) for name in LAYERS}
        separate = {
            name: product.separate(product.product)
            for name, product in products.items()
            if isinstance(product, Compensated)
        }
        blocks.append(replace(block, **separate))
    return replace(model, blocks=tuple(blocks))
