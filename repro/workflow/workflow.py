"""From specs and a scale to jobs, and from job files to quantities, for Snakemake, tables and claims.

Paths of what is built are relative to the working directory, sources are those of this checkout.
"""

from collections.abc import Callable, Iterable, Mapping
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

    Args:
        at: the scale.
        stored: True takes cells from accepted results alone and runs nothing, as is also done where the scale's device
            is missing. False measures every cell here, on all of its windows, items and seeds. None, as in a build,
            prefers accepted results, and measures what this machine can with `brief`.
        remember: cache what was computed; only where no file that is read changes during the workflow's life, as when
            a table is drawn.
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
        """A workflow of accepted results alone; it caches, since these do not change during its life."""
        return cls(at, stored=True, remember=True)

    @property
    def is_of_results(self) -> bool:
        """Whether it was made by `of_results`."""
        return self._remembered is not None and self.stored_only and not self.stored_first

    def once(self, key: tuple[str, ...], make: Callable[[], Any]) -> Any:
        """The result of `make`; cached under the key if this workflow may remember it."""
        if self._remembered is None:
            return make()
        if key not in self._remembered:
            self._remembered[key] = make()
        return self._remembered[key]

    @cached_property
    def brief(self) -> "Workflow":
        """The same cells on their first windows and items, with one seed: what a build measures."""
        return Workflow(self.scale.brief(), stored=False, remember=self._remembered is not None)

    @cached_property
    def _here(self) -> scale.Scale:
        """The scale on the device on which its jobs run here."""
        return self.scale.here()

    # --- cells --------------------------------------------------------------------------------------------------------

    def cells(self, paper: str, number: str, kind: str = "table") -> list[Cell]:
        """Every cell of a table or figure, with its stand-in and at most as many seeds as the scale has."""
        key = (paper, number, kind)
        if key not in self._cells:
            specified = (tables if kind == "table" else figures).cells(paper, number)
            cells = []
            for cell in specified:
                cells.append(replace(cell, stand_in=self.stand_in(cell), seeds=cell.seeds[: self.scale.seeds]))
            self._cells[key] = cells
        return list(self._cells[key])

    def stand_in(self, cell: Cell) -> str:
        """What a cell is measured on: shapes with random weights, or its model's stand-in; empty if it has none."""
        shapes = [f"{SHAPE}{shape}" for shape in self.timed_shapes(cell)]
        return " and ".join(shapes) or self.scale.stand_in(cell.model) or ""

    def grade(self, cell: Cell) -> str:
        """The evidence grade of a cell at this scale: B if only shapes decide it, else the scale's."""
        return "B" if self.timed_shapes(cell) else self.scale.grade

    def timed_shapes(self, cell: Cell) -> list[str]:
        """The public shapes that decide a cell; of a derived cell, those of the operands that its quantity names.

        Empty if a model decides the cell too, or if an operand, named in the quantity or not, lacks its stand-in.
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
            for peer in self.cells(*key):
                by_column.setdefault(peer.cell_key[1:], []).append(peer)
            self._peers[key] = by_column
        return self._peers[key].get(cell.cell_key[1:], [])

    def is_measured_here(self, cell: Cell) -> bool:
        """Whether this scale measures a cell here."""
        return not self.stored_only and self.is_measured(cell) and not self.lacking(cell)

    def lacking(self, cell: Cell) -> str:
        """What this machine lacks to measure a cell or one of its operands; empty if nothing."""
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
        """The same measure of the stand-in with no quantizing step."""
        return replace(cell, recipe="fp16", row="", printed="", seeds=(0,))

    def waits_for_baseline(self, cell: Cell) -> bool:
        """Whether a cell must wait until full precision of the same measure is built here and is above chance."""
        measured, full = metric_of(cell), self.full_precision(cell)
        if not measured.FULL_FIRST or cell.recipe == full.recipe or not self.is_measured(cell):
            return False
        try:
            quantity = self.quantity(full)
        except UserError:  # damaged, or refused
            quantity = None
        return quantity is None or measured.status(quantity.seeds[0]) == "at_chance"

    def operands(self, cell: Cell) -> dict[str, Cell]:
        """The operands of a derived cell by name, each a cell of metric `METRIC: NAME`; empty for other cells."""
        by_name = {}
        for name, (text, measure) in metric_of(cell).operands().items():
            kind, params = tables.params_of(measure, dict(cell.variables), f"{cell.table}: {name}")
            facts = {"metric": f"{cell.metric}: {name}", "printed": "", "unit": measure.get("unit", "")}
            if text is None:
                text = cell.recipe
            elif text:
                text = recipe.parse(text).name
            operand = replace(cell, measure=kind, params=params, recipe=text, **facts)
            by_name[name] = replace(operand, stand_in=self._stand_in_of_operand(operand))
        return by_name

    def _stand_in_of_operand(self, operand: Cell) -> str:
        """What an operand is measured on: its own shape, or its model's stand-in.

        Args:
            operand: the operand, still with the stand-in of the derived cell.
        """
        if shape := metric_of(operand).timed_shape:
            return f"{SHAPE}{shape}"
        if operand.stand_in.startswith(SHAPE):
            return self.scale.stand_in(operand.model) or ""
        return operand.stand_in

    def is_external(self, cell: Cell) -> bool:
        """Whether a cell is read from files of its metric's own, such as kernel times, without a job or a model."""
        operands = list(self.operands(cell).values()) or [cell]
        return all(isinstance(metric_of(operand), External) for operand in operands)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def targets(self, cell: Cell) -> list[Target]:
        """The targets of a cell, one per seed; a single one if no seed matters."""
        parsed = recipe.parse(cell.recipe)
        seeds = cell.seeds[: self._here.seeds] if self.is_drawn(cell) else (0,)
        return [self._target(cell.calibration, cell.stand_in, parsed.name, seed) for seed in seeds]

    def is_drawn(self, cell: Cell) -> bool:
        """Whether a cell's value depends on its seed: its recipe or its metric draws random numbers."""
        return recipe.parse(cell.recipe).seeded or metric_of(cell).SEEDED

    def _target(self, calibration: str, model: str, text: str, seed: int) -> Target:
        """The target, made once: what it caches then serves every cell."""
        key = (calibration, model, text, seed)
        if key not in self._targets:
            self._targets[key] = Target(self._here.calibrated_on(calibration, seed), model, text, seed)
        return self._targets[key]

    def jobs(self, cell: Cell) -> list[dict[str, Job]]:
        """Role to job, one mapping per seed; empty if this scale does not measure the cell.

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
                for name, by_seed in jobs.items():
                    of_seed = by_seed[min(i, len(by_seed) - 1)]  # an operand without seeds has one for all
                    roles |= {f"{name}:{role}": job for role, job in of_seed.items()}
            return seeds
        jobs = [metric_of(cell).jobs(target) for target in self.targets(cell)]
        return [] if None in jobs else jobs

    def inputs(self, cell: Cell) -> dict[str, Any]:
        """The declared inputs that decide a cell's value: metric, recipe, and the inputs of its jobs by seed.

        The device is not among them: the scale says which devices are allowed, and a result names its own.
        """
        later = metric_of(cell).LATER
        params = {}
        for key, value in asdict(cell.params).items():
            if key != "unit" and not (key in later and value == later[key]):
                params[key] = value
        jobs = []
        for jobs_of_seed in self.jobs(cell):
            jobs.append({role: _without_device(job.parsed_inputs()) for role, job in jobs_of_seed.items()})
        configs = [target.recipe.config for target in self.targets(cell)]
        return {"measure": cell.measure, "params": params, "recipe": configs, "jobs": jobs}

    def inputs_hash(self, cell: Cell) -> str:
        """The hash of a cell's declared inputs, by which accepted rows are found."""
        return self.once(("inputs", *cell.identity), lambda: inputs_hash(self.inputs(cell)))

    def every_job(self, cells: Iterable[Cell]) -> list[Job]:
        """All jobs that measure cells here, in an order in which they can run.

        Jobs of full precision under the same measure are among them: ratios compare with it.
        """
        jobs: list[Job] = []
        for cell in cells:
            if not self.is_measured_here(cell):
                continue
            for measured in self._measured_with(cell):
                for jobs_of_seed in self.jobs(measured):
                    jobs += jobs_of_seed.values()
        return distinct(jobs)

    def _measured_with(self, cell: Cell) -> list[Cell]:
        """A cell and full precision of the same measure; of a derived cell itself alone.

        A cell that waits for full precision (`waits_for_baseline`) is left out.
        """
        if self.operands(cell):
            return [cell]
        full = self.full_precision(cell)
        return [full] if self.waits_for_baseline(cell) else [cell, full]

    # --- quantities ---------------------------------------------------------------------------------------------------

    def quantity(self, cell: Cell) -> Quantity | None:
        """The quantity of a cell from the files of its jobs; None if one is missing.

        Raises:
            NotMeasurable: a job could not be done, with its status.
        """
        return self.once(("built quantity", *cell.identity), lambda: self._quantity(cell))

    def _quantity(self, cell: Cell) -> Quantity | None:
        if operands := self.operands(cell):
            quantities = {name: self.quantity(operand) for name, operand in operands.items()}
            return None if None in quantities.values() else compose(cell.params.quantity, quantities)  # type: ignore[arg-type]
        metric = metric_of(cell)
        seeds = []
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
        """The quantity of a cell from series that are already read, such as accepted ones."""
        if operands := self.operands(cell):
            quantities = {}
            for name, operand in operands.items():
                series_of_operand = [_without_prefix(seed, f"{name}:") for seed in seeds]
                quantities[name] = self.of_series(operand, series_of_operand)
            return compose(cell.params.quantity, quantities)
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
        """The cells of those headline claims that need jobs: on the table beneath it, or not stored yet.

        All other claims are judged on stored results.
        """
        cells = []
        open_claims = tables.headline().claims
        for claim in tables.headline_claims():
            on_table_beneath = claim.table == f"{papers.LEADING}/1"
            needs_jobs = on_table_beneath or claim in open_claims
            if needs_jobs and not claim.judged_on_printed:
                cells += self.claim_cells(claim)
        return cells

    def beside_headline(self) -> list[str]:
        """The papers whose Table 1 is built along with the headline table.

        They are the paper that is printed beneath it, and those whose table needs no job.
        """
        built = []
        for paper in papers.PAPERS:
            if paper == papers.LEADING or not any(map(self.jobs, self.cells(paper, "1"))):
                built.append(paper)
        return built

    def claim_cells(self, claim: tables.ClaimSpec) -> list[Cell]:
        """The cells that a claim or its cross-checks name."""
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


def _without_prefix(series: Mapping[str, observations.Series], prefix: str) -> dict[str, observations.Series]:
    """The series whose name begins with a prefix, named without it."""
    return {name.removeprefix(prefix): values for name, values in series.items() if name.startswith(prefix)}


def _without_device(declared: dict[str, Any]) -> dict[str, Any]:
    """A job's declared inputs without device and threads, also inside those of a job that it is compared with."""
    independent = {key: value for key, value in declared.items() if key not in ("device", "threads")}
    return {key: _without_device(value) if isinstance(value, dict) else value for key, value in independent.items()}
