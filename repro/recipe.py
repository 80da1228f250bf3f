"""A recipe names the ordered steps that make a model low-bit: `gptq-w4-g128`, `rtn-w4-pc + spear`, `fp16` (no step).

A step is the name of a baseline or method and the fields of its `Config`, joined by `-`:

    w4 → bits=4    a8 → act_bits=8    g128 → group=128    pc → group=0    sym / asym → symmetric
    act_order → act_order=True         percdamp=0.05 → percdamp=0.05
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, get_type_hints

import yaml

from repro.baselines import BASELINES
from repro.errors import UserError, unknown
from repro.methods import METHODS
from repro.strict import build

STEPS: dict[str, ModuleType] = BASELINES | METHODS
SHORT = {"w": "bits", "a": "act_bits", "g": "group", "r": "rank"}
WORDS = {"pc": ("group", 0), "sym": ("symmetric", True), "asym": ("symmetric", False)}


@dataclass(frozen=True)
class Step:
    """One step: the registry name, its module, and its frozen config."""

    name: str
    module: ModuleType
    config: Any


@dataclass(frozen=True)
class Recipe:
    """The steps in order; `name` is the text they were parsed from, with blanks normalised."""

    name: str
    steps: tuple[Step, ...]

    @property
    def calibrated(self) -> bool:
        """Whether any step needs calibration sequences."""
        return any(step.module.CALIBRATED for step in self.steps)

    @property
    def before(self) -> str:
        """The recipe without its last step where a built model of it can be gone on with, else nothing.

        After a step that rescales weights, those that it quantized are not those of the model any more.
        """
        earlier, _, _ = self.name.rpartition(" + ")
        return "" if any(getattr(step.module, "RESCALES", False) for step in self.steps[:-1]) else earlier

    @property
    def slug(self) -> str:
        """The name as a file name."""
        return re.sub(r"[^A-Za-z0-9_.=-]+", "_", self.name)


def parse(text: str) -> Recipe:
    """Parse a recipe.

    Raises:
        UserError: an unknown step, or a word that its config does not have.
    """
    parts = [part.strip() for part in str(text).split("+")]
    if parts == ["fp16"]:
        return Recipe("fp16", ())
    return Recipe(" + ".join(parts), tuple(_step(part, text) for part in parts))


def with_options(text: str, options: Mapping[str, Mapping[str, Any]]) -> str:
    """A recipe whose steps of a given name get further options, unless it gives them itself."""
    parts = []
    for part in (part.strip() for part in str(text).split("+")):
        name, *words = part.split("-")
        given = {word.partition("=")[0] for word in words}
        parts.append("-".join([part, *(f"{k}={v}" for k, v in options.get(name, {}).items() if k not in given)]))
    return " + ".join(parts)


def _step(text: str, recipe: str) -> Step:
    name, *words = text.split("-")
    if name == "fp16":
        raise UserError(f"recipe {recipe!r}: fp16 is full precision, alone and without options")
    if name not in STEPS:
        raise UserError(f"recipe {recipe!r}: {unknown('step', name, [*STEPS, 'fp16'])}")
    module = STEPS[name]
    hints = get_type_hints(module.Config)
    fields = {f.name for f in dataclasses.fields(module.Config)}
    values: dict[str, Any] = {}
    for word in words:
        short = re.fullmatch(r"([a-z])(\d+)", word)
        if word in WORDS:
            key, value = WORDS[word]
        elif short and short[1] in SHORT:
            key, value = SHORT[short[1]], int(short[2])
        elif "=" in word:
            key, _, raw = word.partition("=")
            try:
                value = yaml.safe_load(raw)
            except yaml.YAMLError:
                raise UserError(f"recipe {recipe!r}: {raw!r} is no value for {key} of {name}") from None
        else:
            key, value = word, True
        if key not in fields or (value is True and hints[key] is not bool):
            listed = ", ".join(sorted(fields))
            raise UserError(f"recipe {recipe!r}: {word!r} says nothing to {name}, whose config has {listed}")
        if key in values:
            raise UserError(f"recipe {recipe!r}: {key} of {name} is given twice")
        values[key] = value
    return Step(name, module, build(module.Config, values, f"recipe {recipe!r}"))
