"""Names of precision schedules, and the recipes of the weight copies that they need.

    flexquant                                   the paper's defaults
    flexquant(threshold=2.0, layers=4)          fields of `repro.methods.flexquant.config.Config`

A recipe names the quantizer of the copies at any width; full precision is the copy of 16 bits.
"""

import dataclasses
from dataclasses import fields

from repro.core.errors import UserError
from repro.methods.flexquant.config import Config
from repro.recipes.recipe import Recipe, parse
from repro.recipes.recipe_text import read_one, write_value

DEFAULT = "gptq-w4-g128"  # section 5.1: GPTQ; groups of 128, AutoGPTQ's default, are our choice


def read(text: str) -> Config:
    """The settings that a text names.

    Raises:
        UserError: another method, an unknown option, or a value that it cannot have.
    """
    return read_one(text, {"flexquant": Config}, "precision")


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
        f"{setting.name}={write_value(getattr(config, setting.name))}"
        for setting in fields(Config)
        if getattr(config, setting.name) != getattr(plain, setting.name)
    ]
    return f"flexquant({', '.join(words)})" if words else "flexquant"
