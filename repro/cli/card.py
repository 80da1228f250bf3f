"""Measure the pocket models and write their card, repro/pocket/README.md."""

import argparse


def options(parser: argparse.ArgumentParser) -> None:
    """The device."""
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])


def run(args: argparse.Namespace) -> None:
    """Measure the pocket models and write their card."""
    from repro.render.card import card

    card(device=args.device)
