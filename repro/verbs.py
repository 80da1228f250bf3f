"""What each verb of the command line does: unpack its options, call the module that does the work."""

import dataclasses
import json
import os
import shutil
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from repro import build, models, papers
from repro.bench import kernel_rows
from repro.cells import KINDS
from repro.errors import UserError, shortened
from repro.files import atomic, write_text
from repro.jobs import compress as compression
from repro.jobs import own_text, runner
from repro.jobs import plan as plans
from repro.jobs.job import Job, distinct
from repro.jobs.target import Target
from repro.jobs.workers import pool
from repro.judge import coverage as covered
from repro.record import accept as acceptance
from repro.record import attest as attestation
from repro.record import measure as measurements
from repro.record import verify as verification
from repro.spec import figures, recipe, tables
from repro.spec import scale as scales
from repro.spec.cell import Cell, table_name
from repro.spec.workflow import OWN, Workflow, canonical
from repro.strict import parse_yaml


def _flow(args: Namespace, recorded: bool | None = None) -> Workflow:
    given = {}
    for word in args.config or ():
        key, sign, value = word.partition("=")
        if not sign:
            raise UserError(f"--config {shortened(word)}: write KEY=VALUE, such as threads=2")
        given[key] = parse_yaml(value, f"--config {shortened(key)}")
    return Workflow(scales.load(given, args.scale, args.configfile), recorded)


def make(args: Namespace) -> int:
    """Build targets, print the tables among them, then the paths of each paper's own Table 1."""
    _flow(args, recorded=True)  # what is wrong with `--config` is said before Snakemake starts
    return build.build(args.targets, args.cores, args.scale, args.configfile, args.config or ())


def show(args: Namespace) -> None:
    """Print a built table."""
    build.show(args.table)


def listed(args: Namespace) -> None:
    """Print what can be built: tables and figures with a spec, scales, recipes' steps, models, kinds of cell."""
    rows = {
        "tables": [*(table_name(p, "table", n) for p, n in tables.specified()), *OWN],
        "figures": figures.names(),
        "pages": [f"docs/{paper}.md" for paper in tables.pages()],
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
    jobs, turns = [], {}
    for turn, target in enumerate(args.targets):
        found = distinct(_jobs_of(args, target))  # a file may name results alone, and their needs have its turn
        turns = dict.fromkeys((job.id for job in found), turn) | turns
        jobs += found
    jobs = distinct(jobs)
    if args.save is not None:
        write_text(args.save, json.dumps([job.to_json() for job in jobs]) + "\n")
        print(f"{len(jobs)} jobs in {args.save}; python -m repro run {args.save.name} runs them anywhere")
        return 0
    if args.dry_run:
        print("\n".join(f"{'built' if runner.done(job) else 'to do'}  {job.id}" for job in jobs))
        return 0
    if any(target.endswith(".json") for target in args.targets):
        runner.check_here(jobs)
    return 1 if pool.run_all(jobs, args.side_by_side, args.gpus, args.minutes, turns) else 0


def _jobs_of(args: Namespace, target: str) -> list[Job]:
    """The jobs of a table, figure or job file."""
    if target.endswith(".json"):
        return runner.from_file(Path(target))
    flow = _flow(args, recorded=False)
    cells = flow.table_cells(canonical(target))
    return measurements.missing(flow, cells) if args.missing else flow.every_job(cells, args.recorded)


def _target(args: Namespace, flow: Workflow) -> Target:
    model, text = own_text.opened(args.model, args.recipe)
    models.folder(model)
    return Target(flow.scale, model, recipe.parse(text).name, args.seed)


def compress(args: Namespace) -> None:
    """A model under a recipe, with the scale's calibration text or one of the user's own."""
    target = _target(args, _flow(args, recorded=False))
    if args.text is not None:
        if args.out is None or args.out.suffix == ".safetensors":
            raise UserError("--text: name a folder for the result as well, --out FOLDER")
        own_text.compress(target, own_text.Text(args.text, args.length), args.out, args.resume)
        print(args.out)
        return
    if args.resume or args.length:
        raise UserError("--resume and --length go with --text FILE")
    job = compression.job(target)
    if args.out is not None and args.out.suffix != ".safetensors":
        raise UserError(f"--out {args.out}: a compressed model is a .safetensors file")
    _run_now([job])
    made = job.folder / compression.OUTPUTS[0]
    if args.out is not None:
        with atomic(args.out) as temporary:
            shutil.copyfile(made, temporary)
    print(args.out or made)


def export(args: Namespace) -> None:
    """A model as a file of another program."""
    from repro.export import export as work  # Transformers takes seconds

    print(work(args.model, args.recipe, args.gguf, args.check))


def generate(args: Namespace) -> None:
    """Stream a model's text, then one line of numbers."""
    from repro.engine import Engine  # Transformers takes seconds
    from repro.engine.core import needs_weights

    needs_weights(args.model)  # a shape's would take minutes to make
    if args.prompt is not None and args.file is not None:
        raise UserError("a prompt and --file: give one of them")
    try:
        given = sys.stdin if args.file is None else args.file.open(encoding="utf-8")
        text = given.read().removesuffix("\n") if args.prompt is None else args.prompt
    except (OSError, ValueError) as error:
        raise UserError(f"--file {args.file or '-'}: no text that can be read ({error})") from None
    where = {name: getattr(args, name) for name in ("context", "device", "dtype", "scale", "build")}
    engine = Engine.load(*own_text.opened(args.model, args.recipe), **where)
    how = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop")
    pieces = engine.generate(engine.chat(text) if args.chat else text, **{name: getattr(args, name) for name in how})
    for piece in pieces:
        print(piece, end="", flush=True)
    print(f"\n{engine.stats}")


def _run_now(jobs: list[Job]) -> None:
    pool.run_here(distinct(jobs))
    for need in distinct(jobs):
        runner.check(need.folder)


def measure(args: Namespace) -> None:
    """Measure a model under a recipe: one command a kind of cell, its options those that a spec may say."""
    flow = _flow(args, recorded=False)
    flow.scale = replace(flow.scale, recorded={}, reduced={})
    target = _target(args, flow)
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(KINDS[args.verb].Ask)}
    asked = KINDS[args.verb].Ask(**{name: value for name, value in given.items() if value is not None})
    cell = Cell(*[""] * 5, target.model, "", measure=args.verb, ask=asked, recipe=target.text, stand_in=target.model,
                seeds=(args.seed,))  # fmt: skip
    if not flow.jobs(cell):
        if why := getattr(KINDS[args.verb], "lacking", lambda ask: "")(asked):
            raise UserError(why)
        raise UserError(
            f"scale {flow.scale.name} has no protocol for {args.verb}; add the key {args.verb!r}, "
            "or choose another scale with --scale"
        )
    _run_now([job for each in flow.jobs(cell) for job in each.values()])
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
    name = canonical(args.table)
    (drawn if figures.is_figure(name) else written).build(flow, name)


def coverage(args: Namespace) -> None:
    """Print how much of the papers is measured: what this folder has built, and what is recorded."""
    lines = covered.coverage(_flow(args))
    print(covered.to_csv(lines) if args.csv else covered.to_text(lines), end="")


def accept(args: Namespace) -> None:
    """Take measurements into results/."""
    take = kernel_rows.accept if kernel_rows.is_kernel_rows(args.file) else acceptance.accept
    for file, count in take(args.file).items():
        print(f"{count} rows into {os.path.relpath(file)}")


def attest(args: Namespace) -> int:
    """Replay a few cells of every group whose code has changed."""
    if args.scale is not None:
        scales.file_of(args.scale)
    return attestation.attest(args.cells, args.scale, args.side_by_side)


def plan(args: Namespace) -> None:
    """Say what a target would cost."""
    flow = _flow(args, recorded=False)
    whole = "all" in args.targets
    names = [*tables.names(), *OWN, *figures.names()] if whole else [canonical(target) for target in args.targets]
    files = [f"figures/{name}.svg" if figures.is_figure(name) else f"tables/{name}.tex" for name in names]
    cells = [cell for name in names for cell in flow.table_cells(name)]
    print(plans.plan(flow, ["all"] if whole else files, cells))


def verify(args: Namespace) -> int:
    """Rebuild and compare."""
    return verification.verify(_flow(args), args.tables)


def pretrain(args: Namespace) -> None:
    """Train a pocket model anew."""
    from repro.train import pretrain as work

    log = work.command(args.model, args.corpus, args.out, args.device, args.stop_after, args.seed)
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
    """Time all kernels and peers; the options are named like the arguments."""
    from repro.bench.bench import bench as work

    work(**{name: value for name, value in vars(args).items() if name not in ("verb", "run")})


def tune(args: Namespace) -> None:
    """Sweep a kernel's launch configurations."""
    from repro.bench.commands.tune import tune as work

    print(os.path.relpath(work(args.kernel)))


def regress(args: Namespace) -> int:
    """Compare runs of benchmarks."""
    from repro.bench.commands.regress import regress as work

    code, lines = work(args.new, args.against, args.threshold, args.partial)
    print("\n".join(lines))
    return code
