"""Options that several verbs share, how they are parsed, and the workflow of the scale that they name."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from repro.core.errors import UserError, shortened


class Parser(argparse.ArgumentParser):
    """A parser whose error is one sentence, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a `UserError`."""
        raise UserError(f"{shortened(message, 300)}; {self.prog} --help lists the options")


def shape(text: str) -> tuple[int, int]:
    """`4096x14336` as (N, K)."""
    rows, _, columns = text.partition("x")
    if not (rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
        raise argparse.ArgumentTypeError(f"{shortened(text)!r} is no shape; write rows and columns as 4096x14336")
    return int(rows), int(columns)


def number(least: int, kind: type = int) -> Callable[[str], int | float]:
    """The `type=` of an option: a number of at least `least` and less than 2**31."""

    def read(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")
        if not least <= value < 2**31:  # also of NaN
            expected = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{shortened(text)!r} is not {expected} of {least} or more")
        return value

    return read


def add_scale(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a scale and override its keys."""
    parser.add_argument("--scale", help="config/<name>.yaml; default $SCALE, else pocket")
    parser.add_argument("--configfile", type=Path, help="a scale file instead of a name")
    parser.add_argument("--config", nargs="+", metavar="KEY=VALUE", help="override single keys of the scale")


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a model, a recipe and a scale."""
    add_scale(parser)
    parser.add_argument("model")
    parser.add_argument("--recipe", default="fp16", help="such as 'gptq-w4-g128' or 'rtn-w4-pc + spear'")
    parser.add_argument("--seed", type=number(0), default=0)


def workflow(args: argparse.Namespace, stored: bool | None = None) -> Any:
    """The `Workflow` of the scale that the options name.

    Raises:
        UserError: an unknown scale, key or value.
    """
    from repro.core.strict import parse_yaml
    from repro.specs import scale
    from repro.workflow.workflow import Workflow

    overrides = {}
    for word in args.config or ():
        key, sign, value = word.partition("=")
        if not sign:
            raise UserError(f"--config {shortened(word)}: write KEY=VALUE, such as threads=2")
        overrides[key] = parse_yaml(value, f"--config {shortened(key)}")
    return Workflow(scale.load(overrides, args.scale, args.configfile), stored)


def target(args: argparse.Namespace, flow: Any) -> Any:
    """The `Target` that the options name.

    Raises:
        UserError: an unknown model or recipe.
    """
    from repro import models
    from repro.jobs import compressed_folder
    from repro.jobs.target import Target
    from repro.recipes import recipe

    model, text = compressed_folder.opened(args.model, args.recipe)
    models.folder(model)
    return Target(flow.scale.here(), model, recipe.parse(text).name, args.seed)


def run_now(jobs: list[Any]) -> None:
    """Run jobs and the jobs that they need, in this process.

    Raises:
        NotMeasurable: one of them cannot be done.
    """
    from repro.store.job import distinct
    from repro.workflow import pool, runner

    pool.run_here(distinct(jobs))
    for need in distinct(jobs):
        runner.check(need.folder)
