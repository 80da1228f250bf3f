"""Replay a few recorded cells whose code has changed; byte-equal ones carry their group forward."""

import argparse

from repro.cli import options as common


def options(parser: argparse.ArgumentParser) -> None:
    """How many, and which."""
    parser.add_argument("--cells", type=common.number(1), default=3, help="cells replayed per group; default 3")
    parser.add_argument("--scale", help="only results of this scale")
    about = "workers; default by device"
    parser.add_argument("--side-by-side", type=common.number(0), default=0, metavar="N", help=about)


def run(args: argparse.Namespace) -> int:
    """Replay a few cells of every group whose code has changed."""
    from repro.record import attest
    from repro.spec import scale as scales

    if args.scale is not None:
        scales.file_of(args.scale)
    return attest.attest(args.cells, args.scale, args.side_by_side)
