"""Accept built tables, figures and kernel times into results/: every row is checked, all are written or none.

How a row is checked depends on its class (`CHECKS`): a measurement is recomputed from the folders of its jobs, a kernel
time is compared with the limits of its device.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from repro.core.errors import UserError
from repro.papers.cell import Cell
from repro.results import measure
from repro.specs import figures
from repro.specs import scale as scales
from repro.store import accepted, kernel_rows, provenance, row_list, stored_row
from repro.store.accepted import AcceptedRow
from repro.store.job import Job, distinct
from repro.store.kernel_rows import KernelRow
from repro.store.measurement import COLUMNS, MEASURED, Measurement
from repro.store.stored_row import StoredRow
from repro.workflow import runner
from repro.workflow.workflow import Workflow

# An H100 reproduced an H200's series bit for bit in 14 of 14 cells, with SPEAR and OmniQuant trained again.
SM_90 = ("NVIDIA H100", "NVIDIA H200", "NVIDIA H800", "NVIDIA GH200")
COMPARED = tuple(name for name in COLUMNS if name != "source")


def accept(path: Path) -> dict[str, int]:
    """Check the fresh rows of a built table, or the kernel times of `bench`, and merge them into results/.

    A table's rows are recomputed from the folders of their jobs under build/, and a time may not be below the roofline.
    Rows that were made under other versions keep these and are stale. Cells without a job are left out: settings need
    no acceptance, and kernel times are accepted from the file of `bench`.

    Args:
        path: a table's CSV, or a file of `bench`. A table's CSV only names cells and scale; its numbers must agree with
            the recomputed ones.

    Returns:
        Number of rows by file that was written.

    Raises:
        UserError: no fresh row, a row given twice, an unknown cell or scale, a row that differs from its observations,
            observations of another job, of another device or of uncommitted code, what `kernel_rows` refuses in
            `check_new` and `check_floors`, or an accepted row that was edited.
    """
    of = KernelRow if kernel_rows.is_kernel_rows(path) else Measurement
    return _merge(stored_row.from_csv(path, of), of, str(path))


def accept_figure(flow: Workflow, name: str) -> dict[str, int]:
    """Check the points of a figure from the folders of their jobs under build/, and merge them into results/.

    Of a derived point whose operands are not all built, the operands that are built are accepted.

    Args:
        flow: a workflow that measures everything itself, on the device class that the jobs ran on.
        name: such as `spear/figure13`.

    Returns:
        Number of rows by file that was written.

    Raises:
        UserError: as `accept`, or the figure is drawn from a table's cells.
    """
    paper, number = figures.split(name)
    table = figures.figure(paper, number).table
    if table:
        raise UserError(f"{name} is drawn from the cells of {table}; accept tables/{table}.csv")
    cells = flow.cells(paper, number, "figure")
    points = [measure.fresh(flow, cell) for cell in cells if any(flow.jobs(cell))]
    return _merge([*points, *measure.fresh_operands(flow, cells)], Measurement, name)


def _merge(rows: Iterable[StoredRow], of: type[StoredRow], where: str) -> dict[str, int]:
    """Check the new rows of a class, and merge them into results/."""
    new = [row for row in rows if row.is_new]
    stored = _stored_kernels(new) if of is KernelRow else []
    try:
        _check_no_duplicates(new)
        accepted_rows = CHECKS[of](new, stored)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if not any(accepted_row.row.status in of.MEASURED for accepted_row in accepted_rows):
        statuses = " or ".join(of.MEASURED)
        raise UserError(f"{where}: no measured row to accept; such a row is fresh, with status {statuses}")
    return accepted.write(accepted_rows)


def _stored_kernels(rows: Iterable[KernelRow]) -> list[KernelRow]:
    """The accepted kernel times of the devices of rows."""
    stored: list[KernelRow] = []
    for path in sorted({accepted.RESULTS / row.stored_as for row in rows if row.device}):
        if row_list.is_stored(path):
            stored += row_list.read(path, KernelRow)
    return stored


def _check_no_duplicates(rows: Iterable[StoredRow]) -> None:
    """Raise unless every row has a key of its own."""
    keys = set()
    for row in rows:
        if row.key in keys:
            raise UserError(f"{row.where}: given twice")
        keys.add(row.key)


def _recomputed(rows: Sequence[Measurement], _: Sequence[StoredRow]) -> list[AcceptedRow]:
    """Recompute the rows that have jobs from their observations."""
    flows: dict[str, Workflow] = {}
    accepted_rows = []
    for row in rows:
        try:
            flow = flows.setdefault(row.scale + row.device_class, _flow(row))
            cell = measure.cell_of(flow, row)
            if any(flow.jobs(cell)):
                accepted_rows.append(_accepted_row(flow, cell, row))
        except UserError as error:
            raise UserError(f"{row.where}: {error}") from None
    return accepted_rows


def _possible(rows: Sequence[KernelRow], stored: Sequence[KernelRow]) -> list[AcceptedRow]:
    """Kernel times, after checking that their device can reach them, also by what is stored of it."""
    kernel_rows.check_new(rows)
    kernel_rows.check_floors(rows, stored)
    return [AcceptedRow(row) for row in rows]


CHECKS: dict[type[StoredRow], Callable[[Any], list[AcceptedRow]]] = {Measurement: _recomputed, KernelRow: _possible}


def _flow(row: Measurement) -> Workflow:
    """The workflow of a row's scale; if the scale leaves the device open, on the device class of the row."""
    at = scales.load(name=row.scale)
    if at.device == "any" and row.device_class in ("cpu", "cuda"):
        at = at.on(row.device_class)
    return Workflow(at, stored=False)


def _accepted_row(flow: Workflow, cell: Cell, row: Measurement) -> AcceptedRow:
    """A row recomputed from its observations, with the series and declared inputs that are stored with it.

    Raises:
        UserError: the row is wrong; the message does not name the cell.
    """
    jobs = measure.jobs_behind(flow, cell)
    for job in jobs:
        if not runner.origin(job):
            raise UserError(f"{job.folder} is not built here; run it here, or copy it from where it ran")
    built, from_jobs = measure.built(flow, cell), measure.fresh(flow, cell)
    if row.note == measure.NO_BETTER:  # not stored: a table that shows the row judges it again
        row = replace(row, status=from_jobs.status, note=from_jobs.note)
    row_texts, job_texts = row.texts(), from_jobs.texts()
    for column in COMPARED:
        if row_texts[column] != job_texts[column]:
            difference = f"{column} is {row_texts[column]!r}, but its jobs give {job_texts[column]!r}"
            raise UserError(f"{difference}; rebuild the table")
    _check_origins(jobs)
    if built.lower_bound is not None and built.value is not None and built.value < built.lower_bound:
        raise UserError(f"{built.value} is less than the {built.lower_bound} that the device allows; measure again")
    quantity = flow.quantity(cell) if built.status in MEASURED else None
    return AcceptedRow(replace(built, source=""), quantity.seeds if quantity else [], flow.inputs(cell))


def _computes_like(device: str) -> str:
    """The architecture of a device if all devices of that architecture compute the same results; else the device."""
    return "sm_90" if device.startswith(SM_90) else device


def _check_origins(jobs: list[Job]) -> None:
    """Check that jobs ran on one device per class, at commits of this project, on the files that their needs hold.

    If no time is measured, devices of one architecture count as one (`_computes_like`).

    Raises:
        UserError: they did not.
    """
    devices: dict[str, str] = {}
    for job in jobs:
        origin = runner.origin(job)
        device_class = job.parsed_options().get("device", "cpu")
        provenance.check_commit(origin["commit"])
        if origin["device_class"] != device_class:
            raise UserError(f"measured on {origin['device_class']!r}, but its scale runs it on {device_class!r}")
        first = devices.setdefault(device_class, origin["device"])
        timed = any(map(runner.times, jobs))
        if first != origin["device"] and (timed or _computes_like(first) != _computes_like(origin["device"])):
            raise UserError(f"measured on {first} and on {origin['device']}; run its jobs on one of them")
    for job in distinct(jobs):
        read = json.loads(runner.origin(job).get("artifacts", "{}"))
        for role, need in job.needs:
            for file, digest in json.loads(runner.origin(need).get("made", "{}")).items():
                if read.get(f"{role}/{file}", digest) != digest:
                    raise UserError(f"{job.id} read another {role} than {need.folder} holds; build it again")
