"""Sweep a kernel's launch configurations on this machine's GPU and store the fastest."""

import argparse
import os

from repro.cli import options as common


def options(parser: argparse.ArgumentParser) -> None:
    """The kernel, and layers."""
    parser.add_argument("kernel")
    about = "layers, among those that are swept; default: all"
    parser.add_argument("--shapes", type=common.shape, nargs="+", default=[], metavar="NxK", help=about)


def run(args: argparse.Namespace) -> None:
    """Sweep a kernel's launch configurations."""
    from repro.bench.tune import tune

    print(os.path.relpath(tune(args.kernel, args.shapes)))
