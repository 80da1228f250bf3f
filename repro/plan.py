"""What a target would cost: jobs, minutes, GPU-minutes, downloads, disk. Estimates from sizes and measured rates."""

import json
from collections import Counter
from dataclasses import dataclass, field

from repro import models, papers, spec, study
from repro.build import OWN, check
from repro.workflow import Run, Workflow

START_S = 7.0  # a job's start: Python, torch, transformers (measured on two cores)
FLOPS = {"cpu": 45e9, "cuda": 60e12}  # per second at batch 1: measured on one core of an EPYC; a cautious GPU guess
STUDY_TOKENS = 2e6  # forward passes of one variant of a study: SPEAR's calibration with a quarter of its budget
LIMIT_TOKENS = 60_000  # tokens that eight zero-shot tasks read per 100 items of each
HUB_PARAMETERS = (("70b", 70e9), ("32b", 32e9), ("14b", 14e9), ("13b", 13e9), ("8b", 8e9), ("7b", 7e9), ("3b", 3.2e9))


@dataclass
class Cost:
    """Totals of a plan."""

    jobs: Counter = field(default_factory=Counter)
    seconds: float = 0.0
    downloads: dict[str, float] = field(default_factory=dict)
    disk: float = 0.0


def parameters(name: str) -> float:
    """Parameters of a model: counted where it is local, read off the id of a hub model (1e9 where it says nothing)."""
    files = [p for p in models.weight_files(name) if p.suffix == ".safetensors"]
    if files:
        return sum(p.stat().st_size for p in files) / 2
    return next((n for word, n in HUB_PARAMETERS if word in name.lower()), 1.2e9)


def cost(flow: Workflow, targets: list[str]) -> Cost:
    """Add up what the targets need, each run once, whether or not it is built already.

    Raises:
        UserError: an unknown target.
    """
    flow.recorded = False  # a plan is for a machine that has the profile's device
    check([t if t == "all" else t.removesuffix(".tex") + ".tex" for t in targets])
    tables, studies = [], []
    for target in targets:
        stem = target.removeprefix("tables/").removesuffix(".tex")
        if stem == "audit":
            continue
        if stem == "table1":
            tables += [tuple(claim.table.split("/")) for claim in spec.headline().claims]
            tables += [(paper, "1") for paper in papers.PAPERS]
        elif stem in (*OWN, "all"):
            tables += spec.specified()
            studies += spec.studies() if stem == "all" else []
        elif tuple(stem.split("/")) in spec.studies():
            studies.append(tuple(stem.split("/")))
        else:
            paper, number = stem.split("/table")
            papers.printed(paper, number)
            tables.append((paper, number))
    total, wanted = Cost(), {}
    for paper, number in dict.fromkeys(tables):
        for _, _, column, _, run in flow.cells(paper, number):
            if run and flow.source(column, run):
                wanted.setdefault((run.id, column.measure), run)
                wanted.setdefault((flow.run(run.model, "fp16").id, column.measure), flow.run(run.model, "fp16"))
    parts = [part for paper, name in studies if study.is_live(flow, study.load(paper, name))
             for part in study.parts(flow, paper, name)]  # fmt: skip
    for base in {part.base.id: part.base for part in parts}.values():
        _add_model(flow, total, base)
        _add(flow, total, base, "compress", _calibration_tokens(flow, base))
    for part in parts:
        scored = (len(part.recipes) + 2) * _tokens(flow, part.base, "perplexity") / len(flow.texts)
        _add(flow, total, part.base, "study", scored + len(part.recipes) * STUDY_TOKENS)
    total.jobs["table"] = len(dict.fromkeys([*tables, *studies]))
    for run in {run.id: run for run in wanted.values()}.values():
        _add_model(flow, total, run)
        if run.recipe.steps:
            _add(flow, total, run, "compress", _calibration_tokens(flow, run))
    for (_, measure), run in wanted.items():
        _add(flow, total, run, measure, _tokens(flow, run, measure))
    return total


def _add(flow: Workflow, total: Cost, run: Run, job: str, tokens: float) -> None:
    total.jobs[job] += 1
    total.seconds += START_S + 2 * parameters(run.model) * tokens / FLOPS[flow.profile.device]


def _add_model(flow: Workflow, total: Cost, run: Run) -> None:
    if models.folder(run.model) is None:
        total.downloads[run.model] = 2 * parameters(run.model)
    total.disk += parameters(run.model) * (1.1 if run.recipe.steps else 0.0)


def _calibration_tokens(flow: Workflow, run: Run) -> float:
    c = flow.profile.calibration
    return 4.0 * c.sequences * c.length if run.recipe.calibrated else 0.0  # two passes and the Hessians of each block


def _tokens(flow: Workflow, run: Run, measure: str) -> float:
    if measure == "zeroshot":
        return LIMIT_TOKENS * ((flow.profile.zeroshot.limit or 2000) / 100 if flow.profile.zeroshot else 0)
    p = flow.profile.perplexity
    windows = (p.windows or 190) + (2 * p.kl_windows if run.recipe.steps else 0)
    return float(windows * p.length * len(flow.texts))


def plan(flow: Workflow, targets: list[str]) -> str:
    """The cost of the targets as text."""
    total, device = cost(flow, targets), flow.profile.device
    minutes = total.seconds / 60
    lines = [
        f"{' '.join(targets)} in profile {flow.profile.name}",
        "jobs          " + ", ".join(f"{n} {name}" for name, n in total.jobs.items()),
        f"minutes       about {minutes:.0f} on one core, {minutes / 2:.0f} on two" if device == "cpu" else
        f"minutes       about {minutes:.0f} on one GPU",
        f"GPU-minutes   {minutes if device == 'cuda' else 0:.0f}",
        "downloads     " + (", ".join(f"{n} {b / 1e9:.1f} GB" for n, b in total.downloads.items()) or "none"),
        f"disk          {(total.disk + sum(total.downloads.values())) / 1e9:.2f} GB",
        f"calibration   {json.dumps(vars(flow.profile.calibration))}",
    ]  # fmt: skip
    return "\n".join(lines)
