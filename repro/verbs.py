"""What each verb of the command line does: unpack its options, call the module that does the work."""

import dataclasses
import json
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from repro import build, models, papers
from repro.cells import KINDS
from repro.errors import UserError, shortened, unknown
from repro.files import atomic, write_text
from repro.jobs import compress as compression
from repro.jobs import pool, runner
from repro.jobs.job import Job, distinct
from repro.jobs.target import Target
from repro.spec import figures, recipe, tables
from repro.spec import scale as scales
from repro.spec.cell import Cell, table_name
from repro.spec.workflow import OWN, Workflow
from repro.strict import parse_yaml


def _scale(args: Namespace) -> scales.Scale:
    given = {}
    for word in args.config or ():
        key, sign, value = word.partition("=")
        if not sign:
            raise UserError(f"--config {shortened(word)}: write KEY=VALUE, such as threads=2")
        given[key] = parse_yaml(value, f"--config {shortened(key)}")
    return scales.load(given, args.scale, args.configfile)


def _flow(args: Namespace, recorded: bool | None = None) -> Workflow:
    return Workflow(_scale(args), recorded)


def _cells(flow: Workflow, name: str) -> list[Cell]:
    """The cells of a table or figure by the name that a user types."""
    text = name.removeprefix("tables/").removeprefix("figures/")
    if figures.is_figure(text):
        return flow.cells(*figures.split(text), "figure")
    return flow.table_cells(text if text in OWN else "/".join(tables.split(text)))


def make(args: Namespace) -> int:
    """Build targets, print the tables among them, then the paths of each paper's own Table 1."""
    _scale(args)  # what is wrong with `--config` is said before Snakemake starts
    return build.build(args.targets, args.cores, args.scale, args.configfile, args.config or ())


def show(args: Namespace) -> None:
    """Print a built table."""
    build.show(args.table)


def listed(args: Namespace) -> None:
    """Print what can be built: tables and figures with a spec, scales, recipes' steps, models, kinds of cell."""
    rows = {
        "tables": [f"{p}/table{n}" if n.isdecimal() else f"{p}/{n}" for p, n in tables.specified()] + list(OWN),
        "figures": figures.names(),
        "scales": scales.names(),
        "steps": sorted(recipe.STEPS),
        "models": models.pocket_names(),
        "kinds of cell": list(KINDS),
        "papers": list(papers.PAPERS),
    }
    for title, names in rows.items():
        print(f"{title:14} {', '.join(names)}")


def run(args: Namespace) -> int:
    """Run the jobs of tables and figures, or of job files, side by side without Snakemake."""
    jobs: list[Job] = []
    for target in args.targets:
        if target.endswith(".json"):
            jobs += runner.from_file(Path(target))
            continue
        flow = _flow(args, recorded=False)
        jobs += flow.every_job(_cells(flow, target), args.recorded)
    jobs = distinct(jobs)
    if args.save is not None:
        write_text(args.save, json.dumps([job.to_json() for job in jobs]) + "\n")
        print(f"{len(jobs)} jobs in {args.save}; python -m repro run {args.save.name} runs them anywhere")
        return 0
    if args.dry_run:
        print("\n".join(f"{'built' if runner.done(job) else 'to do'}  {job.id}" for job in jobs))
        return 0
    return 1 if pool.run_all(jobs, args.side_by_side, args.gpus, args.minutes) else 0


def _target(args: Namespace) -> Target:
    flow = _flow(args, recorded=False)
    models.folder(args.model)
    return Target(flow.scale, args.model, recipe.parse(args.recipe).name, args.seed)


def compress(args: Namespace) -> None:
    """A model under a recipe, with the scale's calibration text."""
    job = compression.job(_target(args))
    if args.out is not None and args.out.suffix != ".safetensors":
        raise UserError(f"--out {args.out}: a compressed model is a .safetensors file")
    _run_now(job)
    made = job.folder / compression.OUTPUTS[0]
    if args.out is not None:
        with atomic(args.out) as temporary:
            shutil.copyfile(made, temporary)
    print(args.out or made)


def _run_now(job: Job) -> None:
    pool.run_here(distinct([job]))
    for need in job.every():
        runner.check(need.folder)


def kind(args: Namespace) -> None:
    """Measure a model under a recipe: one command a kind of cell, its options those that a spec may say."""
    module, target = KINDS[args.verb], _target(args)
    names = [field.name for field in dataclasses.fields(module.Ask)]
    asked = module.Ask(**{name: getattr(args, name) for name in names if getattr(args, name) is not None})
    cell = Cell(
        "", "", "", "", "", args.model, "", measure=args.verb, ask=asked, recipe=target.text, stand_in=args.model
    )
    flow = _flow(args, recorded=False)
    flow.scale = replace(flow.scale, recorded={}, reduced={})
    cell = replace(cell, seeds=(args.seed,))
    if not flow.jobs(cell):
        raise UserError(
            f"scale {flow.scale.name} has no protocol for {args.verb}; add the key {args.verb!r}, "
            "or choose another scale with --scale"
        )
    for job in distinct([job for each in flow.jobs(cell) for job in each.values()]):
        _run_now(job)
    quantity = flow.quantity(cell)
    if quantity is None:
        raise UserError(f"{target.label}: its recipe has nothing to show there")
    found = quantity.interval()
    ends = f" [{found.lo:.7g}, {found.hi:.7g}]" if found.lo is not None else ""
    print(f"{found.value:.7g}{ends} {asked.unit}")


def table(args: Namespace) -> None:
    """Write a table or figure from what is built here, also for a device that is not here."""
    from repro.render import figures as drawn  # matplotlib takes a second
    from repro.render import tables as written

    flow = _flow(args, recorded=False if args.built else None)
    flow.built = args.built
    text = args.table.removeprefix("tables/").removeprefix("figures/")
    if figures.is_figure(text):
        drawn.build(flow, text)
        return
    name = text if text in OWN else "/".join(tables.split(text))
    written.build(flow, name)


def coverage(args: Namespace) -> None:
    """Print how much of the papers is measured: what this folder has built, and what is recorded."""
    from repro.judge import coverage as work

    lines = work.coverage(_flow(args))
    print(work.to_csv(lines) if args.csv else work.to_text(lines), end="")


def accept(args: Namespace) -> None:
    """Take measurements into results/."""
    from repro.bench import kernel_rows
    from repro.record import accept as work

    take = kernel_rows.accept if kernel_rows.is_kernel_rows(args.file) else work.accept
    for file, count in take(args.file).items():
        print(f"{count} rows into {os.path.relpath(file)}")


def attest(args: Namespace) -> int:
    """Replay a few cells of every group whose code has changed."""
    from repro.record import attest as work

    if args.scale is not None and args.scale not in scales.names():
        raise unknown("scale", args.scale, scales.names())
    return work.attest(args.cells, args.scale)


def plan(args: Namespace) -> None:
    """Say what a target would cost."""
    from repro.jobs.plan import plan as work

    flow = _flow(args, recorded=False)
    every = [*flow.names, *figures.names()]
    names = every if "all" in args.targets else [_name(target) for target in args.targets]
    files = [f"figures/{name}.svg" if figures.is_figure(name) else f"tables/{name}.tex" for name in names]
    cells = [cell for name in names for cell in _cells(flow, name)]
    print(work(flow, ["all"] if "all" in args.targets else files, cells))


def _name(target: str) -> str:
    """The name of a table or figure, such as `spear/table1`, from that of a file that is built or from `spear/1`."""
    stem = re.sub(r"^(tables|figures)/|\.(tex|csv|md|svg|pdf)$", "", target)
    if stem in OWN:
        return stem
    kind, split = ("figure", figures.split) if figures.is_figure(stem) else ("table", tables.split)
    paper, number = split(stem)
    return table_name(paper, kind, number)


def verify(args: Namespace) -> int:
    """Rebuild and compare."""
    from repro.record.verify import verify as work

    return work(_flow(args), args.tables)


def pretrain(args: Namespace) -> None:
    """Train a pocket model anew."""
    from repro.train import pretrain as work

    log = work.command(args.model, args.corpus, args.out, args.device, args.stop_after)
    print(json.dumps({key: log.get(key) for key in ("model", "step", "steps", "done", "tokens_per_s", "mfu")}))


def sample(args: Namespace) -> None:
    """Sample and freeze the embedded text."""
    from repro.models.sampling import freeze_embedded

    freeze_embedded(args.device)


def card(args: Namespace) -> None:
    """Measure the pocket models and write their card."""
    from repro.train.card import card as work

    work(device=args.device)


def bench(args: Namespace) -> None:
    """Time all kernels and peers."""
    from repro.bench.bench import bench as work

    how = (args.rounds, args.joule_seconds, args.resume, args.workers)
    work(args.out, args.shapes, args.counts, args.modes, args.only, *how)


def tune(args: Namespace) -> None:
    """Sweep a kernel's launch configurations."""
    from repro.bench.tune import tune as work

    print(os.path.relpath(work(args.kernel)))


def regress(args: Namespace) -> int:
    """Compare runs of benchmarks."""
    from repro.bench.regress import regress as work

    code, lines = work(args.new, args.against, args.threshold, args.partial)
    print("\n".join(lines))
    return code


VERBS: dict[str, Callable[[Namespace], Any]] = {
    f.__name__: f
    for f in (make, show, coverage, accept, attest, run, compress, table, plan, verify, pretrain, sample, card, bench,
              tune, regress)
} | {"list": listed} | {name: kind for name, module in KINDS.items() if hasattr(module, "run")}  # fmt: skip


def named(verb: str) -> Callable[[Namespace], Any]:
    """The function of a verb.

    Raises:
        UserError: there is no such verb.
    """
    if verb not in VERBS:
        raise unknown("verb", verb, VERBS)
    return VERBS[verb]
