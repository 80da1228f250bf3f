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
    **{"no_stand_in": "no stand-in", "not_run": "not run", "too_long": "too long", "other_device": "other device"},
    "oom": "out of memory",
    "at_chance": "at chance",
}
MARKS = {
    **{"arithmetic": "§", "partial": "*", "replicated": "°", "differs": "≠"},
    **{"unattested": "‖", "stale": "†", "at_chance": "‡"},
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
    named = f"{paper}, Table {number}" if number.isdecimal() else f"{paper}, {number}".removeprefix(", ")
    title = f"{named}: {spec.title}"
    if not tables.path_of(paper, number).is_file():
        return _printed_grid(title, cells, f"As printed, {len(by_key)} cells; no spec yet.")
    label = _labels(cells)
    leads = {label[cell.col] for cell in cells if cell.metric in spec.extra_columns and _compares(cell)}
    columns = sorted(dict.fromkeys(label[cell.col] for cell in cells), key=lambda col: col not in leads)
    bare = _without_values(cells, by_key, label, spec)
    printed = {one.row for one in papers.printed(paper, number)} if cells and is_printed("table", number) else set()
    rows: list[Sequence[str | Pair]] = []
    for model in dict.fromkeys(cell.model for cell in cells):
        mine = [cell for cell in cells if cell.model == model]
        if model:
            timed = [by_key[cell.cell_key] for cell in mine if by_key[cell.cell_key].external]  # of shapes
            devices = {one.measurement.stand_in for one in timed} - {""}
            here = _measured_on(mine, scale) or " and ".join(sorted(devices)) or "no stand-in at this scale"
            rows.append([f"{model}; here: {here}"])
        for row in dict.fromkeys(cell.row for cell in mine):
            at: dict[str, list[Measured]] = {col: [] for col in columns}
            for cell in mine:
                if cell.row == row:
                    at[label[cell.col]].append(by_key[cell.cell_key])
            texts = [_pair(at[col], (col, False) in bare, (col, True) in bare) for col in columns]
            if row in printed or any(pair.here for pair in texts):
                rows.append([row, *texts])
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
    notes += _said_of_bare(bare, set(label.values()))
    values = [cell.here for cell in chain(*rows) if isinstance(cell, Pair)]
    if any(re.match(r"[-+][\d.]+ .*; ", value) for value in values):
        notes.append("A value with a sign in front is the difference to full precision, on the same items.")
    return Sheet(title, ["", *columns], rows, [*notes, *remarks(results)])


def _measured_on(cells: Sequence[Cell], scale: Scale) -> str:
    """What cells of one model are measured on, with grades: its stand-in, shapes that are timed; empty if nothing."""
    stand_in = scale.stand_in(cells[0].model)
    on = dict.fromkeys(cell.stand_in for cell in cells if cell.stand_in)
    shapes = [name for name in on if name != stand_in]
    graded = [f"{stand_in}, grade {scale.grade}"] if stand_in in on else []
    if shapes:
        graded.append(f"{' and '.join(shapes)}, grade B")
    return "; ".join(graded)


def _labels(cells: Sequence[Cell]) -> dict[str, str]:
    """What heads each column; where the paper gives each model columns of its own, all models share a label.

    As models are sections here, `WikiText2 2-7B` and `WikiText2 3.2-1B` are one column, `WikiText2`; columns that name
    nothing but their model are named after the unit.
    """
    label = {cell.col: cell.col for cell in cells}
    units = {cell.col: cell.unit for cell in cells}
    models: dict[str, set[str]] = {col: set() for col in label}
    for cell in cells:
        models[cell.col].add(cell.model)
    own: dict[str, list[str]] = {cell.model: [] for cell in cells}
    for col, of in models.items():
        if len(of) == 1:
            own[next(iter(of))].append(col)
    if len(own) < 2 or len({len(columns) for columns in own.values()}) > 1:
        return label
    shared: dict[str, list[str]] = {}
    for together in zip(*own.values()):
        common = set.intersection(*(set(col.split()) for col in together))
        words = " ".join(word for word in together[0].split() if word in common)
        said = words or units[together[0]].replace("ppl", "perplexity")
        shared.setdefault(said, []).extend(together)
    if any(len(columns) > len(own) for columns in shared.values()):
        return label  # two columns of a model would be one
    for said, columns in shared.items():
        label = label | dict.fromkeys(columns, said)
    return label


def _without_values(
    cells: Sequence[Cell], by_key: Mapping[CellKey, Measured], label: Mapping[str, str], spec: tables.Spec
) -> dict[tuple[str, bool], str]:
    """Columns without any measured value, and of others those without any change in nats: in words, why."""
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


def _said_of_bare(bare: Mapping[tuple[str, bool], str], columns: Collection[str]) -> list[str]:
    """A line for each reason, with those of the columns that have no value for it."""
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
    """The columns that hold a printed or a measured value, and their rows."""
    whole = [row for row in rows if len(row) > 1]
    kept = []
    for i in range(1, len(columns) + 1):
        if any(row[i].here or row[i].printed not in ("", "–") for row in whole):
            kept.append(i)
    shown = [row if len(row) == 1 else [row[0], *(row[i] for i in kept)] for row in rows]
    return [columns[i - 1] for i in kept], shown


def _printed_grid(title: str, cells: Sequence[Cell], note: str) -> Sheet:
    """The paper's grid alone, where nothing measures it; several metrics of a cell joined as the paper does."""
    columns = list(dict.fromkeys(cell.col for cell in cells))
    rows: list[Sequence[str]] = []
    for model in dict.fromkeys(cell.model for cell in cells):
        mine = [cell for cell in cells if cell.model == model]
        if model:
            rows.append([model])
        for row in dict.fromkeys(cell.row for cell in mine):
            texts = []
            for col in columns:
                texts.append(" / ".join(cell.printed or "–" for cell in mine if (cell.row, cell.col) == (row, col)))
            rows.append([row, *texts])
    return Sheet(title, ["", *columns], rows, [note])


def _with_targets(
    verdicts: Iterable[judging.Judged], spec: tables.Spec, rows: list[Sequence[str | Pair]]
) -> list[Sequence[str | Pair]]:
    """Rows of one column with the target of each of its metrics where the printed value stands, and the verdicts."""
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
        mine = [targets.get(label, {}).get(metric, ("–", "–")) for metric in spec.measure]
        asked, said = (" / ".join(both[k] for both in mine) if label in targets else "–" for k in (0, 1))
        out.append([label, Pair(asked, pair.here), Pair(said, "")])
    return out


def _compares(cell: Cell) -> bool:
    """Whether it compares with full precision by itself, as KL does: it settles with little text, and leads."""
    return bool(metric_of(cell).reference)


def _pair(every: Sequence[Measured], bare: bool = False, without_nats: bool = False) -> Pair:
    """What the paper printed and what was measured in one place; several metrics are joined as the paper does.

    A bare column has no measured text, nor has a model without a stand-in, which its section says.
    """
    main = [one for one in every if not one.cell.metric.endswith(tables.LOG_PROBABILITY)]
    nats = [one for one in every if one not in main and not without_nats]
    cells = [one.cell for one in main]
    several = len(cells) > 1 and cells[0].number.isdecimal()
    absent = bool(main) and all(one.measurement.status == "no_stand_in" and one.cell.model for one in main)
    printed = " / ".join(cell.printed or "–" for cell in cells if cell.printed or several)
    known = any(one.measurement.status in SHOWN for one in nats)
    shown = [_accuracy(one.measurement) if known else _first(one) for one in main]
    if len(set(shown)) == 1:
        shown = shown[:1]
    text = " / ".join(shown)
    for one in nats:
        if one.measurement.status in SHOWN and one.measurement.value is not None:
            text += f"; {_in_nats(one.measurement, one.against)}"
    if absent or bare:
        text = ""
    return Pair(printed or ("–" if cells and cells[0].kind == "table" and not cells[0].variables else ""), text)


def _first(one: Measured) -> str:
    """A measured value against full precision; the mark alone of an accuracy that is at chance, which says nothing."""
    cell, m = one.cell, one.measurement
    if _is_folded(m):
        return MARKS["at_chance"]
    if m.status == "not_run" and cell.is_full_precision and _compares(cell):
        itself = metric_of(cell).itself
        return measured_text(m) if itself is None else f"{itself:g}"
    return measured_text(m, one.against)


def _accuracy(m: Measurement) -> str:
    """An accuracy next to the log probability that is compared: where it is above chance, and no interval."""
    return MARKS["at_chance"] if _is_folded(m) else measured_text(replace(m, lo=None, hi=None))


def _is_folded(m: Measurement) -> bool:
    """Whether it is one of many accuracies at chance, of which the table says what full precision has in one line."""
    return m.status == "at_chance" and m.number.isdecimal()


def _in_nats(m: Measurement, change: Interval | None) -> str:
    """A log probability's paired change against full precision, or of full precision itself its value."""
    if change is None:
        return f"{measured_text(m)} nats"
    ends = [None if end is None else f"{end:.3f}" for end in (change.lo, change.hi)]
    return f"{change.value:+.3f}{_ends(f'{change.value:.3f}', *ends)} nats"


def number(x: float | None) -> str:
    """Four significant digits, two decimals at most above 1, exponents from a million on and below a thousandth."""
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
    return f"{x:.{0 if size >= whole else 1 if size >= tenths else 2 if size >= 1 else 3}f}"


def measured_text(m: Measurement, against: Interval | None = None) -> str:
    """A measured value with marks, what a reader compares first; or the status that says why there is none."""
    if m.status not in SHOWN or m.value is None:
        return WORDS.get(m.status, m.status)
    marks = "".join(dict.fromkeys(MARKS[w] for w in (m.source, m.status) if w in MARKS))
    marks += f"{m.n}" if m.source == "partial" and m.n else ""
    if against is not None:
        decimals = max(0, 4 - len(f"{abs(against.value):.0f}"))  # four digits of what is greater than 1
        ratio = against.value > 0.5 and m.unit == "ppl"
        shown = [None if x is None else f"{x:.{decimals}f}" for x in (against.value, against.lo, against.hi)]
        first = f"×{shown[0]}" if ratio else f"{against.value:+.{decimals}f}"
        return f"{first}{_ends(*shown)}; {number(m.value)}{marks}"
    shown = [None if x is None else number(x) for x in (m.value, m.lo, m.hi)]
    exact = {m.lo, m.hi} <= {None, m.value}  # a setting or a count
    if exact and m.value.is_integer() and abs(m.value) < 1e6:
        return f"{m.value:.0f}{marks}"
    return f"{shown[0]}{marks}{_ends(*shown)}"


def _ends(value: str | None, lo: str | None, hi: str | None) -> str:
    """An interval in brackets; nothing where it is not known, or shows the value alone."""
    return "" if lo is None or lo == hi == value else f" [{lo}, {hi}]"


def remarks(results: TableResults) -> list[str]:
    """The table's own notes, verdicts of its claims, how it was measured, where, and what the marks mean."""
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
        out.append(f"Measured on {'; '.join(_origins(ran))}.")
    missing = sorted({m.note for m in cells if m.status in ("unsupported", "diverged", "oom") and m.note})
    out += [f"Not possible: {note}." for note in missing]
    absent = {one.lacking for one in results.by_key.values()} - {""}
    out += [f"Not run: {why}." for why in sorted(absent)]
    out += _at_chance(cells)
    out += [MEANS] * any(getattr(cell.params, "without", ()) == ("boolq",) for cell in results.cells)
    words = {m.source for m in cells} | {m.status for m in cells}
    marks = {MARKS[word] for word in words if word in MARKS}
    return out + [f"{mark} {LEGEND[mark]}." for mark in LEGEND if mark in marks]


def _origins(cells: Sequence[Measurement]) -> list[str]:
    """Each device with the commits at which it measured, of which ten digits are shown."""
    commits: dict[str, set[str]] = {}
    for m in cells:
        for commit in m.commit.split(JOIN):  # of a cell that is composed of several
            commits.setdefault(m.device, set()).add(re.sub(r"^([0-9a-f]{10})[0-9a-f]+", r"\1", commit))
    return [
        f"{device}, commit{'s' * (len(commits[device]) > 1)} {', '.join(sorted(commits[device]))}"
        for device in sorted(commits)
    ]


def _at_chance(cells: Sequence[Measurement]) -> Iterator[str]:
    """What full precision has of the tasks that are folded, by stand-in, in one line."""
    folded = [m for m in cells if _is_folded(m) and m.recipe == "fp16" and m.value is not None]
    said = []
    for name in dict.fromkeys(m.stand_in for m in folded):
        mine = dict.fromkeys(f"{m.col} {number(m.value)}" for m in folded if m.stand_in == name)
        said.append(f"{name} {', '.join(mine)}")
    if said:
        where = "every recipe's is in the table's CSV"
        yield f"Accuracies at chance are folded ({where}); full precision's: {'; '.join(said)}."
    nats = [m.status in SHOWN for m in cells if m.metric.endswith(tables.LOG_PROBABILITY)]
    if any(nats):
        yield NATS if all(nats) else f"{NATS} Where none stand behind a value they were not run."


def verdict_line(judged: judging.Judged) -> str:
    """A claim with its verdict and count of cases, grade, models, values and cross-checks, in one line."""
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
    """The values of the cases that have a verdict, with their intervals if they are few; what is compared in nats."""
    shown = f"{readings(of_measured(judged), judged.spec.percent)} {judged.spec.unit}".rstrip()
    nats = any(case.nats and case.verdict is not None for case in judged.cases)
    return f"{shown} (of log probability, in nats)" if nats else shown


def of_measured(judged: judging.Judged) -> list[tuple[float | None, float | None, float | None]]:
    """Value and interval of every case that has a verdict."""
    return [(case.measured, case.lo, case.hi) for case in judged.cases if case.verdict is not None]


def cross_checks(judged: judging.Judged) -> list[str]:
    """A claim's cross-checks: the values of its cases, and where verdict or values are others than the claim's own.

    A value is another where the interval of the difference excludes 0.
    """
    lines = []
    for name in judged.spec.cross_checks if judged.measured else ():
        both = []
        for case in judged.cases:
            if case.verdict is not None:
                both += [(case.verdict, one) for one in case.cross_checks if one.name == name]
        if not both:
            continue
        verdicts, apart = [one.verdict for _, one in both], [one.apart for _, one in both]
        said = judging.together(verdicts)
        word = judging.PLAIN[said]
        count = judging.counted([verdict == judging.HOLDS for verdict in verdicts])
        agrees = "agrees" if said == judging.together([v for v, _ in both]) else f"disagrees: {word} ({count})"
        agrees += f", another value in {judging.counted(apart)}" * any(apart)
        lines.append(f"{name}: {readings([one[1:4] for _, one in both], judged.spec.percent)} ({agrees})")
    return lines


def readings(values: Sequence[tuple[float | None, float | None, float | None]], percent: bool) -> str:
    """A few values with their intervals; of many the least and the greatest."""
    known = [x for x, _, _ in values if x is not None]
    if len(known) <= 3:
        return ", ".join(quantity(*value, percent) for value in values if value[0] is not None)
    return f"{quantity(min(known), percent=percent)} to {quantity(max(known), percent=percent)}"


def quantity(x: float | None, lo: float | None = None, hi: float | None = None, percent: bool = False) -> str:
    """A claim's quantity with three significant digits, and its interval."""
    if x is None:
        return "–"

    def show(value: float) -> str:
        return _rounded(100 * value if percent else value, whole=100, tenths=10)

    shown = [None if end is None else show(end) for end in (x, lo, hi)]
    return show(x) + (" %" if percent else "") + _ends(*shown)
