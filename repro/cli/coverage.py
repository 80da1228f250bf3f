"""Show measured and printed cells of every table and data figure."""

import argparse

from repro.cli import options as common


def options(parser: argparse.ArgumentParser) -> None:
    """A scale, and the form."""
    common.add_scale(parser)
    parser.add_argument("--csv", action="store_true")


def run(args: argparse.Namespace) -> None:
    """Print how much of the papers is measured and stored."""
    from repro.verdicts import coverage

    lines = coverage.coverage(common.workflow(args, stored=True))
    print(coverage.to_csv(lines) if args.csv else coverage.to_text(lines), end="")
