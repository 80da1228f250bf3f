"""Remove accepted results that no table, figure or verdict is made of any more."""

import argparse

from repro.cli import options as common
from repro.core.errors import UserError


def options(parser: argparse.ArgumentParser) -> None:
    """A scale, and whether results/ is changed."""
    common.add_scale(parser)
    parser.add_argument("--dry-run", action="store_true", help="list them and remove nothing")


def run(args: argparse.Namespace) -> None:
    """Name the unused rows, each with the reason, and remove them."""
    if args.config or args.configfile:
        raise UserError("prune: results are stored by the name of their scale; give --scale alone")
    from repro.verdicts import prune

    rows = prune.unused(common.workflow(args, stored=True).scale.name)
    for row, reason in rows.items():
        print(f"{row.where_stored}, measured on {row.device}: {reason}")
    if not rows:
        print("every row is used")
    elif args.dry_run:
        print(f"{len(rows)} rows are not used; results/ is unchanged")
    else:
        prune.remove(rows)
        print(f"{len(rows)} rows are not used and were removed")
