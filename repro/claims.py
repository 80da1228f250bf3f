"""Claims as predicates over cells: judged on what was measured, else by arithmetic on the printed numbers (grade D).

    quantity  (b - s) / (b - f)        holds  >= 0.555

On measured cells the quantity is bootstrapped over windows or items, paired where cells share them. Per case: it holds
when the whole interval satisfies the predicate, fails when none of it does, else it is inconclusive. A claim holds when
every case does and fails when one does; at grade C the words are seen, not seen, inconclusive at this scale. Printed
numbers are judged within their rounding.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from repro import papers, record, spec, statistics, table
from repro.errors import UserError, unknown
from repro.record import Measurement
from repro.workflow import Place, Workflow

OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
}
FUNCTIONS = {
    "min": lambda *v: np.minimum.reduce(np.broadcast_arrays(*v)),
    "max": lambda *v: np.maximum.reduce(np.broadcast_arrays(*v)),
}
WORDS = {
    "C": ("seen", "not seen", "inconclusive at this scale"),
    "D": ("printed numbers agree", "printed numbers disagree", "within rounding"),
}
PLAIN = ("holds", "fails", "inconclusive")


def evaluate(expression: str, values: Mapping[str, Any]) -> Any:
    """Arithmetic and comparisons over named numbers or arrays; nothing else is allowed.

    Raises:
        UserError: an unknown name, or anything that is not arithmetic.
    """

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Expression(body=body):
                return value(body)
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.Name(id=name):
                if name not in values:
                    raise UserError(f"predicate {expression!r}: {unknown('name', name, values)}")
                return values[name]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
                return FUNCTIONS[name](*map(value, args))
            case ast.BoolOp(op=ast.And(), values=parts):
                return np.logical_and.reduce([value(part) for part in parts])
            case ast.Compare(left=left, ops=ops, comparators=rights) if all(type(op) in OPERATORS for op in ops):
                sides = [value(left), *map(value, rights)]
                pairs = zip(ops, sides, sides[1:])
                return np.logical_and.reduce([OPERATORS[type(op)](a, b) for op, a, b in pairs])
        raise UserError(f"predicate {expression!r}: only arithmetic, min, max and comparisons are allowed")

    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError:
        raise UserError(f"predicate {expression!r}: not an expression") from None
    try:
        return value(tree)
    except ZeroDivisionError:
        raise UserError(f"predicate {expression!r}: divides by zero") from None


def satisfied(holds: str, x: Any) -> Any:
    """Whether quantity `x` satisfies a comparison such as `>= 0.5` or `0.1 <= x <= 0.2`."""
    return evaluate(holds if re.search(r"\bx\b", holds) else f"x {holds}", {"x": x})


@dataclass(frozen=True)
class Case:
    """One case of a claim: its comparison, the quantity on the printed cells, on the measured ones with interval."""

    model: str
    holds: str
    printed: float | None
    measured: float | None = None
    lo: float | None = None
    hi: float | None = None
    on: str = ""
    missing: str = ""


@dataclass(frozen=True)
class Judged:
    """A claim with its cases, the grade of the evidence, and the verdict."""

    spec: spec.ClaimSpec
    cases: tuple[Case, ...]
    grade: str
    verdict: str
    measured: bool
    why: str = ""
    cells: tuple[Measurement, ...] = field(default=(), repr=False)


def judge(flow: Workflow, claim: spec.ClaimSpec) -> Judged:
    """Judge one claim on what this profile measures live, else on accepted measurements, else on the printed numbers.

    Accepted are those of the profile that this one is `judged_on`, before its own, which may have a smaller budget.

    Raises:
        UserError: the spec names a claim, cell or case that the paper did not print.
    """
    paper, number = claim.table.split("/")
    ids = claim.claim.split()[1:]
    known = papers.claims(paper)
    for name in (part for item in ids for part in item.split("-")):
        if name not in known:
            raise UserError(f"claim {claim.claim}: {unknown(f'claim of {paper}', name, known)}")
    printed = {(c.row, c.col, c.model) for c in papers.printed(paper, number)}
    for row, col, model in (place for _, named in claim.places() for place in named.values()):
        if (row, col, model) not in printed:
            raise UserError(f"claim {claim.claim}: {claim.table} printed no {row} | {col} of {model}")
    own = cases, cells = _cases(flow, claim)
    evidence = [own]
    if flow.profile.judged_on and not (_whole(cases) and all(m.live == "live" for m in cells if m.value is not None)):
        evidence.insert(0, _cases(Workflow(name=flow.profile.judged_on, recorded=True), claim))
    for found, named in evidence:
        if _whole(found):
            grade = max(m.grade for m in named if m.grade)
            verdict = WORDS.get(grade, PLAIN)[_all([_of_interval(case) for case in found if case.measured is not None])]
            return Judged(claim, found, grade, verdict, True, cells=named)
    if any(case.printed is None for case in cases):
        return Judged(claim, cases, "", "not measurable", False, "a printed cell is blank", cells)
    verdicts = [_of_printed(claim, case, named) for case, (_, named) in zip(cases, claim.places())]
    return Judged(claim, cases, "D", WORDS["D"][_all(verdicts)], False, _why(cells), cells)


def _cases(flow: Workflow, claim: spec.ClaimSpec) -> tuple[tuple[Case, ...], tuple[Measurement, ...]]:
    """The claim's cases on what `flow` measured, and the cells they name, one after the other."""
    paper, number = claim.table.split("/")
    places = claim.places()
    wanted = {place for _, named in places for place in named.values()}
    found = {(m.row, m.col, m.model): m for m in table.measure(flow, paper, number, wanted)}
    bound = [(keys, {name: found[place] for name, place in named.items()}) for keys, named in places]
    cases = tuple(_case(flow, claim, keys, named) for keys, named in bound)
    return cases, tuple(m for _, named in bound for m in named.values())


def _whole(cases: Sequence[Case]) -> bool:
    """Whether some case is measured, and every other only lacks a stand-in."""
    return any(c.measured is not None for c in cases) and all(
        c.measured is not None or c.missing == "no_stand_in" for c in cases
    )


def held(judged: Judged) -> str:
    """How many of the measured cases hold, such as `19 of 24 cases hold, 2 do not`; nothing where none is measured."""
    found = [_of_interval(case) for case in judged.cases if case.measured is not None]
    return f"{found.count(0)} of {len(found)} cases hold, {found.count(1)} do not" if found else ""


def _all(verdicts: list[int]) -> int:
    """0 when all hold, 1 when one fails, else 2."""
    return 1 if 1 in verdicts else 2 if 2 in verdicts else 0


def _of_interval(case: Case) -> int:
    inside = np.append(np.linspace(case.lo, case.hi, 1001), case.measured)
    found = satisfied(case.holds, inside)
    return 0 if found.all() else 1 if not found.any() else 2


def _of_printed(claim: spec.ClaimSpec, case: Case, named: Mapping[str, Place]) -> int:
    """The verdict of the printed numbers; 2 when rounding alone, half a unit of each last digit, can turn it."""
    paper, number = claim.table.split("/")
    cells = {(c.row, c.col, c.model): c for c in reversed(papers.printed(paper, number))}
    ends = [(cells[p].number - cells[p].tolerance, cells[p].number + cells[p].tolerance) for p in named.values()]
    corners = [evaluate(claim.quantity, dict(zip(named, corner))) for corner in product(*ends)]
    found = {bool(satisfied(case.holds, x)) for x in (case.printed, *corners)}
    return 2 if len(found) == 2 else 1 - int(found.pop())


def _why(cells: Sequence[Measurement]) -> str:
    missing = [m for m in cells if m.status not in ("ok", "floor")]
    counts = {s: sum(m.status == s for m in missing) for s in dict.fromkeys(m.status for m in missing)}
    return ", ".join(f"{n} of {len(cells)} cells {status.replace('_', ' ')}" for status, n in counts.items())


def _case(flow: Workflow, claim: spec.ClaimSpec, keys: Mapping[str, str], named: dict[str, Measurement]) -> Case:
    paper, number = claim.table.split("/")
    print_ = {(c.row, c.col, c.model): c.number for c in reversed(papers.printed(paper, number))}
    numbers = {name: print_.get((m.row, m.col, m.model)) for name, m in named.items()}
    printed = None if None in numbers.values() else float(evaluate(claim.quantity, numbers))
    holds = claim.holds.format(**keys)
    missing = [m for m in named.values() if m.status not in ("ok", "floor")]
    if missing:
        return Case(keys["model"], holds, printed, missing=missing[0].status)
    value = float(evaluate(claim.quantity, {name: m.value for name, m in named.items()}))
    samples, groups, finish = {}, {}, {}
    for name, m in named.items():
        found = _samples(flow, paper, number, m)
        if found is None:  # a recorded cell: its interval, taken as normal, independent of the others
            spread = 0.0 if m.lo is None or m.hi is None else (m.hi - m.lo) / 3.92
            draws = np.random.default_rng([0, len(samples)]).normal(m.value, spread, 2000)
            samples[name], groups[name], finish[name] = None, "", draws
        else:
            samples[name], groups[name], finish[name] = found
    arrays = {name: values for name, values in samples.items() if values is not None}

    def expression(means: dict[str, np.ndarray]) -> np.ndarray:
        parts = {n: finish[n](means[n]) if n in means else finish[n] for n in samples}
        return np.asarray(evaluate(claim.quantity, parts))

    if arrays:
        low, high = statistics.paired(arrays, expression, {n: groups[n] for n in arrays})
    else:
        low, high = (float(q) for q in np.quantile(expression({}), [0.025, 0.975]))
    on = ", ".join(dict.fromkeys(m.stand_in + ("*" if m.live == "recorded" else "") for m in named.values()))
    return Case(keys["model"], holds, printed, value, min(low, value), max(high, value), on)


def _samples(flow: Workflow, paper: str, number: str, m: Measurement) -> tuple[np.ndarray, str, Callable] | None:
    """Per-window values of a perplexity, the group they are paired in, and what turns their mean into it."""
    if m.live != "live":
        stored = record.RESULTS / m.scores
        return (table.scores(str(stored))[0]["nll"].to_numpy(), m.col, np.exp) if m.scores else None
    for row, col, column, model, run in flow.cells(paper, number):
        if (row, col, model) == (m.row, m.col, m.model) and run and column.measure == "perplexity":
            path = flow.source(column, run)
            return table.scores(str(path))[0]["nll"].to_numpy(), column.corpus, np.exp
    return None


def show(x: float | None, percent: bool) -> str:
    """A quantity as text with three significant digits."""
    if x is None:
        return "–"
    x = 100 * x if percent else x
    digits = max(0, 2 - int(math.floor(math.log10(abs(x))))) if x and abs(x) < 1000 else 0
    return f"{x:.{min(digits, 4)}f}" + (" %" if percent else "")
