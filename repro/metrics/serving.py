"""Tail latency between tokens and mean time to the first token under continuous batching (SPEAR, Table 3).

Requests with ShareGPT's lengths arrive by a Poisson process at a public shape with random weights, W4 per channel, of
which a share of the layers has compensators. Iterations are real: mixed batches of the engine, their wall time with all
that the host does; time in which nothing is to be done is skipped. One job serves the same requests under every policy
at every share.

The printed targets and rate are of a GH200. Here one factor stretches the paper's time, so that the device neither
makes a target idle nor the load: the predicted iteration of 256 tokens with 38 % of the layers compensated over the
printed P99 of that cell, 17.2 ms. Targets are multiplied by it, the rate is divided. The rule is written here, the
factor is measured by each job before anything is served.

What varies from run to run is what arrives. An interval of one seed is over blocks of its requests, which wait for each
other: on a simulated clock with 38 % of the layers and a budget of 128 tokens such intervals of the mean first token
covered the mean of 60 seeds in less than 75 % of cases, and a P99 has none. Over three seeds those of the mean first
token cover it in at least 75 %, those of a P99 in at least 90 % (`tests/metrics/test_serving_cell.py`).
"""

import gc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from repro.core.errors import UserError, at_least, unknown
from repro.data import arrivals
from repro.engine import weights
from repro.engine.overlapped import dispatched
from repro.engine.random_shape import random_decoder
from repro.engine.scheduling import (
    ChunkPolicy,
    LatencyTable,
    LatencyTarget,
    Request,
    Scheduler,
    Served,
    StaticBudget,
    WallClock,
    serve,
)
from repro.engine.serving import (
    SIZES,
    Iterations,
    MixedSteps,
    latency_table,
    measured_iterations,
    measured_products,
)
from repro.engine.shapes import SHAPES
from repro.engine.step import Cache, Decoder
from repro.jobs.target import Target
from repro.metrics.metric import Metric, check_gpu
from repro.recipes.recipe import parse
from repro.store import observations
from repro.store.job import Job, make
from repro.store.observations import Observations, Series

W4 = "rtn-w4-pc"
COMPENSATED = f"{W4} + spear(placement=random, k_share={{k_share}}, rank={{rank}})"
RANKS = {"Llama-2-7B": 24}  # on RTN at 4 bits per channel (Table 8); Table 3 names none
PERCENTS = (15, 38, 60)  # of the layers that have a compensator, chosen by a seed as random weights have no damage
BUDGETS = (512, 256, 128, 64)
TARGETS = (22, 16)  # milliseconds on the paper's device
POLICIES = tuple(
    [f"static-{tokens}" for tokens in BUDGETS]
    + [f"spear-{target}" for target in TARGETS]
    + [f"spear-{target}-joint" for target in TARGETS]
)
REFERENCE = (38, 256, 17.2)  # percent, tokens, printed milliseconds: what the paper's time is stretched by
QUANTILE = 99


@dataclass(frozen=True)
class Protocol:
    """`requests` at `rate` a second, over a cache of `rows`.

    Attributes:
        rate: on the paper's device (section 5.3.3).
        seed: of lengths, arrivals and prompts; a cell's own seed is added to it.
        blocks: of neighbouring requests, which are what an interval resamples.
        decodes, context: of a calibrated iteration, so many tokens are decoded at most, each after so many others.
        repeats: timings of everything that is calibrated.
    """

    requests: int = 300
    rate: float = 16.0
    seed: int = 0
    rows: int = 64
    blocks: int = 10
    decodes: int = 32
    context: int = 384
    repeats: int = 15

    def __post_init__(self) -> None:
        at_least(self, requests=2, seed=0, rows=2, blocks=2, decodes=1, context=1, repeats=1)
        if self.requests % self.blocks:
            raise UserError(f"requests is {self.requests}; it must be a multiple of blocks, {self.blocks}")
        if self.decodes >= self.rows:
            raise UserError(f"decodes is {self.decodes}; it must be below rows, {self.rows}")
        if not self.rate > 0:
            raise UserError(f"rate is {self.rate}; it must be positive")


@dataclass(frozen=True)
class Serving(Metric):
    """A number of one policy at one share of compensated layers.

    Attributes:
        policy: `static-512` is a budget of tokens, `spear-22` SPEAR's rule for 22 ms on the paper's device, `-joint`
            the same with decodes and chunk priced as one batch.
        percent: of the layers that have a compensator.
        show: `itl` is the 99th percentile of all milliseconds between tokens, `ttft` the mean milliseconds to the
            first token, `late` the share of the former in percent that is beyond `target` (a P99 keeps a target where
            1 % is not), `stretch` how long here a second of the paper is, `predicted` what the table says of an
            iteration as one batch over what it took, in the mean.
        target: of `late`, milliseconds on the paper's device.
    """

    VERSION = 1
    TIMES = True
    SEEDED = True
    SHAPED = True
    DEFAULT = {}
    PROTOCOL = Protocol

    shape: str
    policy: str
    percent: int
    show: Literal["itl", "ttft", "late", "stretch", "predicted"] = "itl"
    target: int = 0
    unit: str = "ms"

    def __post_init__(self) -> None:
        if self.shape not in RANKS:
            raise unknown("shape of serving", self.shape, RANKS)
        if self.policy not in POLICIES:
            raise unknown("policy", self.policy, POLICIES)
        if self.percent not in PERCENTS:
            raise unknown("percent of the layers", str(self.percent), map(str, PERCENTS))
        targets = TARGETS if self.show == "late" else (0,)
        if self.target not in targets:
            raise unknown(f"target of {self.show}", str(self.target), map(str, targets))

    @property
    def column(self) -> str:
        """The name of its series."""
        return f"{self.policy} {self.percent} {self.show}" + (f" {self.target}" if self.target else "")

    def jobs(self, target: Target) -> dict[str, Job] | None:
        """One job serves a shape with one placement and the arrivals of one seed under all policies."""
        protocol = target.scale.protocols["serving"]
        if protocol is None:
            return None
        rule = vars(protocol) | {"shape": self.shape, "rank": RANKS[self.shape], "device": target.scale.device}
        rule |= {"percent": self.percent, "policies": list(POLICIES), "sizes": list(SIZES)}
        rule["seed"] += target.seed
        return {"served": make("serving", f"{self.shape}/{self.percent}", rule, rule, {}, ())}

    @staticmethod
    def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
        """Calibrate and serve.

        Raises:
            NotMeasurable: there is no GPU, or it has too little memory.
        """
        options = job.parsed_options()
        check_gpu(options["device"], "times of serving")
        observations.save(folder / observations.FILE, measured(options, torch.device("cuda")), origin)

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The series of what is shown; of a share of late tokens, the late ones and all."""
        recorded = observed["served"].series
        if self.show == "late":
            return {"late": recorded[self.column], "all": recorded[f"{self.policy} {self.percent} gaps"]}
        if self.show == "stretch":
            return {"stretch": recorded["stretch"]}
        return {self.show: recorded[self.column]}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """The number."""
        return 100 * mean["late"] / mean["all"] if self.show == "late" else mean[self.show]

    @property
    def limits(self) -> tuple[float, float]:
        """Times and ratios are positive, shares up to 100 %."""
        return (0.0, 100.0 if self.show == "late" else math.inf)


# --- the measurement --------------------------------------------------------------------------------------------------


def measured(options: Mapping[str, Any], device: torch.device) -> dict[str, Series]:
    """All series of a job: calibrate, stretch, serve under every policy.

    Args:
        options: of the job.
        device: in bfloat16 on a GPU, else in float32.
    """
    backbone, placed = decoders(options, device)
    cache = Cache(backbone, options["rows"])
    tables = calibrated(options, MixedSteps(backbone, cache, options["sizes"]), placed)
    reference, tokens, printed = REFERENCE
    stretch = tables[reference](tokens) / printed
    requests, prompts = workload(options, stretch, backbone.config.vocab_size)
    series = {"stretch": Series(np.asarray([stretch]), "model")}
    percent = options["percent"]
    steps = MixedSteps(placed[percent], cache, options["sizes"])
    if steps.graphed:
        steps.capture()
    warm_up(steps, requests, prompts)
    for name in options["policies"]:
        chosen = policy(name, tables[percent], stretch, options["sizes"])
        served = served_by(steps, chosen, requests, prompts)
        series |= summarized(f"{name} {percent}", served, tables[percent], stretch, options)
    return series


def decoders(options: Mapping[str, Any], device: torch.device) -> tuple[Decoder, dict[int, Decoder]]:
    """The shape without compensators, and with them by the percent of layers that have one: its own, `REFERENCE`'s."""
    from transformers import AutoConfig  # takes seconds

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = AutoConfig.for_model(**SHAPES[options["shape"]])
    context = weights.check(f"shape/{options['shape']}", config, None)
    placed = {}
    for percent in sorted({options["percent"], REFERENCE[0]}):
        recipe = parse(COMPENSATED.format(k_share=percent / 100, rank=options["rank"]))
        placed[percent] = dispatched(random_decoder(recipe, config, context, device, dtype))
    return random_decoder(parse(W4), config, context, device, dtype), placed


def calibrated(
    options: Mapping[str, Any], backbone: MixedSteps, placed: Mapping[int, Decoder]
) -> dict[int, LatencyTable]:
    """The latency table of every placement, from one set of measured iterations and products."""
    sizes, repeats = options["sizes"], options["repeats"]
    if backbone.graphed:
        backbone.capture()
    iterations = measured_iterations(backbone, sizes, options["decodes"], options["context"], repeats)
    backbone.graphs.clear()
    products = measured_products([backbone.model, *placed.values()], sizes, repeats)
    return {percent: latency_table(model, iterations, products, sizes) for percent, model in placed.items()}


def workload(options: Mapping[str, Any], stretch: float, vocabulary: int) -> tuple[list[Request], dict[int, list[int]]]:
    """The requests at the stretched rate, and random prompts by their number."""
    arrived = arrivals.draw(options["requests"], options["rate"] / stretch, options["seed"])
    rng = np.random.default_rng(options["seed"])
    requests, prompts = [], {}
    for number, (arrival, prompt_tokens, new_tokens) in enumerate(arrived):
        requests.append(Request(number, arrival, prompt_tokens, new_tokens))
        prompts[number] = rng.integers(vocabulary, size=prompt_tokens).tolist()
    return requests, prompts


def policy(name: str, table: LatencyTable, stretch: float, sizes: list[int]) -> ChunkPolicy:
    """The policy of a name of `POLICIES`."""
    kind, number, *joint = name.split("-")
    if kind == "static":
        return StaticBudget(int(number))
    return LatencyTarget(table, int(number) * stretch, most=sizes[-1], joint=bool(joint))


def served_by(
    steps: MixedSteps, chosen: ChunkPolicy, requests: list[Request], prompts: Mapping[int, list[int]]
) -> Served:
    """Serve requests under a policy; no garbage is collected meanwhile, which servers put off as well."""
    scheduler = Scheduler(chosen, len(steps.cache.lengths))
    iterations = Iterations(steps, {request.number: prompts[request.number] for request in requests})
    gc.collect()
    gc.disable()
    try:
        return serve(requests, scheduler, iterations, WallClock())
    finally:
        gc.enable()


def warm_up(steps: MixedSteps, requests: list[Request], prompts: Mapping[int, list[int]]) -> None:
    """Serve the first requests, whose times are dropped."""
    short_requests = [
        Request(request.number, 0.0, request.prompt_tokens, min(request.new_tokens, 8)) for request in requests[:8]
    ]
    served_by(steps, StaticBudget(steps.sizes[-1]), short_requests, prompts)


def summarized(
    name: str, served: Served, table: LatencyTable, stretch: float, options: Mapping[str, Any]
) -> dict[str, Series]:
    """The series of one policy at one share, by blocks of neighbouring requests where they have an interval."""
    blocks = options["blocks"]
    group = f"{options['shape']}, {options['percent']} %, {options['requests']} requests, seed {options['seed']}"
    gaps = [1e3 * np.asarray(of_request) for of_request in served.gaps]
    every_gap = np.concatenate(gaps)
    ratios = [table(decodes + tokens) / (1e3 * seconds) for decodes, tokens, seconds in served.iterations]

    def by_block(values: list[float]) -> Series:
        return Series(np.asarray(values, dtype=float).reshape(blocks, -1).mean(1), "items", group)

    series = {
        f"{name} itl": Series(np.percentile(every_gap, [QUANTILE]), "model"),
        f"{name} ttft": by_block([1e3 * first for first in served.first]),
        f"{name} gaps": by_block([len(of_request) for of_request in gaps]),
        f"{name} predicted": Series(np.asarray([np.mean(ratios)]), "model"),
    }
    for target in TARGETS:
        series[f"{name} late {target}"] = by_block(
            [float((of_request > target * stretch).sum()) for of_request in gaps]
        )
    return series
