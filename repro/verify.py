"""Rebuild tables in a clean folder and say per cell how they compare with what is recorded in results/."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from repro import papers, record, spec
from repro.errors import UserError, unknown
from repro.files import ROOT, write_text
from repro.record import Measurement
from repro.workflow import Workflow

FOLDER = Path("build/verify")


def compare(old: Measurement, new: Measurement | None) -> str:
    """`identical`, `within` the recorded interval, `differs`, or `absent` from the rebuilt table."""
    if new is None or new.value is None or new.live != "live":
        return "absent"
    if f"{new.value:.7g}" == f"{old.value:.7g}":
        return "identical"
    inside = old.lo is not None and old.hi is not None and old.lo <= new.value <= old.hi
    return "within" if inside else "differs"


def verify(flow: Workflow, tables: list[str], cores: int | None = None) -> int:
    """Rebuild the recorded tables of this profile from nothing and compare; 0 when no cell differs, else 1.

    Raises:
        UserError: an unknown table, or nothing recorded for one.
    """
    known = {f"{paper}/table{number}": (paper, number) for paper, number in spec.specified()}
    chosen = [t.removeprefix("tables/").removesuffix(".tex") for t in tables] or list(known)
    for name in chosen:
        if name not in known:
            raise unknown("table with a spec", name, known)
    recorded = {name: _recorded(flow, *known[name]) for name in chosen}
    if tables and (bare := [name for name in chosen if not recorded[name]]):
        raise UserError(
            f"nothing is recorded for {bare[0]} in profile {flow.profile.name}; build it and accept its .csv"
        )
    chosen = [name for name in chosen if recorded[name]]
    if not chosen:
        raise UserError(f"nothing is recorded for profile {flow.profile.name}; build a table and accept its .csv")
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    targets = [f"tables/{name}.csv" for name in chosen]
    words = [sys.executable, "-m", "snakemake", "-s", str(ROOT / "Snakefile"), "--directory", str(FOLDER)]
    here = {name: str(Path(m).resolve()) if Path(m).is_dir() else m for name, m in flow.profile.models.items()}
    write_text(FOLDER / "profile.yaml", json.dumps(asdict(flow.profile) | {"models": here}))
    words += ["--cores", str(cores or os.cpu_count() or 1), "--quiet", "rules", "host"]
    words += ["--configfile", str((FOLDER / "profile.yaml").resolve()), "--", *targets]
    if subprocess.run(words).returncode:
        return 2
    verdicts = []
    for name in chosen:
        fresh = {row.key: row for row in record.from_csv(FOLDER / "tables" / f"{name}.csv")}
        for old in recorded[name]:
            new = fresh.get(old.key)
            verdicts.append(compare(old, new))
            now = "–" if new is None or new.value is None else f"{new.value:.7g}"
            print(
                f"{verdicts[-1]:10} {name} | {old.row} | {old.col} | {old.model}: recorded {old.value:.7g}, now {now}"
            )
    counts = ", ".join(f"{verdicts.count(v)} {v}" for v in ("identical", "within", "differs", "absent"))
    print(f"{len(verdicts)} cells: {counts}")
    return 1 if "differs" in verdicts else 0


def _recorded(flow: Workflow, paper: str, number: str) -> list[Measurement]:
    papers.printed(paper, number)
    return [row for row in record.accepted(paper, "table", number) if row.profile == flow.profile.name]
