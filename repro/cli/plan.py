"""Show jobs, minutes, downloads and disk of a target, without running it."""

import argparse
import itertools

from repro.cli import options as common
from repro.specs import names


def options(parser: argparse.ArgumentParser) -> None:
    """Targets and a scale."""
    common.add_scale(parser)
    parser.add_argument("targets", nargs="+")


def run(args: argparse.Namespace) -> None:
    """Say what a target would cost."""
    whole = "all" in args.targets
    everything = [*names.tables(), *names.OWN, *names.figures()]
    wanted = everything if whole else [names.canonical(target) for target in args.targets]
    from repro.make import plan

    flow = common.workflow(args, stored=False)
    files = [f"figures/{name}.svg" if names.is_figure(name) else f"tables/{name}.tex" for name in wanted]
    cells = list(itertools.chain.from_iterable(map(flow.table_cells, wanted)))
    print(plan.plan(flow, ["all"] if whole else files, cells))
