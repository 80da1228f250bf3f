"""Rebuild stored cells in a clean folder, all or a sample of them, and compare with results/."""

import argparse

from repro.cli import options as common
from repro.core.errors import UserError


def options(parser: argparse.ArgumentParser) -> None:
    """Tables, a scale, and a draw."""
    common.add_scale(parser)
    parser.add_argument("tables", nargs="*", help="such as spear/table1; default: everything stored at this scale")
    draw = "rebuild N stored cells that this machine can rebuild, drawn at random, and compare them window by window"
    parser.add_argument("--sample", type=common.number(1), metavar="N", help=draw)
    parser.add_argument("--seed", type=common.number(0), default=0, metavar="S", help="seed of the sample (default 0)")
    minutes = "start no job after this many minutes, and compare what is rebuilt by then; 0: no limit"
    parser.add_argument("--minutes", type=common.number(0, float), default=0.0, metavar="M", help=minutes)


def run(args: argparse.Namespace) -> int:
    """Rebuild and compare; 1 where a cell differs."""
    if args.sample is None and (args.seed or args.minutes):
        raise UserError("verify: --seed and --minutes belong to a draw; add --sample N")
    from repro.results import verify

    sample = verify.Sample(args.sample, args.seed, args.minutes) if args.sample else None
    return verify.verify(common.workflow(args), args.tables, sample)
