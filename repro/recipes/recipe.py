"""A recipe names the ordered steps that make a model low-bit: `gptq-w4-g128`, `rtn-w4-pc + spear`, `fp16` (no step).

A step is a baseline or method with fields of its `Config`, in either spelling of `recipe_text.py`.

Values are YAML, and `5e-05` is a float (YAML 1.1 reads it as text). `Recipe.name` is the canonical spelling, so that
two spellings of a recipe have one name: the dash form unless a value needs the other (a list, null, text with a blank).
"""

import dataclasses
import json
import re
from collections import ChainMap, Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise, zip_longest
from types import ModuleType
from typing import Any

from repro.baselines import BASELINES
from repro.core import strict
from repro.core.errors import UserError, unknown
from repro.core.files import short_hash
from repro.methods import METHODS
from repro.models.attachments import REGISTRIES
from repro.recipes.recipe_text import SHORT, WORDS, check_option, cut, names, options, write_value

STEPS: ChainMap[str, ModuleType] = ChainMap(METHODS, BASELINES)
REGISTRIES.append(BASELINES)  # METHODS adds itself
ALWAYS = ("bits", "group")  # in every name, default or not: a table's reader looks for them first
SLUG = 80  # characters
_optioned: dict[tuple, str] = {}  # what `with_options` gave, by what it was asked


@dataclass(frozen=True)
class Step:
    """One step: the registry name, its module, and its frozen config; `given` are the fields that its text names."""

    name: str
    module: ModuleType
    config: Any
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    @property
    def calibrated(self) -> bool:
        """Whether it needs calibration sequences: its config says, else its module."""
        return getattr(self.config, "calibrated", self.module.CALIBRATED)

    @property
    def second_text(self) -> str:
        """The text that it reads besides the calibration text, by one of a scale's names; empty for none."""
        return getattr(self.config, "second_text", "")

    @property
    def attaches(self) -> str:
        """What kind of thing it adds to layers, such as a compensator; empty for a step that changes weights alone."""
        return getattr(self.module, "KIND", "")

    @property
    def prepares(self) -> bool:
        """Whether it only changes weights, which a quantizer after it stores."""
        return getattr(self.module, "PREPARES", False)

    @property
    def rescales(self) -> bool:
        """Whether it changes weights before it quantizes them."""
        return getattr(self.module, "RESCALES", False)

    @property
    def work(self) -> Callable[..., Any] | None:
        """What its training takes, as `repro.train.training_cost` asks for it; None of a step that is not trained."""
        return getattr(self.module, "work", None)


@dataclass(frozen=True)
class Recipe:
    """The steps in order; none is full precision."""

    steps: tuple[Step, ...]

    @cached_property
    def name(self) -> str:
        """The canonical text: in each step the fields that differ from their defaults, and always bits and group."""
        return " + ".join(map(_spell, self.steps)) or "fp16"

    @cached_property
    def config(self) -> list[list]:
        """`[name, {field: value}]` of every step with its fields, fit for JSON: what a run's hash is made of.

        A field that came after accepted results is left out at the value that changes nothing (`LATER` of its step).
        """
        return [[step.name, _declared(step)] for step in self.steps]

    @property
    def calibrated(self) -> bool:
        """Whether any step needs calibration sequences."""
        return any(step.calibrated for step in self.steps)

    @property
    def seeded(self) -> bool:
        """Whether the result depends on a seed: a step is calibrated or has a field `seed`."""
        return any(step.calibrated or hasattr(step.config, "seed") for step in self.steps)

    @cached_property
    def before(self) -> str:
        """The recipe minus its last step, if that compressed model can be reused as a starting point; otherwise empty.

        It cannot after a step that rescales weights: those that it quantized are no longer the model's.
        """
        earlier = self.steps[:-1]
        reusable = earlier and not any(step.rescales for step in earlier)
        return Recipe(earlier).name if reusable else ""

    @cached_property
    def slug(self) -> str:
        """The name as a file name of at most 80 characters; a hash of the name ends it when it is cut."""
        slug = re.sub(r"[^A-Za-z0-9_.=-]+", "_", self.name).strip("_")
        return slug if len(slug) <= SLUG else f"{slug[: SLUG - 9]}.{short_hash(self.name)}"

    @cached_property
    def _by_seed(self) -> dict[int, "Recipe"]:
        """What `with_seed` made of it: every cell asks again."""
        return {}


def parse(text: str) -> Recipe:
    """Parse a recipe in either form.

    Raises:
        UserError: an unknown step or option, a value of the wrong type, or text that is not a recipe.
    """
    return _parsed(str(text), (*METHODS.items(), *BASELINES.items()))  # those of a ChainMap take ten times as long


@cache
def _parsed(text: str, steps: tuple[tuple[str, ModuleType], ...]) -> Recipe:
    """The recipe of a text, read once for each set of steps."""
    built = tuple(_build(name, values, text) for name, values in _read(text))
    kinds = Counter(step.attaches for step in built if step.attaches)
    if twice := [kind for kind, count in kinds.items() if count > 1]:
        raise _error(text, f"a second {twice[0]} is refused; a layer takes one attachment of each kind")
    for first, then in pairwise(built):
        if first.attaches == "sparsity":
            raise _error(text, f"{then.name} after {first.name} is refused; {first.name} is a recipe's last step")
    for first, then in zip_longest(built, built[1:]):
        if first.prepares and (then is None or then.attaches):
            raise _error(
                text,
                f"{first.name} stores no weights; put a quantizer after it: {first.name} + rtn-w4-g128",
            )
    for first, then in pairwise(built[1:]):  # a compensator that comes first says itself that nothing is quantized
        if first.attaches == "compensator" and not then.attaches:
            raise _error(
                text,
                f"{then.name} after {first.name} is refused; a compensator corrects what quantizers before it left",
            )
    return Recipe(built)


def with_options(text: str, more: Mapping[str, Mapping[str, Any]]) -> str:
    """The recipe with further options for the steps of a given name, except where its text gives them.

    Raises:
        UserError: as `parse`, or an option that its step does not have.
    """
    key = (str(text), repr(more), *METHODS.items(), *BASELINES.items())
    if key not in _optioned:  # asked for by every change of a scale, thousands of times a table
        steps = []
        for name, values in _read(str(text)):
            further = more.get(name, {})
            for option in further:
                try:
                    check_option(name, option, option, STEPS[name].Config)
                except ValueError as error:
                    raise _error(text, error) from None
            steps.append(_build(name, dict(further) | values, str(text)))
        _optioned[key] = " + ".join(_spell(step, step.given) for step in steps) or "fp16"
    return _optioned[key]


def with_seed(recipe: Recipe, seed: int) -> Recipe:
    """The recipe with `seed` in every step that has a field `seed` which its text does not give; 0 changes nothing."""
    if seed == 0:
        return recipe
    if seed not in recipe._by_seed:
        steps = []
        for step in recipe.steps:
            if hasattr(step.config, "seed") and "seed" not in step.given:
                config = dataclasses.replace(step.config, seed=seed)
                step = dataclasses.replace(step, config=config, given=step.given | {"seed"})
            steps.append(step)
        recipe._by_seed[seed] = Recipe(tuple(steps))
    return recipe._by_seed[seed]


# --- running ----------------------------------------------------------------------------------------------------------


def on_device(steps: tuple[Step, ...], device: str) -> tuple[Step, ...]:
    """The steps as they run on a class of device: on a CPU whatever is trained computes in float32.

    There bfloat16 takes 7.5 times as long. It is no part of the recipe's identity, which is the same on every device;
    `computed_in` is kept with the environment of a result.
    """
    return tuple(_in_float32(step) if device == "cpu" else step for step in steps)


def _in_float32(step: Step) -> Step:
    if not hasattr(step.config, "compute"):
        return step
    return dataclasses.replace(step, config=dataclasses.replace(step.config, compute="float32"))


def computed_in(steps: tuple[Step, ...], device: str) -> dict[str, str]:
    """The dtype that each trained step computes in on a class of device, by the step's name."""
    run = on_device(steps, device)
    return {step.name: step.config.compute for step in run if hasattr(step.config, "compute")}


# --- reading ----------------------------------------------------------------------------------------------------------


def _read(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The name of each step and the values that the text gives, not yet checked for their types."""
    steps = []
    try:
        parts = names(text)
        if parts == [("fp16", [])] and text.strip() == "fp16":
            return []
        for name, words in parts:
            if name == "fp16":
                raise ValueError("fp16 is full precision, alone and without options")
            if name not in STEPS:
                raise ValueError(unknown("step", cut(name), [*STEPS, "fp16"]))
            steps.append((name, options(name, words, STEPS[name].Config)))
    except ValueError as error:
        raise _error(text, error) from None
    return steps


def _build(name: str, values: dict[str, Any], text: str) -> Step:
    """The step with its config checked."""
    try:
        config = strict.build(STEPS[name].Config, values, "")
    except UserError as error:
        raise _error(text, str(error).removeprefix(": ")) from None
    return Step(name, STEPS[name], config, frozenset(values))


def _error(text: str, why: object) -> UserError:
    return UserError(f"recipe {cut(text)!r}: {cut(str(why), 400)}")


# --- spelling ---------------------------------------------------------------------------------------------------------


def _fields(config: Any) -> dict[str, Any]:
    """Every field of a config as JSON has it."""
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config) if f.init}


def _declared(step: Step) -> dict[str, Any]:
    """The fields of a step that are part of its identity."""
    later = getattr(step.module, "LATER", {})
    declared = {}
    for name, value in _fields(step.config).items():
        if name not in later or value != later[name]:
            declared[name] = value
    return declared


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _fields(value)
    if isinstance(value, Mapping):
        return {key: _plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value + 0.0 if isinstance(value, float) else value  # -0.0 equals 0.0 and has its name


def _spell(step: Step, always: frozenset[str] = frozenset()) -> str:
    """The canonical text of a step; `always` are fields to write even where they are the default."""
    values = _fields(step.config)
    spelled = {}
    for f in dataclasses.fields(step.config):
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        keep = f.name in ALWAYS or f.name in always or default is dataclasses.MISSING
        if f.init and (keep or json.dumps(values[f.name]) != json.dumps(_plain(default))):
            spelled[f.name] = values[f.name]
    words = [_word(name, value, values, dash=True) for name, value in spelled.items()]
    if None not in words:
        return "-".join([step.name, *words])
    return f"{step.name}({', '.join(_word(name, value, values, dash=False) for name, value in spelled.items())})"


def _word(name: str, value: Any, fields: Mapping[str, Any], dash: bool) -> str | None:
    """`pc`, `g128` or `key=value`, in the call form `pc` or `g=128`; None where a word between dashes cannot say it."""
    for word, (key, meant) in WORDS.items():
        if key == name and value is meant and word not in fields:
            return word
    if value is True:
        return name
    short = next((short for short, key in SHORT.items() if key == name and short not in fields), None)
    text = write_value(value)
    if not dash:
        return f"{short or name}={text}"
    if short and type(value) is int and 0 <= value < 10**9 and f"{short}{value}" not in fields:
        return f"{short}{value}"
    if value is None or isinstance(value, list | dict) or (isinstance(value, str) and re.search(r"[^\w.]", text)):
        return None
    return f"{name}={text}"
