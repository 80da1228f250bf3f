"""A table's content: under each printed column the paper's value and what was measured, then verdicts and remarks."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from repro.cells import KINDS
from repro.judge import claims
from repro.judge.statistics import Interval
from repro.record import measure
from repro.record.measurement import SHOWN, Measurement
from repro.render.sheet import Pair, Sheet
from repro.spec import tables
from repro.spec.cell import Cell, Place
from repro.spec.workflow import Workflow

WORDS = {
    **{"no_stand_in": "no stand-in", "not_run": "not run", "too_long": "too long", "other_device": "other device"},
    "oom": "out of memory",
}
MARKS = {
    **{"arithmetic": "§", "partial": "*", "replicated": "°", "differs": "≠"},
    **{"unattested": "‖", "stale": "†", "floor": "‡"},
}
LEGEND = {
    "§": "arithmetic on the recipe and the public shapes of the paper's own model; nothing ran",
    "*": "measured here, on as many windows or items as stand behind it, with one seed; no value of it is stored",
    "°": "stored, and measured again here: it agrees window by window, within the bounds of repro/record/replicate.py",
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


def sheet(flow: Workflow, name: str, found: dict[Place, Measurement], cells: Sequence[Cell]) -> Sheet:
    """The sheet of a printed table or of a spec of our own."""
    paper, number = tables.split(name)
    spec = tables.table(paper, number)
    label = f"{paper}, Table {number}" if number.isdecimal() else f"{paper}, {number}".removeprefix(", ")
    what = f"{label}: {spec.title}"
    title = what if paper in tables.FOLDERS else f"{what}. Scale {flow.scale.name}: {flow.scale.about}"
    if not tables.path_of(paper, number).is_file():
        return _printed_grid(what, cells, f"As printed, {len(found)} cells; no spec yet.")
    leads = {cell.col for cell in cells if cell.metric in spec.beside and _compares(cell)}
    columns = sorted(dict.fromkeys(cell.col for cell in cells), key=lambda col: col not in leads)
    rows: list[Sequence[str | Pair]] = []
    for model in dict.fromkeys(cell.model for cell in cells):
        mine = [cell for cell in cells if cell.model == model]
        used = [col for col in columns if any(cell.col == col for cell in mine)]
        stand_in = flow.scale.stand_in(model) if model else None
        if model:
            graded = f", grade {flow.scale.grade}" if stand_in else ""
            devices = {found[cell.place].stand_in for cell in mine if flow.is_taken(cell)} - {""}  # of times of shapes
            here = stand_in or " and ".join(sorted(devices)) or "no stand-in at this scale"
            rows.append([f"{model}; here: {here}{graded}"])
        for row in dict.fromkeys(cell.row for cell in mine):
            at = {col: [cell for cell in mine if (cell.row, cell.col) == (row, col)] for col in used}
            rows.append([row, *(_pair(flow, at.get(col, ()), found) for col in columns)])
    if paper in tables.FOLDERS and columns == [""]:
        columns, rows = ["target", "verdict"], _with_targets(flow, tables.table(paper, number), rows)
    return Sheet(title, ["", *columns], rows, remarks(flow, paper, number, list(found.values())))


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


def _with_targets(flow: Workflow, spec: tables.Spec, rows: list[Sequence[str | Pair]]) -> list[Sequence[str | Pair]]:
    """Rows of one column with the target of each of its metrics where the printed value stands, and the verdicts."""
    targets: dict[str, dict[str, tuple[str, str]]] = {}  # by row and metric
    for claim in spec.claims:
        for (_, named), case in zip(claim.places(), claims.judge(flow, claim).cases):
            if list(named) == [claim.quantity]:
                ((row, _, _, metric),) = named.values()
                word = "–" if case.verdict is None else claims.PLAIN[case.verdict]
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
    module = KINDS.get(cell.measure)
    return hasattr(module, "reference") and module.reference(cell.ask)


def _pair(flow: Workflow, cells: Iterable[Cell], found: dict[Place, Measurement]) -> Pair:
    """What the paper printed and what was measured in one place; several metrics are joined as the paper does."""
    every = list(cells)
    cells = [cell for cell in every if not cell.metric.endswith(tables.LOG_PROBABILITY)]
    nats = [(cell, found[cell.place]) for cell in every if cell not in cells]
    several = len(cells) > 1 and cells[0].number.isdecimal()
    printed = " / ".join(cell.printed or "–" for cell in cells if cell.printed or several)
    known = any(m.status in SHOWN for _, m in nats)
    shown = [_accuracy(found[cell.place]) if known else _first(flow, cell, found[cell.place]) for cell in cells]
    if len(set(shown)) == 1:
        shown = shown[:1]
    text = " / ".join(shown)
    for cell, m in nats:
        change = _in_nats(m, measure.against_full(flow, cell, m))
        text += f"; {change}" * (change != f"nats {text}")
    return Pair(printed or ("–" if cells and cells[0].kind == "table" and not cells[0].variables else ""), text)


def _first(flow: Workflow, cell: Cell, m: Measurement) -> str:
    """A measured value against full precision; the mark alone of an accuracy that is at chance, which says nothing."""
    if _is_folded(m):
        return MARKS["floor"]
    if m.status == "not_run" and cell.recipe == flow.full_precision(cell).recipe and _compares(cell):
        itself = getattr(KINDS[cell.measure], "itself", lambda ask: None)(cell.ask)
        return here(m) if itself is None else f"{itself:g}"
    return here(m, measure.against_full(flow, cell, m))


def _accuracy(m: Measurement) -> str:
    """An accuracy next to the log probability that is compared: where it is above chance, and no interval."""
    return MARKS["floor"] if _is_folded(m) else here(replace(m, lo=None, hi=None))


def _is_folded(m: Measurement) -> bool:
    """Whether it is one of many accuracies at chance, of which the table says what full precision has in one line."""
    return m.status == "floor" and m.number.isdecimal()


def _in_nats(m: Measurement, change: Interval | None) -> str:
    """A log probability's paired change against full precision, or of full precision itself its value."""
    if m.status not in SHOWN or m.value is None:
        return f"nats {WORDS.get(m.status, m.status)}"
    if change is None:
        return f"{here(m)} nats"
    ends = [None if end is None else f"{end:.3f}" for end in (change.lo, change.hi)]
    return f"{change.value:+.3f}{_ends(f'{change.value:.3f}', *ends)} nats"


def number(x: float | None) -> str:
    """Four significant digits, two decimals at most above 1, exponents from a million on and below a thousandth."""
    if x is None:
        return ""
    if 0 < abs(x) < 5e-4:
        return f"{x:.2g}"
    return f"{x:.1e}" if abs(x) >= 1e6 else _rounded(x, whole=1000, tenths=100)


def _rounded(x: float, whole: float, tenths: float) -> str:
    """No decimals from `whole` on, one from `tenths` on, two from 1 on, else three."""
    size = abs(x)
    return f"{x:.{0 if size >= whole else 1 if size >= tenths else 2 if size >= 1 else 3}f}"


def here(m: Measurement, against: Interval | None = None) -> str:
    """A measured value with marks, what a reader compares first; or the status that says why there is none."""
    if m.status not in SHOWN or m.value is None:
        return WORDS.get(m.status, m.status)
    marks = "".join(dict.fromkeys(MARKS[w] for w in (m.live, m.status) if w in MARKS))
    marks += f"{m.n}" if m.live == "partial" and m.n else ""
    if against is not None:
        show = "×{:.3f}" if against.value > 0.5 and m.unit == "ppl" else "{:+.3f}"
        ends = _ends(
            f"{against.value:.3f}", *(None if end is None else f"{end:.3f}" for end in (against.lo, against.hi))
        )
        return f"{show.format(against.value)}{ends}; {number(m.value)}{marks}"
    shown = [None if x is None else number(x) for x in (m.value, m.lo, m.hi)]
    return f"{shown[0]}{marks}{_ends(*shown)}"


def _ends(value: str | None, lo: str | None, hi: str | None) -> str:
    """An interval in brackets; nothing where it is not known, or shows the value alone."""
    return "" if lo is None or lo == hi == value else f" [{lo}, {hi}]"


def remarks(flow: Workflow, paper: str, number_: str, cells: Sequence[Measurement]) -> list[str]:
    """The table's own notes, verdicts of its claims, how it was measured, where, and what the marks mean."""
    spec = tables.table(paper, number_)
    out = [*spec.notes, *(verdict_line(claims.judge(flow, claim)) for claim in spec.claims)]
    ran = [m for m in cells if m.value is not None and m.live and m.device]
    if ran:
        covers = sorted({m.covers for m in ran if m.covers})
        read = "× is the ratio to full precision on the same windows. " if any(m.unit == "ppl" for m in ran) else ""
        if covers:
            how = " (block jackknife)" * any("windows" in word or "items" in word for word in covers)
            read += f"Intervals are 95 %, over {'; '.join(covers)}{how}. "
        groups = "; ".join(sorted({part for m in ran for part in m.protocol.split("; ") if part}))
        out += filter(None, [(read + groups + "." * bool(groups)).rstrip()])
        made = sorted({f"{m.device}, commit {m.commit}" for m in ran})
        out.append("Measured on " + "; ".join(made) + ".")
    missing = sorted({m.note for m in cells if m.status in ("unsupported", "diverged", "oom") and m.note})
    out += [f"Not possible: {note}." for note in missing]
    absent = {flow.lacking(cell) for cell in flow.cells(paper, number_)} & {m.note for m in cells} - {""}
    out += [f"Not run: {why}." for why in sorted(absent)]
    out += _at_chance(cells)
    marks = {MARKS[w] for m in cells for w in (m.live, m.status) if w in MARKS}
    return out + [f"{mark} {LEGEND[mark]}." for mark in LEGEND if mark in marks]


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
    if any(m.metric.endswith(tables.LOG_PROBABILITY) for m in cells):
        yield NATS


def verdict_line(judged: claims.Judged) -> str:
    """A claim with its verdict and count of cases, grade, models, values and further readings, in one line."""
    spec, ours = judged.spec, tables.split(judged.spec.table)[0] in tables.FOLDERS
    facts = [judged.said] if judged.verdict else []
    if judged.measured:
        models = ", ".join(dict.fromkeys(name for case in judged.cases for name in case.on.split(", ") if name))
        facts += [f"grade {judged.grade}", f"on {models}"]
        facts += ["one seed"] if judged.one_seed else []
        facts += [f"measured: {measured(judged)}"]
        facts += also(judged)
    facts += [judged.why] if judged.why else []
    facts += [f"predicate changed after the runs: {spec.changed}"] if spec.changed else []
    facts += [f"the paper's own numbers: {judged.own_numbers}"] if judged.own_numbers and not ours else []
    text = "; ".join(facts)
    return f"{spec.claim}: {spec.says}. {'Target' if ours else 'Printed'}: {spec.printed}. {text[0].upper()}{text[1:]}."


def measured(judged: claims.Judged) -> str:
    """The values of the cases that have a verdict, with their intervals if they are few; what is compared in nats."""
    shown = readings(of_measured(judged), judged.spec.percent)
    nats = any(case.nats and case.verdict is not None for case in judged.cases)
    return f"{shown} (of log probability, in nats)" if nats else shown


def of_measured(judged: claims.Judged) -> list[tuple[float | None, float | None, float | None]]:
    """Value and interval of every case that has a verdict."""
    return [(case.measured, case.lo, case.hi) for case in judged.cases if case.verdict is not None]


def also(judged: claims.Judged) -> list[str]:
    """A claim's further readings: the values of its cases, and where verdict or values are others than the claim's own.

    A value is another where the interval of the difference excludes 0.
    """
    lines = []
    for name in judged.spec.also if judged.measured else ():
        counted = [case for case in judged.cases if case.verdict is not None]
        both = [(case.verdict, one) for case in counted for one in case.also if one.name == name]
        if not both:
            continue
        found, apart = [one.verdict for _, one in both], [one.apart for _, one in both]
        said = claims.together(found)
        word = claims.PLAIN[said]
        held = claims.counted([verdict == claims.HOLDS for verdict in found])
        agrees = "agrees" if said == claims.together([v for v, _ in both]) else f"disagrees: {word} ({held})"
        agrees += f", another value in {claims.counted(apart)}" * any(apart)
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
