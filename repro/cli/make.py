"""Build targets and print the tables among them."""

import argparse
import os

from repro.cli import options as common
from repro.cli import show
from repro.specs import names


def options(parser: argparse.ArgumentParser) -> None:
    """Targets and a scale."""
    common.add_scale(parser)
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--cores", type=common.number(1), default=os.cpu_count() or 1)


def run(args: argparse.Namespace) -> int:
    """Build targets, print the tables among them, then the paths of each paper's own Table 1."""
    targets = list(dict.fromkeys(map(names.page_with, args.targets)))
    names.check_targets(targets)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read with torch: a waiting thread leaves its core to others
    from repro.make import build

    code = build.build(targets, args.cores, common.workflow(args, stored=True).scale)
    if code:
        return code
    for target in targets:
        if target.startswith("tables/"):
            show.show(target)
        elif target != "all":
            print(f"written: {'  '.join(written(target))}")
    return 0


def written(target: str) -> list[str]:
    """The files that are built with a figure or a page."""
    stem, _, _ = target.rpartition(".")
    if target.startswith("figures/"):
        return [f"{stem}{form}" for form in names.DRAWN]
    return [target, f"{stem}/"]
