"""Do two recipes damage the same layers most? Rank correlation, and overlap of the top 30 % (SPEAR, appendix C.3)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from repro.core.errors import UserError
from repro.jobs.target import Target
from repro.metrics import sensitivity
from repro.metrics.metric import Metric
from repro.metrics.sensitivity import TOP, by_layer
from repro.store.job import Job
from repro.store.observations import Observations, Series


@dataclass(frozen=True)
class Agreement(Metric):
    """Against the recipe `other`: Spearman's `rho` over all layers; `jaccard` of the two sets of the most damaged `top`
    layers; `mismatch`, percent of one set that is not in the other, (1 - J) / (1 + J); `moved`, how far
    in model order, in percent of the layers, the most damaged layer is from the other's."""  # fmt: skip

    VERSION = 1

    show: Literal["rho", "jaccard", "mismatch", "moved"]
    other: str
    top: float = TOP
    unit: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.top <= 1:
            raise UserError(f"agreement: top is {self.top}; it must be a share of the layers above 0, 1 at most")

    def jobs(self, target: Target) -> dict[str, Job]:
        """The two jobs that quantize layer after layer."""
        damage = sensitivity.Sensitivity("damage")
        jobs = {}
        for role, compressed in (("one", target), ("other", target.under(self.other))):
            for job in damage.jobs(compressed).values():  # none in full precision
                jobs[role] = job
        return jobs

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The damage of every layer by sequence, under both recipes; none in full precision."""
        if len(observed) < 2:
            return {}
        series = {}
        for role in ("one", "other"):
            layers = by_layer(observed[role].series, "damage")
            series |= {f"{role} {i}": damages for i, damages in enumerate(layers)}
        return series

    def value(self, mean: Mapping[str, Any]) -> Any:
        """The agreement of two mean damages `[layers]`; of equal damages the earlier layer counts as worse."""
        damages, other_damages = (np.stack(by_layer(mean, role)) for role in ("one", "other"))
        if self.show == "rho":
            return sensitivity.spearman(damages, other_damages)
        orders = [np.argsort(-damage, axis=0, kind="stable") for damage in (damages, other_damages)]
        if self.show == "moved":
            return 100 * np.abs(orders[0][0] - orders[1][0]) / len(damages)
        count = sensitivity.top(len(damages), self.top)
        shared = sum((orders[0][i] == orders[1][:count]).sum(0) for i in range(count))
        jaccard = shared / (2 * count - shared)
        return jaccard if self.show == "jaccard" else 100 * (1 - jaccard) / (1 + jaccard)

    @property
    def limits(self) -> tuple[float, float]:
        """A correlation is -1 to 1, an overlap 0 to 1, percent 0 to 100."""
        return {"rho": (-1.0, 1.0), "jaccard": (0.0, 1.0)}.get(self.show, (0.0, 100.0))

    @property
    def reference(self) -> bool:
        """True: it is itself a comparison of two recipes."""
        return True

    @property
    def itself(self) -> float | None:
        """Full precision damages nothing."""
        return None
