"""Write a table or figure from what is built here, without Snakemake."""

import argparse

from repro.cli import options as common
from repro.specs import names


def options(parser: argparse.ArgumentParser) -> None:
    """Which one."""
    common.add_scale(parser)
    about = "with --built: the device it was run on, where the scale leaves it open"
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help=about)
    parser.add_argument("table")
    about = (
        "prefer what was run here on all windows and seeds, also for a GPU that is not here, so that it can be accepted"
    )
    parser.add_argument("--built", action="store_true", help=about)


def run(args: argparse.Namespace) -> None:
    """Write a table or figure from what is built here, also for a device that is not here."""
    name = names.canonical(args.table)
    if names.is_figure(name):
        from repro.render import figure_files as writer

        folder, endings = "figures", names.DRAWN
    else:
        from repro.render import table_files as writer

        folder = "tables"
        endings = (".tex", ".csv", ".md")

    flow = common.workflow(args, stored=False if args.built else None)
    if args.built and flow.scale.device == "any":
        flow.scale = flow.scale.on(args.device)
    writer.build(flow, name)
    print("written:", *(f"{folder}/{name}{ending}" for ending in endings))
