"""`attest`: replay a few accepted cells whose code has changed; byte-equal ones carry all of the same code forward.

A group is the accepted rows that the same code made on the same device and whose declared inputs are today's. A few of
its cells, chosen by a hash of the commit, are run anew in an empty folder, on that device with the recorded library
versions. If statuses, observations and files that were read and made are equal byte for byte, one line in
results/<device>/attested.csv says so, and the group's rows are `carried` from then on.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from repro.errors import UserError
from repro.jobs.job import built_under, distinct
from repro.jobs.workers import pool
from repro.record import accepted, measure, provenance, recorded
from repro.record.measurement import Measurement
from repro.spec import scale as scales
from repro.spec.cell import Cell
from repro.spec.workflow import Workflow, has_cuda

FOLDER = Path("build/attest")
VERSIONS = ("torch", "transformers", "numpy")  # libraries that decide the last bits of a result
ALIKE = ("status", "observations", "artifacts")
STANDS, CODE = "stand", "were made by other code"
OTHERWISE = "are stale for other reasons than code: measure them again"
VERSION = "were measured with other library versions than this machine's, which alone makes nothing stale"


@dataclass(frozen=True, eq=False)
class Recorded:
    """An accepted row with its cell at its scale."""

    flow: Workflow
    cell: Cell
    row: Measurement

    @property
    def name(self) -> str:
        """The cell in a message."""
        return " / ".join(filter(None, [self.cell.table, *self.cell.place])) + f" at {self.row.scale}"


@dataclass
class Group:
    """Accepted rows that the units `before` made on a device and that the units `after` would make today."""

    before: str
    after: str
    device_class: str
    device: str
    rows: list[Recorded] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{len(self.rows)} rows on {self.device}, code {self.before} to {self.after}"


def attest(cells: int = 3, scale: str | None = None, side_by_side: int = 0) -> int:
    """Replay some cells of every group whose code has changed, and note the groups that are byte-equal.

    Args:
        cells: how many of each group are replayed.
        scale: only results of this scale, and only they are carried forward.
        side_by_side: worker processes of the replay; 0 is one for each GPU, or as many as the cores carry.

    Returns:
        1 if a replayed cell differs or could not be run, else 0. A group of another device is not an error: the command
        that runs it there is printed.

    Raises:
        UserError: an unknown scale, no cells, or uncommitted changes.
    """
    if cells < 1:
        raise UserError(f"attest: --cells {cells}; replay at least one cell of each group")
    commit = provenance.commit()
    if not re.fullmatch("[0-9a-f]{7,40}", commit):
        raise UserError(f"attest: the code is at commit {commit!r}; commit it first, the line in results/ names it")
    groups, counts = _groups(scale)
    shown = [f"{count} accepted rows {what}" for what, count in counts.items() if count]
    print("; ".join(shown) or "nothing is accepted yet")
    ready: list[tuple[Group, list[Recorded]]] = []
    for group in groups:
        if fit := [one for one in group.rows if not _elsewhere(one.row)]:
            ready.append((group, sorted(fit, key=lambda one: _rank(commit, one.row))[:cells]))
            continue
        print(f"not attested: {group}: {_elsewhere(group.rows[0].row)}; where they were measured, run")
        print("\n".join(f"    {command}" for command in _commands(group.rows)))
    if ready:
        replayed = [one for _, chosen in ready for one in chosen]
        jobs = [job for one in replayed for job in measure.jobs_behind(one.flow, one.cell)]
        pool.rebuild(distinct(jobs), FOLDER, side_by_side)
    equal = [_judge(group, chosen, commit, scale or "") for group, chosen in ready]
    if groups:
        print(f"{sum(equal)} of {len(groups)} groups attested, {len(groups) - len(ready)} belong to other machines")
    return 0 if all(equal) else 1


def _groups(scale: str | None) -> tuple[list[Group], dict[str, int]]:
    """The groups whose code alone has changed, and how many accepted rows stand or not, and have other versions."""
    flows: dict[str, Workflow | None] = {}
    groups: dict[tuple[str, ...], Group] = {}
    counts = dict.fromkeys((STANDS, CODE, OTHERWISE, VERSION), 0)
    if scale is not None:
        scales.load(name=scale)
    today = _versions(provenance.environment())
    for row in accepted.every():
        if scale is not None and row.scale != scale:
            continue
        if row.scale not in flows:
            known = row.scale in scales.names()
            flows[row.scale] = Workflow(scales.load(name=row.scale), recorded=False) if known else None
        flow = flows[row.scale]
        cell = measure.asked(flow, row) if flow else None
        stands = recorded.standing(flow, cell, row) if cell else {"status": "stale", "note": ""}
        if stands.get("note") == recorded.CODE:
            key = (row.units, recorded.units(flow, cell), row.device_class, row.device)
            groups.setdefault(key, Group(*key)).rows.append(Recorded(flow, cell, row))
            counts[CODE] += 1
        else:
            counts[OTHERWISE if "status" in stands else STANDS] += 1
        counts[VERSION] += any(_versions(text) != today for text in row.environment.split(recorded.JOIN))
    return sorted(groups.values(), key=str), counts


def _rank(commit: str, row: Measurement) -> str:
    """What orders the cells of a group: nobody chooses them, and the same commit chooses the same."""
    return hashlib.sha256(json.dumps([commit, *row.key]).encode()).hexdigest()


def _versions(environment: str) -> dict[str, str]:
    """The deciding libraries' versions in the JSON of an environment."""
    try:
        found = json.loads(environment)
        return {name: str(found.get(name, "none")) for name in VERSIONS}
    except (ValueError, AttributeError):
        return dict.fromkeys(VERSIONS, "unknown")


def _elsewhere(row: Measurement) -> str:
    """Why a row cannot be replayed on this machine; empty if it can."""
    classes = row.device_class.split(recorded.JOIN)
    if "cuda" in classes and not has_cuda():
        return "this machine has no CUDA device"
    here = {provenance.device_name(one) for one in classes}
    if here != set(row.device.split(recorded.JOIN)):
        return f"this machine is {' and '.join(sorted(here))}"
    today = _versions(provenance.environment())
    was = [pair for text in row.environment.split(recorded.JOIN) for pair in _versions(text).items()]
    other = next(((name, version) for name, version in was if today[name] != version), None)
    return f"{other[0]} is {today[other[0]]} here, and was {other[1]}" if other else ""


def _commands(rows: Iterable[Recorded]) -> list[str]:
    """The commands that run the cells of rows on the device that they were measured on."""
    names: dict[tuple[str, bool], dict[str, None]] = {}
    for one in rows:
        named = names.setdefault((one.row.scale, one.flow.is_recorded(one.cell)), {})
        named[one.cell.table] = None
    return [
        f"python -m repro run {' '.join(found)} --scale {scale}{' --recorded' * recorded}"
        for (scale, recorded), found in names.items()
    ]


def _judge(group: Group, chosen: Sequence[Recorded], commit: str, scale: str) -> bool:
    """Whether the replayed cells of a group are what was accepted; then it is noted, else the differences printed."""
    known = accepted.units_of(group.rows[0].row)
    today = recorded.modules(group.rows[0].flow, group.rows[0].cell)
    changed = ", ".join(provenance.changed(known, today)) if known is not None else "unknown modules"
    differs = [found for one in chosen if (found := _difference(one))]
    for found in differs:
        print(f"differs: {found}; changed since: {changed}")
    if differs:
        return False
    names = "; ".join(one.name for one in chosen)
    line = {"before": group.before, "after": group.after, "device": group.device, "scale": scale, "commit": commit}
    line |= {"date": date.today().isoformat(), "replayed": f"{len(chosen)} cells: {names}"}
    accepted.attest(line)
    print(f"attested: {group}: {line['replayed']}; changed since: {changed}")
    return True


def _difference(one: Recorded) -> str:
    """How the replay of a cell differs from what was accepted; empty if it does not."""
    with built_under(FOLDER):
        fresh = measure.built(one.flow, one.cell)
    if not fresh.live:
        return f"{one.name} could not be run anew, the reason stands above"
    for name in ALIKE:
        old, new = getattr(one.row, name), getattr(fresh, name)
        if old != new:
            return f"{one.name}: its {name} were {old}, now {new}"
    return ""
