"""Time all kernels and peers on this machine's GPU."""

import argparse
from pathlib import Path

from repro.cli import options as common
from repro.core.files import check_replaceable

COUNTS = [1, 4, 8, 16, 64, 256, 512, 1024, 2048]


def options(parser: argparse.ArgumentParser) -> None:
    """What to time, and for how long."""
    add = parser.add_argument
    add("--out", type=Path, default=Path("build/kernels.csv"), help="CSV, rewritten after every shape")
    add("--shapes", type=common.shape, nargs="+", default=[], metavar="NxK", help="default: those of the peers")
    add("--counts", type=common.number(1), nargs="+", default=COUNTS, metavar="M")
    add("--modes", nargs="+", default=["cold"], choices=["cold", "warm"])
    add("--only", nargs="+", default=[], metavar="WORD", help="only providers whose label contains one of these words")
    add("--rounds", type=common.number(1), default=25)
    about = "extra seconds per kernel for the energy reading (0 disables it)"
    add("--joule-seconds", type=common.number(0, float), default=0.05, help=about)
    add("--resume", action="store_true", help="keep rows that the file already has from the same commit")
    about = "processes that compile all kernels beforehand; 0: none"
    add("--workers", type=common.number(0), default=8, help=about)


def run(args: argparse.Namespace) -> None:
    """Time all kernels and peers; the options are named like the arguments."""
    from repro.bench.bench import bench
    from repro.store import kernel_rows

    check_replaceable(args.out, "--out", kernel_rows.is_kernel_rows)
    bench(**vars(args))
