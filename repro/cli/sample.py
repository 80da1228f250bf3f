"""Sample the embedded text from the largest pocket model and freeze it."""

import argparse


def options(parser: argparse.ArgumentParser) -> None:
    """Where it is computed."""
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])


def run(args: argparse.Namespace) -> None:
    """Sample and freeze the embedded text."""
    from repro.models.sampling import freeze_embedded

    freeze_embedded(args.device)
