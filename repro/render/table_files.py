"""Write tables: a printed one, the project's own Table 1 (headline claims), the leaderboard, the audit."""

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path

from repro import papers
from repro.core.files import csv_text, write_text
from repro.papers.cell import Cell
from repro.render import content, own_numbers
from repro.render.latex import latex
from repro.render.sheet import Sheet, markdown
from repro.results import measure, replicate
from repro.results.measured import Measured
from repro.specs import tables
from repro.specs.names import canonical
from repro.specs.scale import Scale
from repro.stats.statistics import Interval
from repro.store.measurement import MEASURED, Measurement, to_csv
from repro.store.stored_row import text
from repro.verdicts import coverage, judging, table_results
from repro.workflow.workflow import Workflow


def build(flow: Workflow, name: str, out: Path = Path("tables")) -> Sheet:
    """Write one table as `.csv` (every cell), `.tex` and `.md`.

    Raises:
        UserError: as `sheet_and_csv`.
    """
    sheet, lines = sheet_and_csv(flow, name)
    stem = out / canonical(name)
    write_text(stem.with_suffix(".csv"), lines)
    write_text(stem.with_suffix(".tex"), latex(sheet))
    write_text(stem.with_suffix(".md"), markdown(sheet))
    return sheet


def sheet_and_csv(flow: Workflow, name: str) -> tuple[Sheet, str]:
    """One table, and its CSV with every cell.

    Args:
        name: `spear/table1`, `spear/memory`, or one of the project's own: `table1`, `table2`, `audit`,
            `own-numbers`.

    Raises:
        UserError: an unknown table, or an error in its spec.
    """
    if name in OWN:
        return OWN[name](flow)
    paper, number = tables.split(name)
    results = table_results.table_results(flow, paper, number)
    if paper in papers.PAPERS and coverage.other_device(paper, "table", number):
        bare = [
            key for key, measured in results.by_key.items() if measured.measurement.status in ("not_run", "no_stand_in")
        ]
        results = results.marked({key: {"status": "other_device"} for key in bare})
    changes, notes = replicate.changes_and_notes(flow, name, results.by_key)
    results = results.marked(changes)
    sheet = content.sheet(results)
    sheet = replace(sheet, notes=[*sheet.notes, *notes])
    return sheet, to_csv([*results.measurements, *measure.fresh_operands(flow, results.cells)])


def headline(flow: Workflow) -> tuple[Sheet, str]:
    """The project's own Table 1: a row for each measured claim; below, by paper, the claims that are not measured."""
    head = tables.headline()
    judged = table_results.judged(flow, tables.headline_claims())
    rows: list[list[str]] = []
    waiting = []
    for paper in papers.PAPERS:
        of_paper = [claim for claim in judged if tables.split(claim.spec.table)[0] == paper]
        if measured := [_headline_row(claim) for claim in of_paper if claim.measured]:
            rows += [[paper], *measured]
        named = [f"{_ids(claim)} {claim.spec.says}" for claim in of_paper if not claim.measured]
        figures = [text.partition(" ")[2] for text in head.figures_only if text.startswith(f"{paper} ")]
        if named or figures:
            waiting.append(f"Not measured of {paper}: {'; '.join([*named, *figures])}.")
    columns = ["claim", "what it says", "printed", "measured here", "verdict"]
    cases = chain.from_iterable(claim.cases for claim in judged)
    on_few = any("*" in case.on for case in cases)
    remarks = [
        f"Judged on the accepted results of scale {judged[0].scale}, whose models stand in for the papers'; values of "
        "up to three cases with their 95 % intervals, of more the least and the greatest.",
        "Grades: A the paper's model and protocol, B its shapes and real kernels, C a scaled analogue, at which claims "
        "hold on the stand-ins. One seed: a case rests on a single draw; its interval has the variance of its family.",
        *waiting,
        "What the papers' own numbers say of their claims, which is no verdict on a method: tables/own-numbers.",
        *[f"* {content.LEGEND['*']}."] * on_few,
        *replicate.sentences(replicate.replicas(flow, "table1")),
    ]
    top = ["claim", "says", "printed", "case", "from_printed", "measured", "lo", "hi", "on", "grade", "verdict"]
    lines = [[*top, "own_numbers", "why"]]
    for claim in judged:
        facts = [claim.spec.claim, claim.spec.says, claim.spec.printed]
        for c in claim.cases:
            numbers = [*map(text, (c.printed, c.measured, c.lo, c.hi))]
            lines.append([*facts, c.model, *numbers, c.on, claim.grade, claim.verdict, claim.own_numbers, claim.why])
    return Sheet(head.title, columns, rows, remarks, left=len(columns)), csv_text(lines)


def _headline_row(claim: judging.Judged) -> list[str]:
    """The row of a claim: its number, what it says, what was printed and measured, and the verdict."""
    values = content.measured(claim)
    values += "*" * any("*" in case.on for case in claim.cases)  # on a few windows
    word = "; ".join([claim.said, *["one seed"] * claim.one_seed])
    return [_ids(claim), claim.spec.says, claim.spec.printed, values, f"{claim.grade}: {word}"]


def _ids(claim: judging.Judged) -> str:
    return claim.spec.claim.partition(" ")[2] or "figure"


def printed_alone(flow: Workflow) -> tuple[Sheet, str]:
    """The table of the papers' own numbers: arithmetic on printed cells, without a verdict on a method or a grade."""
    judged = []
    lines = [["paper", *own_numbers.HEAD]]
    for paper in papers.PAPERS:
        claims = own_numbers.claims_of(paper)
        lines_of_paper = list(own_numbers.rows(table_results.judged(flow, claims)))
        lines_of_paper += own_numbers.formula_rows(paper, own_numbers.without_predicate(paper, claims))
        judged += [[paper], *([row[0].partition(" ")[2], *row[1:]] for row in lines_of_paper)] if lines_of_paper else []
        lines += [[paper, *row] for row in lines_of_paper]
    remark = "Each printed cell is known to half a unit of its last digit: within rounding, both are possible."
    title = "The papers' own numbers: what arithmetic on printed cells says of a claim"
    return Sheet(title, own_numbers.HEAD, judged, [remark], left=len(own_numbers.HEAD)), csv_text(lines)


Entries = dict[str, dict[str, dict[str, Measurement]]]  # by model, recipe and column
Ratios = dict[tuple[str, str], Interval]  # of perplexity to full precision, by model and recipe


def compared(flow: Workflow) -> list[Measured]:
    """The cells of all specs that are comparable: one seed, calibrated on the scale's text, not derived."""
    alike = []
    for cell in flow.table_cells("table2"):
        plain = cell.seeds == (0,) and not cell.calibration and not flow.operands(cell)
        if plain and flow.is_measured(cell):
            alike.append(measure.one_measured(flow, cell))
    return alike


def leaders(alike: Iterable[Measured], scale: Scale) -> tuple[Entries, Ratios]:
    """The measurements of cells by model, recipe and column, and their ratios of perplexity to full precision.

    Of cells with the same key, the first one counts.
    """
    entries: Entries = {}
    ratios: Ratios = {}
    for measured in alike:
        cell, m = measured.cell, measured.measurement
        if m.status not in MEASURED:
            continue
        label = _column(scale, cell)
        entries.setdefault(cell.stand_in, {}).setdefault(m.recipe, {}).setdefault(label, m)
        if cell.unit == "ppl" and measured.against:
            ratios.setdefault((cell.stand_in, m.recipe), measured.against)
    return entries, ratios


def leaderboard(flow: Workflow) -> tuple[Sheet, str]:
    """Every recipe of any spec that this scale measures, evaluated alike."""
    entries, ratios = leaders(compared(flow), flow.scale)
    measured_recipes: set[str] = set()
    for recipes in entries.values():
        measured_recipes.update(*recipes.values())
    labels = sorted(measured_recipes)
    rows: list[list[str]] = []
    lines = [["model", "recipe", "column", "value", "lo", "hi"]]
    for model, recipes in sorted(entries.items(), key=lambda item: _by_size(item[0])):
        rows.append([model])
        for name, cells in sorted(recipes.items(), key=lambda item: _bits(item[1])):
            against = ratios.get((model, name))
            ratio = "–"
            if against:
                perplexity = replace(next(iter(cells.values())), unit="ppl")
                ratio = content.measured_text(perplexity, against).partition(";")[0]
            values = [content.measured_text(cells[label]) if label in cells else "–" for label in labels]
            rows.append([name, ratio, *values])
            for column, cell in cells.items():
                lines.append([model, name, column, text(cell.value), text(cell.lo), text(cell.hi)])
    title = f"Every recipe, evaluated alike. Scale {flow.scale.name}: {flow.scale.about}"
    remark = "× is perplexity over full precision on the same windows; BPW stored bits a block weight; "
    remark += "MB the whole model."
    return Sheet(title, ["recipe", "× fp16", *labels], rows, [remark]), csv_text(lines)


def _column(scale: Scale, cell: Cell) -> str:
    """The column of a cell: its text by its own name, then what it counts or its unit."""
    corpus = getattr(cell.params, "corpus", "")
    count = getattr(cell.params, "show", "") or getattr(cell.params, "count", "")
    return " ".join(filter(None, [scale.text(corpus) if corpus else "", count, cell.unit * (not count)]))


def scattered(flow: Workflow) -> dict[str, dict[str, list[tuple[float | str, float, float | None, float | None, str]]]]:
    """The leaderboard's points: bits a block weight, ratio, its interval, recipe; by model and family of recipes."""
    entries, ratios = leaders(compared(flow), flow.scale)
    panels: dict[str, dict[str, list]] = {}
    for (model, name), against in sorted(ratios.items(), key=lambda item: (_by_size(item[0][0]), item[0])):
        if bits := _bits(entries[model][name]):
            family = " + ".join(part.split("-")[0].split("(")[0] for part in name.split(" + "))
            point = (bits, against.value, against.lo, against.hi, name)
            panels.setdefault(model, {}).setdefault(family, []).append(point)
    return panels


def _by_size(model: str) -> list[str | int]:
    """A model's name to sort by: pocket-10m comes after pocket-3m."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", model)]


def _bits(cells: dict[str, Measurement]) -> float:
    return next((m.value or 0.0 for label, m in cells.items() if label == "bpw"), 0.0)


def audit(flow: Workflow) -> tuple[Sheet, str]:
    """The table of the audit: where papers contradict their own numbers."""
    columns = ["paper", "id", "table", "cell", "printed", "recomputed", "difference"]
    rows = []
    for paper in papers.PAPERS:
        rows += [[paper, *finding] for finding in papers.audit(paper)]
    title = "Where the papers and their own numbers were compared"
    return Sheet(title, columns, rows, left=len(columns)), csv_text([columns, *rows])


OWN = {"table1": headline, "table2": leaderboard, "audit": audit, "own-numbers": printed_alone}
