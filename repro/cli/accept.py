"""Take a built table's measurements into results/, recomputed and checked."""

import argparse
import os
from pathlib import Path

from repro.files import regular


def options(parser: argparse.ArgumentParser) -> None:
    """What is accepted."""
    parser.add_argument("file", type=Path)


def run(args: argparse.Namespace) -> None:
    """Take measurements into results/."""
    from repro.bench import kernel_rows
    from repro.record import accept

    regular(args.file)
    take = kernel_rows.accept if kernel_rows.is_kernel_rows(args.file) else accept.accept
    for file, count in take(args.file).items():
        print(f"{count} rows into {os.path.relpath(file)}")
