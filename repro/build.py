"""`make TARGET`: check the targets, clear a lock whose Snakemake is gone, build, print the table."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from repro import papers, profile, render, spec
from repro.errors import UserError, unknown
from repro.files import ROOT
from repro.strict import load_yaml

OWN = ("table1", "table2", "audit")


def check(targets: Sequence[str]) -> None:
    """Raise unless every target is one that this project builds.

    Raises:
        UserError: it names the target and the nearest one that there is.
    """
    tables = [f"{p}/table{n}" for p in papers.PAPERS for n in papers.tables(p)]
    tables += ["/".join(both) for both in spec.studies()]
    known = ["all", *(f"tables/{t}{kind}" for t in (*OWN, *tables) for kind in (".tex", ".csv", ".md"))]
    for target in targets:
        if target not in known:
            raise unknown("target", target, [t for t in known if t.endswith((".tex", "all"))])


def build(targets: Sequence[str], cores: int, name: str | None = None, configfile: Path | None = None) -> int:
    """Run Snakemake on `targets` and print the tables among them; returns its exit code, 2 for bad input.

    Raises:
        UserError: an unknown target or profile, or another Snakemake at work in this folder.
    """
    check(targets)
    if cores < 1:
        raise UserError(f"--cores {cores}: at least one core is needed")
    if configfile is None:
        name = profile.load(None, name).name
    elif not isinstance(load_yaml(configfile), dict):
        raise UserError(f"{configfile}: not a profile; expected a mapping with keys of Profile")
    unlock(Path.cwd())
    words = [sys.executable, "-m", "snakemake", "-s", str(ROOT / "Snakefile"), "--cores", str(cores)]
    words += ["--rerun-incomplete", "--max-checksum-file-size", "20MB", "--quiet", "rules", "host"]
    words += ["--configfile", str(configfile)] if configfile else []
    done = subprocess.run([*words, "--", *targets], env=os.environ | ({"PROFILE": name} if name else {}))
    if done.returncode:
        return 2
    for target in targets:
        if target.startswith("tables/"):
            show(target)
    return 0


def unlock(folder: Path) -> None:
    """Remove Snakemake's lock in `folder` when no Snakemake works there any more.

    Raises:
        UserError: one does.
    """
    locks = list((folder / ".snakemake" / "locks").glob("*.lock"))
    if not locks:
        return
    for process in psutil.process_iter(["pid", "cmdline", "cwd"]):
        words = process.info["cmdline"] or []
        if process.info["pid"] == os.getpid() or process.info["cwd"] != str(folder.resolve()):
            continue
        if any(re.search(r"(^|/)snakemake$", word) for word in words[:3]):
            raise UserError(f"{folder}: Snakemake (process {process.info['pid']}) is at work here; wait until it ends")
    for lock in locks:
        lock.unlink(missing_ok=True)


def show(target: str) -> None:
    """Print a built table and, under the project's own Table 1, the paths of each paper's own.

    Raises:
        UserError: unknown, or not built yet.
    """
    stem = target.removeprefix("tables/").removesuffix(".tex").removesuffix(".csv").removesuffix(".md")
    check([f"tables/{stem}.tex"])
    path = Path("tables") / f"{stem}.md"
    if not path.is_file():
        raise UserError(f"{path}: not built yet; run make tables/{stem}.tex")
    print(render.terminal(render.read_markdown(path.read_text(encoding="utf-8"))))
    if stem == "table1":
        first = Path("tables") / "spear" / "table1.md"
        print(render.terminal(render.read_markdown(first.read_text(encoding="utf-8"))))
        for paper in papers.PAPERS:
            print(f"{papers.ABOUT[paper].title[:60]}: tables/{paper}/table1.tex")
    print(f"written: tables/{stem}.tex  tables/{stem}.csv  tables/{stem}.md")
