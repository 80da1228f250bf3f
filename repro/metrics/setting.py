"""A setting that the paper printed, read from the parsed config that the code really uses: no run, no interval."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from repro.core.errors import UserError, unknown
from repro.jobs.target import Target
from repro.store.job import Job
from repro.store.observations import Observations, Series

VERSION = 1
JOBLESS = True  # fresh everywhere


@dataclass(frozen=True)
class Params:
    """An option of a step of the recipe, times `factor` where the paper prints it in another unit."""

    step: str
    option: str
    factor: float = 1.0
    unit: str = ""


def jobs(params: Params, target: Target) -> dict[str, Job]:
    """None: the recipe says it."""
    return {}


def series(params: Params, found: Mapping[str, Observations], target: Target) -> dict[str, Series]:
    """The option as one number.

    Raises:
        UserError: the recipe has no such step, or the step no such option, or it is no number.
    """
    configs = dict(target.recipe.config)
    if params.step not in configs:
        raise UserError(f"setting: the recipe {target.recipe.name!r} has no step {params.step!r}")
    if params.option not in configs[params.step]:
        raise UserError(f"setting: {unknown(f'option of {params.step}', params.option, configs[params.step])}")
    found_value = configs[params.step][params.option]
    if isinstance(found_value, bool | str | list) or found_value is None:
        raise UserError(f"setting: {params.option} of {params.step} is {found_value!r}, not a number")
    return {"setting": Series(np.asarray([params.factor * found_value], dtype=float), "model")}


def value(params: Params, mean: Mapping[str, Any]) -> Any:
    """The option."""
    return mean["setting"]
