"""Measure a model under a recipe: a verb for each metric, with the options of its specs."""

import argparse
import ast
import dataclasses
import typing
from pathlib import Path
from typing import Any

from repro.cli import options as common
from repro.core.errors import UserError
from repro.papers.cell import Cell


def options(parser: argparse.ArgumentParser, path: Path) -> None:
    """The model, and an option for each field of a metric.

    Args:
        path: the metric's module, which is read without importing it.
    """
    common.add_target(parser)
    for field in params_fields(path):
        how: dict = {"required": field.required}
        if typing.get_origin(field.type) is tuple:
            how["nargs"] = "+"
        elif typing.get_origin(field.type) is typing.Literal:
            how["choices"] = typing.get_args(field.type)
        elif field.type is bool:
            how = {"action": "store_true", "default": None}
        elif field.type in (int, float):
            how["type"] = common.number(0, field.type)
        parser.add_argument(f"--{field.name}", **how)


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a metric; its type is str, int, float, bool, a Literal or a tuple."""

    name: str
    type: Any
    required: bool


def params_fields(path: Path) -> list[Field]:
    """The fields of the metric in a module, read from its source: importing it would import torch."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    (metric,) = [node for node in classes if {ast.unparse(base) for base in node.bases} & {"Metric", "Accuracy"}]
    fields = []
    for statement in metric.body:
        if isinstance(statement, ast.AnnAssign):
            annotation = compile(ast.Expression(statement.annotation), str(path), "eval")
            kind = eval(annotation, {"Literal": typing.Literal})  # noqa: S307  # our own source
            fields.append(Field(statement.target.id, kind, required=statement.value is None))
    return fields


def run(args: argparse.Namespace, kind: str) -> None:
    """Measure; print the texts or tasks and, in the last line, the value with its interval.

    Raises:
        UserError: the scale has no protocol for the metric, or the metric has no value for the recipe.
    """
    from repro.metrics import KINDS
    from repro.results import stored_rows

    metric = KINDS[kind]
    options_of_metric = {field.name: getattr(args, field.name) for field in dataclasses.fields(metric)}
    params = metric(**{name: value for name, value in options_of_metric.items() if value is not None})
    flow = _of_metric(common.workflow(args, stored=False), kind, params)
    target = common.target(args, flow)
    nowhere = Cell(paper="", kind="", number="", row="", col="", model=target.model, metric="")
    facts = {"measure": kind, "params": params, "recipe": target.text, "stand_in": target.model, "seeds": (args.seed,)}
    cell = dataclasses.replace(nowhere, **facts)
    if why := params.lacking():
        raise UserError(why)
    if not flow.jobs(cell):
        raise UserError(
            f"scale {flow.scale.name} has no protocol for {kind}; add the key {kind!r}, "
            "or choose another scale with --scale"
        )
    common.run_now(stored_rows.jobs(flow, cell))
    quantity = flow.quantity(cell)
    if quantity is None:
        raise UserError(f"{target.label}: its recipe gives no value")
    interval = quantity.interval()
    if facts := [*_observed_on(quantity, interval.n), *_against_full(flow, cell, quantity)]:
        print("; ".join(facts))
    print(f"{interval.value:.7g}{_ends(interval)} {params.unit}")


def _of_metric(flow: Any, kind: str, params: Any) -> Any:
    """The workflow whose scale measures nothing but a metric of a kind."""
    from repro.workflow.workflow import Workflow

    protocol = flow.scale.protocols.get(kind)
    if protocol is None:
        return flow
    protocols = {**flow.scale.protocols, kind: params.only(protocol)}
    return Workflow(dataclasses.replace(flow.scale, protocols=protocols), stored=False)


def _ends(interval: Any) -> str:
    return f" [{interval.lo:.7g}, {interval.hi:.7g}]" if interval.lo is not None else ""


def _observed_on(quantity: Any, n: int) -> list[str]:
    """The texts and tasks that a value was measured on, with the number of windows or items."""
    series = []
    for seed in quantity.seeds:
        series += [observed for observed in seed.values() if observed.group]
    groups = dict.fromkeys(observed.group for observed in series)
    return [f"{n} {series[0].axis} of {', '.join(groups)}"] if series else []


def _against_full(flow: Any, cell: Cell, quantity: Any) -> list[str]:
    """The ratio of a compressed model's perplexity to full precision's on the same windows, which is measured too."""
    from repro.results import stored_rows
    from repro.stats.quantity import compose

    full = flow.full_precision(cell)
    if cell.measure != "perplexity" or cell.recipe == full.recipe or not cell.params.against:
        return []
    common.run_now(stored_rows.jobs(flow, full))
    reference = flow.quantity(full)
    if reference is None:
        return []
    ratio = compose(cell.params.against, {"q": quantity, "f": reference}).interval()
    ends = f" [{ratio.lo:.3f}, {ratio.hi:.3f}]" if ratio.lo is not None else ""
    return [f"×{ratio.value:.3f}{ends} of full precision's {reference.interval().value:.7g}"]
