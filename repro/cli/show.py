"""Print a built table: table1, spear/table1, …"""

import argparse
from pathlib import Path

from repro import papers
from repro.errors import UserError
from repro.render.sheet import Sheet, read_markdown, terminal
from repro.spec import names


def options(parser: argparse.ArgumentParser) -> None:
    """The table's name."""
    parser.add_argument("table")


def run(args: argparse.Namespace) -> None:
    """Print a built table."""
    show(args.table)


def show(target: str) -> None:
    """Print a built table and, under the project's own Table 1, SPEAR's and the paths of each paper's own.

    Raises:
        UserError: unknown, not built yet, or damaged.
    """
    stem = names.canonical(target) if "/" in target else target
    names.check_targets([f"tables/{stem}.tex"])
    path = Path("tables") / f"{stem}.md"
    if not path.is_file():
        raise UserError(f"{path}: not built yet; run make tables/{stem}.tex")
    print(terminal(read(path)))
    if stem == "table1":
        print(terminal(read(Path("tables") / papers.LEADING / "table1.md")))
        for paper in papers.PAPERS:
            path = Path("tables") / paper / "table1.tex"
            print(f"{papers.ABOUT[paper].title[:60]}: {'' if path.is_file() else 'make '}{path}")
    print(f"written: tables/{stem}.tex  tables/{stem}.csv  tables/{stem}.md")


def read(path: Path) -> Sheet:
    """The sheet of a built table.

    Raises:
        UserError: the file is damaged.
    """
    try:
        return read_markdown(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, IndexError, AttributeError):  # AttributeError: a head that is no head
        raise UserError(f"{path}: damaged, not a table that was built here; delete it and build it again") from None
