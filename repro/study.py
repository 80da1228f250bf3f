"""A study asks one question of our own about a method: its variants over a grid, with intervals over windows and seeds.

    tables/spear/memory.yaml   base: rtn-w{bits}-pc  step: spear-budget={budget}-seed={seed}  rows: {a: gate=false}

Measured is the share of the gap between the base and full precision that a variant gives back, (b - s) / (b - f) in
perplexity, and every row beside the first. Studies have no printed cells; what a verdict on one is worth is grade C.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from repro import perplexity, provenance, record, spec, statistics
from repro.errors import UserError, unknown
from repro.files import ROOT, short_hash
from repro.record import Measurement
from repro.strict import build, load_yaml
from repro.workflow import Run, Workflow

KIND, METRIC = "study", "recovered"


@dataclass(frozen=True)
class StudySpec:
    """One study.

    Attributes:
        title: what it asks.
        base: recipe of the quantized model, with `{key}` of the grid.
        step: what is put behind it, with `{key}` of the grid and `{seed}`.
        rows: label to the options that this variant adds to `step`; the others are compared with the first.
        models: the papers' models whose stand-ins are studied.
        grid: values by key; a column is one combination of them.
        seeds: each variant is made with each of them.
        corpus: the text that is scored, by its own name.
        live: profiles in which it is run; in others it is drawn from accepted measurements of them.
    """

    title: str
    base: str
    step: str
    rows: dict[str, str]
    models: tuple[str, ...]
    grid: dict[str, tuple[float | str, ...]]
    corpus: str
    live: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)

    def columns(self) -> dict[str, dict[str, float | str]]:
        """Every combination of the grid by its label, such as `bits 4, budget 0.02`."""
        combinations = (dict(zip(self.grid, values)) for values in product(*self.grid.values()))
        return {", ".join(f"{key} {value}" for key, value in plain(c).items()): c for c in combinations}

    def recipe(self, row: str, point: Mapping[str, float | str], seed: int) -> str:
        """The recipe of a variant at a point of the grid."""
        step = "-".join(filter(None, (self.step, self.rows[row])))
        return f"{self.base} + {step}".format(**plain(point), seed=seed)


def plain(point: Mapping[str, float | str]) -> dict[str, str]:
    """The values of a grid point as a recipe writes them."""
    return {key: f"{value:g}" if isinstance(value, float) else value for key, value in point.items()}


@dataclass(frozen=True)
class Part:
    """What one job makes: all variants of a model at one point of the grid with one seed.

    Attributes:
        base: the quantized model without the studied step.
        recipes: row label to recipe.
    """

    model: str
    stand_in: str
    column: str
    seed: int
    base: Run
    recipes: dict[str, str]
    corpus: str
    path: str


def load(paper: str, name: str) -> StudySpec:
    """The spec of a study.

    Raises:
        UserError: no such study, a key or value that a spec does not have, or a template that names an unknown key.
    """
    if (paper, name) not in spec.studies():
        raise unknown("study", f"{paper}/{name}", ["/".join(both) for both in spec.studies()])
    where = f"tables/{paper}/{name}.yaml"
    what = build(StudySpec, load_yaml(ROOT / "tables" / paper / f"{name}.yaml"), where)
    try:
        for row, point in product(what.rows, what.columns().values()):
            what.recipe(row, point, 0)
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(f"{where}: a template names {error}, which is no key of the grid") from None
    return what


def parts(flow: Workflow, paper: str, name: str) -> list[Part]:
    """The jobs of a study in a profile, whether or not it is run there."""
    what, found = load(paper, name), []
    for (label, point), model, seed in product(what.columns().items(), what.models, what.seeds):
        stand_in = flow.stand_in(model)
        if stand_in is None:
            continue
        recipes = {row: what.recipe(row, point, seed) for row in what.rows}
        base = flow.run(stand_in, what.base.format(**plain(point)))
        ids = [flow.run(stand_in, recipe).id for recipe in recipes.values()]
        slug = short_hash(json.dumps([base.id, ids, what.corpus, flow.ppl]))
        path = f"build/studies/{paper}/{name}/{slug}.parquet"
        found.append(Part(model, stand_in, label, seed, base, recipes, what.corpus, path))
    return found


def is_live(flow: Workflow, what: StudySpec) -> bool:
    """Whether a profile runs a study here."""
    return flow.profile.name in what.live and not flow.recorded


def inputs(flow: Workflow, paper: str, name: str) -> list[str]:
    """Spec, accepted measurements and, where it is run, the scores of a study."""
    what = load(paper, name)
    stored = sorted((ROOT / "results").glob(f"*/{paper}-{KIND}-{name}.csv"))
    made = [part.path for part in parts(flow, paper, name)] if is_live(flow, what) else []
    return [str(ROOT / "tables" / paper / f"{name}.yaml"), *map(str, stored), *made]


def measure(flow: Workflow, paper: str, name: str) -> list[Measurement]:
    """Every cell of a study: live where all its parts are built, else recorded in one of its profiles, else not run.

    A cell's value is the mean over seeds; its interval comes from windows, resampled together for all runs of the cell;
    `note` holds each seed's value and the compensators' bytes as a share of the 4-bit block weights.
    """
    what = load(paper, name)
    stored = {
        (m.row, m.col, m.model, m.metric): m for m in record.accepted(paper, KIND, name) if m.profile in what.live
    }
    frames: dict[tuple[str, str], list[Any]] = {}
    for part in parts(flow, paper, name) if is_live(flow, what) else ():
        if Path(part.path).is_file():
            frames.setdefault((part.model, part.column), []).append((part, perplexity.load_frame(part.path, "recipe")))
    cells = []
    for model, column, row in product(what.models, what.columns(), what.rows):
        made = frames.get((model, column), [])
        for metric in (METRIC, "difference") if row != next(iter(what.rows)) else (METRIC,):
            blank = Measurement(paper, KIND, name, row, column, model, metric, unit="%", profile=flow.profile.name)
            if flow.stand_in(model) is None:
                cells.append(replace(blank, status="no_stand_in"))
            elif len(made) == len(what.seeds):
                refused = {k: v for _, frame in made for k, v in json.loads(frame.attrs["refused"]).items()}
                wanted = {part.recipes[r] for part, _ in made for r in (row, next(iter(what.rows)))}
                origin = _origin(flow, what, row, made)
                if reasons := [refused[recipe] for recipe in sorted(wanted & refused.keys())]:
                    cells.append(replace(blank, status="unsupported", note=reasons[0], **origin))
                else:
                    cells.append(replace(blank, **origin, **_cell(what, row, metric, made)))
            elif old := stored.get((row, column, model, metric)):
                cells.append(replace(old, live="recorded", status=_still(flow, old)))
            else:
                cells.append(blank)
    return cells


def _origin(flow: Workflow, what: StudySpec, row: str, made: list[Any]) -> dict[str, Any]:
    """Where a cell comes from."""
    part, frame = made[0]
    return {
        "live": "live",
        "grade": flow.profile.grade,
        "stand_in": part.stand_in,
        "recipe": part.recipes[row],
        "protocol": f"{frame.attrs['protocol']} on {frame.attrs['label']}",
        "seed": " ".join(map(str, what.seeds)),
        **{key: frame.attrs[key] for key in ("device", "commit", "code", "environment")},
    }


def _cell(what: StudySpec, row: str, metric: str, made: list[Any]) -> dict[str, Any]:
    """Value and interval of one cell, from the parts of all seeds."""
    first = next(iter(what.rows))
    arrays, shares = {}, []
    for part, frame in made:
        by_recipe = {recipe: rows["nll"].to_numpy() for recipe, rows in frame.groupby("recipe", sort=False)}
        arrays |= {"f": by_recipe["fp16"], "b": by_recipe[part.base.recipe.name]}
        arrays |= {f"s{part.seed}": by_recipe[part.recipes[row]], f"r{part.seed}": by_recipe[part.recipes[first]]}
        shares.append(json.loads(frame.attrs["shares"])[part.recipes[row]])

    def recovered(mean: Mapping[str, Any], letter: str) -> list[Any]:
        b, f = np.exp(mean["b"]), np.exp(mean["f"])
        return [100 * (b - np.exp(mean[f"{letter}{seed}"])) / (b - f) for seed in what.seeds]

    def values(mean: Mapping[str, Any]) -> list[Any]:
        ours = recovered(mean, "s")
        return ours if metric == METRIC else [r - s for r, s in zip(recovered(mean, "r"), ours)]

    each = [float(v) for v in values({key: array.mean() for key, array in arrays.items()})]
    low, high = statistics.paired(arrays, lambda mean: np.mean(values(mean), axis=0))
    note = {"seeds": [round(v, 3) for v in each], "share": round(float(np.mean(shares)), 6)}
    value, n = float(np.mean(each)), len(arrays["f"])
    return {"value": value, "lo": low, "hi": high, "n": n, "status": "ok", "note": json.dumps(note)}


def _still(flow: Workflow, old: Measurement) -> str:
    """`stale` when the code that made a recorded value has changed since."""
    if old.value is None:
        return old.status
    today = provenance.code_hash([Path(p) for p in flow.code("study", flow.run(old.stand_in, old.recipe))])
    return old.status if today == old.code else "stale"


def seeds(cell: Measurement) -> list[float]:
    """The value of each seed."""
    return json.loads(cell.note)["seeds"]


def share(cell: Measurement) -> float:
    """Bytes of what the variant stores, as a share of the block weights at 4 bits."""
    return json.loads(cell.note)["share"]


def lines(cells: Sequence[Measurement]) -> dict[str, dict[str, list[tuple[float, ...]]]]:
    """For the figure: panel (stand-in and all of the grid but its last key) to row to points against the share."""
    found: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    for cell in cells:
        if cell.value is not None and cell.metric == METRIC:
            panel = ", ".join([cell.stand_in, *cell.col.split(", ")[:-1]])
            found.setdefault(panel, {}).setdefault(cell.row, []).append(
                (100 * share(cell), cell.value, cell.lo, cell.hi)
            )
    return found


def verdict(cell: Measurement) -> str:
    """Whether the first row gives back more than this one: all seeds and the whole interval have to say so."""
    if cell.status != "ok" or cell.lo is None or cell.hi is None:
        return "–"
    if cell.lo > 0 and min(seeds(cell)) > 0:
        return "better"
    return "worse" if cell.hi < 0 and max(seeds(cell)) < 0 else "no difference seen"


def check(row: Measurement, where: str) -> None:
    """Raise unless a study has the cell of a measurement.

    Raises:
        UserError: no such study, row, column or model.
    """
    what = load(row.paper, row.number)
    for kind, name, known in (("row", row.row, what.rows), ("column", row.col, what.columns()),
                              ("model", row.model, what.models), ("profile", row.profile, what.live)):  # fmt: skip
        if name not in known:
            raise UserError(f"{where}: {unknown(kind, name, known)}")


def every(flow: Workflow) -> Iterator[Part]:
    """Every part of every study that a profile runs here."""
    for paper, name in spec.studies():
        if is_live(flow, load(paper, name)):
            yield from parts(flow, paper, name)
