"""Print a table, built here or from stored results: table1, spear/table1, …"""

import argparse
from pathlib import Path

from repro import papers
from repro.core.errors import UserError, unknown
from repro.core.files import reading
from repro.render.sheet import Sheet, read_markdown, terminal
from repro.specs import names

SAID_LAST = ("replicated here", "differs: ")  # starts of the notes that a build prints last


def options(parser: argparse.ArgumentParser) -> None:
    """The table's name."""
    parser.add_argument("table")


def run(args: argparse.Namespace) -> None:
    """Print a table: as it was built here, else from stored results."""
    show(args.table)


def show(target: str) -> None:
    """Print a table. The project's Table 1 is followed by SPEAR's Table 1 and the path of each paper's own.

    Raises:
        UserError: an unknown table, what is none, or a damaged file.
    """
    stem = stem_of(target)
    stems = [stem, f"{papers.LEADING}/table1"] if stem == "table1" else [stem]
    sheets = [sheet_of(name) for name in stems]
    for sheet in sheets:
        print(terminal(sheet))
    if stem == "table1":
        for paper in papers.PAPERS:
            path = Path("tables") / paper / "table1.tex"
            print(f"{papers.ABOUT[paper].title[:60]}: {'' if path.is_file() else 'make '}{path}")
    if path_of(stem).is_file():
        print(f"written: tables/{stem}.tex  tables/{stem}.csv  tables/{stem}.md")
    else:
        print(f"from stored results; make tables/{stem}.tex builds it, and replicates what this machine can")
    last_notes = []
    for sheet in sheets:
        last_notes += [note for note in sheet.notes if note.startswith(SAID_LAST)]
    for line in dict.fromkeys(last_notes):
        print(line)


def stem_of(target: str) -> str:
    """The name of a table that a user types, also as a path of what is built.

    Raises:
        UserError: there is no such table; a paper, a page and a figure are named as such.
    """
    if target in papers.PAPERS:
        hint = f"name one of its tables, such as {target}/table1, or open docs/{target}.md"
        raise UserError(f"{target} is a paper; {hint}")
    if target.startswith("docs/"):
        raise UserError(f"{target}: a page is no table; open it, or name a table, such as {papers.LEADING}/table1")
    if "/" not in target and target not in (*names.OWN, *names.tables(), *names.figures()):
        raise unknown("table", target, [*names.OWN, *names.tables()])
    stem = names.canonical(target)
    if names.is_figure(stem):
        raise UserError(f"{stem} is a figure; make figures/{stem}.svg draws it")
    return stem


def path_of(stem: str) -> Path:
    """The file of a built table."""
    return Path("tables") / f"{stem}.md"


def sheet_of(stem: str) -> Sheet:
    """The sheet of a table as it was built here, else from stored results.

    Raises:
        UserError: the built file is damaged.
    """
    if path_of(stem).is_file():
        return read(path_of(stem))
    from repro.render import table_files
    from repro.specs import scale
    from repro.workflow.workflow import Workflow

    return table_files.sheet_and_csv(Workflow.of_results(scale.load()), stem)[0]


def read(path: Path) -> Sheet:
    """The sheet of a built table.

    Raises:
        UserError: the file is damaged.
    """
    try:
        with reading(path):
            return read_markdown(path.read_text(encoding="utf-8"))
    except (ValueError, IndexError, AttributeError):  # AttributeError: a malformed head
        raise UserError(f"{path}: damaged, not a table that was built here; delete it and build it again") from None
