"""The size of a compressed model: bits per block weight, megabytes, or the share that compensation adds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from repro.baselines import low_rank
from repro.baselines.grid import Grid
from repro.jobs import compress
from repro.jobs.target import Target
from repro.metrics.metric import Metric
from repro.store.job import Job
from repro.store.observations import Observations, Series

QUANTIZER = ("codes", "scales", "zeros", "indices", "unquantized")  # kinds of bits that are no compensation


@dataclass(frozen=True)
class Storage(Metric):
    """`bpw`: bits per block weight. `megabytes`: the whole model. `compensation`: megabytes beside the weights.
    `share`: the same in percent of the block weights at 4 bits."""  # fmt: skip

    VERSION = 1

    count: Literal["bpw", "megabytes", "compensation", "share"] = "bpw"
    unit: str = "bits"

    def jobs(self, target: Target) -> dict[str, Job]:
        """The job that compresses the model counts its bits."""
        return {"bits": compress.job(target)}

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The bits by kind, and the totals."""
        return {name: series for name, series in observed["bits"].series.items() if name.startswith("bits/")}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """The count that was asked for."""
        if self.count == "bpw":
            return mean["bits/bpw"]
        if self.count == "megabytes":
            return mean["bits/bytes"] / 1e6
        named_bits = {f"bits/{kind}" for kind in (*QUANTIZER, "bpw", "bytes", "block_weights")}
        extra = sum((bits for name, bits in mean.items() if name not in named_bits), 0 * mean["bits/bytes"])
        return extra / 8e6 if self.count == "compensation" else 100 * extra / (4 * mean["bits/block_weights"])

    def exact(self, steps: Sequence[Any], shape: Any) -> float | None:
        """The count at a paper's own shape by arithmetic; None where the recipe alone does not fix what is stored.

        Known are grids, with half-precision scales for all groups, and corrections of a given rank in every layer.

        Args:
            steps: those of a parsed recipe.
            shape: the `PublicShape`.
        """
        layers = shape.linears
        weights = sum(map(prod, shape.linears))
        by_kind = {"bits/unquantized": 16.0 * weights}
        for step in steps:
            config = step.config
            if isinstance(config, Grid) and not getattr(config, "act_order", False):
                groups = sum(n * (k // config.group if config.group else 1) for n, k in layers)
                scale = {"float16": 16, "float32": 32}[config.scale_dtype]
                zero = 0 if config.symmetric else config.bits
                by_kind = {
                    "bits/codes": config.bits * weights,
                    "bits/scales": scale * groups,
                    "bits/zeros": zero * groups,
                }
            elif isinstance(config, low_rank.Config) and not config.budget:
                stored = [low_rank.stored_bytes(config.rank, layer, config.factor_bits) for layer in layers]
                by_kind[f"bits/{step.name}"] = 8 * sum(stored)
            else:
                return None
        if self.count in ("compensation", "share") and not any(
            isinstance(step.config, low_rank.Config) for step in steps
        ):
            return None
        bits = sum(by_kind.values())
        totals = {"bits/bpw": bits / weights, "bits/bytes": bits / 8 + 2 * shape.others, "bits/block_weights": weights}
        return float(self.value(by_kind | totals))
