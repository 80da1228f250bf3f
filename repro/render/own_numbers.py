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
    for paper_of_spec, number in tables.specified():
        if paper_of_spec == paper:
            every += tables.table(paper, number).claims
    order = papers.tables(paper)

    def position(claim: ClaimSpec) -> int:
        _, number = tables.split(claim.table)
        return order.index(number) if number in order else len(order)

    return sorted(every, key=position)


def title(number: str) -> str:
    """`Table 4`, or the name of a spec of our own."""
    return f"Table {number}" if number.isdecimal() else number


def rows(judged: Sequence[Judged]) -> Iterator[list[str]]:
    """A row for every predicate whose cells are printed, in the columns of `HEAD`."""
    for claim in judged:
        if claim.own_numbers or claim.spec.judged_on_printed:
            printed = content.readings([(case.printed, None, None) for case in claim.cases], claim.spec.percent) or "–"
            measured = [case.measured for case in claim.cases if case.measured is not None]
            on_stand_ins = (
                content.readings([(x, None, None) for x in measured], claim.spec.percent) if not claim.verdict else ""
            )
            result = "; ".join(filter(None, [claim.own_numbers or "not all printed", claim.why * (not claim.verdict)]))
            result += f"; on the stand-ins {on_stand_ins}" * bool(on_stand_ins)
            where = title(tables.split(claim.spec.table)[1])
            yield [claim.spec.claim, where, claim.spec.says, claim.spec.printed, printed, result]


def without_predicate(paper: str, claims: Sequence[ClaimSpec]) -> list[dict[str, str]]:
    """The paper's claims that no predicate names."""
    without = []
    for number, line in papers.claims(paper).items():
        if not any(names(claim, number) for claim in claims):
            without.append(line)
    return without


def names(claim: ClaimSpec, number: str) -> bool:
    """Whether a predicate is on a claim of this number, by itself or in a range such as C018-C020."""
    for item in claim.claim.split()[1:]:
        first, _, last = item.partition("-")
        if first <= number <= (last or first):
            return True
    return False


def by_formula(lines: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Of the claims in `lines`, those whose formula on printed numbers was computed in claims.csv."""
    return [line for line in lines if line["consistent"] in WORDS and line["recomputed"]]


def formula_rows(paper: str, lines: Sequence[dict[str, str]]) -> Iterator[list[str]]:
    """The claims of `by_formula`, in the columns of `HEAD`."""
    for line in by_formula(lines):
        printed = line.get("printed") or line.get("values", "")
        named = [f"{paper} {line['id']}", line["where"], line["statement"], printed]
        yield [*named, line["recomputed"], WORDS[line["consistent"]]]
