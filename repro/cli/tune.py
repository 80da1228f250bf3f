"""Sweep a kernel's launch configurations on this machine's GPU and store the fastest."""

import argparse
import os


def options(parser: argparse.ArgumentParser) -> None:
    """The kernel."""
    parser.add_argument("kernel")


def run(args: argparse.Namespace) -> None:
    """Sweep a kernel's launch configurations."""
    from repro.bench.tune import tune

    print(os.path.relpath(tune(args.kernel)))
