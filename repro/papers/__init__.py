"""What the five papers printed, as data: tables, claims, audit, figures and metrics.

Each paper's CSV files lie in a folder of their own, byte for byte (SHA256SUMS). A value keeps the digits that were
printed; `Printed.number` is None where a paper prints no number: a dash, an unreadable cell, a setting in words.
"""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import NamedTuple

from repro.core.errors import unknown
from repro.core.strict import load_yaml

HERE = Path(__file__).resolve().parent


class About(NamedTuple):
    """Title and arXiv id of a paper."""

    title: str
    arxiv: str


ABOUT = {
    "spear": About(
        "SPEAR: A System for Post-Quantization Error-Adaptive Recovery Enabling Efficient Low-Bit LLM Serving",
        "2606.11244",
    ),
    "bitbybit": About(
        "Bit-by-Bit: Progressive QAT Strategy with Outlier Channel Splitting for Stable Low-Bit LLMs", "2604.07888"
    ),
    "flexquant": About(
        "FlexQuant: A Flexible and Efficient Dynamic Precision Switching Framework for LLM Quantization", "2506.12024"
    ),
    "spqt": About("Enabling Dynamic Sparsity in Quantized LLM Inference", "2511.04477"),
    "subspec": About(
        "Speculate Deep and Accurate: Lossless and Training-Free Acceleration for Offloaded LLMs"
        " via Substitute Speculative Decoding",
        "2509.18344",
    ),
}
PAPERS = tuple(ABOUT)
LEADING = "spear"  # the paper whose Table 1 is printed under the headline table

NUMBER = re.compile(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?")


@dataclass(frozen=True)
class Printed:
    """One cell of a printed table; `value` has the digits of the paper."""

    paper: str
    kind: str
    table: str
    row: str
    col: str
    model: str
    metric: str
    value: str
    unit: str
    direction: str
    note: str

    @property
    def number(self) -> float | None:
        """The value as a number; None for a blank cell and for a setting in words."""
        return number(self.value)

    @property
    def tolerance(self) -> float | None:
        """Half a unit of the last printed digit: 20.46 is known to 0.005 and 1.7e3 to 50."""
        if self.number is None:
            return None
        return float(Decimal(5).scaleb(int(Decimal(self.value).as_tuple().exponent) - 1))


class Finding(NamedTuple):
    """A place where a paper and its own numbers were compared."""

    id: str
    table: str
    cell: str
    printed: str
    recomputed: str
    difference: str


class Figure(NamedTuple):
    """A figure that shows data; one that is printed in parts (2a, 2b, 2c) is one figure with `parts`.

    Attributes:
        models: the papers' models that it draws, as the paper's list names them; `;` between two.
    """

    number: str
    parts: tuple[str, ...]
    models: str


def number(value: str) -> float | None:
    """A printed value as a number; None for a blank cell and for a setting in words."""
    return float(value) if NUMBER.fullmatch(value) else None


def tables(paper: str) -> list[str]:
    """The table numbers of a paper, in numeric order."""
    return sorted((path.stem.removeprefix("table") for path in _folder(paper).glob("table*.csv")), key=int)


def printed(paper: str, table: str | int) -> list[Printed]:
    """The cells of one printed table, in the paper's order.

    Raises:
        UserError: there is no such paper or table.
    """
    if str(table) not in tables(paper):
        raise unknown(f"table of {paper}", table, tables(paper))
    return list(_cells(paper, str(table)))


def claims(paper: str) -> dict[str, dict[str, str]]:
    """The claims of a paper by id, each with the columns of its file."""
    return {line["id"]: line for line in _lines(paper, "claims")}


def audit(paper: str) -> list[Finding]:
    """The findings of a paper's audit; an audit without ids is numbered A001, A002, … in its own order."""
    findings = []
    for i, line in enumerate(_lines(paper, "audit"), start=1):
        recomputed = line["recomputed"] if "recomputed" in line else line["recomputed_or_other_source"]
        where = (line.get("id", f"A{i:03}"), line["table"], line["cell"])
        findings.append(Finding(*where, line["printed"], recomputed, line["difference"]))
    return findings


def data_figures(paper: str) -> list[Figure]:
    """The figures of a paper that show data (diagrams are left out), parts merged, in numeric order."""
    merged: dict[str, dict[str, str]] = {}
    for line in _lines(paper, "figures"):
        if line["kind"] == "data":
            merged.setdefault(line["figure"].rstrip("abcdefgh"), {})[line["figure"]] = line["models"]
    figures = []
    for number, models_by_part in sorted(merged.items(), key=lambda item: int(item[0])):
        parts = tuple(part for part in models_by_part if part != number)
        models = "; ".join(filter(None, models_by_part.values()))
        figures.append(Figure(number, parts, models))
    return figures


def metrics(paper: str) -> dict[str, dict[str, str]]:
    """The metrics of a paper by name: meaning, unit, and which direction is better ('none': neither)."""
    return {line["metric"]: line for line in _lines(paper, "metrics")}


@cache
def unmeasured(paper: str) -> dict[str, str]:
    """Metrics of a paper that nothing here measures, to what is missing to measure them."""
    path = _folder(paper) / "unmeasured.yaml"
    return load_yaml(path) if path.is_file() else {}


def index(paper: str) -> dict[str, dict[str, str]]:
    """The index of a paper's tables by number: caption, models, methods, bits, data, hardware, cells."""
    return {line["table"]: line for line in _lines(paper, "index")}


def _folder(paper: str) -> Path:
    if paper not in ABOUT:
        raise unknown("paper", paper, PAPERS)
    return HERE / paper


def _lines(paper: str, name: str) -> Iterator[dict[str, str]]:
    with open(_folder(paper) / f"{name}.csv", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


@cache
def _cells(paper: str, table: str) -> tuple[Printed, ...]:
    return tuple(Printed(paper=paper, kind="table", **line) for line in _lines(paper, f"table{table}"))
