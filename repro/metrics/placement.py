"""Which layers a step chose: the share of layers, or their rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from repro.jobs import compress
from repro.jobs.target import Target
from repro.metrics.metric import Metric
from repro.store.job import Job
from repro.store.observations import Observations, Series


@dataclass(frozen=True)
class Placement(Metric):
    """`share` of layers in percent, or mean `rank` of the chosen ones."""

    VERSION = 1

    show: Literal["share", "rank"]
    unit: str = ""

    def jobs(self, target: Target) -> dict[str, Job]:
        """The job that compresses the model notes what its steps chose."""
        return {"layers": compress.job(target)}

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """One number a layer, in model order: the rank (0: not chosen) and whether it is above 0."""
        recorded = observed["layers"].series
        if "layers/rank" not in recorded:
            return {}
        ranks = recorded["layers/rank"]
        return {"rank": ranks, "chosen": Series((ranks.values > 0).astype(float), "layers")}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """Percent of layers, or the mean rank of the chosen ones."""
        return 100 * mean["chosen"] if self.show == "share" else mean["rank"] / mean["chosen"]
