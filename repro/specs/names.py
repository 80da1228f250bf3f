"""Names of all tables, figures and pages. It imports nothing slow, so that a typo is reported at once."""

import re
from itertools import product
from pathlib import Path

from repro import papers
from repro.core.errors import unknown
from repro.core.files import HOME
from repro.papers.cell import table_name

FOLDERS = ("kernels",)  # of specs of our own that belong to no paper
OWN = ("table1", "table2", "audit", "own-numbers")  # the project's own tables
LEADERBOARD = "leaderboard"  # a figure that is drawn from the cells of tables/table2, without a spec
FORMATS = (".csv", ".tex", ".md")  # of a built table
DRAWN = (".svg", ".pdf", ".csv", ".md")  # of a built figure


# --- tables -----------------------------------------------------------------------------------------------------------


def tables() -> list[str]:
    """`spear/table1`, `spear/memory`: every printed table, with or without a spec, and every spec of our own."""
    return [table_name(paper, "table", number) for paper, number in [*_printed_tables(), *own_tables()]]


def split_table(name: str) -> tuple[str, str]:
    """`spear/table1`, `spear/1` or `spear/memory` (also as a path of what is built) as paper and number or name.

    Raises:
        UserError: no such paper, table or spec.
    """
    text = re.sub(r"^tables/|\.(tex|csv|md|yaml)$", "", str(name))
    paper, _, number = text.rpartition("/")
    number = number.removeprefix("table") if number.removeprefix("table").isdecimal() else number
    printed = paper in papers.PAPERS and number in papers.tables(paper)
    if not printed and not _is_own_table(paper, number):
        raise unknown("table", text, tables())
    return paper, number


def table_spec(paper: str, number: str) -> Path:
    """The file of a table's spec, which may not exist."""
    return HOME / "tables" / f"{table_name(paper, 'table', number)}.yaml"


def _folders_of_own_tables() -> tuple[str, ...]:
    """The folders of specs of our own; the last is tables/ itself."""
    return (*papers.PAPERS, *FOLDERS, "")


def _is_own_table(paper: str, number: str) -> bool:
    """Whether `own_tables` has it. It is asked for every cell that names another table, so it lists no folder."""
    named = paper in _folders_of_own_tables() and number and not number.isdecimal() and not number.startswith("table")
    return bool(named) and table_spec(paper, number).is_file()


def own_tables() -> list[tuple[str, str]]:
    """Paper and name of every spec of our own, which belongs to no printed table."""
    specs = []
    for folder in _folders_of_own_tables():
        names = [path.stem for path in sorted((HOME / "tables" / folder).glob("*.yaml"))]
        specs += [(folder, name) for name in names if not name.startswith("table")]
    return specs


def specified_tables() -> list[tuple[str, str]]:
    """Paper and number or name of everything that has a spec, in the papers' order."""
    printed = [(paper, number) for paper, number in _printed_tables() if table_spec(paper, number).is_file()]
    return [*printed, *own_tables()]


def pages() -> list[str]:
    """The papers that have a page in docs/: those with a spec."""
    with_spec = {paper for paper, _ in specified_tables()}
    return [paper for paper in papers.PAPERS if paper in with_spec]


def _printed_tables() -> list[tuple[str, str]]:
    printed = []
    for paper in papers.PAPERS:
        printed += [(paper, number) for number in papers.tables(paper)]
    return printed


# --- figures ----------------------------------------------------------------------------------------------------------


def figures() -> list[str]:
    """`spear/figure13`, `kernels/roofline`: every figure with a spec, and the leaderboard's."""
    return [*(table_name(paper, "figure", number) for paper, number in specified_figures()), LEADERBOARD]


def is_figure(name: str) -> bool:
    """Whether a name that a user types is meant as a figure's."""
    return "/figure" in name or name in figures()


def split_figure(name: str) -> tuple[str, str]:
    """`spear/figure13` or `kernels/roofline`, also as a path of what is built, as paper and number or name.

    Raises:
        UserError: there is no such figure, or it has no spec.
    """
    text = re.sub(r"^figures/|\.\w+$", "", str(name))
    known = {table_name(paper, "figure", number): (paper, number) for paper, number in specified_figures()}
    if text not in known:
        raise unknown("figure with a spec", text, known)
    return known[text]


def figure_spec(paper: str, number: str) -> Path:
    """The file of a figure's spec, which may not exist."""
    return HOME / "figures" / f"{table_name(paper, 'figure', number)}.yaml"


def specified_figures() -> list[tuple[str, str]]:
    """Paper and number of every figure, or part of one, that has a spec, then folder and name of those of our own."""
    specs = []
    for paper in papers.PAPERS:
        for figure in papers.data_figures(paper):
            numbers = (figure.number, *figure.parts)
            specs += [(paper, number) for number in numbers if figure_spec(paper, number).is_file()]
    for folder in (*papers.PAPERS, *FOLDERS):
        names = [path.stem for path in sorted((HOME / "figures" / folder).glob("*.yaml"))]
        specs += [(folder, name) for name in names if not name.startswith("figure")]
    return specs


# --- what a user types ------------------------------------------------------------------------------------------------


def canonical(name: str) -> str:
    """The name of a table or figure, such as `spear/table1`, from `spear/1` or a file that is built of it.

    Raises:
        UserError: there is no such table, or no such figure with a spec.
    """
    stem = re.sub(r"^(tables|figures)/|\.(tex|csv|md|svg|pdf)$", "", name)
    if stem in (*OWN, LEADERBOARD):
        return stem
    kind, split = ("figure", split_figure) if is_figure(stem) else ("table", split_table)
    paper, number = split(stem)
    return table_name(paper, kind, number)


def targets() -> list[str]:
    """Every file that can be built, and `all`."""
    written = [f"tables/{name}{form}" for name, form in product((*OWN, *tables()), FORMATS)]
    drawn = [f"figures/{name}{form}" for name, form in product(figures(), DRAWN)]
    return ["all", *written, *drawn, *(f"docs/{paper}.md" for paper in pages())]


def page_with(target: str) -> str:
    """The page that a page of one of its tables, or of its figures, is built with; any other target as it is."""
    match = re.fullmatch(r"docs/(\w+)/\w+\.md", target)
    if match and match[1] in pages() and (HOME / target).is_file():
        return f"docs/{match[1]}.md"
    return target


def check_targets(wanted: list[str]) -> None:
    """Raise unless every target is one that this project builds.

    Raises:
        UserError: it names the target and the nearest one.
    """
    known = targets()
    hinted = [target for target in known if target.endswith((".tex", ".svg", "all")) or target.startswith("docs/")]
    for target in wanted:
        if target not in known:
            raise unknown("target", target, hinted)
