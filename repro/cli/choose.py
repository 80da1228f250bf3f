"""Select the best rate of every method of a sweep in its spec; extend a list whose best is at an end."""

import argparse
from collections.abc import Mapping

from repro.cli import options as common
from repro.specs import names


def options(parser: argparse.ArgumentParser) -> None:
    """Which sweep, and whose measurements."""
    common.add_scale(parser)
    parser.add_argument("sweep", help="such as bitbybit/rates")
    about = "with --built: the device it was run on, where the scale leaves it open"
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help=about)
    parser.add_argument("--built", action="store_true", help="use what was run here instead of accepted results")


def run(args: argparse.Namespace) -> int:
    """Rewrite the spec; 1 where rows are new or not measured yet, so that it is run and chosen from again."""
    name = names.canonical(args.sweep)
    from repro.results import choose
    from repro.specs import tables

    flow = common.workflow(args, stored=False if args.built else None)
    if args.built and flow.scale.device == "any":
        flow.scale = flow.scale.on(args.device)
    paper, number = tables.split(name)
    rates = choose.sweep(flow, paper, number)
    chosen = choose.choices(rates)
    for method, values in rates.items():
        choice = f"x {chosen[method]:g}" if method in chosen else "no choice yet"
        print(f"{method}: {choice} ({_listed(values)})")
    added_rows = choose.rewrite(tables.path_of(paper, number), rates)
    print(*(f"new: {row}" for row in added_rows), sep="\n")
    return 0 if len(chosen) == len(rates) else 1


def _listed(values: Mapping[float, float | None]) -> str:
    """What was measured at each multiple of a method's rate; `-` where it is not measured yet."""
    listed = []
    for multiple, value in values.items():
        measured = "-" if value is None else f"{value:.4g}"
        listed.append(f"x {multiple:g}: {measured}")
    return ", ".join(listed)
