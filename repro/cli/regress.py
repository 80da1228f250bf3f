"""Check whether a kernel became slower. Exit 1: yes, in two runs; 3: in one, measure again."""

import argparse
from pathlib import Path

from repro.cli import options as common


def options(parser: argparse.ArgumentParser) -> None:
    """The runs that are compared."""
    add = parser.add_argument
    add("new", type=Path, nargs="+", help="pytest --benchmark-json of a run, and of a second one")
    add("--against", type=Path, nargs="+", required=True, help="runs of the baseline, preferably three")
    about = "relative slowdown that is ignored; default 0.03"
    add("--threshold", type=common.number(0, float), default=0.03, help=about)
    add("--partial", action="store_true", help="allow new runs without some of the kernels")


def run(args: argparse.Namespace) -> int:
    """Compare runs of benchmarks."""
    from repro.bench.regress import regress

    code, lines = regress(args.new, args.against, args.threshold, args.partial)
    print("\n".join(lines))
    return code
