"""From raw scores to tables: one printed table, the headline table, the leaderboard, the audit."""

import csv
import io
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from repro import claims, papers, plot, record, render, spec, study, table
from repro.files import write_text
from repro.record import Measurement
from repro.render import Sheet
from repro.workflow import Workflow

WORDS = {"no_stand_in": "no stand-in", "not_run": "not run", "too_long": "too long"}
MARKS = {"recorded": "*", "stale": "†", "floor": "‡"}
LEGEND = {
    "*": "recorded: an accepted measurement from results/, not of this run",
    "†": "stale: recorded, and the code that made it has changed since",
    "‡": "at chance: full precision itself is less than 3 standard errors above it",
}


def build_table(flow: Workflow, paper: str, number: str, out: Path) -> Sheet:
    """Write one printed table as `.csv` (every cell), `.tex` and `.md` under `out`/<paper>/."""
    cells = table.measure(flow, paper, number)
    sheet = table_sheet(flow, paper, number, cells)
    write(out / paper / f"table{number}", sheet, record.to_csv(cells))
    return sheet


def write(stem: Path, sheet: Sheet, csv_text: str) -> None:
    """The three faces of a table."""
    write_text(stem.with_suffix(".csv"), csv_text)
    write_text(stem.with_suffix(".tex"), render.latex(sheet))
    write_text(stem.with_suffix(".md"), render.markdown(sheet))


def table_sheet(flow: Workflow, paper: str, number: str, cells: list[Measurement]) -> Sheet:
    """A table by model: under each printed column the paper's value and ours, then what we measure besides."""
    printed_cols = list(dict.fromkeys(c.col for c in papers.printed(paper, number)))
    by_model = model_columns(paper, number)
    companions = [c for c, *_ in table.COMPANIONS if any(m.col == c for m in cells)]
    wide = len(set(by_model.values())) > 1 or len(printed_cols) > 8  # columns differ by model: one line a cell
    head = ["", *(["cell", "paper", "here"] if wide else [h for c in printed_cols for h in (c, "here")]), *companions]
    at: dict[tuple[str, str, str], Measurement] = {}
    for m in cells:  # several metrics in one place are shown as `41 / 26`
        first = at.setdefault((m.row, m.col, m.model), m)
        if first is not m:
            both = f"{first.printed or '–'} / {m.printed or '–'}"
            at[m.row, m.col, m.model] = replace(first, printed=both)
    rows: list[list[str]] = []
    for model, cols in by_model.items():
        stand_in = flow.stand_in(model)
        grade = f", grade {flow.profile.grade}" if stand_in else ""
        if model:
            rows.append([f"{model}; here: {stand_in or 'no stand-in in this profile'}{grade}"])
        for row in dict.fromkeys(m.row for m in cells if m.model == model):
            extra = [value(at.get((row, c, model))) for c in companions]
            if wide:
                rows += [[row, m.col, *pair(m), *extra] for c in cols if (m := at.get((row, c, model)))]
            else:
                pairs = [pair(at.get((row, c, model))) for c in printed_cols]
                rows.append([row, *(text for both in pairs for text in both), *extra])
    what = f"{paper}, Table {number}: {spec.table(paper, number).title}"
    title = f"{what}. Profile {flow.profile.name}: {flow.profile.about}"
    return Sheet(title, head, rows, notes(cells) + judged_notes(flow, paper, number), left=2 if wide else 1)


def judged_notes(flow: Workflow, paper: str, number: str) -> list[str]:
    """The claims that a table's own spec carries, each with grade, verdict and how many cases hold."""
    lines = []
    for claim in spec.table(paper, number).claims:
        judged = claims.judge(flow, claim)
        held, where = claims.held(judged), ", ".join(dict.fromkeys(case.on for case in judged.cases if case.on))
        grade = f"grade {judged.grade}" if judged.grade else "no grade"
        found = "; ".join(filter(None, (f"{judged.verdict} ({grade})", held, f"on {where}" if where else "")))
        lines.append(f"{claim.claim}: {claim.says}. Printed: {claim.printed}. {found[0].upper()}{found[1:]}.")
    return lines


def build_study(flow: Workflow, paper: str, name: str, out: Path, figures: Path | None = None) -> Sheet:
    """Write a study as `.csv` (every cell), `.tex` and `.md` under `out`/<paper>/, and its figure where it has an axis.

    Args:
        figures: folder of figures; by default the one beside `out`.
    """
    what, cells = study.load(paper, name), study.measure(flow, paper, name)
    at = {(m.model, m.col, m.row, m.metric): m for m in cells}
    first, *others = what.rows
    tall = len(others) > 5  # many variants at few points of a grid: a line a variant
    points = tuple(what.columns())

    def line(model: str, column: str) -> list[str]:
        best = at[model, column, first, study.METRIC]
        return [f"{100 * study.share(best):.2f} %" if best.value is not None else "–", here(best)]

    def pair_of(model: str, column: str, row: str) -> list[str]:
        return [here(at[model, column, row, metric]) for metric in (study.METRIC, "difference")]

    rows: list[list[str]] = []
    for model in what.models:
        stand_in = flow.stand_in(model) or "no stand-in in this profile"
        rows.append([f"{stand_in}, for {model}; grade {flow.profile.grade}"])
        if tall:
            rows.append([first, *(text for column in points for text in (line(model, column)[1], ""))])
            rows += [[row, *(text for column in points for text in pair_of(model, column, row))] for row in others]
        else:
            rows += [
                [column, *line(model, column), *(text for row in others for text in pair_of(model, column, row))]
                for column in points
            ]
    if tall:
        head = ["", *(text for column in points for text in (column, f"{first} – this"))]
    else:
        head = ["", "share of 4-bit weights", first, *(text for row in others for text in (row, f"{first} – {row}"))]
    ran = [m for m in cells if m.value is not None]
    remarks = [
        "Share of the gap in perplexity between the quantized model and full precision that comes back, in %: the mean "
        f"over seeds {', '.join(map(str, what.seeds))}, with 95 % bootstraps over windows, paired."
    ]
    for row in others:
        found = Counter(study.verdict(m) for m in cells if m.row == row and m.metric == "difference")
        counts = ", ".join(f"{n} {word}" for word, n in found.items() if word != "–")
        if counts:
            remarks.append(f"{first} against {row}, whole interval and every seed: {counts}.")
    if ran:
        recovered = [(m.row, max(study.seeds(m)) - min(study.seeds(m))) for m in ran if m.metric == study.METRIC]
        widest = {row: max(wide for r, wide in recovered if r == row) for row in dict.fromkeys(r for r, _ in recovered)}
        listed = ", ".join(f"{row} {wide:.1f}" for row, wide in widest.items())
        remarks.append(f"Largest range over seeds, in points: {listed}. {ran[0].protocol}.")
    sheet = Sheet(f"{paper}: {what.title}. Profile {flow.profile.name}", head, rows, remarks + notes(cells)[1:])
    write(out / paper / name, sheet, record.to_csv(cells))
    if ran and all(isinstance(v, float) for v in list(what.grid.values())[-1]):
        folder = figures or out.parent / "figures"
        plot.shares_back(study.lines(cells), what.title, folder / paper / f"{name}.svg")
    return sheet


def model_columns(paper: str, number: str) -> dict[str, tuple[str, ...]]:
    """The printed columns of each model, in printed order."""
    found: dict[str, dict[str, None]] = {}
    for cell in papers.printed(paper, number):
        found.setdefault(cell.model, {})[cell.col] = None
    return {model: tuple(cols) for model, cols in found.items()}


def notes(cells: Iterable[Measurement]) -> list[str]:
    """What was measured how, then the marks that occur."""
    cells = list(cells)
    ran = [m for m in cells if m.status in ("ok", "floor", "stale")]
    out = []
    if ran:
        protocols = dict.fromkeys(f"{m.col}: {m.protocol}" for m in ran if m.printed)
        out.append("Intervals are 95 % bootstraps over windows or items. " + "; ".join(protocols) + ".")
        made = dict.fromkeys(f"{m.device}, commit {m.commit}" for m in ran)
        out.append("Measured on " + "; ".join(made) + ".")
    marks = {MARKS[w] for m in cells for w in (m.live, m.status) if w in MARKS}
    return out + [f"{mark} {LEGEND[mark]}." for mark in LEGEND if mark in marks]


def number(x: float | None) -> str:
    """Four significant digits, two decimals at most, exponents from a million on."""
    if x is None:
        return ""
    if abs(x) >= 1e6:
        return f"{x:.1e}"
    return f"{x:.0f}" if abs(x) >= 1000 else f"{x:.1f}" if abs(x) >= 100 else f"{x:.2f}" if abs(x) >= 1 else f"{x:.3f}"


def value(m: Measurement | None) -> str:
    """A measured value without its interval."""
    return number(m.value) if m and m.status in ("ok", "floor", "stale") else "–"


def pair(m: Measurement | None) -> tuple[str, str]:
    """What the paper printed and what is here, blank where the paper's table has no such cell."""
    return (m.printed or "–", here(m)) if m else ("", "")


def here(m: Measurement) -> str:
    """A measured value with interval and marks, or the status that says why there is none."""
    if m.status not in ("ok", "floor", "stale"):
        return WORDS.get(m.status, m.status)
    marks = "".join(dict.fromkeys(MARKS[w] for w in (m.live, m.status) if w in MARKS))
    interval = f" [{number(m.lo)}, {number(m.hi)}]" if m.lo is not None else ""
    return f"{number(m.value)}{marks}{interval}"


def build_headline(flow: Workflow, out: Path) -> Sheet:
    """Write the project's own Table 1: `tables/table1.{csv,tex,md}`."""
    head = spec.headline()
    judged = [claims.judge(flow, claim) for claim in head.claims]
    rows = []
    for j in judged:
        here_, printed = [], []
        for case in j.cases:
            printed.append(claims.show(case.printed, j.spec.percent))
            ends = f" [{claims.show(case.lo, j.spec.percent)}, {claims.show(case.hi, j.spec.percent)}]"
            here_.append(claims.show(case.measured, j.spec.percent) + ends if case.measured is not None else "–")
        on = ", ".join(dict.fromkeys(c.on for c in j.cases if c.on)) or "printed cells"
        measured = "; ".join(here_) if j.measured else "–"
        rows.append(
            [j.spec.claim, j.spec.says, j.spec.printed, "; ".join(printed), measured, on, j.grade or "–", j.verdict]
        )
    columns = ["claim", "what it says", "printed", "from printed cells", "measured here", "on", "grade", "verdict"]
    widths = ("l", "p{4.2cm}", "p{2.4cm}", "p{2.4cm}", "p{3.6cm}", "p{2cm}", "l", "p{2cm}")
    remarks = [
        f"Profile {flow.profile.name}: {flow.profile.about}.",
        "Grades: A the paper's model and protocol, B its shapes and real kernels, C a scaled analogue, D arithmetic on "
        "printed numbers. One value a case; intervals are paired 95 % bootstraps.",
        "* recorded: judged on accepted measurements of profile " + (flow.profile.judged_on or flow.profile.name) + ".",
        "Only in figures, without printed cells: " + "; ".join(head.figures_only) + ".",
    ]
    sheet = Sheet(head.title, columns, rows, remarks, left=len(columns), widths=widths)
    lines = [
        ["claim", "says", "printed", "case", "from_printed", "measured", "lo", "hi", "on", "grade", "verdict", "why"]
    ]
    for j in judged:
        for c in j.cases:
            numbers = ["" if x is None else f"{x:.7g}" for x in (c.printed, c.measured, c.lo, c.hi)]
            lines.append(
                [j.spec.claim, j.spec.says, j.spec.printed, c.model, *numbers, c.on, j.grade, j.verdict, j.why]
            )
    write(out / "table1", sheet, csv_text(lines))
    return sheet


def build_leaderboard(flow: Workflow, out: Path, figures: Path = Path("figures")) -> Sheet:
    """Write tables/table2 and figures/leaderboard.svg: every recipe of any spec, by model, evaluated alike."""
    texts = list(dict.fromkeys(flow.profile.corpora.values()))
    runs = {
        run.id: run
        for paper, num in spec.specified()
        for _, _, column, _, run in flow.cells(paper, num)
        if run is not None and column.measure == "perplexity" and flow.source(column, run)
    }
    entries: dict[str, dict[str, dict[str, Measurement]]] = {}
    for run in runs.values():
        bare = Measurement("", "table", "", "", "", "", "")
        cells = {text: replace(bare, **table.perplexity_cell(flow.scores(run, text))) for text in texts}
        cells |= {m.col: m for m in table.companion_cells(bare, flow.scores(run, texts[0]))}
        full = flow.scores(flow.run(run.model, "fp16"), texts[0])
        cells["x"] = replace(bare, **table.ratio_cell(flow.scores(run, texts[0]), full))
        entries.setdefault(run.model, {})[run.recipe.name] = cells
    head = ["recipe", "BPW", *texts, f"{texts[0]} / fp16", "KL", "Top-1", "MB"]
    rows: list[list[str]] = []
    for model, recipes in entries.items():
        rows.append([model])
        for name, cells in sorted(recipes.items(), key=lambda item: item[1]["BPW"].value or 0):
            rows.append([name, f"{cells['BPW'].value:.3f}", *(here(cells[text]) for text in (*texts, "x"))])
            rows[-1] += [value(cells.get(companion)) for companion in head[-3:]]
    title = f"Every recipe, evaluated alike. Profile {flow.profile.name}: {flow.profile.about}"
    remark = "BPW: stored bits per block weight. KL (nats), top-1 agreement (%) to full precision. MB: the whole model."
    sheet = Sheet(title, head, rows, [remark])
    lines = [["model", "recipe", "column", "value", "lo", "hi"]]
    for model, recipes in entries.items():
        for name, cells in recipes.items():
            numbers = {c: [record.text(x) for x in (m.value, m.lo, m.hi)] for c, m in cells.items()}
            lines += [[model, name, column, *three] for column, three in numbers.items()]
    write(out / "table2", sheet, csv_text(lines))
    panels: dict[str, dict[str, list[plot.Point]]] = {}
    for model, recipes in entries.items():
        for name, cells in recipes.items():
            family = " + ".join(part.split("-")[0] for part in name.split(" + "))
            if family != "fp16":
                x = cells["x"]
                panels.setdefault(model, {}).setdefault(family, []).append((cells["BPW"].value, x.value, x.lo, x.hi))
    subtitle = f"{texts[0]}, profile {flow.profile.name}; paired 95 % intervals"
    plot.quality_against_bits(panels, subtitle, figures / "leaderboard.svg")
    return sheet


def build_audit(out: Path) -> Sheet:
    """Write tables/audit: where the papers and their own numbers were compared, and what came of it."""
    findings = [(paper, f) for paper in papers.PAPERS for f in papers.audit(paper)]
    columns = ["paper", "table", "cell", "printed", "recomputed", "difference"]
    rows = [[p, f.table, f.cell, f.printed, f.recomputed, f.difference] for p, f in findings]
    widths = ("l", "l", "p{4cm}", "p{3.5cm}", "p{4cm}", "p{2.5cm}")
    sheet = Sheet("Where the papers and their own numbers were compared", columns, rows, left=6, widths=widths)
    lines = [["paper", "id", *columns[1:], "kind", "severity", "comment"]]
    lines += [[p, f.id, *row[1:], f.kind, f.severity, f.comment] for (p, f), row in zip(findings, rows)]
    write(out / "audit", sheet, csv_text(lines))
    return sheet


def csv_text(lines: list[list[str]]) -> str:
    """Lines as CSV text."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()
