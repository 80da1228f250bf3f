"""Check claims on the papers' own numbers, by arithmetic on printed cells: never a verdict on a method."""

from collections.abc import Iterator, Sequence

from repro import papers
from repro.render import content
from repro.specs import tables
from repro.specs.claims import ClaimSpec
from repro.verdicts.judging import Judged

HEAD = ("claim", "where", "what it says", "printed", "from its cells", "the numbers are")
WORDS = {"yes": "consistent", "partly": "partly consistent", "no": "inconsistent"}  # of claims.csv


def claims_of(paper: str) -> list[ClaimSpec]:
    """Every predicate on a paper, the headline table's first, in the order of the tables."""
    every = [claim for claim in tables.headline().claims if tables.split(claim.table)[0] == paper]
    for other, number in tables.specified():
        if other == paper:
            every += tables.table(paper, number).claims
    order = papers.tables(paper)
    numbers = [tables.split(claim.table)[1] for claim in every]
    return [c for _, c in sorted(zip(numbers, every), key=lambda x: order.index(x[0]) if x[0] in order else len(order))]


def title(number: str) -> str:
    """`Table 4`, or the name of a spec of our own."""
    return f"Table {number}" if number.isdecimal() else number


def rows(judged: Sequence[Judged]) -> Iterator[list[str]]:
    """A line for every predicate whose cells are printed, in the columns of `HEAD`."""
    for one in judged:
        if one.own_numbers or one.spec.judged_on_printed:
            printed = content.readings([(case.printed, None, None) for case in one.cases], one.spec.percent) or "–"
            measured = [case.measured for case in one.cases if case.measured is not None]
            here = content.readings([(x, None, None) for x in measured], one.spec.percent) if not one.verdict else ""
            said = "; ".join(filter(None, [one.own_numbers or "not all printed", one.why * (not one.verdict)]))
            said += f"; on the stand-ins {here}" * bool(here)
            where = title(tables.split(one.spec.table)[1])
            yield [one.spec.claim, where, one.spec.says, one.spec.printed, printed, said]


def without_predicate(paper: str, written: Sequence[ClaimSpec]) -> list[dict[str, str]]:
    """The paper's claims that no predicate names."""
    return [line for name, line in papers.claims(paper).items() if not any(names(one, name) for one in written)]


def names(claim: ClaimSpec, number: str) -> bool:
    """Whether a predicate is on a claim of this number, by itself or in a range such as C018-C020."""
    for item in claim.claim.split()[1:]:
        first, _, last = item.partition("-")
        if first <= number <= (last or first):
            return True
    return False


def by_formula(lines: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Those of claims without a predicate whose formula on printed numbers was computed, in claims.csv."""
    return [line for line in lines if line["consistent"] in WORDS and line["recomputed"]]


def formula_rows(paper: str, lines: Sequence[dict[str, str]]) -> Iterator[list[str]]:
    """Their lines, in the columns of `HEAD`."""
    for line in by_formula(lines):
        printed = line.get("printed") or line.get("values", "")
        named = [f"{paper} {line['id']}", line["where"], line["statement"], printed]
        yield [*named, line["recomputed"], WORDS[line["consistent"]]]
