"""Milliseconds of a decoded token at a public shape under tensor parallelism (SPEAR's Table 5 and Figure 9).

The weights are random: times and bytes are real. Compensators are those of Table 8's 4 bits per channel, the layers
chosen by a seed, since random weights have no damage. Every rank draws its part of the blocks from the same seed, so
that all of these are alike, and has its tokens of one head. One job times a shape in every way at one degree, in
processes of their own, one a GPU (`engine/ranks.py`): run it where all GPUs are seen, `python -m repro run TARGET`
without `--gpus`.

A step is one CUDA graph, all-reduces among it; `launched` is launch by launch from the host. The paper does not say
which its rows are; gaps between launches dominate its naive rows (section 4.1), so that both are timed. A host keeps
one of several paces for a second or longer, up to a factor of 2 apart, so that the ways which it launches are timed in
interleaved rounds: within a round their ratio is of one pace.
"""

import gc
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from repro.core.errors import at_least, unknown
from repro.engine import parallel, ranks, sharding, weights
from repro.engine.core import SHAPE
from repro.engine.parallel import Group, ParallelCore
from repro.engine.random_shape import random_decoder
from repro.engine.shapes import SHAPES
from repro.engine.step import Decoder
from repro.jobs.target import Target
from repro.metrics import shape_decode
from repro.metrics.metric import Metric, check_gpu
from repro.recipes.recipe import parse
from repro.store import observations
from repro.store.job import Job, make
from repro.store.observations import Observations, Series

DEGREES = (2, 3, 4)  # ranks
COMPENSATED = f"{shape_decode.W4} + spear(placement=random, k_share={{k_share}}, rank={{rank}})"
HOW = {  # a recipe, how partial sums are added up (`engine/parallel.py`), and whether a step is launched by the host
    "bf16": ("fp16", "plain", False),
    "w4": (COMPENSATED, "plain", False),  # whose compensators are left out
    "naive": (COMPENSATED, "separate", False),
    "fused": (COMPENSATED, "joined", False),
    "spear": (COMPENSATED, "peers", False),
    "spear-headless": (COMPENSATED, "peers", False),
    "w4-launched": (COMPENSATED, "plain", True),
    "naive-launched": (COMPENSATED, "separate", True),
    "fused-launched": (COMPENSATED, "joined", True),
    "spear-launched": (COMPENSATED, "peers", True),
}
HEADLESS = ("spear-headless",)  # ways whose steps have no head: what the others take longer is the head's
# Share of the layers and rank on RTN at 4 bits per channel. 7B and 13B are Table 8's; of 70B, which it lacks, these are
# the usual 40 % with the rank whose bytes are the 148 MB of Table 2.
PLACED = {"Llama-2-7B": (0.39, 24), "Llama-2-13B": (0.40, 26), "Llama-2-70B": (0.40, 28)}


def recipe_of(shape: str, how: str) -> str:
    """The recipe of a way to decode a shape."""
    k_share, rank = PLACED[shape]
    return HOW[how][0].format(k_share=k_share, rank=rank)


@dataclass(frozen=True)
class Protocol:
    """`new` greedy tokens after `prompt` random ones; a round before the first of `rounds` is dropped.

    Of steps that the host launches, which take up to 20 times as long, `launched` tokens in each of `launched_rounds`.
    """

    prompt: int = 128
    new: int = 64
    rounds: int = 3
    launched: int = 8
    launched_rounds: int = 8

    def __post_init__(self) -> None:
        at_least(self, prompt=1, new=2, rounds=2, launched=2, launched_rounds=2)


@dataclass(frozen=True)
class ParallelDecode(Metric):
    """Milliseconds of a step of one shape over so many ranks in one of `HOW`.

    Attributes:
        ranks: GPUs, one of `DEGREES`.
    """

    VERSION = 2  # a head that is split over ranks; interleaved rounds
    TIMES = True
    SHAPED = True
    DEFAULT = {}
    PROTOCOL = Protocol

    shape: str
    ranks: int
    how: str
    unit: str = "ms"

    def __post_init__(self) -> None:
        if self.shape not in PLACED:
            raise unknown("shape of parallel_decode", self.shape, PLACED)
        if self.ranks not in DEGREES:
            raise unknown("number of ranks", str(self.ranks), map(str, DEGREES))
        if self.how not in HOW:
            raise unknown("way to decode", self.how, HOW)

    @property
    def column(self) -> str:
        """The name of its times."""
        return series_name(self.ranks, self.how)

    def jobs(self, target: Target) -> dict[str, Job] | None:
        """One job times a shape in every way at one degree, whatever the target."""
        protocol = target.scale.protocols["parallel_decode"]
        if protocol is None:
            return None
        recipes = {how: recipe_of(self.shape, how) for how in HOW}
        rule = vars(protocol) | {"shape": self.shape, "degrees": [self.ranks], "recipes": recipes}
        rule |= {"device": target.scale.device}
        return {"rounds": make("parallel_decode", f"{self.shape}/{self.ranks}", rule, rule, {}, ())}

    @staticmethod
    def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
        """Time the rounds.

        Raises:
            NotMeasurable: there are fewer GPUs than ranks, or they have too little memory.
        """
        options = job.parsed_options()
        check_gpu(options["device"], "times of shapes")
        ranks.gpus_for(max(options["degrees"]))
        measured = ranks.run(times, options, max(options["degrees"]), options["device"])
        series = {}
        for how, (_, _, launched) in HOW.items():
            new = options["launched"] if launched else options["new"]
            name = series_name(max(options["degrees"]), how)
            rounds = np.asarray(measured[name], dtype=float)
            # Ways with one name of a group are paired, round by round.
            series[name] = Series(rounds, "items", f"{options['shape']}, {new} tokens after {options['prompt']}")
        observations.save(folder / observations.FILE, series, origin)

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The rounds."""
        return {"ms": observed["rounds"].series[self.column]}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """Milliseconds of the mean step."""
        return mean["ms"]

    @property
    def limits(self) -> tuple[float, float]:
        """They are positive."""
        return (0.0, math.inf)


def series_name(degree: int, how: str) -> str:
    """The name of the times of a way over so many ranks."""
    return f"tp{degree} {how}"


# --- on a rank --------------------------------------------------------------------------------------------------------


def times(options: Mapping[str, Any], device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of a step by series, one value a round; of all ranks together in the groups of the degrees."""
    milliseconds: dict[str, list[float]] = {}
    if device.type == "cuda":
        compile_together(options, device)
    for degree in options["degrees"]:
        group = dist.new_group(list(range(degree)))  # a call of all ranks, whether they are in it or not
        if dist.get_rank() < degree:
            milliseconds |= times_of_degree(options, Group(group), device)
        dist.barrier()
    return milliseconds


def compile_together(options: Mapping[str, Any], device: torch.device) -> None:
    """Compile the kernels of all degrees before anything is timed."""
    calls = []
    for degree in options["degrees"]:
        part = rank_decoder(options["shape"], options["recipes"]["spear"], 0, degree, 1, torch.device("meta"))
        calls += parallel.loads(part, degree, device, torch.bfloat16)
    parallel.compile_on_ranks(calls)


def times_of_degree(options: Mapping[str, Any], link: Group, device: torch.device) -> dict[str, list[float]]:
    """The same of one degree: the ways of a recipe share its weights."""
    milliseconds: dict[str, list[float]] = {}
    recipes, context = options["recipes"], options["prompt"] + options["new"] + 1
    for recipe in dict.fromkeys(recipes[how] for how in HOW):
        model = rank_decoder(options["shape"], recipe, link.rank, link.ranks, context, device)
        launched = []
        for how in HOW:
            if recipes[how] != recipe:
                continue
            engine = engine_of(options["shape"], how, model, link)
            if HOW[how][2]:
                launched.append((how, engine))
                continue
            rounds = [engine.time(options["prompt"], options["new"]).ms_p50 for _ in range(1 + options["rounds"])]
            milliseconds[series_name(link.ranks, how)] = rounds[1:]
            del engine
            release(device)
        for how, rounds in interleaved(launched, options).items():
            milliseconds[series_name(link.ranks, how)] = rounds
        del model, launched  # before the next recipe's, since they may fill half of the memory
        release(device)
    return milliseconds


def engine_of(shape: str, how: str, model: Decoder, link: Group) -> ParallelCore:
    """An engine of a rank's part that decodes in one way."""
    _, communication, launched = HOW[how]
    joined = parallel.parallel(model, link, communication)
    if how in HEADLESS:
        joined = replace(joined, head=NoHead())
    engine = ParallelCore(f"{SHAPE}{shape}", joined)
    if launched:
        engine.steps.graphed = False
    return engine


def interleaved(engines: list[tuple[str, ParallelCore]], options: Mapping[str, Any]) -> dict[str, list[float]]:
    """Milliseconds of a step of each engine, one value for each round; engines take turns within a round."""
    rounds: dict[str, list[float]] = {how: [] for how, _ in engines}
    for number in range(1 + options["launched_rounds"]):
        for how, engine in engines:
            ms = engine.time(options["prompt"], options["launched"]).ms_p50
            if number > 0:  # the first one is dropped
                rounds[how].append(ms)
    return rounds


class NoHead(nn.Module):
    """In place of a head: every token is 0, whatever the hidden states are."""

    def greedy(self, x: Tensor) -> Tensor:
        """int64 `[T]` zeros."""
        return torch.zeros(len(x), dtype=torch.int64, device=x.device)


def rank_decoder(shape: str, recipe: str, rank: int, degree: int, context: int, device: torch.device) -> Decoder:
    """A rank's part of a shape with random weights; in float32 on a CPU, else in bfloat16.

    Blocks and embedding are alike on all ranks. Of the head, which all ranks draw alike, a rank has its tokens.
    """
    from transformers import AutoConfig  # takes seconds

    config = AutoConfig.for_model(**SHAPES[shape])
    slots = weights.check(f"{SHAPE}{shape}", config, context)
    torch.manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = random_decoder(parse(recipe), sharding.local_config(config, degree), slots, device, dtype)
    return replace(model, head=sharding.head_of(model, rank, degree))


def release(device: torch.device) -> None:
    """Give memory back that nothing names any more: graphs and weights."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
