"""Run the jobs of tables and figures side by side, without Snakemake; resumes."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from repro.cli import options as common
from repro.core.files import check_replaceable, write_text
from repro.specs import names


def options(parser: argparse.ArgumentParser) -> None:
    """What to run, on how many workers and GPUs, and for how long."""
    common.add_scale(parser)
    parser.add_argument("targets", nargs="+", help="spear/table1, spear/figure13, or a file of jobs")
    parser.add_argument("--side-by-side", type=common.number(1), default=1, metavar="N", help="worker processes")
    about = "number of GPUs for the workers, which share them by MPS where allowed"
    parser.add_argument("--gpus", type=common.number(0), default=0, help=about)
    about = "start no job after this many minutes; 0: no limit"
    parser.add_argument("--minutes", type=common.number(0, float), default=0.0, help=about)
    about = "only cells without an accepted result at this scale"
    parser.add_argument("--missing", action="store_true", help=about)
    parser.add_argument("--dry-run", action="store_true", help="print the jobs")
    about = "the device to run on, where the scale leaves it open; default this machine's, and cuda with --save"
    parser.add_argument("--device", choices=["cpu", "cuda"], help=about)
    about = "write the jobs to a file, for another machine"
    parser.add_argument("--save", type=Path, metavar="FILE", help=about)


def run(args: argparse.Namespace) -> int:
    """Run the jobs of tables and figures, or of job files, side by side without Snakemake."""
    targets = [target if _is_file(target) else names.canonical(target) for target in args.targets]
    from repro.store.job import distinct
    from repro.workflow import pool, runner

    jobs = []
    turn_by_id = {}
    for position, target in enumerate(targets):
        target_jobs = distinct(_jobs_of(args, target))  # a file may name results alone, and their needs have its turn
        turn_by_id = dict.fromkeys((job.id for job in target_jobs), position) | turn_by_id
        jobs += target_jobs
    jobs = distinct(jobs)
    if not jobs:
        print(f"no job to run for {', '.join(args.targets)}")
    if args.save is not None:
        check_replaceable(args.save, "--save", runner.is_file_of_jobs)
        write_text(args.save, json.dumps([job.to_json() for job in jobs]) + "\n")
        print(f"{len(jobs)} jobs in {args.save}; python -m repro run {args.save.name} runs them anywhere")
        return 0
    if args.dry_run:
        print("\n".join(f"{'built' if runner.done(job) else 'to do'}  {job.id}" for job in jobs))
        return 0
    if any(map(_is_file, targets)):
        runner.check_here(jobs)
    return 1 if pool.run_all(jobs, args.side_by_side, args.gpus, args.minutes, turn_by_id) else 0


def _is_file(target: str) -> bool:
    """Whether a target is a file of jobs."""
    return target.endswith(".json")


def _jobs_of(args: argparse.Namespace, target: str) -> list[Any]:
    """The jobs of a table, figure or job file."""
    from repro.metrics import metric_of
    from repro.results import measure
    from repro.workflow import runner

    if _is_file(target):
        return runner.from_file(Path(target))
    flow = common.workflow(args, stored=False)
    device = args.device or ("cuda" if args.save is not None else None)
    if device and flow.scale.device == "any":
        flow.scale = flow.scale.on(device)
    cells = flow.table_cells(target)
    for why in sorted({metric_of(cell).lacking() for cell in cells} - {""}):
        print(f"{target}: not run: {why}", file=sys.stderr)
    return measure.missing(flow, cells) if args.missing else flow.every_job(cells)
