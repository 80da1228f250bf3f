"""Names of precision schedules, and the recipes of the weight copies that they need.

    flexquant                                   the paper's defaults
    flexquant(threshold=2.0, layers=4)          fields of `repro.methods.flexquant.config.Config`
    flexquant=threshold=2.0,layers=4            the same, as a shell likes it

A recipe names the quantizer of the copies at any width; full precision is the copy of 16 bits.
"""

import dataclasses
import re
from dataclasses import fields

from repro.core.errors import UserError, unknown
from repro.core.strict import build
from repro.methods.flexquant.config import Config
from repro.recipes.recipe import Recipe, parse
from repro.recipes.recipe_text import read_value, split, write_value

DEFAULT = "gptq-w4-g128"  # section 5.1: GPTQ; groups of 128, AutoGPTQ's default, are our choice


def read(text: str) -> Config:
    """The settings that a text names.

    Raises:
        UserError: another method, an unknown option, or a value that it cannot have.
    """
    form = re.fullmatch(r"\s*([a-z]+)\s*(?:\((.*)\)|=(.*))?\s*", text, re.DOTALL)
    if form is None or form[1] != "flexquant":
        raise UserError(f"precision {text!r}: write flexquant, or flexquant(threshold=2.0, layers=4)")
    inside = form[2] if form[2] is not None else form[3]
    options = {}
    try:
        words = split(inside, ",") if inside and inside.strip() else []
        for word in words:
            name, equals, value = (part.strip() for part in word.partition("="))
            if name not in (known := [each.name for each in fields(Config)]):
                raise unknown("option of flexquant", name, known)
            if not equals:
                raise UserError(f"option {name!r} of flexquant needs a value: {name}=...")
            options[name] = read_value(value, name, "flexquant")
        return build(Config, options, f"precision {text!r}")
    except ValueError as error:
        raise UserError(f"precision {text!r}: {error}") from None


def recipe_at(text: str, bits: int) -> str:
    """The recipe that makes a copy at a width, from one that names the quantizer at any other.

    Raises:
        UserError: a recipe that is not one quantizer of weights, or a width that it does not make.
    """
    if bits == 16:
        return "fp16"
    steps = parse(text).steps
    if len(steps) != 1 or not hasattr(steps[0].config, "symmetric"):
        raise UserError(f"recipe {text!r}: name one quantizer of weights for the copies, such as {DEFAULT}")
    config = dataclasses.replace(steps[0].config, bits=bits)
    return Recipe((dataclasses.replace(steps[0], config=config),)).name


def write(config: Config) -> str:
    """The text that `read` reads as these settings: the fields that differ from their defaults."""
    plain = Config()
    words = [
        f"{each.name}={write_value(getattr(config, each.name))}"
        for each in fields(Config)
        if getattr(config, each.name) != getattr(plain, each.name)
    ]
    return f"flexquant({', '.join(words)})" if words else "flexquant"
