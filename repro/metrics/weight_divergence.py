"""KL divergence between a layer's quantized and its original weights, layer by layer (FlexQuant, Figure 2).

It is what FlexQuant orders its layers by (`methods/flexquant/order.py`), with the bins and the direction of its
settings. No text is read.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from repro.jobs import compress
from repro.jobs.target import Target
from repro.methods.flexquant.config import Config
from repro.methods.flexquant.order import weight_divergence
from repro.metrics.metric import Metric
from repro.models.lowbit import block_linears
from repro.store import observations
from repro.store.job import Job, make
from repro.store.observations import Observations, Series


@dataclass(frozen=True)
class WeightDivergence(Metric):
    """Nats: of every layer, for a figure (`layers`); their `mean`; the largest over the smallest (`spread`)."""

    VERSION = 1

    show: Literal["layers", "mean", "spread"] = "mean"
    direction: Literal["quantized", "full"] = "quantized"
    unit: str = ""

    def jobs(self, target: Target) -> dict[str, Job]:
        """One job compares all layers; full precision has none."""
        if not target.recipe.steps:
            return {}
        compressed = compress.job(target)
        config = Config(direction=self.direction)
        rule = {name: asdict(config)[name] for name in ("direction", "bins", "pseudocount")}
        inputs = target.inputs() | rule | {"calibration": compressed.parsed_inputs().get("calibration")}
        job = make(
            "weight_divergence", target.label, inputs, target.options() | rule, {"weights": compressed}, target.steps
        )
        return {"layers": job}

    @staticmethod
    def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
        """Compare every linear layer of the blocks, in model order.

        Raises:
            UserError: damaged inputs.
        """
        options = job.parsed_options()
        full = compress.load(options, None)
        quantized = compress.load(options, folders["weights"])
        config = Config(direction=options["direction"], bins=options["bins"], pseudocount=options["pseudocount"])
        quantized_linears = block_linears(quantized.model)
        values = []
        for name, linear in block_linears(full.model).items():
            values.append(weight_divergence(linear.weight.detach(), quantized_linears[name].weight.detach(), config))
        observations.save(folder / observations.FILE, {"layers": Series(np.asarray(values), "layers")}, origin)

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The layers for a figure, else one number."""
        if "layers" not in observed:
            return {}
        recorded = observed["layers"].series["layers"]
        if self.show == "layers":
            return {"layers": recorded}
        number = recorded.values.mean() if self.show == "mean" else recorded.values.max() / recorded.values.min()
        return {self.show: Series(np.asarray([number]), "model")}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """The number, or the mean of what is drawn."""
        return mean[self.show]

    @property
    def reference(self) -> bool:
        """True: it is itself a comparison with full precision."""
        return True

    @property
    def itself(self) -> float | None:
        """Full precision does not diverge from itself, and has no spread."""
        return None if self.show == "spread" else 0.0
