"""A table is a spec of a few lines: printed row labels with recipes, printed columns with what is measured. No logic.

    tables/spear/table1.yaml   rows: {RTN pc: rtn-w4-pc, …}  columns: {Wiki: {measure: perplexity, corpus: wikitext2}}
    tables/table1.yaml         the project's own Table 1: claims as predicates over cells

A printed row without a recipe, and a table without a spec, is shown with status `not_run`: nothing is dropped.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from repro import papers
from repro.errors import UserError, unknown
from repro.files import ROOT
from repro.strict import build, load_yaml


@dataclass(frozen=True)
class Column:
    """What is measured under a printed column label; `corpus` is the paper's, which the profile maps to a text."""

    measure: Literal["perplexity", "zeroshot"]
    corpus: str = ""


@dataclass(frozen=True)
class ClaimSpec:
    """A claim as a predicate: `quantity` over named cells must satisfy `holds` in every case.

    Attributes:
        claim: paper and the claim's ids in `repro/papers/<paper>/claims.csv`.
        says: the claim in our own words.
        printed: what the paper prints for it.
        table: the table whose cells are meant; a table's own spec leaves it out.
        cells: name in `quantity` to `row label | column label`; `{key}` is filled in from the case.
        cases: the model labels (or mappings with `model` and other keys) for which the claim is made.
        quantity: arithmetic over the names.
        holds: a comparison such as `>= 0.555` or `0.1 <= x <= 0.2`; `{key}` as in `cells`.
        percent: show the quantity as a percentage.
    """

    claim: str
    says: str
    printed: str
    table: str
    cells: dict[str, str]
    cases: tuple[str | dict[str, str], ...]
    quantity: str
    holds: str
    percent: bool = False

    def __post_init__(self) -> None:
        paper, _, number = self.table.partition("/")
        check_table(paper, number)
        for case in self.cases:
            keys = {"model": case} if isinstance(case, str) else case
            try:
                [f"{text.format(**keys)} of {keys['model']}" for text in (*self.cells.values(), self.holds)]
            except (KeyError, IndexError, ValueError) as error:
                raise UserError(f"claim {self.claim!r}: the case {keys} does not give {error}") from None

    def places(self) -> list[tuple[dict[str, str], dict[str, tuple[str, str, str]]]]:
        """Per case its keys, and the (row, col, model) of every named cell."""
        found = []
        for case in self.cases:
            keys = {"model": case} if isinstance(case, str) else case
            parts = {name: text.format(**keys).partition(" | ") for name, text in self.cells.items()}
            found.append((keys, {name: (row, col, keys["model"]) for name, (row, _, col) in parts.items()}))
        return found


@dataclass(frozen=True)
class TableSpec:
    """One printed table.

    Attributes:
        rows: printed row label to recipe.
        extra: recipes of your own, one a row at the end of the table; the label is the recipe.
        columns: printed column label to what is measured under it.
        claims: what the paper says about this table, judged under it; their `table` is this one.
    """

    title: str
    rows: dict[str, str] = field(default_factory=dict)
    columns: dict[str, Column] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    claims: tuple[ClaimSpec, ...] = ()


@dataclass(frozen=True)
class HeadlineSpec:
    """The project's own Table 1: at most 15 headline claims, and those that only figures carry."""

    title: str
    claims: tuple[ClaimSpec, ...]
    figures_only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.claims) > 15:
            raise UserError(f"tables/table1.yaml: {len(self.claims)} claims; the headline table has at most 15")


def check_table(paper: str, number: str) -> None:
    """Raise unless the paper printed that table.

    Raises:
        UserError: there is no such paper or table.
    """
    if number not in papers.tables(paper):
        raise unknown(f"table of {paper}", number, papers.tables(paper))


def path_of(paper: str, number: str) -> Path:
    """Where the spec of a table is, or would be."""
    return ROOT / "tables" / paper / f"table{number}.yaml"


def table(paper: str, number: str) -> TableSpec:
    """The spec of a printed table; one without rows where nobody wrote it yet.

    Raises:
        UserError: no such table, a key or value that a spec does not have, or a label that the paper did not print.
    """
    check_table(paper, number)
    path = path_of(paper, number)
    if not path.is_file():
        return TableSpec(papers.index(paper)[number]["caption"])
    where = f"tables/{paper}/table{number}.yaml"
    data = load_yaml(path)
    if isinstance(data, dict) and isinstance(data.get("claims"), list):
        here = {"table": f"{paper}/{number}"}
        data["claims"] = [here | claim if isinstance(claim, dict) else claim for claim in data["claims"]]
    spec = build(TableSpec, data, where)
    cells = papers.printed(paper, number)
    for kind, labels, known in (
        ("row", spec.rows, {cell.row for cell in cells}),
        ("column", spec.columns, {cell.col for cell in cells}),
    ):
        for label in labels:
            if label not in known:
                hint = " (rows of your own go under `extra`)" if kind == "row" else ""
                raise UserError(f"{where}: {unknown(f'printed {kind}', label, known)}{hint}")
    return spec


def specified() -> list[tuple[str, str]]:
    """Paper and number of every table that has a spec, in the papers' order."""
    return [
        (paper, number)
        for paper in papers.PAPERS
        for number in papers.tables(paper)
        if path_of(paper, number).is_file()
    ]


def studies() -> list[tuple[str, str]]:
    """Paper and name of every study (`repro/study.py`): the specs beside a paper's tables that are not of a table."""
    found = ((paper, path.stem) for paper in papers.PAPERS for path in sorted((ROOT / "tables" / paper).glob("*.yaml")))
    return [(paper, name) for paper, name in found if not name.startswith("table")]


def headline() -> HeadlineSpec:
    """The spec of tables/table1.

    Raises:
        UserError: a key or value that it does not have.
    """
    return build(HeadlineSpec, load_yaml(ROOT / "tables" / "table1.yaml"), "tables/table1.yaml")
