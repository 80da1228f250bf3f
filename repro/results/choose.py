"""Write the best learning rate of each method of a sweep into its spec; extend lists whose best rate is at an end.

A sweep is a spec of our own, such as `tables/bitbybit/rates.yaml`, with rows `METHOD, x MULTIPLE` of the same multiples
for all methods. Its first metric decides, and less is better; the best rows become `selected`. A method has no choice
yet if some multiple is not measured, or if the best one is the first or the last. Rows of other tables that take its
rate are not run until then.
"""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from repro.core.errors import UserError
from repro.core.files import write_text
from repro.results import measure
from repro.workflow.workflow import Workflow

ROW = re.compile(r"(.+), x ([0-9.]+)")
SELECTED = re.compile(r"^selected:.*(?:\n  - .*)*$", re.MULTILINE)
RATE = re.compile(r"(\w*lr: )([0-9.e+-]+)")
Sweep = dict[str, dict[float, float | None]]  # by method and multiple; None where it was not measured


def label(method: str, multiple: float) -> str:
    """The row of a method's multiple."""
    return f"{method}, x {multiple:g}"


def sweep(flow: Workflow, paper: str, name: str) -> Sweep:
    """The measured value of every row; infinity if the training diverged.

    Raises:
        UserError: a row is not `METHOD, x MULTIPLE`.
    """
    cells = flow.cells(paper, name)
    metric = cells[0].metric
    rates: Sweep = {}
    for cell in cells:
        if cell.metric != metric:
            continue
        read = ROW.fullmatch(cell.row)
        if read is None:
            raise UserError(
                f"{paper}/{name}: the row {cell.row!r} is not `METHOD, x MULTIPLE`; no rate is chosen from it"
            )
        measured = measure.measurement_of(flow, cell)
        value = math.inf if measured.status == "diverged" else measured.value
        stale = measured.status == "stale"
        rates.setdefault(read[1], {})[float(read[2])] = None if stale else value
    return rates


def best(values: Mapping[float, float | None]) -> float | None:
    """The multiple with the least value; None if one is not measured."""
    if None in values.values():
        return None
    return min(values, key=lambda multiple: (values[multiple], multiple))


def further(values: Mapping[float, float | None]) -> float | None:
    """The next multiple of 1, 3, 10, 30, … to extend the list with; None if the best is not at an end."""
    chosen = best(values)
    if chosen == max(values):
        return _steps(chosen, up=True)
    return _steps(chosen, up=False) if chosen == min(values) else None


def _steps(multiple: float, up: bool) -> float:
    """The neighbour of a multiple among 1, 3, 10, 30 and so on, in both directions."""
    power = 10.0 ** math.floor(math.log10(multiple) + 1e-9)
    is_three = multiple > 2 * power
    if up:
        return 10 * power if is_three else 3 * power
    return power if is_three else 0.3 * power


def choices(rates: Sweep) -> dict[str, float]:
    """The best multiple of every method that has a choice: not the first and not the last of its list."""
    return {method: best(values) for method, values in rates.items() if best(values) and not further(values)}


def wrong(rates: Sweep, chosen: Iterable[str]) -> list[str]:
    """The chosen rows that are not the best of their list, or at its end."""
    right = {label(*choice) for choice in choices(rates).items()}
    return [row for row in chosen if row not in right]


def rewrite(spec: Path, rates: Sweep) -> list[str]:
    """Write the choices into a spec, and add the next multiple to every list whose best is at an end.

    Returns:
        The added rows, which have to be run.
    """
    text = spec.read_text(encoding="utf-8")
    new = []
    for method, values in rates.items():
        multiple = further(values)
        if multiple is not None:
            new.append(label(method, multiple))
            text = _with_row(text, method, multiple, best(values))
    lines = [f"  - {label(*choice)}" for choice in choices(rates).items()]
    text = SELECTED.sub(lambda _: "\n".join(["selected:", *lines]) if lines else "selected: []", text)
    write_text(spec, text)
    return new


def _with_row(text: str, method: str, multiple: float, end: float) -> str:
    """The text of a spec with a new row after the end of a method's list; its rates are those of x 10, rescaled."""
    lines = text.split("\n")
    starts = {value: f'  "{label(method, value)}": ' for value in (10, end)}
    model = next(line for line in lines if line.startswith(starts[10])).removeprefix(starts[10])
    line = next(i for i, line in enumerate(lines) if line.startswith(starts[end]))
    scaled = RATE.sub(lambda rate: f"{rate[1]}{float(rate[2]) * multiple / 10:.1e}", model)
    return "\n".join([*lines[: line + 1], f'  "{label(method, multiple)}": {scaled}', *lines[line + 1 :]])
