"""The target of a measurement: a stand-in under a recipe with one seed, at a scale; and what every job declares."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from repro import models
from repro.recipes.recipe import Recipe, parse, with_seed
from repro.store.job import Job


@dataclass(frozen=True)
class Target:
    """A stand-in under a recipe, with one seed, at a scale.

    Attributes:
        scale: the `Scale`; its device is the one that the job runs on.
        model: the stand-in.
        text: the recipe, in any spelling.
        seed: shifts the draw of calibration text, and seeds whatever is drawn or trained.
    """

    scale: Any
    model: str
    text: str
    seed: int = 0
    _jobs: dict[str, Job] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, kind: str, make: Callable[[], Job]) -> Job:
        """The target's one job of a kind, made the first time: a hundred cells of a table ask for it."""
        if kind not in self._jobs:
            self._jobs[kind] = make()
        return self._jobs[kind]

    @cached_property
    def recipe(self) -> Recipe:
        """The parsed recipe, with the seed in the steps that take one."""
        return with_seed(parse(self.text), self.seed)

    @cached_property
    def tokenizer(self) -> str:
        """The key of the model's tokenizer; whoever scores a dozen tasks on one target reads its files' times once."""
        return models.tokenizer_key(self.model)

    @cached_property
    def threads(self) -> int:
        """CPU threads of a job on it."""
        trained = any(step.work for step in self.recipe.steps)
        return max(self.scale.threads, self.scale.training_threads) if trained else self.scale.threads

    @property
    def short(self) -> str:
        """The stand-in's name as part of a file name: no blank and no character that a shell or Snakemake reads."""
        return re.sub(r"[^A-Za-z0-9_.=-]+", "_", Path(self.model.split("@")[0]).name).strip("_.") or "model"

    @property
    def label(self) -> str:
        """Model and recipe as part of a file name."""
        return f"{self.short}/{self.recipe.slug}"

    @property
    def steps(self) -> tuple[str, ...]:
        """The names of the recipe's steps."""
        return tuple(step.name for step in self.recipe.steps)

    def under(self, text: str) -> "Target":
        """The same target under another recipe."""
        return Target(self.scale, self.model, text, self.seed)

    def inputs(self) -> dict[str, Any]:
        """The inputs that every job on the target declares."""
        scale = self.scale
        facts = {"model": models.fingerprint(self.model), "steps": self.recipe.config, "dtype": scale.dtype}
        facts |= {"device": scale.device} | ({"threads": self.threads} if scale.device == "cpu" else {})
        return facts

    def options(self) -> dict[str, Any]:
        """The options that every job on the target has."""
        scale = self.scale
        words = {"model": self.model, "recipe": self.recipe.name, "seed": self.seed, "device": scale.device}
        return words | {"dtype": scale.dtype, "threads": self.threads, "hub": scale.hub}
