"""Distribution of stored codes, and of the weights that they stand for, over all block linears (Bit-by-Bit, Figure 3).

Weights are counted in bins of equal width. The outermost bins' middles are at the magnitude that one in a thousand of
full precision's weights exceeds; larger weights count in these bins. So all widths of a master share their bins. A
channel that is stored as two columns has one weight and two codes; columns that read 0 have codes, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from repro import models
from repro.core.errors import UserError
from repro.jobs import compress
from repro.jobs.target import Target
from repro.metrics.metric import Metric
from repro.models.groups import quantizer
from repro.models.lowbit import block_linears
from repro.models.quantized import QuantizedWeight
from repro.store import observations
from repro.store.job import Job, make
from repro.store.observations import Observations, Series

GROUP = 32  # columns of a group of weights that have no scales
PAIRS = 2**24  # pairs of values that are compared at a time
BEYOND = 1e-3  # share of full precision's weights that are larger than the last bin's middle


@dataclass(frozen=True)
class Protocol:
    """The number of `bins`; odd, so that 0 is the middle of one."""

    bins: int = 101

    def __post_init__(self) -> None:
        if self.bins < 3 or self.bins % 2 == 0:
            raise UserError(f"bins is {self.bins}; an odd number, 3 or more, has 0 in the middle of one")


@dataclass(frozen=True)
class Histogram(Metric):
    """How evenly weights use their values.

    `values` is the effective number of bins, the exponential of the histogram's entropy. `groups` is the effective
    number of different values in a group, the mean over groups; a group is the columns that share a scale (32 in a
    model without scales).

    For a figure: the share in percent of `weights` in each bin or of each of the `codes`, and the x values that belong
    to them: the middles of the `bins`, or the `levels` that codes stand for, in steps of their master.
    """

    VERSION = 1
    DEFAULT = {}
    PROTOCOL = Protocol

    show: Literal["values", "groups", "weights", "bins", "codes", "levels"] = "values"
    unit: str = ""

    def jobs(self, target: Target) -> dict[str, Job] | None:
        """One job counts both; None where the scale says null."""
        protocol = target.scale.protocols["histogram"]
        if protocol is None:
            return None
        rule = asdict(protocol)
        needs = {}
        inputs = target.inputs()
        if target.recipe.steps:
            needs["weights"] = compress.job(target)
            inputs["calibration"] = needs["weights"].parsed_inputs().get("calibration")
        job = make("histogram", target.label, inputs | rule, target.options() | rule, needs, target.steps)
        return {"counts": job}

    @staticmethod
    def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
        """Count weights, and codes where there are some.

        Raises:
            UserError: damaged inputs, layers whose codes have different widths, or weights that are not finite.
        """
        options = job.parsed_options()
        full = models.load(options["model"], options["device"], options["dtype"], options["hub"])
        lm = compress.load(options, folders.get("weights"))
        reach = largest([linear.weight for linear in block_linears(full).values()])
        middles, shares = of_weights([linear.weight for linear in linears(lm.model)], reach, options["bins"])
        series = {"bins": Series(middles, "bins"), "weights": Series(shares, "bins")}
        if lm.weights:
            stored = [weight.codes for weight in lm.weights.values()]
            widths = [getattr(weight, "group", 0) or weight.codes.shape[1] for weight in lm.weights.values()]
            levels, shares = of_codes(lm.weights)
            by_code = {"levels": Series(levels, "codes"), "codes": Series(shares, "codes")}
        else:
            stored = [linear.weight for linear in linears(lm.model)]
            widths = [GROUP] * len(stored)
            by_code = {}
        series["groups"] = Series(np.asarray([of_groups(stored, widths)]), "model")
        series |= by_code
        observations.save(folder / observations.FILE, series, origin)

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The series of what is shown; empty for codes of full precision."""
        recorded = observed["counts"].series
        name = "weights" if self.show == "values" else self.show
        if self.show == "values":
            return {"values": Series(np.asarray([effective(recorded[name].values)]), "model")}
        if name not in recorded:
            return {}
        scaled = 100 if name in ("weights", "codes") else 1
        return {name: Series(scaled * recorded[name].values, recorded[name].axis)}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """The number, or the mean of what is drawn."""
        (only,) = mean.values()
        return only


def linears(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of the blocks that compute with a weight matrix."""
    return list(block_linears(model).values())


@torch.no_grad()
def largest(weights: list[Tensor]) -> float:
    """The magnitude that one in a thousand of the weights exceeds.

    Raises:
        UserError: some are not finite, or all are 0.
    """
    flat = torch.cat([weight.detach().float().abs().flatten() for weight in weights]).cpu().numpy()
    reach = float(np.quantile(flat, 1 - BEYOND))
    if not np.isfinite(flat).all() or not reach > 0:
        raise UserError("the model's weights hold NaN or Inf, or nearly all of them are 0; the model is damaged")
    return reach


@torch.no_grad()
def of_weights(weights: list[Tensor], reach: float, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Middles of the bins from -reach to reach, and the share of the weights in each, float64 `[bins]`."""
    half = bins // 2
    counts = np.zeros(bins)
    for weight in weights:
        level = np.rint(weight.detach().double().cpu().numpy().ravel() / reach * half)
        counts += np.bincount((level.clip(-half, half) + half).astype(np.int64), minlength=bins)
    return reach * np.arange(-half, half + 1) / half, counts / counts.sum()


def of_codes(weights: Mapping[str, QuantizedWeight]) -> tuple[np.ndarray, np.ndarray]:
    """The value of each code in steps of its master, and its share of all codes, float64 `[2^bits]` each.

    Raises:
        UserError: layers with different widths.
    """
    forms = set()
    for weight in weights.values():
        forms.add((weight.bits, getattr(weight, "shift", 0), getattr(weight, "delta", "zero")))
    if len(forms) > 1:
        raise UserError(f"codes of {', '.join(sorted({f'{b} bits' for b, *_ in forms}))} have no common histogram")
    ((bits, shift, delta),) = forms
    counts = sum(np.bincount(weight.codes.flatten().cpu().numpy(), minlength=2**bits) for weight in weights.values())
    return np.arange(2**bits) * 2**shift + quantizer.offset(shift, delta), counts / counts.sum()


@torch.no_grad()
def of_groups(values: Sequence[Tensor], groups: Sequence[int]) -> float:
    """exp of the entropy of equal values in one group, the mean over all groups: 1 if all are equal, at most its size.

    Args:
        values: codes or weights `[N, K]` of each layer.
        groups: columns of a group, of each layer.

    Raises:
        UserError: a group does not divide K.
    """
    total, count = 0.0, 0
    for tensor, size in zip(values, groups, strict=True):
        for batch in quantizer.split(tensor.detach(), size).flatten(0, 1).split(max(1, PAIRS // size**2)):
            equal = (batch[:, :, None] == batch[:, None, :]).sum(-1)  # how many have the value of each
            total += float((equal.double() / size).log().mean(1).neg().exp().sum())
            count += len(batch)
    return total / count


def effective(shares: np.ndarray) -> float:
    """exp of the entropy of shares that add up to 1."""
    positive = shares[shares > 0]
    return float(np.exp(-(positive * np.log(positive)).sum()))
