"""A claim of a paper as a predicate over cells, as a spec writes it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from repro.core.errors import UserError, shortened, unknown
from repro.specs.templates import Value, filled

LARGEST = 10_000  # cases of a claim


@dataclass(frozen=True)
class ClaimSpec:
    """A claim as a predicate: `quantity` over named cells must satisfy `holds` in every case.

    Attributes:
        claim: paper and the claim's ids in `repro/papers/<paper>/claims.csv`.
        says: the claim in our own words.
        printed: what the paper prints for it, the reason for the threshold.
        table: the table whose cells are meant; a table's own spec leaves it out.
        cells: name in `quantity` to `row label | column label`, then ` | metric` where a row and column hold several,
            then ` | model` where it is another than the case's; `{key}` is filled in from the case.
        cases: model labels, mappings with `model` and other keys, or mappings of lists, which mean their product.
        quantity: arithmetic over the names; `{key}` as in `cells` (a constant of the case, such as a parameter count).
        holds: a comparison such as `>= 0.555` or `0.1 <= x <= 0.2`; `{key}` as in `cells`.
        log_probability: of a claim on accuracy, the comparison that the same quantity of the log probabilities next to
            the named cells must satisfy, which judges it; `holds` is then of the paper's own numbers, and of cases
            without such a log probability.
        neutral: the quantity where nothing has an effect, 0 of a difference, 1 of a ratio: tells the direction.
        target: it is a target of this project and no claim of the paper: it is met or not.
        most: the claim is about most cases ("typically"), not about every one.
        percent: show the quantity as a percentage.
        unit: the unit of the quantity, shown after its measured values.
        cross_checks: name to another column of the table, printed or extra, that replaces the named one in the same
            rows (`KL: KL`). The line says where they disagree; they never decide the verdict.
        more: further tables whose cells are meant, where a claim is about several (each task, each width of bits).
        judged_on_printed: why it is about the paper's own numbers alone and has no verdict; else empty.
        changed: why the predicate was changed after the runs that it judges; empty for those written before.
        causes: cells that were run to find out why it is not seen, `table | row`; the paper's page names them.
        ablations: what was exchanged for the same reason, by name: cells in place of those of `cells`, judged by the
            same predicate, and under `table` the table that has them where it is another. The page names one that the
            claim does not fail with as what changes its verdict.
    """

    claim: str
    says: str
    printed: str
    table: str
    cells: dict[str, str]
    cases: tuple[str | dict[str, Value | tuple[Value, ...]], ...]
    quantity: str
    holds: str
    log_probability: str = ""
    neutral: float = 0.0
    target: bool = False
    most: bool = False
    percent: bool = False
    unit: str = ""
    cross_checks: dict[str, str] = field(default_factory=dict)
    more: tuple[str, ...] = ()
    judged_on_printed: str = ""
    changed: str = ""
    causes: tuple[str, ...] = ()
    ablations: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cases = self.case_cells()
        for keys, named in cases:
            for text in (self.quantity, self.holds, self.log_probability):
                self.filled(text, keys)
            if not named:
                raise UserError(f"claim {self.claim!r}: `cells` needs a cell, such as {{f: FP16 | Wiki}}")
        if not cases:
            raise UserError(f"claim {self.claim!r}: `cases` needs a case, such as a model")
        for name, instead in self.ablations.items():
            if strange := sorted(instead.keys() - self.cells.keys() - {"table"}):
                raise UserError(f"claim {self.claim!r}: ablations: {name}: {unknown('cell', strange[0], self.cells)}")

    def case_cells(self) -> list[tuple[dict[str, Value], dict[str, tuple[str, str, str, str]]]]:
        """Per case its keys, and the (row, column, model, metric) of every named cell; metric empty for the first."""
        cells_by_case = []
        for case in self.cases:
            lists = {"model": (case,)} if isinstance(case, str) else case
            lists = {key: value if isinstance(value, tuple) else (value,) for key, value in lists.items()}
            if "model" not in lists:
                raise UserError(f"claim {self.claim!r}: the case {shortened(case)} does not give 'model'")
            if (size := math.prod(map(len, lists.values()))) > LARGEST:
                raise UserError(f"claim {self.claim!r}: {size:,} cases of {shortened(case)}; at most {LARGEST:,}")
            for values in product(*lists.values()):
                keys = dict(zip(lists, values))
                named = {}
                for name, text in self.cells.items():
                    row, col, metric, model = [*self.filled(text, keys).split(" | "), "", "", ""][:4]
                    named[name] = (row, col, model or str(keys["model"]), metric)
                cells_by_case.append((keys, named))
        return cells_by_case

    def ablated(self, name: str) -> "ClaimSpec":
        """The claim with the cells of one of `ablations` in place of its own."""
        instead = dict(self.ablations[name])
        table = instead.pop("table", "")
        more = (*self.more, table) if table else self.more
        return replace(self, cells=self.cells | instead, more=more, cross_checks={}, causes=(), ablations={})

    def filled(self, text: str, keys: Mapping[str, Value]) -> str:
        try:
            return filled(text, keys)
        except (KeyError, ValueError) as error:
            raise UserError(f"claim {self.claim!r}: the case {shortened(keys)} does not give {error}") from None


@dataclass(frozen=True)
class HeadlineSpec:
    """The project's own Table 1.

    Attributes:
        measured: claims of tables' own specs, at most 20, as `spear/1: spear C021`, the first one of that id there.
        claims: further claims, of which only the paper's own numbers are known yet.
        figures_only: claims that only figures carry, in words.
    """

    title: str
    measured: tuple[str, ...] = ()
    claims: tuple[ClaimSpec, ...] = ()
    figures_only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.measured) > 20:
            raise UserError(f"{len(self.measured)} measured claims; the headline table has at most 20")
