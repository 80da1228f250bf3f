"""Measure a model under a recipe: a verb for each kind of cell, its options those that a spec may say."""

import argparse
import dataclasses
import typing

from repro.cells import KINDS
from repro.cli import options as common
from repro.errors import UserError
from repro.spec.cell import Cell


def options(parser: argparse.ArgumentParser, kind: str) -> None:
    """The model, and the fields of what the kind is asked for."""
    common.add_target(parser)
    ask = KINDS[kind].Ask
    hints = typing.get_type_hints(ask)
    for field in dataclasses.fields(ask):
        how: dict = {"required": field.default is dataclasses.MISSING}
        hint = hints[field.name]
        if typing.get_origin(hint) is tuple:
            how |= {"nargs": "+"}
        elif typing.get_origin(hint) is typing.Literal:
            how |= {"choices": typing.get_args(hint)}
        elif hint is bool:
            how = {"action": "store_true", "default": None}
        elif hint is int:
            how["type"] = common.number(0)
        parser.add_argument(f"--{field.name}", **how)


def run(args: argparse.Namespace, kind: str) -> None:
    """Measure, and print the value with its interval.

    Raises:
        UserError: a scale without a protocol for the kind, or a recipe that has nothing to show there.
    """
    module = KINDS[kind]
    flow = common.workflow(args, recorded=False)
    flow.scale = dataclasses.replace(flow.scale, recorded={}, reduced={})
    target = common.target(args, flow)
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(module.Ask)}
    asked = module.Ask(**{name: value for name, value in given.items() if value is not None})
    nowhere = Cell(paper="", kind="", number="", row="", col="", model=target.model, metric="")
    asks = {"measure": kind, "ask": asked, "recipe": target.text, "stand_in": target.model, "seeds": (args.seed,)}
    cell = dataclasses.replace(nowhere, **asks)
    if not flow.jobs(cell):
        if why := getattr(module, "lacking", lambda ask: "")(asked):
            raise UserError(why)
        raise UserError(
            f"scale {flow.scale.name} has no protocol for {kind}; add the key {kind!r}, "
            "or choose another scale with --scale"
        )
    common.run_now([job for each in flow.jobs(cell) for job in each.values()])
    quantity = flow.quantity(cell)
    if quantity is None:
        raise UserError(f"{target.label}: its recipe has nothing to show there")
    found = quantity.interval()
    ends = f" [{found.lo:.7g}, {found.hi:.7g}]" if found.lo is not None else ""
    print(f"{found.value:.7g}{ends} {asked.unit}")
