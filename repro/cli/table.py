"""Write a table or figure from what is built here, without Snakemake."""

import argparse

from repro.cli import options as common
from repro.spec import names


def options(parser: argparse.ArgumentParser) -> None:
    """Which one."""
    common.add_scale(parser)
    parser.add_argument("table")
    parser.add_argument("--built", action="store_true", help="also for a device that is not here")


def run(args: argparse.Namespace) -> None:
    """Write a table or figure from what is built here, also for a device that is not here."""
    name = names.canonical(args.table)
    if names.is_figure(name):
        from repro.render import figures as writer

        folder, endings = "figures", names.DRAWN
    else:
        from repro.render import tables as writer

        folder, endings = "tables", (".tex", ".csv", ".md")

    flow = common.workflow(args, recorded=False if args.built else None)
    flow.built = args.built
    writer.build(flow, name)
    print("written:", *(f"{folder}/{name}{ending}" for ending in endings))
