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
class Ask:
    """An option of a step of the recipe, times `factor` where the paper prints it in another unit."""

    step: str
    option: str
    factor: float = 1.0
    unit: str = ""


def jobs(ask: Ask, target: Target) -> dict[str, Job]:
    """None: the recipe says it."""
    return {}


def series(ask: Ask, found: Mapping[str, Observations], target: Target) -> dict[str, Series]:
    """The option as one number.

    Raises:
        UserError: the recipe has no such step, or the step no such option, or it is no number.
    """
    configs = dict(target.recipe.config)
    if ask.step not in configs:
        raise UserError(f"setting: the recipe {target.recipe.name!r} has no step {ask.step!r}")
    if ask.option not in configs[ask.step]:
        raise UserError(f"setting: {unknown(f'option of {ask.step}', ask.option, configs[ask.step])}")
    found_value = configs[ask.step][ask.option]
    if isinstance(found_value, bool | str | list) or found_value is None:
        raise UserError(f"setting: {ask.option} of {ask.step} is {found_value!r}, not a number")
    return {"setting": Series(np.asarray([ask.factor * found_value], dtype=float), "model")}


def value(ask: Ask, mean: Mapping[str, Any]) -> Any:
    """The option."""
    return mean["setting"]
