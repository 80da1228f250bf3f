"""Results of a table or figure, looked up once: its measured cells, and the verdicts on its claims."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from repro.papers.cell import Cell, CellKey, table_name
from repro.results import measure
from repro.results.measured import Measured
from repro.specs import tables
from repro.specs.claims import ClaimSpec
from repro.specs.scale import Scale
from repro.store.measurement import Measurement
from repro.verdicts import judging
from repro.verdicts.judging import Judged
from repro.workflow.workflow import Workflow


@dataclass(frozen=True, eq=False)
class TableResults:
    """All results of a table or figure. Code that renders them looks nothing else up.

    Attributes:
        paper, number, kind: of the table or figure, as of a `Cell`.
        scale: the scale at which its cells are measured.
        by_key: every cell, in the order of the spec.
        verdicts: on the claims of a table's spec, in its order.
    """

    paper: str
    number: str
    kind: str
    scale: Scale
    by_key: Mapping[CellKey, Measured]
    verdicts: Sequence[Judged] = ()

    @property
    def name(self) -> str:
        """The name, such as `spear/table1`."""
        return table_name(self.paper, self.kind, self.number)

    @property
    def cells(self) -> list[Cell]:
        """The cells, in the order of the spec."""
        return [measured.cell for measured in self.by_key.values()]

    @property
    def measurements(self) -> list[Measurement]:
        """The measurements of the cells."""
        return [measured.measurement for measured in self.by_key.values()]

    def marked(self, changes: Mapping[CellKey, Mapping[str, Any]]) -> "TableResults":
        """A copy with some fields of measurements changed, such as `source`."""
        by_key = {key: measured.marked(**changes.get(key, {})) for key, measured in self.by_key.items()}
        return replace(self, by_key=by_key)


def looked_up(flow: Workflow, paper: str, number: str, kind: str = "table") -> TableResults:
    """Measure every cell of a table or figure.

    Raises:
        UserError: unknown table or figure, damaged results, or an error in its spec.
    """
    return TableResults(paper, number, kind, flow.scale, measure.measured(flow, flow.cells(paper, number, kind)))


def table_results(flow: Workflow, paper: str, number: str, kind: str = "table") -> TableResults:
    """Measure every cell of a table or figure and judge its claims.

    Raises:
        UserError: as `looked_up`.
    """
    results = looked_up(flow, paper, number, kind)
    claims = tables.table(paper, number).claims if kind == "table" else ()
    return replace(results, verdicts=judged(flow, claims))


def judged(flow: Workflow, claims: Iterable[ClaimSpec]) -> list[Judged]:
    """The verdicts on claims of any tables.

    Raises:
        UserError: as `judging.verdict`.
    """
    return [judge(flow, claim) for claim in claims]


def judge(flow: Workflow, claim: ClaimSpec) -> Judged:
    """The verdict on one claim, judged on the cells that it names.

    Raises:
        UserError: as `judging.verdict`.
    """
    key = ("claim", claim.table, claim.claim, claim.says, claim.quantity, claim.holds, repr(claim.cells))
    return flow.once((*key, claim.log_probability), lambda: _judge(flow, claim))


def _judge(flow: Workflow, claim: ClaimSpec) -> Judged:
    cells = [measure.one_measured(flow, cell) for cell in flow.claim_cells(claim)]
    return judging.verdict(claim, cells, flow.scale.name)
