"""Accepted rows that no table, figure or verdict is made of any more, and their removal from results/.

A row falls out of use when its spec is changed, or when another row of its cell comes first, such as one that was
measured later on another device. What is removed remains in the history of the repository.
"""

from repro.results import measure
from repro.specs import names
from repro.specs import scale as scales
from repro.store import accepted
from repro.store.accepted import AcceptedRow, RowId
from repro.store.measurement import Measurement
from repro.verdicts import table_results
from repro.workflow import draws
from repro.workflow.workflow import Workflow


def unused(scale: str) -> dict[Measurement, str]:
    """The accepted rows of a scale that nothing is made of, and why.

    A row is used if its series are read for a cell or a claim of any table or figure, if a stale cell is shown with its
    inputs, or if it belongs to the rows from which the variance between seeds is pooled (`draws.POOL`).

    Raises:
        UserError: an unknown scale, a spec with an error, or damaged results.
    """
    flow = Workflow.of_results(scales.load(name=scale))
    stale_inputs = set()
    with accepted.recorded() as read:
        for kind, specified in (("table", names.specified_tables()), ("figure", names.specified_figures())):
            for paper, number in specified:
                results = table_results.table_results(flow, paper, number, kind)
                stale_inputs.update(m.inputs for m in results.measurements if m.status == "stale")
    reasons = {}
    for row in accepted.every():
        is_used = (row.stored_as, row.key) in read or row.inputs in stale_inputs or row.table == draws.POOL
        if row.scale == scale and not is_used:
            is_specified = measure.cell_if_specified(flow, row) is not None
            reasons[row] = "its cell is taken from other rows" if is_specified else "no spec has its cell"
    return reasons


def remove(rows: dict[Measurement, str]) -> dict[str, int]:
    """Remove rows from results/, with the series and declared inputs that no other row needs.

    Returns:
        Number of rows by file afterwards, of the files that were written.

    Raises:
        UserError: as `accepted.rewrite`.
    """
    ids: set[RowId] = {(row.stored_as, row.key) for row in rows}

    def kept(stored: AcceptedRow) -> AcceptedRow | None:
        return None if (stored.row.stored_as, stored.row.key) in ids else stored

    return accepted.rewrite(kept)
