"""Rebuild tables in a clean folder and compare with what is recorded."""

import argparse

from repro.cli import options as common


def options(parser: argparse.ArgumentParser) -> None:
    """Tables and a scale."""
    common.add_scale(parser)
    parser.add_argument("tables", nargs="*")


def run(args: argparse.Namespace) -> int:
    """Rebuild and compare."""
    from repro.record import verify

    return verify.verify(common.workflow(args), args.tables)
