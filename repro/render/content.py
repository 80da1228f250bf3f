"""Content of a table: the paper's value and ours under each printed column, then verdicts and remarks."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from repro import papers
from repro.metrics import metric_of
from repro.papers.cell import Cell, CellKey, is_printed
from repro.render.sheet import Pair, Sheet
from repro.results.measured import Measured
from repro.results.stored_rows import JOIN
from repro.specs import tables
from repro.specs.scale import Scale
from repro.stats.statistics import Interval
from repro.store.measurement import SHOWN, Measurement
from repro.verdicts import judging
from repro.verdicts.table_results import TableResults

WORDS = {
    "no_stand_in": "no stand-in",
    "not_run": "not run",
    "too_long": "too long",
    "other_device": "other device",
    "oom": "out of memory",
    "at_chance": "at chance",
}
MARKS = {
    "arithmetic": "§",
    "partial": "*",
    "replicated": "°",
    "differs": "≠",
    "unattested": "‖",
    "stale": "†",
    "at_chance": "‡",
}
LEGEND = {
    "§": "arithmetic on the recipe and the public shapes of the paper's own model; nothing ran",
    "*": "measured here, on as many windows or items as stand behind it, with one seed; no value of it is stored",
    "°": "stored, and measured again here: it agrees window by window, within the bounds of repro/results/replicate.py",
    "≠": "stored, and measured again here: it differs",
    "‖": "stored, unattested: timed before versions were kept; it stands until it is timed anew",
    "†": "stale: stored, and its declared inputs or versions have changed since",
    "‡": "at chance: full precision itself is less than 3 standard errors above it",
}

NATS = (
    "Nats: the paired change, against full precision, of the log probability of the right answer among the answers (of "
    "LAMBADA's last word itself); less than 0 is damage. A mean is that of tasks with several answers, without BoolQ, "
    "which full precision answers with one word throughout, and without MMLU, at chance."
)


MEANS = (
    "Mean accuracies are without BoolQ, to which full precision says no throughout, so that damage raises it; the "
    "paper's have it."
)


def sheet(results: TableResults, only: Collection[str] | None = None) -> Sheet:
    """The sheet of a printed table or of a spec of our own.

    Args:
        results: what is shown, all of it looked up.
        only: the rows that are shown; all without it.
    """
    paper = results.paper
    number = results.number
    by_key = results.by_key
    scale = results.scale
    cells = [cell for cell in results.cells if only is None or cell.row in only]
    spec = tables.table(paper, number)
    name = f"{paper}, Table {number}" if number.isdecimal() else f"{paper}, {number}".removeprefix(", ")
    title = f"{name}: {spec.title}"
    if not tables.path_of(paper, number).is_file():
        return _printed_grid(title, cells, f"As printed, {len(by_key)} cells; no spec yet.")
    label = _labels(cells)
    leads = {label[cell.col] for cell in cells if cell.metric in spec.extra_columns and _compares(cell)}
    columns = sorted(dict.fromkeys(label[cell.col] for cell in cells), key=lambda col: col not in leads)
    bare = _without_values(cells, by_key, label, spec)
    printed_rows: set[str] = set()
    if cells and is_printed("table", number):
        printed_rows = {printed.row for printed in papers.printed(paper, number)}
    rows: list[Sequence[str | Pair]] = []
    for model in dict.fromkeys(cell.model for cell in cells):
        of_model = [cell for cell in cells if cell.model == model]
        if model:
            rows.append([f"{model}; here: {_measured_on(of_model, by_key, scale)}"])
        for row in dict.fromkeys(cell.row for cell in of_model):
            by_column: dict[str, list[Measured]] = {col: [] for col in columns}
            for cell in of_model:
                if cell.row == row:
                    by_column[label[cell.col]].append(by_key[cell.cell_key])
            pairs = [_pair(by_column[col], (col, False) in bare, (col, True) in bare) for col in columns]
            if row in printed_rows or any(pair.here for pair in pairs):
                rows.append([row, *pairs])
    if paper in tables.FOLDERS and columns == [""]:
        columns = ["target", "verdict"]
        rows = _with_targets(results.verdicts, spec, rows)
    else:
        columns, rows = _without_empty_columns(columns, rows)
    scaled = any(
        cell.model and cell.stand_in == scale.stand_in(cell.model) and not by_key[cell.cell_key].external
        for cell in cells
    )
    notes = [f"Scale {scale.name}: {scale.about}."] if scaled and paper not in tables.FOLDERS else []
    if len(spec.measure) > 1 and not number.isdecimal() and paper not in tables.FOLDERS:
        notes.append(f"In a cell: {' / '.join(spec.measure)}.")
    notes += _notes_on_bare(bare, set(label.values()))
    values = [cell.here for cell in chain(*rows) if isinstance(cell, Pair)]
    if any(re.match(r"[-+][\d.]+ .*; ", value) for value in values):
        notes.append("A value with a sign in front is the difference to full precision, on the same items.")
    return Sheet(title, ["", *columns], rows, [*notes, *remarks(results)])


def _measured_on(cells: Sequence[Cell], by_key: Mapping[CellKey, Measured], scale: Scale) -> str:
    """What cells of one model are measured on, with grades: its stand-in, shapes that are timed, or devices."""
    stand_in = scale.stand_in(cells[0].model)
    on = dict.fromkeys(cell.stand_in for cell in cells if cell.stand_in)
    shapes = [name for name in on if name != stand_in]
    graded = [f"{stand_in}, grade {scale.grade}"] if stand_in in on else []
    if shapes:
        graded.append(f"{' and '.join(shapes)}, grade B")
    if graded:
        return "; ".join(graded)
    external = [by_key[cell.cell_key] for cell in cells if by_key[cell.cell_key].external]
    devices = {measured_cell.measurement.stand_in for measured_cell in external} - {""}
    return " and ".join(sorted(devices)) or "no stand-in at this scale"


def _labels(cells: Sequence[Cell]) -> dict[str, str]:
    """The heading of each printed column. Columns that differ only in their model share one.

    Models are sections here, so `WikiText2 2-7B` and `WikiText2 3.2-1B` become one column, `WikiText2`. Columns that
    are named after nothing but their model get the unit as a heading.
    """
    label = {cell.col: cell.col for cell in cells}
    units = {cell.col: cell.unit for cell in cells}
    models: dict[str, set[str]] = {col: set() for col in label}
    for cell in cells:
        models[cell.col].add(cell.model)
    columns_of_model: dict[str, list[str]] = {cell.model: [] for cell in cells}
    for col, names in models.items():
        if len(names) == 1:
            columns_of_model[next(iter(names))].append(col)
    if len(columns_of_model) < 2 or len({len(columns) for columns in columns_of_model.values()}) > 1:
        return label
    shared: dict[str, list[str]] = {}
    for together in zip(*columns_of_model.values()):
        common = set.intersection(*(set(col.split()) for col in together))
        words = " ".join(word for word in together[0].split() if word in common)
        heading = words or units[together[0]].replace("ppl", "perplexity")
        shared.setdefault(heading, []).extend(together)
    if any(len(columns) > len(columns_of_model) for columns in shared.values()):
        return label  # two columns of a model would be one
    for heading, columns in shared.items():
        label = label | dict.fromkeys(columns, heading)
    return label


def _without_values(
    cells: Sequence[Cell], by_key: Mapping[CellKey, Measured], label: Mapping[str, str], spec: tables.Spec
) -> dict[tuple[str, bool], str]:
    """Why columns have no measured value, or no change in nats: (heading, whether it is about nats) to the reason."""
    statuses: dict[tuple[str, bool], list[str]] = {}
    absent = {}
    for cell in cells:
        if why := tables.absent_reason(spec, cell.col):
            absent[label[cell.col]] = why
    for cell in cells:
        key = label[cell.col], cell.metric.endswith(tables.LOG_PROBABILITY)
        statuses.setdefault(key, []).append(by_key[cell.cell_key].measurement.status)
    bare: dict[tuple[str, bool], str] = {}
    if not any(cell.printed or by_key[cell.cell_key].measurement.status in SHOWN for cell in cells):
        return bare  # a table of our own that has nothing else to show
    for key, mine in statuses.items():
        if not any(status in SHOWN for status in mine):
            reasons = dict.fromkeys(status for status in mine if status != "no_stand_in") or ["no_stand_in"]
            bare[key] = " or ".join(WORDS.get(status, status) for status in reasons)
            if key[0] in absent and "not_run" in reasons:
                bare[key] += f", for lack of {absent[key[0]]}"
    return bare


def _notes_on_bare(bare: Mapping[tuple[str, bool], str], columns: Collection[str]) -> list[str]:
    """A note for each reason, with the columns that have no value for it."""
    if len(set(bare.values())) == 1 and all((col, False) in bare for col in columns):
        return [f"{_capital(next(iter(bare.values())))}: the whole table."]
    lines = []
    for reason in dict.fromkeys(bare.values()):
        named = [col for (col, nats), why in bare.items() if why == reason and not nats]
        of_nats = [col for (col, nats), why in bare.items() if why == reason and nats and (col, False) not in bare]
        named += [f"nats of {', '.join(of_nats)}"] if of_nats else []
        lines += [f"{_capital(reason)}: {'; '.join(named)}."] if named else []
    return lines


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _without_empty_columns(
    columns: Sequence[str], rows: Sequence[Sequence[str | Pair]]
) -> tuple[list[str], list[Sequence[str | Pair]]]:
    """Columns and rows without the columns that hold neither a printed nor a measured value."""
    full_rows = [row for row in rows if len(row) > 1]
    indices = []
    for i in range(1, len(columns) + 1):
        if any(row[i].here or row[i].printed not in ("", "–") for row in full_rows):
            indices.append(i)
    reduced = []
    for row in rows:
        is_section = len(row) == 1
        reduced.append(row if is_section else [row[0], *(row[i] for i in indices)])
    return [columns[i - 1] for i in indices], reduced


def _printed_grid(title: str, cells: Sequence[Cell], note: str) -> Sheet:
    """The printed grid of a table without a spec; several metrics of a cell are joined as in the paper."""
    columns = list(dict.fromkeys(cell.col for cell in cells))
    rows: list[Sequence[str]] = []
    for model in dict.fromkeys(cell.model for cell in cells):
        of_model = [cell for cell in cells if cell.model == model]
        if model:
            rows.append([model])
        for row in dict.fromkeys(cell.row for cell in of_model):
            texts = []
            for col in columns:
                printed = [cell.printed or "–" for cell in of_model if (cell.row, cell.col) == (row, col)]
                texts.append(" / ".join(printed))
            rows.append([row, *texts])
    return Sheet(title, ["", *columns], rows, [note])


def _with_targets(
    verdicts: Iterable[judging.Judged], spec: tables.Spec, rows: list[Sequence[str | Pair]]
) -> list[Sequence[str | Pair]]:
    """Rows of one column with the targets of its metrics in place of the printed values, and a column of verdicts."""
    targets: dict[str, dict[str, tuple[str, str]]] = {}  # by row and metric
    for judged in verdicts:
        claim = judged.spec
        for (_, named), case in zip(claim.case_cells(), judged.cases):
            if list(named) == [claim.quantity]:
                ((row, _, _, metric),) = named.values()
                word = "–" if case.verdict is None else judging.PLAIN[case.verdict]
                targets.setdefault(row, {})[metric] = (case.holds.replace(">=", "≥").replace("<=", "≤"), word)
    out: list[Sequence[str | Pair]] = []
    for row in rows:
        if len(row) == 1:
            out.append(row)
            continue
        label, pair = row
        target_text = verdict_text = "–"
        if label in targets:
            of_row = [targets[label].get(metric, ("–", "–")) for metric in spec.measure]
            target_text = " / ".join(target for target, _ in of_row)
            verdict_text = " / ".join(verdict for _, verdict in of_row)
        out.append([label, Pair(target_text, pair.here), Pair(verdict_text, "")])
    return out


def _compares(cell: Cell) -> bool:
    """Whether a metric is itself a comparison with full precision, as KL is. Such columns need little text and come
    first."""
    return bool(metric_of(cell).reference)


def _pair(every: Sequence[Measured], bare: bool = False, without_nats: bool = False) -> Pair:
    """The printed and the measured text of a cell; several metrics are joined as in the paper.

    The measured text is empty in a bare column, and for a model without a stand-in, as its section heading says.
    """
    of_metric = [cell_here for cell_here in every if not cell_here.cell.metric.endswith(tables.LOG_PROBABILITY)]
    of_log_probability = [cell_here for cell_here in every if cell_here not in of_metric and not without_nats]
    cells = [cell_here.cell for cell_here in of_metric]
    is_joined = len(cells) > 1 and cells[0].number.isdecimal()
    absent = bool(of_metric) and all(
        cell_here.measurement.status == "no_stand_in" and cell_here.cell.model for cell_here in of_metric
    )
    printed = " / ".join(cell.printed or "–" for cell in cells if cell.printed or is_joined)
    has_nats = any(cell_here.measurement.status in SHOWN for cell_here in of_log_probability)
    texts = [_accuracy(cell_here.measurement) if has_nats else _first(cell_here) for cell_here in of_metric]
    if len(set(texts)) == 1:
        texts = texts[:1]
    text = " / ".join(texts)
    for cell_here in of_log_probability:
        if cell_here.measurement.status in SHOWN and cell_here.measurement.value is not None:
            text += f"; {_in_nats(cell_here.measurement, cell_here.against)}"
    if absent or bare:
        text = ""
    return Pair(printed or ("–" if cells and cells[0].kind == "table" and not cells[0].variables else ""), text)


def _first(cell_here: Measured) -> str:
    """A measured value against full precision; of an accuracy at chance only the mark."""
    cell, m = cell_here.cell, cell_here.measurement
    if _is_folded(m):
        return MARKS["at_chance"]
    if m.status == "not_run" and cell.is_full_precision and _compares(cell):
        itself = metric_of(cell).itself
        return measured_text(m) if itself is None else f"{itself:g}"
    return measured_text(m, cell_here.against)


def _accuracy(m: Measurement) -> str:
    """An accuracy next to its log probability: without an interval, and at chance only the mark."""
    return MARKS["at_chance"] if _is_folded(m) else measured_text(replace(m, lo=None, hi=None))


def _is_folded(m: Measurement) -> bool:
    """Whether it is an accuracy at chance in a printed table, whose values a single note replaces."""
    return m.status == "at_chance" and m.number.isdecimal()


def _in_nats(m: Measurement, change: Interval | None) -> str:
    """A log probability's paired change against full precision; of full precision itself its value."""
    if change is None:
        return f"{measured_text(m)} nats"
    ends = [None if end is None else f"{end:.3f}" for end in (change.lo, change.hi)]
    return f"{change.value:+.3f}{_ends(f'{change.value:.3f}', *ends)} nats"


def number(x: float | None) -> str:
    """Four significant digits, at most two decimals above 1, an exponent below 5e-4 and from 1e6 on."""
    if x is None:
        return ""
    if 0 < abs(x) < 5e-4:
        return _short_exponent(f"{x:.2g}")
    return _short_exponent(f"{x:.1e}") if abs(x) >= 1e6 else _rounded(x, whole=1000, tenths=100)


def _short_exponent(text: str) -> str:
    """`3.3e+06` as papers print it: `3.3e6`."""
    return re.sub(r"e\+?(-?)0*", r"e\1", text)


def _rounded(x: float, whole: float, tenths: float) -> str:
    """No decimals from `whole` on, one from `tenths` on, two from 1 on, else three."""
    size = abs(x)
    if size >= whole:
        return f"{x:.0f}"
    if size >= tenths:
        return f"{x:.1f}"
    return f"{x:.2f}" if size >= 1 else f"{x:.3f}"


def measured_text(m: Measurement, against: Interval | None = None) -> str:
    """A measured value with its marks, after its comparison with full precision if there is one; or the status."""
    if m.status not in SHOWN or m.value is None:
        return WORDS.get(m.status, m.status)
    marks = "".join(dict.fromkeys(MARKS[w] for w in (m.source, m.status) if w in MARKS))
    marks += f"{m.n}" if m.source == "partial" and m.n else ""
    if against is not None:
        decimals = max(0, 4 - len(f"{abs(against.value):.0f}"))  # four digits of what is greater than 1
        ratio = against.value > 0.5 and m.unit == "ppl"
        texts = [None if x is None else f"{x:.{decimals}f}" for x in (against.value, against.lo, against.hi)]
        change = f"×{texts[0]}" if ratio else f"{against.value:+.{decimals}f}"
        return f"{change}{_ends(*texts)}; {number(m.value)}{marks}"
    texts = [None if x is None else number(x) for x in (m.value, m.lo, m.hi)]
    exact = {m.lo, m.hi} <= {None, m.value}  # a setting or a count
    if exact and m.value.is_integer() and abs(m.value) < 1e6:
        return f"{m.value:.0f}{marks}"
    return f"{texts[0]}{marks}{_ends(*texts)}"


def _ends(value: str | None, lo: str | None, hi: str | None) -> str:
    """An interval in brackets; empty if it is unknown, or no wider than the value as shown."""
    return "" if lo is None or lo == hi == value else f" [{lo}, {hi}]"


def remarks(results: TableResults) -> list[str]:
    """The spec's notes, verdicts on claims, how and where cells were measured, and the legend of the marks."""
    cells = results.measurements
    out = [*tables.table(results.paper, results.number).notes, *map(verdict_line, results.verdicts)]
    ran = [m for m in cells if m.value is not None and m.source and m.device]
    if ran:
        covers = sorted({m.covers for m in ran if m.covers})
        read = "× is the ratio to full precision on the same windows. " if any(m.unit == "ppl" for m in ran) else ""
        if covers:
            how = " (block jackknife)" * any("windows" in word or "items" in word for word in covers)
            read += f"Intervals are 95 %, over {'; '.join(covers)}{how}. "
        parts: set[str] = set()
        for m in ran:
            parts.update(m.protocol.split("; "))
        groups = "; ".join(sorted(parts - {""}))
        out += filter(None, [(read + groups + "." * bool(groups)).rstrip()])
        out.append(f"Measured on {'; '.join(origins(ran))}.")
    missing = sorted({m.note for m in cells if m.status in ("unsupported", "diverged", "oom") and m.note})
    out += [f"Not possible: {note}." for note in missing]
    absent = {measured_cell.lacking for measured_cell in results.by_key.values()} - {""}
    out += [f"Not run: {why}." for why in sorted(absent)]
    out += _at_chance(cells)
    out += [MEANS] * any(getattr(cell.params, "without", ()) == ("boolq",) for cell in results.cells)
    words = {m.source for m in cells} | {m.status for m in cells}
    marks = {MARKS[word] for word in words if word in MARKS}
    return out + [f"{mark} {LEGEND[mark]}." for mark in LEGEND if mark in marks]


def origins(cells: Sequence[Measurement]) -> list[str]:
    """Each device with the commits (ten digits) at which it measured."""
    commits: dict[str, set[str]] = {}
    for m in cells:
        for commit in m.commit.split(JOIN):  # of a cell that is composed of several
            commits.setdefault(m.device, set()).add(re.sub(r"^([0-9a-f]{10})[0-9a-f]+", r"\1", commit))
    return [
        f"{device}, commit{'s' * (len(commits[device]) > 1)} {', '.join(sorted(commits[device]))}"
        for device in sorted(commits)
    ]


def _at_chance(cells: Sequence[Measurement]) -> Iterator[str]:
    """The notes on accuracies at chance: full precision's accuracies by stand-in, and what nats are."""
    folded = [m for m in cells if _is_folded(m) and m.recipe == "fp16" and m.value is not None]
    by_stand_in = []
    for name in dict.fromkeys(m.stand_in for m in folded):
        accuracies = dict.fromkeys(f"{m.col} {number(m.value)}" for m in folded if m.stand_in == name)
        by_stand_in.append(f"{name} {', '.join(accuracies)}")
    if by_stand_in:
        where = "every recipe's is in the table's CSV"
        yield f"Accuracies at chance are folded ({where}); full precision's: {'; '.join(by_stand_in)}."
    nats = [m.status in SHOWN for m in cells if m.metric.endswith(tables.LOG_PROBABILITY)]
    if any(nats):
        yield NATS if all(nats) else f"{NATS} Where none stand behind a value they were not run."


def verdict_line(judged: judging.Judged) -> str:
    """One line on a claim: verdict, count of cases, grade, models, values and cross-checks."""
    spec = judged.spec
    ours = tables.split(judged.spec.table)[0] in tables.FOLDERS
    facts = [judged.said] if judged.verdict else []
    if judged.measured:
        named = chain.from_iterable(case.on.split(", ") for case in judged.cases)
        models = ", ".join(dict.fromkeys(filter(None, named)))
        facts += [f"grade {judged.grade}"]
        facts += [f"on {models}"] if models else []
        facts += ["one seed"] if judged.one_seed else []
        facts += [f"measured: {measured(judged)}"]
        facts += cross_checks(judged)
    facts += [judged.why] if judged.why else []
    facts += [f"predicate changed after the runs: {spec.changed}"] if spec.changed else []
    facts += [f"the paper's own numbers: {judged.own_numbers}"] if judged.own_numbers and not ours else []
    text = "; ".join(facts)
    return f"{spec.claim}: {spec.says}. {'Target' if ours else 'Printed'}: {spec.printed}. {text[0].upper()}{text[1:]}."


def measured(judged: judging.Judged) -> str:
    """The values of the judged cases, with intervals if they are few."""
    values = f"{readings(of_measured(judged), judged.spec.percent)} {judged.spec.unit}".rstrip()
    nats = any(case.nats and case.verdict is not None for case in judged.cases)
    return f"{values} (of log probability, in nats)" if nats else values


def of_measured(judged: judging.Judged) -> list[tuple[float | None, float | None, float | None]]:
    """Value and interval of every case that has a verdict."""
    return [(case.measured, case.lo, case.hi) for case in judged.cases if case.verdict is not None]


def cross_checks(judged: judging.Judged) -> list[str]:
    """A claim's cross-checks: their values, and whether verdict or values differ from the claim's own.

    A value differs if the interval of the difference excludes 0.
    """
    lines = []
    for name in judged.spec.cross_checks if judged.measured else ():
        checks = []
        for case in judged.cases:
            if case.verdict is not None:
                checks += [(case.verdict, check) for check in case.cross_checks if check.name == name]
        if not checks:
            continue
        verdicts, apart = [check.verdict for _, check in checks], [check.apart for _, check in checks]
        said = judging.together(verdicts)
        word = judging.PLAIN[said]
        count = judging.counted([verdict == judging.HOLDS for verdict in verdicts])
        agrees = "agrees" if said == judging.together([v for v, _ in checks]) else f"disagrees: {word} ({count})"
        agrees += f", another value in {judging.counted(apart)}" * any(apart)
        lines.append(f"{name}: {readings([check[1:4] for _, check in checks], judged.spec.percent)} ({agrees})")
    return lines


def readings(values: Sequence[tuple[float | None, float | None, float | None]], percent: bool) -> str:
    """Up to three values with their intervals; of more, the least and the greatest."""
    known = [x for x, _, _ in values if x is not None]
    if len(known) <= 3:
        return ", ".join(quantity(*value, percent) for value in values if value[0] is not None)
    return f"{quantity(min(known), percent=percent)} to {quantity(max(known), percent=percent)}"


def quantity(x: float | None, lo: float | None = None, hi: float | None = None, percent: bool = False) -> str:
    """A claim's quantity with three significant digits, and its interval."""
    if x is None:
        return "–"

    factor = 100 if percent else 1
    texts = [None if end is None else _rounded(factor * end, whole=100, tenths=10) for end in (x, lo, hi)]
    return texts[0] + " %" * percent + _ends(*texts)
