"""What a compressed model takes to store: bits per block weight, megabytes, or the share that compensation adds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from repro.jobs import compress
from repro.jobs.job import Job
from repro.jobs.target import Target
from repro.record.observations import Observations, Series

QUANTIZER = ("codes", "scales", "zeros", "indices", "unquantized")  # kinds of bits that are no compensation


@dataclass(frozen=True)
class Ask:
    """`bpw`: bits per block weight. `megabytes`: the whole model. `compensation`: megabytes beside the weights.
    `share`: the same in percent of the block weights at 4 bits."""  # fmt: skip

    count: Literal["bpw", "megabytes", "compensation", "share"] = "bpw"
    unit: str = "bits"


def jobs(ask: Ask, target: Target) -> dict[str, Job]:
    """The job that compresses the model counts its bits."""
    return {"bits": compress.job(target)}


def series(ask: Ask, found: Mapping[str, Observations], target: Target) -> dict[str, Series]:
    """The bits by kind, and the totals."""
    return {name: one for name, one in found["bits"].series.items() if name.startswith("bits/")}


def value(ask: Ask, mean: Mapping[str, Any]) -> Any:
    """The count that was asked for."""
    if ask.count == "bpw":
        return mean["bits/bpw"]
    if ask.count == "megabytes":
        return mean["bits/bytes"] / 1e6
    known = {f"bits/{kind}" for kind in (*QUANTIZER, "bpw", "bytes", "block_weights")}
    extra = sum((bits for name, bits in mean.items() if name not in known), 0 * mean["bits/bytes"])
    return extra / 8e6 if ask.count == "compensation" else 100 * extra / (4 * mean["bits/block_weights"])
