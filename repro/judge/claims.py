"""Claims as predicates over cells: judged on what was measured, else by arithmetic on the printed numbers (grade D).

    quantity  (b - s) / (b - f)        holds  >= 0.555

The quantity is arithmetic over cells, with an interval from their observations, paired wherever they share windows or
items, live or recorded. A case holds when the whole interval satisfies the predicate, fails when none of it does, else
it is inconclusive. A claim holds when every case does and fails when one does; cases without a stand-in leave it
inconclusive. At grade C the words are seen, not seen, inconclusive at this scale. Printed numbers are judged within
their rounding.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from repro import papers
from repro.cells import KINDS
from repro.errors import UserError, shortened, unknown
from repro.judge import rounding
from repro.judge.quantity import Quantity, compose, constant, evaluate, satisfied
from repro.record import measure
from repro.record.measurement import MEASURED, Measurement
from repro.spec import tables
from repro.spec.cell import Cell, Place
from repro.spec.workflow import Workflow

WORDS = {
    "C": ("seen", "not seen", "inconclusive at this scale"),
    "D": ("printed numbers agree", "printed numbers disagree", "within rounding"),
}
PLAIN = ("holds", "fails", "inconclusive")
HOLDS, FAILS, UNDECIDED = range(3)


class Reading(NamedTuple):
    """A further reading of a case: its value and interval, its verdict by the same predicate.

    `apart`: the 95 % interval of its difference to the case's own value excludes 0.
    """

    name: str
    value: float
    lo: float | None
    hi: float | None
    verdict: int
    apart: bool


@dataclass(frozen=True)
class Case:
    """One case of a claim: its comparison, the quantity on the printed cells, on the measured ones with interval.

    Attributes:
        verdict: 0 holds, 1 fails, 2 undecided; None where the case is not judged.
        on: the stand-ins, `*` after those whose cells were measured here on their first windows or items alone.
        missing: status of the first cell that is not measured.
        also: its further readings.
    """

    model: str
    holds: str
    printed: float | None
    measured: float | None = None
    lo: float | None = None
    hi: float | None = None
    covers: str = ""
    on: str = ""
    missing: str = ""
    also: tuple[Reading, ...] = ()
    verdict: int | None = None


@dataclass(frozen=True)
class Judged:
    """A claim with its cases, the grade of the evidence, and the verdict.

    Attributes:
        measured: whether it is judged on measured cells; else on printed ones.
        why: what kept it from more: cases or cells that are missing, or the spec's own reason.
        scale: where it was measured.
        cells: every cell that its cases name, once.
    """

    spec: tables.ClaimSpec
    cases: tuple[Case, ...]
    grade: str
    verdict: str
    measured: bool
    why: str = ""
    scale: str = ""
    cells: tuple[Measurement, ...] = field(default=(), repr=False)

    @property
    def count(self) -> str:
        """In how many of all its cases the claim holds, such as `1 of 3 cases`."""
        return counted([case.verdict == HOLDS for case in self.cases])

    @property
    def one_seed(self) -> bool:
        """Whether some measured cell rests on a single draw of what is drawn."""
        return self.measured and any(len(m.seeds.split()) == 1 for m in self.cells if m.status in MEASURED)


def counted(found: Sequence[bool]) -> str:
    """In how many of all cases something is so, such as `1 of 3 cases`."""
    return f"{sum(found)} of {len(found)} case{'s' * (len(found) != 1)}"


def judge(flow: Workflow, claim: tables.ClaimSpec) -> Judged:
    """Judge one claim on what is measured at this scale, else on the printed numbers.

    Raises:
        UserError: the spec names a claim, cell, column or metric that is not there, or a predicate that is none.
    """
    _check(claim)
    cases, cells, scale = evidence(flow, claim)
    if not claim.judged_on_printed and complete(cases):
        return _measured(claim, cases, cells, scale)
    if any(case.printed is None for case in cases):
        return Judged(
            claim, cases, "", "not measurable", False, f"a cell has no printed number; {_why(cells)}", scale, cells
        )
    known, judged = rounding.cells(claim), []
    for case, (keys, named) in zip(cases, claim.places()):
        cell = {name: known[place] for name, place in named.items()}
        found = rounding.corners(claim.quantity.format(**keys), case.holds, cell)
        judged.append(replace(case, verdict=_verdict(found)))
    cases = tuple(judged)
    why = claim.judged_on_printed or _why(cells)
    word = WORDS["D"][together([case.verdict for case in cases])]
    return Judged(claim, cases, "D", word, False, why, scale, cells)


def _measured(claim: tables.ClaimSpec, cases: tuple[Case, ...], cells: tuple[Measurement, ...], scale: str) -> Judged:
    grade = max(m.grade for m in cells if m.status in MEASURED)  # A is the best letter
    missing = sum(case.verdict is None for case in cases)
    chance = sum(m.status == "floor" for m in cells)  # where nothing can be lost or won: judged all the same, and said
    said = [f"{missing} of {len(cases)} cases have no stand-in"] * bool(missing)
    why = ", ".join(said + [f"{chance} of {len(cells)} cells at chance"] * bool(chance))
    word = WORDS.get(grade, PLAIN)[together([case.verdict for case in cases])]
    return Judged(claim, cases, grade, word, True, why, scale, cells)


def complete(cases: Sequence[Case]) -> bool:
    """Whether some case is measured, and every other only lacks a stand-in."""
    return any(c.measured is not None for c in cases) and all(
        c.measured is not None or c.missing == "no_stand_in" for c in cases
    )


def together(verdicts: Sequence[int | None]) -> int:
    """Fails when one fails, holds when all hold; a claim about every case is undecided while one is not judged."""
    if FAILS in verdicts:
        return FAILS
    return HOLDS if set(verdicts) == {HOLDS} else UNDECIDED


def verdict_of(case: Case) -> int:
    """Holds: the whole interval satisfies the predicate; fails: none of it does; else, or without one, undecided."""
    if case.lo is None or case.hi is None:
        return UNDECIDED
    found = satisfied(case.holds, np.append(np.linspace(case.lo, case.hi, 1001), case.measured))
    return _verdict(found)


def _verdict(found: np.ndarray) -> int:
    return HOLDS if found.all() else FAILS if not found.any() else UNDECIDED


# --- what was measured ------------------------------------------------------------------------------------------------


def evidence(flow: Workflow, claim: tables.ClaimSpec) -> tuple[tuple[Case, ...], tuple[Measurement, ...], str]:
    """The claim's cases on what `flow` has measured, the cells that they name, and the scale's name.

    Raises:
        UserError: its table has no such cell.
    """
    known: dict[Place, Cell] = {}
    for cell in flow.claim_cells(claim):
        known[cell.place] = cell
        known.setdefault((*cell.place[:3], ""), cell)
    cases, measured = [], {}
    for keys, named in claim.places():
        for row, col, model, metric in named.values():
            if (row, col, model, metric) not in known:
                where = f"{row} | {col}{' | ' * bool(metric)}{metric}"
                raise UserError(f"claim {claim.claim}: {claim.table} has no cell {where} of {model}")
        bound = {name: known[place] for name, place in named.items()}
        for cell in bound.values():
            if cell.place not in measured:
                measured[cell.place] = measure.one(flow, cell)
        here = {name: measured[cell.place] for name, cell in bound.items()}
        cases.append(_case(flow, claim, keys, bound, here, tuple(known.values())))
    return tuple(cases), tuple(measured.values()), flow.scale.name


def _case(
    flow: Workflow,
    claim: tables.ClaimSpec,
    keys: Mapping[str, object],
    cells: Mapping[str, Cell],
    here: Mapping[str, Measurement],
    table: Sequence[Cell],
) -> Case:
    quantity = claim.quantity.format(**keys)
    known = {name: papers.number(cell.printed) for name, cell in cells.items()}
    printed = None if None in known.values() else float(evaluate(quantity, known))
    if printed is not None and not np.isfinite(printed):
        raise UserError(
            f"claim {claim.claim}: {shortened(quantity)!r} of the printed cells is {printed}, no finite number"
        )
    case = Case(str(keys["model"]), claim.holds.format(**keys), printed)
    missing = [m for m in here.values() if m.status not in MEASURED or (m.value is None and not m.live)]
    if missing:
        return replace(case, missing=missing[0].status)
    own = compose(quantity, {name: measure.quantity(flow, cells[name], m) for name, m in here.items()})
    found = own.interval()
    marks = {"brief": "*", "arithmetic": "public shapes"}  # the latter has no stand-in
    on = ", ".join(dict.fromkeys(m.stand_in + marks.get(m.live, "") for m in here.values()))
    ends = (found.lo, found.hi) if found.n or found.lo is not None else (found.value, found.value)  # a count is exact
    case = replace(case, measured=found.value, lo=ends[0], hi=ends[1], covers=found.covers, on=on)
    also = tuple(_readings(flow, claim, case, quantity, own, cells, table))
    return replace(case, also=also, verdict=verdict_of(case))


def _readings(
    flow: Workflow,
    claim: tables.ClaimSpec,
    case: Case,
    quantity: str,
    own: Quantity,
    cells: Mapping[str, Cell],
    table: Sequence[Cell],
) -> Iterator[Reading]:
    """The claim's other readings of one case: the same quantity on another column of the same rows."""
    for name, column in claim.also.items():
        parts = {}
        for part, cell in cells.items():
            same = (c for c in table if (c.row, c.model) == (cell.row, cell.model))
            other = next((c for c in same if c.col in (column, f"{column}, {cell.col}")), None)
            if other is None:  # a row without a recipe
                continue
            itself = getattr(KINDS.get(other.measure), "itself", lambda ask: None)(other.ask)
            if itself is not None and other.recipe == flow.full_precision(other).recipe:
                parts[part] = constant(itself)
            elif (m := measure.one(flow, other)).status in MEASURED:
                parts[part] = measure.quantity(flow, other, m)
        if parts.keys() == cells.keys():
            reading = compose(quantity, parts)
            got, gap = reading.interval(), compose("x - y", {"x": reading, "y": own}).interval()
            verdict = verdict_of(replace(case, measured=got.value, lo=got.lo, hi=got.hi))
            apart = gap.lo is not None and gap.hi is not None and not gap.lo <= 0 <= gap.hi
            yield Reading(name, got.value, got.lo, got.hi, verdict, apart)


# --- what was printed -------------------------------------------------------------------------------------------------


def _check(claim: tables.ClaimSpec) -> None:
    """Raise unless the paper makes the claim, and the table has the columns of its further readings."""
    paper, number = tables.split(claim.table)
    known = papers.claims(paper) if paper in papers.PAPERS else {}
    if known and claim.claim.partition(" ")[0] != paper:
        raise UserError(f"claim {shortened(claim.claim)!r}: begin with its paper, as in '{paper} {next(iter(known))}'")
    for name in (part for item in claim.claim.split()[1:] for part in item.split("-")):
        if known and name not in known:
            raise UserError(f"claim {claim.claim}: {unknown(f'claim of {paper}', name, known)}")
    columns = {cell.col for cell in papers.printed(paper, number)} if number.isdecimal() else set()
    for column in claim.also.values():
        if column not in (known := columns | tables.table(paper, number).beside.keys()):
            raise UserError(f"claim {claim.claim}: also: {unknown(f'column of {claim.table}', column, known)}")


def _why(cells: Sequence[Measurement]) -> str:
    missing = [m for m in cells if m.status not in MEASURED]
    counts = {s: sum(m.status == s for m in missing) for s in dict.fromkeys(m.status for m in missing)}
    return ", ".join(f"{n} of {len(cells)} cells {status.replace('_', ' ')}" for status, n in counts.items())
