"""Accept a built table or figure into results/, recomputed and checked."""

import argparse
import os
from pathlib import Path
from typing import Any

from repro.cli import options as common
from repro.core.errors import UserError
from repro.core.files import regular
from repro.specs import names


def options(parser: argparse.ArgumentParser) -> None:
    """The file or figure to accept."""
    parser.add_argument("file", type=Path, help="a table's .csv, kernel times, or a figure such as spear/figure13")
    parser.add_argument("--scale", help="of a figure; a table's .csv says it (default $SCALE, else pocket)")
    about = "of a figure: the device it was run on, where the scale leaves it open (default cuda)"
    parser.add_argument("--device", choices=["cpu", "cuda"], help=about)


def run(args: argparse.Namespace) -> None:
    """Take measurements into results/."""
    not_a_table = args.file.parts[:1] == ("figures",) or not os.path.isfile(args.file)
    figure = not_a_table and names.is_figure(os.path.splitext(args.file)[0])
    if not figure and (args.scale or args.device):
        raise UserError(f"{args.file}: --scale and --device belong to a figure; a table's .csv says them itself")
    from repro.results import accept

    if figure:
        written = accept.accept_figure(_flow(args), names.canonical(str(args.file)))
    else:
        written = accept.accept(regular(args.file))
    for file, count in written.items():
        print(f"{count} rows into {os.path.relpath(file)}")


def _flow(args: argparse.Namespace) -> Any:
    """The workflow that a figure was measured with."""
    flow = common.workflow(argparse.Namespace(config=(), scale=args.scale, configfile=None), stored=False)
    if flow.scale.device == "any":
        flow.scale = flow.scale.on(args.device or "cuda")
    return flow
