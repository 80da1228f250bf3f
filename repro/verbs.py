"""What each verb of the command line does: unpack its options, call the room that does the work."""

import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from repro import papers
from repro.errors import UserError, unknown
from repro.strict import load_yaml


def _flow(args: Namespace):  # noqa: ANN202
    from repro.workflow import Workflow

    if args.configfile:
        config = load_yaml(args.configfile)
        if not isinstance(config, dict):
            raise UserError(f"{args.configfile}: not a profile; expected a mapping with keys of Profile")
        return Workflow(config)
    return Workflow(None, args.profile)


def _place(text: str) -> tuple[str, str]:
    """`spear/table1` or `spear/1` as paper and number."""
    paper, _, number = text.removesuffix(".tex").removeprefix("tables/").partition("/")
    if paper not in papers.PAPERS:
        raise unknown("table", text, [f"{p}/table{n}" for p in papers.PAPERS for n in papers.tables(p)])
    number = number.removeprefix("table")
    if number not in papers.tables(paper):
        raise unknown(f"table of {paper}", number, papers.tables(paper))
    return paper, number


def tokens(args: Namespace) -> None:
    """Rule `tokens`."""
    from repro.jobs.tokens import tokens as work

    work(args.corpus, args.model, args.out, args.hub)


def compress(args: Namespace) -> None:
    """Rule `compress`."""
    from repro.jobs.compress import compress as work

    where = (args.start, args.calibration, args.sequences, args.length, args.seed)
    work(args.model, args.recipe, args.out, *where, args.device, args.dtype, args.hub)


def perplexity(args: Namespace) -> None:
    """Rule `perplexity`."""
    from repro.jobs.perplexity import perplexity as work

    if len(args.tokens) != len(args.out):
        raise UserError(f"perplexity: {len(args.tokens)} files of tokens for {len(args.out)} outputs; give one each")
    texts = dict(zip(args.tokens, args.out))
    options = (args.length, args.windows, args.kl_windows, args.device, args.dtype, args.hub)
    work(args.model, texts, args.weights, *options, code=_code(args))


def zeroshot(args: Namespace) -> None:
    """Rule `zeroshot`."""
    from repro.jobs.zeroshot import zeroshot as work

    options = (args.limit, args.batch_size, args.device, args.dtype, args.hub)
    work(args.model, args.tasks, args.out, args.weights, *options, code=_code(args))


def study(args: Namespace) -> None:
    """Rule `study_part`."""
    from repro.jobs.study import study as work

    options = (args.length, args.windows, args.device, args.dtype, args.hub)
    work(args.model, args.weights, args.recipes, args.tokens, args.out, *options, code=_code(args))


def _code(args: Namespace) -> str:
    from repro.provenance import code_hash

    return code_hash([path.resolve() for path in args.code]) if args.code else ""


def table(args: Namespace) -> None:
    """Rules `table` and `study`."""
    from repro import spec
    from repro.jobs.tables import build_study, build_table

    flow, both = _flow(args), tuple(args.table.removeprefix("tables/").removesuffix(".tex").split("/"))
    flow.recorded = flow.recorded and not args.built
    if both in spec.studies():
        build_study(flow, *both, args.out)
    else:
        build_table(flow, *_place(args.table), args.out)


def headline(args: Namespace) -> None:
    """Rule `headline`."""
    from repro.jobs.tables import build_headline

    build_headline(_flow(args), args.out)


def leaderboard(args: Namespace) -> None:
    """Rule `leaderboard`."""
    from repro.jobs.tables import build_leaderboard

    build_leaderboard(_flow(args), args.out)


def audit(args: Namespace) -> None:
    """Rule `audit`."""
    from repro.jobs.tables import build_audit

    build_audit(args.out)


def make(args: Namespace) -> int:
    """Build targets, print the tables among them, then the paths of each paper's own Table 1."""
    from repro.build import build

    return build(args.targets, args.cores, args.profile, args.configfile)


def show(args: Namespace) -> None:
    """Print a built table."""
    from repro.build import show as work

    work(args.table)


def coverage(args: Namespace) -> None:
    """Print the coverage of all tables and figures: what this folder has built, and what is recorded."""
    from repro import coverage as rooms
    from repro import record

    flow = _flow(args)
    built = [p for p in sorted(Path("tables").glob("*/table*.csv"))]
    rows = [row for path in built for row in record.from_csv(path) if row.live and row.profile == flow.profile.name]
    rows += [replace(row, live="recorded") for row in record.accepted() if row.profile == flow.profile.name]
    stand_ins = set(flow.profile.models)
    lines = rooms.coverage([vars(r) for r in rows], lambda cell: cell.value != "" and cell.model in stand_ins)
    print(rooms.to_csv(lines) if args.csv else rooms.to_text(lines), end="")


def accept(args: Namespace) -> None:
    """Take measurements into results/."""
    from repro import kernel_rows, record

    work = kernel_rows.accept if kernel_rows.is_kernel_rows(args.file) else record.accept
    for file, count in work(args.file).items():
        print(f"{count} rows into {os.path.relpath(file)}")


def plan(args: Namespace) -> None:
    """Say what a target would cost."""
    from repro.plan import plan as work

    print(work(_flow(args), args.targets))


def verify(args: Namespace) -> int:
    """Rebuild and compare."""
    from repro.verify import verify as work

    return work(_flow(args), args.tables)


def pretrain(args: Namespace) -> None:
    """Train a pocket model anew."""
    import torch

    from repro.pretrain import pretrain as work
    from repro.pretrain_config import load_config
    from repro.pretrain_corpus import cached_ids

    config = load_config()
    if args.model not in config.models:
        raise unknown("pocket model", args.model, config.models)
    corpus = args.corpus or (Path(os.environ["REPRO_DATA"]) / "corpus" if os.environ.get("REPRO_DATA") else None)
    if corpus is None:
        raise UserError("pretrain: name the folder of the training shards with --corpus, or set REPRO_DATA")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("pretrain: this machine has no CUDA device; --device cpu trains, slowly")
    ids = torch.from_numpy(cached_ids(corpus, args.out, config.training.wikitext_every))
    log = work(args.model, ids, config, args.out, args.device, args.stop_after)
    print({key: log.get(key) for key in ("model", "step", "steps", "done", "tokens_per_s", "mfu")})


def sample(args: Namespace) -> None:
    """Sample and freeze the embedded text."""
    from repro.sampling import freeze_embedded

    freeze_embedded(args.device)


def card(args: Namespace) -> None:
    """Measure the pocket models and write their card."""
    from repro.card import card as work

    work(device=args.device)


def bench(args: Namespace) -> None:
    """Time all kernels and peers."""
    from repro.bench import bench as work

    how = (args.rounds, args.joule_seconds, args.resume, args.workers)
    work(args.out, args.shapes, args.counts, args.modes, args.only, *how)


def tune(args: Namespace) -> None:
    """Sweep a kernel's launch configurations."""
    from repro.tune import tune as work

    print(os.path.relpath(work(args.kernel)))


def regress(args: Namespace) -> int:
    """Compare runs of benchmarks."""
    from repro.regress import regress as work

    code, lines = work(args.new, args.against, args.threshold, args.partial)
    print("\n".join(lines))
    return code


def speed(args: Namespace) -> None:
    """Print the bars of accepted kernel times, and draw their figures."""
    from repro.speed import draw as work

    drawn, tables = work(args.out)
    print("\n".join([*tables, *map(os.path.relpath, drawn)]))


VERBS: dict[str, Callable[[Namespace], int | None]] = {
    f.__name__: f
    for f in (tokens, compress, perplexity, zeroshot, study, table, headline, leaderboard, audit, make, show, coverage,
              accept, plan, verify, pretrain, sample, card, bench, tune, regress, speed)
}  # fmt: skip
