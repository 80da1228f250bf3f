"""Claims as predicates over cells, judged on what was measured.

    quantity  (b - s) / (b - f)        holds  >= 0.555

The quantity is arithmetic over cells, with an interval from their observations, paired wherever they share windows or
items, fresh or stored. A case holds when its whole interval satisfies the predicate, fails when none of it does, and is
undecided else. Where full precision is at chance, or every method compared has lost the model, it has no verdict.

A claim about every case holds when all of them do. It fails as soon as some fail, also while others are missing: by
Holm's step-down procedure (1979, Scandinavian Journal of Statistics 6, 65-70), so that one of 48 does not fail it by
chance. What fails is said by its direction: the same as in the paper but smaller (or larger), none, or the opposite.

What the paper's own cells say of the claim by arithmetic is another question (`own_numbers`): consistent, inconsistent,
or within their rounding. It is no verdict on the method.

A claim on accuracy is judged on the log probability of the right answers where its spec says so: on the paired change
in nats, which moves before accuracy does, and where accuracy is at chance.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit

from repro import papers
from repro.core.errors import UserError, shortened, unknown
from repro.core.strict import load_yaml
from repro.metrics import metric_of
from repro.papers.cell import CellKey
from repro.recipes import recipe
from repro.results.measured import Measured
from repro.specs import tables
from repro.stats.quantity import Quantity, compose, constant, evaluate, on_same_windows, satisfied
from repro.stats.statistics import LEVEL, NotFinite
from repro.store.measurement import MEASURED, Measurement
from repro.verdicts import rounding

PLAIN = ("holds", "fails", "undecided")
HOLDS, FAILS, UNDECIDED = range(3)
OWN_NUMBERS = ("consistent", "inconsistent", "within rounding")
ON_STAND_INS = "holds on the stand-ins"  # of grade C
DIRECTIONS = ("opposite direction", "no effect", "same direction, smaller", "same direction, larger")
NO_VERDICT = "no verdict"
COLLAPSED = 5.0  # times full precision's perplexity; comparisons of models above that say little
LOST = "collapsed"  # why a case has no verdict if all compared models are above `COLLAPSED`
EXCUSED = ("no_stand_in", "at_chance", LOST)  # reasons that no run at this scale can remove
REASONS = {
    "no_stand_in": "without a stand-in",
    "at_chance": "at chance",
    LOST: f"all that is compared is above {COLLAPSED:.0f} times full precision",
}


class CrossCheck(NamedTuple):
    """A cross-check of a case: its value and interval, its verdict by the same predicate.

    `apart`: the 95 % interval of its difference to the case's own value excludes 0, on the windows that both have.
    """

    name: str
    value: float
    lo: float | None
    hi: float | None
    verdict: int
    apart: bool


@dataclass(frozen=True)
class Case:
    """One case of a claim: its predicate, and the quantity on the printed and on the measured cells.

    Attributes:
        holds: the predicate that judges it.
        verdict: 0 holds, 1 fails, 2 undecided; None if the case is not judged.
        df: degrees of freedom of the interval's t quantile; None for a normal one.
        on: the stand-ins, with `*` if their cells were measured here on the first windows or items only.
        missing: why it is not judged: the status of the first cell that is not measured, or one of `EXCUSED`.
        nats: whether log probabilities are compared, while the printed value is of accuracies.
        cross_checks: the same quantity on other columns.
    """

    model: str
    holds: str
    printed: float | None
    measured: float | None = None
    lo: float | None = None
    hi: float | None = None
    df: float | None = None
    covers: str = ""
    on: str = ""
    missing: str = ""
    cross_checks: tuple[CrossCheck, ...] = ()
    nats: bool = False
    verdict: int | None = None


@dataclass(frozen=True)
class Judged:
    """A claim with its cases, the grade of the evidence, and the verdict.

    Attributes:
        grade: of the worst measured cell; empty without a verdict.
        measured: whether there is a verdict, which needs measured cells.
        why: why there is no (full) verdict: missing cases or cells, or the spec's own reason.
        scale: at which it was measured.
        cells: every cell that its cases name, once.
        own_numbers: one of `OWN_NUMBERS`, by the paper's printed cells; empty if it does not print them all.
    """

    spec: tables.ClaimSpec
    cases: tuple[Case, ...]
    grade: str
    verdict: str
    measured: bool
    why: str = ""
    scale: str = ""
    cells: tuple[Measurement, ...] = field(default=(), repr=False)
    own_numbers: str = ""

    @property
    def count(self) -> str:
        """In how many of the judged cases the claim holds, such as `1 of 3 cases`."""
        return counted([case.verdict == HOLDS for case in self.cases if case.verdict is not None])

    @property
    def said(self) -> str:
        """The verdict with its count."""
        if not self.measured or self.verdict.startswith(PLAIN[UNDECIDED]):
            return self.verdict
        holds = self.verdict in (ON_STAND_INS, PLAIN[HOLDS])
        return f"{self.verdict} ({'' if holds else 'holds in '}{self.count})"

    @property
    def one_seed(self) -> bool:
        """Whether some measured cell depends on a seed and has only one."""
        return self.measured and any(len(m.seeds.split()) == 1 for m in self.cells if m.status in MEASURED)


def counted(flags: Sequence[bool]) -> str:
    """How many flags are set, such as `1 of 3 cases`."""
    return f"{sum(flags)} of {len(flags)} case{'s' * (len(flags) != 1)}"


def unjudged(paper: str) -> dict[str, str]:
    """Claims of a paper, by id, that neither a predicate nor arithmetic on its numbers can judge, with the reason."""
    path = papers.HERE / paper / "unjudged.yaml"
    return load_yaml(path) if path.is_file() else {}


def verdict(claim: tables.ClaimSpec, measured: Sequence[Measured], scale: str) -> Judged:
    """Judge one claim on measured cells of its tables.

    Raises:
        UserError: the spec names a claim, cell, column or metric that is not there, or a predicate that is none.
    """
    _check(claim)
    cases, cells = evidence(claim, measured)
    printed = own_numbers(claim, cases)
    if claim.judged_on_printed:
        return Judged(claim, cases, "", "", False, claim.judged_on_printed, scale, cells, printed)
    if {m.source for m in cells if m.status in MEASURED} == {"arithmetic"}:
        plain_verdict = PLAIN[together([case.verdict for case in cases])]
        return Judged(
            claim, cases, "", "", False, f"on the public shapes of its model: {plain_verdict}", scale, cells, printed
        )
    judged = [case for case in cases if case.verdict is not None]
    word = _word(claim, cases, cells)
    if not judged:
        return Judged(claim, cases, "", word, False, _why(cells), scale, cells, printed)
    return Judged(claim, cases, _grade(cells), word, True, _missing(cases), scale, cells, printed)


def own_numbers(claim: tables.ClaimSpec, cases: Sequence[Case]) -> str:
    """What the paper's printed cells say of a claim, each known to half a unit of its last digit.

    Empty if the paper does not print all of them.
    """
    if any(case.printed is None for case in cases):
        return ""
    printed_cells = rounding.cells(claim)
    verdicts = []
    for keys, named in claim.case_cells():
        cell = {name: printed_cells[key] for name, key in named.items()}
        verdicts.append(_verdict(rounding.corners(claim.quantity.format(**keys), claim.holds.format(**keys), cell)))
    return OWN_NUMBERS[together(verdicts, claim.most)]


def _grade(cells: Sequence[Measurement]) -> str:
    return max(m.grade for m in cells if m.status in MEASURED)  # A is the best letter


def _missing(cases: Sequence[Case]) -> str:
    """The cases that are not judged, counted by reason."""
    missing = [case.missing for case in cases if case.verdict is None]
    counts = {name: missing.count(name) for name in dict.fromkeys(missing)}
    return ", ".join(f"{n} of {counted_cases(len(cases))} {_reason(name)}" for name, n in counts.items())


def counted_cases(n: int) -> str:
    """Such as `3 cases`."""
    return f"{n} case{'s' * (n != 1)}"


def _reason(status: str) -> str:
    return REASONS.get(status, status.replace("_", " "))


def _word(claim: tables.ClaimSpec, cases: Sequence[Case], cells: Sequence[Measurement]) -> str:
    """The verdict on a claim about every case, in words."""
    judged = [case for case in cases if case.verdict is not None]
    if not judged:
        missing = [case.missing for case in cases]
        return f"{NO_VERDICT}: {_reason(max(missing, key=missing.count))}"
    if claim.most:
        return _word_of_most(claim, judged, cases, cells)
    failing = rejected(judged)
    ours = claim.target or tables.split(claim.table)[0] in tables.FOLDERS  # a target of our own is met or not
    if failing:
        return PLAIN[FAILS] if ours else direction(failing, claim.neutral)
    left = [case for case in cases if case.verdict is None and case.missing not in EXCUSED]
    possible = [case for case in cases if case.missing != "no_stand_in"]
    most = 2 * len(judged) >= len(possible)  # a few cases above chance do not speak for all
    if all(case.verdict == HOLDS for case in judged) and not left and most:
        return ON_STAND_INS if _grade(cells) == "C" else PLAIN[HOLDS]
    return _undecided(cases)


def _undecided(cases: Sequence[Case]) -> str:
    """`undecided, 2 of 3 hold`, of the cases that this scale can judge."""
    possible = [case for case in cases if case.missing not in EXCUSED]
    holding = sum(case.verdict == HOLDS for case in possible)
    return f"{PLAIN[UNDECIDED]}, {holding} of {len(possible)} hold"


def _word_of_most(
    claim: tables.ClaimSpec, judged: Sequence[Case], cases: Sequence[Case], cells: Sequence[Measurement]
) -> str:
    """The verdict on a claim about most cases."""
    judgement = together([case.verdict for case in judged], most=True)
    if judgement == FAILS:
        return direction([case for case in judged if case.verdict == FAILS], claim.neutral)
    if judgement == HOLDS:
        return ON_STAND_INS if _grade(cells) == "C" else PLAIN[HOLDS]
    return _undecided(cases)


def rejected(cases: Sequence[Case]) -> list[Case]:
    """The cases that fail, by Holm's procedure at 5 % over the family of all cases."""
    by_chance = sorted(((p_failing(case), n) for n, case in enumerate(cases)), key=lambda pair: pair)
    failing = []
    for rank, (p, n) in enumerate(by_chance):
        if p > (1 - LEVEL) / (len(cases) - rank):
            break
        failing.append(cases[n])
    return failing


def p_failing(case: Case) -> float:
    """The p-value of a failing case: 1 minus the level of the widest interval that is wholly outside the predicate."""
    if case.verdict != FAILS:
        return 1.0
    below = case.measured - case.lo
    above = case.hi - case.measured
    if below == above == 0:
        return 0.0
    least, most = 1.0, 64.0  # times the half-widths at 95 %: the p-value of 64 of them is below that of any family

    def fails(times: float) -> bool:
        ends = case.measured - times * below, case.measured + times * above
        return not satisfied(case.holds, np.append(np.linspace(*ends, 1001), case.measured)).any()

    if fails(most):
        return 0.0
    for _ in range(40):
        middle = (least + most) / 2
        least, most = (middle, most) if fails(middle) else (least, middle)
    df = math.inf if case.df is None else case.df
    return 2 * float(stdtr(df, -least * stdtrit(df, (1 + LEVEL) / 2)))


def direction(failing: Sequence[Case], neutral: float = 0.0) -> str:
    """How the failing cases differ from the paper: the most frequent of `DIRECTIONS`, of ties the mildest.

    Without a printed value in the same unit, an effect is larger where the predicate is satisfied between it and none.

    Args:
        failing: the cases that fail.
        neutral: the quantity if nothing has an effect: 0 for a difference, 1 for a ratio.
    """
    words = []
    for case in failing:
        low, high = case.lo - neutral, case.hi - neutral
        if not _is_upward(case, neutral):
            low, high = -high, -low
        if high < 0:
            words.append(DIRECTIONS[0])
        elif low <= 0:
            words.append(DIRECTIONS[1])
        else:
            if case.printed is not None and not case.nats:
                is_larger = abs(case.measured - neutral) > abs(case.printed - neutral)
            else:
                smaller_effects = np.linspace(neutral, case.measured, 1001)
                is_larger = satisfied(case.holds, smaller_effects).any()
            words.append(DIRECTIONS[3 if is_larger else 2])
    return max(words, key=lambda word: (words.count(word), DIRECTIONS.index(word)))


def _is_upward(case: Case, neutral: float) -> bool:
    """Whether the effect that a failing case's claim is about is above `neutral`, by its predicate or printed value.

    A predicate that no effect satisfies asks for one on the side where it is satisfied. One that no effect satisfies
    too, as "costs at most 5 %", says on which side it allows one; an effect that is forbidden altogether, as "costs
    nothing", is opposite to it.
    """
    nothing, much = satisfied(case.holds, np.asarray([neutral, neutral + 1e9]))
    if much and not nothing:
        return True
    if case.printed is not None:
        return case.printed > neutral
    least = 1e-6 * (1 + abs(neutral))
    if not nothing:
        above = neutral + least * np.logspace(0, 15, 1501)
        return bool(satisfied(case.holds, above).any())
    measured_above = case.lo > neutral
    allowed = satisfied(case.holds, np.asarray([neutral + least if measured_above else neutral - least]))[0]
    return bool(measured_above == allowed)


def together(verdicts: Sequence[int | None], most: bool = False) -> int:
    """Fails if one fails, holds if all hold; with `most`, what more than half do; otherwise undecided."""
    if most:
        half = len(verdicts) / 2
        if verdicts.count(HOLDS) > half:
            return HOLDS
        return FAILS if verdicts.count(FAILS) > half else UNDECIDED
    if FAILS in verdicts:
        return FAILS
    return HOLDS if set(verdicts) == {HOLDS} else UNDECIDED


def verdict_of(case: Case) -> int:
    """Holds if the whole interval satisfies the predicate, fails if none of it does; otherwise undecided."""
    if case.lo is None or case.hi is None:
        return UNDECIDED
    satisfying = satisfied(case.holds, np.append(np.linspace(case.lo, case.hi, 1001), case.measured))
    return _verdict(satisfying)


def _verdict(satisfying: np.ndarray) -> int:
    """The verdict from whether the predicate is satisfied at points of an interval, bool `[n]`."""
    if satisfying.all():
        return HOLDS
    return UNDECIDED if satisfying.any() else FAILS


# --- what was measured ------------------------------------------------------------------------------------------------


def evidence(claim: tables.ClaimSpec, measured: Sequence[Measured]) -> tuple[tuple[Case, ...], tuple[Measurement, ...]]:
    """The claim's cases on measured cells, and the measurements that they name, once.

    Raises:
        UserError: its table has no such cell.
    """
    by_key: dict[CellKey, Measured] = {}
    for cell in measured:
        by_key[cell.cell.cell_key] = cell
        by_key.setdefault((*cell.cell.cell_key[:3], ""), cell)
    cases, named_cells = [], {}
    for keys, named in claim.case_cells():
        for row, col, model, metric in named.values():
            if (row, col, model, metric) not in by_key:
                where = f"{row} | {col}{' | ' * bool(metric)}{metric}"
                raise UserError(f"claim {claim.claim}: {claim.table} has no cell {where} of {model}")
        bound = {name: by_key[key] for name, key in named.items()}
        printed = {name: papers.number(cell.cell.printed) for name, cell in bound.items()}
        nats = _log_probabilities(claim, bound, by_key)
        bound = nats or bound
        for cell in bound.values():
            named_cells[cell.cell.cell_key] = cell.measurement
        cases.append(_case(claim, keys, printed, bound, tuple(by_key.values()), bool(nats)))
    return tuple(cases), tuple(named_cells.values())


def _case(
    claim: tables.ClaimSpec,
    keys: Mapping[str, object],
    printed_numbers: Mapping[str, float | None],
    cells: Mapping[str, Measured],
    table: Sequence[Measured],
    nats: bool,
) -> Case:
    quantity = claim.quantity.format(**keys)
    printed = None if None in printed_numbers.values() else float(evaluate(quantity, printed_numbers))
    if printed is not None and not np.isfinite(printed):
        raise UserError(
            f"claim {claim.claim}: {shortened(quantity)!r} of the printed cells is {printed}, not a finite number"
        )
    holds = claim.log_probability if nats else claim.holds
    case = Case(str(keys["model"]), holds.format(**keys), printed, nats=nats)
    measurements = [measured.measurement for measured in cells.values()]
    missing = [m for m in measurements if m.status not in MEASURED or (m.value is None and not m.source)]
    if missing:
        return replace(case, missing=missing[0].status)
    at_chance = "at_chance" in {m.status for m in measurements}
    if claim.log_probability and not nats and at_chance:
        return replace(case, missing="at_chance")  # equal accuracies at chance have no quotient
    if any(m.source == "partial" and recipe.parse(m.recipe).seeded for m in measurements):
        return replace(case, missing="not_run")  # a few windows of one draw are no evidence on what is drawn
    computed = compose(quantity, {name: measured.quantity for name, measured in cells.items()})
    try:
        interval = computed.interval()
    except NotFinite:
        if not at_chance:
            raise
        return replace(case, missing="at_chance")  # no text matches any reference: both scores are 0
    marks = {"partial": "*", "arithmetic": "public shapes"}  # the latter has no stand-in
    on = ", ".join(dict.fromkeys(m.stand_in + marks.get(m.source, "") for m in measurements))
    is_exact = not interval.n and interval.lo is None  # a count
    ends = (interval.value, interval.value) if is_exact else (interval.lo, interval.hi)
    case = replace(case, measured=interval.value, lo=ends[0], hi=ends[1], df=interval.df, covers=interval.covers, on=on)
    cross_checks = tuple(_cross_checks(claim, case, quantity, computed, cells, table))
    if at_chance:
        return replace(case, cross_checks=cross_checks, missing="at_chance")
    if _all_lost(cells.values()):
        return replace(case, cross_checks=cross_checks, missing=LOST)
    return replace(case, cross_checks=cross_checks, verdict=verdict_of(case))


def _log_probabilities(
    claim: tables.ClaimSpec, cells: Mapping[str, Measured], by_key: Mapping[CellKey, Measured]
) -> dict[str, Measured]:
    """The log probabilities next to the named accuracies; empty unless the claim is judged on them and all exist."""
    by_name = {}
    for name, measured in cells.items() if claim.log_probability else ():
        key = (*measured.cell.cell_key[:3], measured.cell.metric + tables.LOG_PROBABILITY)
        if key not in by_key:
            return {}
        by_name[name] = by_key[key]
    return by_name


def _all_lost(cells: Iterable[Measured]) -> bool:
    """Whether a case compares perplexities of several models that are all above `COLLAPSED` times full precision."""
    ratios = []
    for measured in cells:
        if measured.cell.unit != "ppl" or measured.full is None or measured.full.measurement.value is None:
            return False
        ratios.append(measured.measurement.value / measured.full.measurement.value)
    return len(ratios) > 1 and min(ratios) > COLLAPSED


def _cross_checks(
    claim: tables.ClaimSpec,
    case: Case,
    quantity: str,
    judged: Quantity,
    cells: Mapping[str, Measured],
    table: Sequence[Measured],
) -> Iterator[CrossCheck]:
    """The claim's cross-checks of one case: the same quantity on another column of the same rows.

    Args:
        judged: the quantity of the case itself.
        cells: name in `quantity` to the cell that the case is judged on.
        table: all cells that the claim may name.
    """
    for name, column in claim.cross_checks.items():
        operands = {}
        for operand, measured in cells.items():
            cell = measured.cell
            of_same_row = (
                replacement
                for replacement in table
                if (replacement.cell.row, replacement.cell.model) == (cell.row, cell.model)
            )
            replacement = next(
                (
                    replacement
                    for replacement in of_same_row
                    if replacement.cell.col in (column, f"{column}, {cell.col}")
                ),
                None,
            )
            if replacement is None:  # a row without a recipe
                continue
            itself = metric_of(replacement.cell).itself
            if itself is not None and replacement.cell.is_full_precision:
                operands[operand] = constant(itself)
            elif replacement.measurement.status in MEASURED:
                operands[operand] = replacement.quantity
        if operands.keys() == cells.keys():
            check = compose(quantity, operands)
            interval, on_both = check.interval(), on_same_windows([check, judged])
            gap = compose("x - y", dict(zip("xy", on_both))).interval()
            verdict = verdict_of(replace(case, measured=interval.value, lo=interval.lo, hi=interval.hi))
            apart = gap.lo is not None and gap.hi is not None and not gap.lo <= 0 <= gap.hi
            yield CrossCheck(name, interval.value, interval.lo, interval.hi, verdict, apart)


# --- what was printed -------------------------------------------------------------------------------------------------


def _check(claim: tables.ClaimSpec) -> None:
    """Raise unless the paper makes the claim, and the table has the columns of its cross-checks."""
    paper, number = tables.split(claim.table)
    claims = papers.claims(paper) if paper in papers.PAPERS else {}
    if claims and claim.claim.partition(" ")[0] != paper:
        raise UserError(f"claim {shortened(claim.claim)!r}: begin with its paper, as in '{paper} {next(iter(claims))}'")
    for item in claim.claim.split()[1:]:
        for name in item.split("-"):
            if claims and name not in claims:
                raise UserError(f"claim {claim.claim}: {unknown(f'claim of {paper}', name, claims)}")
    columns = {cell.col for cell in papers.printed(paper, number)} if number.isdecimal() else set()
    for column in claim.cross_checks.values():
        if column not in (claims := columns | tables.table(paper, number).extra_columns.keys()):
            raise UserError(f"claim {claim.claim}: cross_checks: {unknown(f'column of {claim.table}', column, claims)}")


def _why(cells: Sequence[Measurement]) -> str:
    counts = Counter(m.status for m in cells if m.status not in MEASURED)
    return ", ".join(f"{n} of {len(cells)} cells {_reason(status)}" for status, n in counts.items())
