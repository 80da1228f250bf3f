"""A setting that the paper printed, read from the parsed config that the code really uses: no run, no interval."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from repro.core.errors import UserError, unknown
from repro.jobs.target import Target
from repro.metrics.metric import Metric
from repro.store.observations import Observations, Series


@dataclass(frozen=True)
class Setting(Metric):
    """An option of a step of the recipe, times `factor` where the paper prints it in another unit."""

    VERSION = 1
    JOBLESS = True  # fresh everywhere

    step: str
    option: str
    factor: float = 1.0
    unit: str = ""

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The option as one number.

        Raises:
            UserError: the recipe has no such step, or the step no such option, or it is no number.
        """
        configs = dict(target.recipe.config)
        if self.step not in configs:
            raise UserError(f"setting: the recipe {target.recipe.name!r} has no step {self.step!r}")
        if self.option not in configs[self.step]:
            raise UserError(f"setting: {unknown(f'option of {self.step}', self.option, configs[self.step])}")
        found_value = configs[self.step][self.option]
        if isinstance(found_value, bool | str | list) or found_value is None:
            raise UserError(f"setting: {self.option} of {self.step} is {found_value!r}, not a number")
        return {"setting": Series(np.asarray([self.factor * found_value], dtype=float), "model")}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """The option."""
        return mean["setting"]
