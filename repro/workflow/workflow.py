"""From specs and a scale to jobs, and from job files to quantities, for Snakemake, tables and claims.

Paths of what is built are relative to the working directory, sources are those of this checkout.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

from repro import papers
from repro.core.errors import UserError
from repro.engine.core import SHAPE
from repro.jobs.target import Target
from repro.metrics import metric_of
from repro.metrics.metric import External
from repro.papers.cell import Cell
from repro.recipes import recipe
from repro.specs import figures, scale, tables
from repro.specs.names import OWN, canonical  # noqa: F401  asked for here too
from repro.specs.scale import has_cuda
from repro.stats.quantity import Quantity, compose, names_in
from repro.store import observations
from repro.store.job import Job, distinct
from repro.store.measurement import inputs_hash
from repro.workflow import draws


class Workflow:
    """One scale's cells and jobs.

    With `stored` nothing is run: cells come from accepted results, as they do where the scale's device is not there.
    With `stored=False` every cell is measured here, on all of its windows, items and seeds. Without either, as in a
    build, accepted results come first, and `brief` is how this machine measures a cell itself. With `remember` no file
    that it reads changes while it lives, as when a table is drawn: what was asked once is not computed again.
    """

    def __init__(self, at: scale.Scale, stored: bool | None = None, remember: bool = False) -> None:
        self.scale = at
        self.stored_first = stored is None
        self._cells: dict[tuple[str, str, str], list[Cell]] = {}
        self._peers: dict[tuple[str, str, str], dict[tuple[str, ...], list[Cell]]] = {}
        self._targets: dict[tuple[str, str, str, int], Target] = {}
        self._jobs: dict[str, list[dict[str, Job]]] = {}
        self._remembered: dict[tuple[str, ...], Any] | None = {} if remember else None
        self.stored_only = (at.device == "cuda" and not has_cuda()) if stored is None else stored

    @classmethod
    def of_results(cls, at: scale.Scale) -> "Workflow":
        """Accepted results alone, which do not change while it lives: what was asked once is not computed again."""
        return cls(at, stored=True, remember=True)

    @property
    def is_of_results(self) -> bool:
        """Whether it is one of accepted results alone (`of_results`)."""
        return self._remembered is not None and self.stored_only and not self.stored_first

    def once(self, key: tuple[str, ...], make: Callable[[], Any]) -> Any:
        """What `make` gives, computed once for a key where this workflow may remember it."""
        if self._remembered is None:
            return make()
        if key not in self._remembered:
            self._remembered[key] = make()
        return self._remembered[key]

    @cached_property
    def brief(self) -> "Workflow":
        """The same cells on their first windows and items, with one seed: what a build measures itself."""
        return Workflow(self.scale.brief(), stored=False, remember=self._remembered is not None)

    @cached_property
    def _here(self) -> scale.Scale:
        """The scale on the device class that its jobs run on here."""
        return self.scale.here()

    # --- cells --------------------------------------------------------------------------------------------------------

    def cells(self, paper: str, number: str, kind: str = "table") -> list[Cell]:
        """Every cell of a table or figure, with its stand-in."""
        key = (paper, number, kind)
        if key not in self._cells:
            specified = (tables if kind == "table" else figures).cells(paper, number)
            self._cells[key] = [
                replace(cell, stand_in=self.stand_in(cell), seeds=cell.seeds[: self.scale.seeds]) for cell in specified
            ]
        return list(self._cells[key])

    def stand_in(self, cell: Cell) -> str:
        """What a cell is measured on: its model's stand-in, empty without one, or shapes with random weights."""
        shapes = [f"{SHAPE}{shape}" for shape in self.timed_shapes(cell)]
        return " and ".join(shapes) or self.scale.stand_in(cell.model) or ""

    def grade(self, cell: Cell) -> str:
        """What evidence of a cell that is measured at this scale is worth: B where it is of shapes alone."""
        return "B" if self.timed_shapes(cell) else self.scale.grade

    def timed_shapes(self, cell: Cell) -> list[str]:
        """The public shapes that alone decide a cell; of arithmetic, those of all that its quantity names.

        Empty where a model decides it, too, or where an operand needs a stand-in that is not there, named or not.
        """
        metric = metric_of(cell)
        shapes = {name: metric_of(operand).timed_shape for name, operand in self.operands(cell).items()}
        if not shapes:
            return [metric.timed_shape] if metric.timed_shape else []
        named = [shape for name, shape in shapes.items() if name in names_in(metric.quantity)]
        runs = all(shapes.values()) or self.scale.stand_in(cell.model)
        return list(dict.fromkeys(named)) if all(named) and runs else []

    def peers(self, cell: Cell) -> list[Cell]:
        """The cells of a cell's table or figure in the same column, of the same model and metric, itself among them."""
        key = (cell.paper, cell.number, cell.kind)
        if key not in self._peers:
            by_column: dict[tuple[str, ...], list[Cell]] = {}
            for one in self.cells(*key):
                by_column.setdefault(one.cell_key[1:], []).append(one)
            self._peers[key] = by_column
        return self._peers[key].get(cell.cell_key[1:], [])

    def is_measured_here(self, cell: Cell) -> bool:
        """Whether this scale measures a cell here."""
        return not self.stored_only and self.is_measured(cell) and not self.lacking(cell)

    def lacking(self, cell: Cell) -> str:
        """What this machine lacks to measure a cell or an operand of a derived one; empty if nothing."""
        for operand in self.operands(cell).values():
            if why := self.lacking(operand):
                return why
        return metric_of(cell).lacking()

    def is_measured(self, cell: Cell) -> bool:
        """Whether this scale measures a cell anywhere."""
        if not (cell.measure and (cell.stand_in or not cell.model) and cell.recipe):
            return False  # a setting is printed without a model
        if cell.calibration and cell.calibration not in self.scale.calibration_texts:
            return False
        spec = tables.table(cell.paper, cell.number) if cell.kind == "table" else None
        return not spec or not spec.scales or self.scale.name in spec.scales

    def full_precision(self, cell: Cell) -> Cell:
        """The same measure of the stand-in without any step."""
        return replace(cell, recipe="fp16", row="", printed="", seeds=(0,))

    def waits_for_baseline(self, cell: Cell) -> bool:
        """Whether a cell is not run before full precision of the same measure is built here, above chance."""
        measured, full = metric_of(cell), self.full_precision(cell)
        if not measured.FULL_FIRST or cell.recipe == full.recipe or not self.is_measured(cell):
            return False
        try:
            quantity = self.quantity(full)
        except UserError:  # damaged, or refused
            quantity = None
        return quantity is None or measured.status(quantity.seeds[0]) == "at_chance"

    def operands(self, cell: Cell) -> dict[str, Cell]:
        """The cells that a derived one is arithmetic over, by name, of metric `METRIC: NAME`; empty for all others."""
        by_name = {}
        for name, (text, measure) in metric_of(cell).operands().items():
            kind, params = tables.params_of(measure, dict(cell.variables), f"{cell.table}: {name}")
            facts = {"metric": f"{cell.metric}: {name}", "printed": "", "unit": measure.get("unit", "")}
            if text is None:
                text = cell.recipe
            elif text:
                text = recipe.parse(text).name
            operand = replace(cell, measure=kind, params=params, recipe=text, **facts)
            by_name[name] = replace(operand, stand_in=self._of_operand(operand))
        return by_name

    def _of_operand(self, operand: Cell) -> str:
        """What an operand is measured on, which still has its whole cell's stand-in: its own shape, or the model's."""
        if shape := metric_of(operand).timed_shape:
            return f"{SHAPE}{shape}"
        if operand.stand_in.startswith(SHAPE):
            return self.scale.stand_in(operand.model) or ""
        return operand.stand_in

    def is_external(self, cell: Cell) -> bool:
        """Whether a cell comes from results of its kind's own, such as kernel times: no job and no model behind it."""
        operands = list(self.operands(cell).values()) or [cell]
        return all(isinstance(metric_of(one), External) for one in operands)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def targets(self, cell: Cell) -> list[Target]:
        """What a cell is measured on, one a seed; a single one where nothing is drawn."""
        at, parsed = self._here, recipe.parse(cell.recipe)
        seeds = cell.seeds[: at.seeds] if self.is_drawn(cell) else (0,)
        return [self._target(cell.calibration, cell.stand_in, parsed.name, seed) for seed in seeds]

    def is_drawn(self, cell: Cell) -> bool:
        """Whether the seeds of a cell decide its value: its recipe or its metric draws something."""
        return recipe.parse(cell.recipe).seeded or metric_of(cell).SEEDED

    def _target(self, calibration: str, *on: Any) -> Target:
        """A target made once, so that what is known of it is known for every cell; `on` is all but its scale."""
        key = (calibration, *on)
        if key not in self._targets:
            self._targets[key] = Target(self._here.calibrated_on(calibration, on[-1]), *on)
        return self._targets[key]

    def jobs(self, cell: Cell) -> list[dict[str, Job]]:
        """Role to job, one mapping a seed; empty where this scale does not measure the cell.

        Raises:
            UserError: the spec names a corpus, model or recipe that is unknown.
        """
        facts = (cell.measure, cell.params, cell.recipe, cell.stand_in, cell.seeds, cell.variables, cell.number)
        if (key := repr(facts)) not in self._jobs:
            self._jobs[key] = self._make_jobs(cell)
        return self._jobs[key]

    def _make_jobs(self, cell: Cell) -> list[dict[str, Job]]:
        if not self.is_measured(cell):
            return []
        if operands := self.operands(cell):
            jobs = {name: self.jobs(operand) for name, operand in operands.items()}
            if not all(jobs.values()):
                return []
            seeds: list[dict[str, Job]] = [{} for _ in range(max(map(len, jobs.values())))]
            for i, roles in enumerate(seeds):
                for name, each in jobs.items():
                    roles |= {f"{name}:{role}": job for role, job in each[min(i, len(each) - 1)].items()}
            return seeds
        jobs = [metric_of(cell).jobs(target) for target in self.targets(cell)]
        return [] if None in jobs else jobs

    def inputs(self, cell: Cell) -> dict[str, Any]:
        """What decides a cell's value, declared: the measure, and the inputs of its jobs by seed.

        The device is none of it: the scale says which ones it may be, and a result names its own.
        """
        later = metric_of(cell).LATER
        params = {}
        for key, value in asdict(cell.params).items():
            if key != "unit" and not (key in later and value == later[key]):
                params[key] = value
        jobs = [{role: _without_device(job.parsed_inputs()) for role, job in each.items()} for each in self.jobs(cell)]
        config = [recipe.with_seed(recipe.parse(t.text), t.seed).config for t in self.targets(cell)]
        return {"measure": cell.measure, "params": params, "recipe": config, "jobs": jobs}

    def inputs_hash(self, cell: Cell) -> str:
        """The hash of what decides a cell's value, by which accepted rows are found."""
        return self.once(("inputs", *cell.identity), lambda: inputs_hash(self.inputs(cell)))

    def every_job(self, cells: Iterable[Cell]) -> list[Job]:
        """All jobs that measure cells here, in an order in which they can run.

        Each brings full precision of the same measure, which ratios compare with.
        """
        wanted: list[Job] = []
        for cell in cells:
            if self.is_measured_here(cell):
                full = self.full_precision(cell)
                both = [cell] if self.operands(cell) else [full] if self.waits_for_baseline(cell) else [cell, full]
                for one in both:
                    for each in self.jobs(one):
                        wanted += each.values()
        return distinct(wanted)

    # --- quantities ---------------------------------------------------------------------------------------------------

    def quantity(self, cell: Cell) -> Quantity | None:
        """The quantity of a cell from built files; None where a file is missing.

        Raises:
            NotMeasurable: a job could not be done, with its status.
        """
        return self.once(("built quantity", *cell.identity), lambda: self._quantity(cell))

    def _quantity(self, cell: Cell) -> Quantity | None:
        if operands := self.operands(cell):
            quantities = {name: self.quantity(operand) for name, operand in operands.items()}
            return None if None in quantities.values() else compose(cell.params.quantity, quantities)  # type: ignore[arg-type]
        metric, seeds = metric_of(cell), []
        if isinstance(metric, External):
            return metric.read()
        for target, jobs in zip(self.targets(cell), self.jobs(cell)):
            paths = {role: job.folder / observations.FILE for role, job in jobs.items()}
            if not all(path.is_file() for path in paths.values()):
                return None
            read = {role: observations.once(path, path.stat().st_mtime_ns) for role, path in paths.items()}
            series = metric.series(read, target)
            if not series:
                return None
            seeds.append(series)
        return self.of_series(cell, seeds) if seeds else None

    def of_series(self, cell: Cell, seeds: list[dict[str, observations.Series]]) -> Quantity:
        """The quantity of a cell whose series are at hand, such as accepted ones."""
        if operands := self.operands(cell):
            inner = {}
            for name, operand in operands.items():
                mine = [{k.removeprefix(f"{name}:"): one for k, one in seed.items() if k.startswith(f"{name}:")}
                        for seed in seeds]  # fmt: skip
                inner[name] = self.of_series(operand, mine)
            return compose(cell.params.quantity, inner)
        metric = metric_of(cell)
        once = draws.of(self, cell, seeds)
        return Quantity(seeds, metric.value, metric.reference, limits=metric.limits, draws=once)

    # --- what a target needs ------------------------------------------------------------------------------------------

    def table_cells(self, name: str) -> list[Cell]:
        """The cells of `spear/table1` or `spear/figure13`, or those behind one of the project's own tables."""
        if name == "table1":
            return self._headline_cells()
        if name in ("audit", "own-numbers"):
            return []
        if name in ("table2", figures.LEADERBOARD):
            behind = tables.specified()
        elif figures.is_figure(name):
            return self.cells(*figures.split(name), "figure")
        else:
            behind = tables.behind(*tables.split(name))
        cells = []
        for paper, number in behind:
            cells += self.cells(paper, number)
        return cells

    def _headline_cells(self) -> list[Cell]:
        """The cells of the headline's claims on the table beneath it and on tables of which nothing is stored yet; the
        others are judged on what is stored, and need no job.
        """
        cells = []
        open_claims = tables.headline().claims
        for claim in tables.headline_claims():
            beneath = claim.table == f"{papers.LEADING}/1"
            if not claim.judged_on_printed and (beneath or claim in open_claims):
                cells += self.claim_cells(claim)
        return cells

    def beside_headline(self) -> list[str]:
        """The papers whose Table 1 is made with the headline table: the one that is printed beneath it, and those whose
        table takes no job."""  # fmt: skip
        return [p for p in papers.PAPERS if p == papers.LEADING or not any(map(self.jobs, self.cells(p, "1")))]

    def claim_cells(self, claim: tables.ClaimSpec) -> list[Cell]:
        """The cells that a claim names, in any of its readings."""
        cells = []
        for name in (claim.table, *claim.more):
            cells += self.cells(*tables.split(name))
        wanted = set()
        for _, named in claim.case_cells():
            wanted |= {key[:3] for key in named.values()}
        rows = {(row, model) for row, _, model in wanted}
        compared = set(claim.cross_checks.values())
        named = []
        for cell in cells:
            of_a_row = (cell.row, cell.model) in rows
            if cell.cell_key[:3] in wanted or (of_a_row and {cell.col, cell.metric} & compared):
                named.append(cell)
        return named


def _without_device(declared: dict[str, Any]) -> dict[str, Any]:
    """A job's declared inputs, and those of what it is compared with, whatever they ran on."""
    kept = {key: value for key, value in declared.items() if key not in ("device", "threads")}
    return {key: _without_device(value) if isinstance(value, dict) else value for key, value in kept.items()}
