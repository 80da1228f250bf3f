"""The printed numbers: whole, unaltered, counted, and read as numbers where they are numbers."""

import os
import subprocess
import sys
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest

from repro import papers
from repro.core.errors import UserError
from repro.core.files import ROOT, sha256
from repro.specs import tables
from repro.verdicts.judging import unjudged

SUMS = {}
for listed in (papers.HERE / "SHA256SUMS").read_text().splitlines():
    digest, name = listed.split("  ", 1)
    SUMS[name] = digest
ORIGINAL = Path(os.environ.get("REPRO_PAPERS", ROOT.parent / "shared" / "papers"))
COUNTS = {"spear": (25, 8), "bitbybit": (8, 4), "flexquant": (2, 6), "spqt": (3, 4), "subspec": (7, 3)}
EVERY = []
for each_paper in papers.PAPERS:
    EVERY += [(each_paper, table) for table in papers.tables(each_paper)]


def cell(paper, table, row, col, model):
    (result,) = [c for c in papers.printed(paper, table) if (c.row, c.col, c.model) == (row, col, model)]
    return result


def test_files_match_their_hashes():
    files = []
    for paper in papers.PAPERS:
        files += [file for file in (papers.HERE / paper).iterdir() if file.suffix != ".yaml"]  # those are ours
    there = {str(f.relative_to(papers.HERE)) for f in files}
    assert there == set(SUMS)
    assert {name: sha256(papers.HERE / name) for name in SUMS} == SUMS
    assert {Path(name).suffix for name in SUMS} == {".csv", ".md"}


@pytest.mark.skipif(
    not ORIGINAL.is_dir(), reason="no original papers beside the checkout, REPRO_PAPERS names no folder"
)
def test_files_are_the_originals():
    listed = set()
    for paper in papers.PAPERS:
        files = [file for file in (ORIGINAL / paper).iterdir() if file.suffix != ".txt"]
        listed |= {str(file.relative_to(ORIGINAL)) for file in files}
    assert listed == set(SUMS)
    assert {name: sha256(ORIGINAL / name) for name in SUMS} == SUMS


def test_every_table_and_figure_is_here():
    assert {p: (len(papers.tables(p)), len(papers.data_figures(p))) for p in papers.PAPERS} == COUNTS
    assert len(EVERY) == 45
    assert sum(figures for _, figures in COUNTS.values()) == 25


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_tables_are_numbered_and_indexed(paper):
    assert papers.tables(paper) == [str(i) for i in range(1, COUNTS[paper][0] + 1)]
    assert list(papers.index(paper)) == papers.tables(paper)


@pytest.mark.parametrize("paper,table", EVERY)
def test_every_printed_cell_is_there_once(paper, table):
    cells = papers.printed(paper, table)
    index, metrics = papers.index(paper)[table], papers.metrics(paper)
    assert len(cells) == int(index["cells"])
    valued = sum(c.value != "" for c in cells)
    assert valued == int(index.get("cells_with_value", valued))
    assert len({(c.row, c.col, c.model, c.metric) for c in cells}) == len(cells)
    for c in cells:
        assert (c.paper, c.kind, c.table) == (paper, "table", table)
        assert (metrics[c.metric]["unit"], metrics[c.metric]["direction"]) == (c.unit, c.direction)
        assert (c.number is None) == (c.tolerance is None)


def test_what_is_no_number_is_known():
    none = []
    for paper, table in EVERY:
        none += [(c.paper, c.table, c.value) for c in papers.printed(paper, table) if c.number is None]
    assert Counter(none) == {
        ("spear", "2", ""): 10,  # dash: nothing is added to FP16 and to plain RTN
        ("spear", "4", ""): 3,
        ("spear", "7", "AdamW"): 1,
        ("spear", "7", "INT8 per-channel symmetric"): 1,
        ("spear", "8", ""): 6,
        ("spear", "11", ""): 6,
        ("flexquant", "1", ""): 11,  # dash
        ("spqt", "2", ""): 41,  # out of memory or dash
        ("subspec", "2", ""): 2,  # lost in the text rendering
        ("subspec", "5", ""): 4,  # lost in the text rendering
    }


@pytest.mark.parametrize(
    "paper,table,row,col,model,number,tolerance",
    [
        ("spear", 1, "RTN pc", "Wiki", "Llama-3.2-1B", 20.46, 0.005),
        ("spear", 1, "FP16", "ZS", "Llama-2-13B", 0.711, 0.0005),
        ("spear", 2, "FP16", "Mem", "Llama-3.2-1B", None, None),
        ("bitbybit", 3, "none (end-to-end NLL) [w2a16 g32]", "WikiText2 ppl", "LLaMA-3.2-1B", 1700, 50),
        ("flexquant", 2, "INT-8", "Rouge-L", "LongWriter-LLaMA3.1-8B", 46, 0.5),
        ("spqt", 2, "A19 Pro / Baseline-F16", "Llama-2-7B", "Llama-2-7B", None, None),
        ("spqt", 3, "Baseline-Q4K", "Llama-3-8B", "Llama-3-8B", 5.93, 0.005),
        ("subspec", 1, "SubSpec [T=0, 24GB]", "Mean speedup", "Qwen2.5-32B-Instruct", 12.5, 0.005),
        ("subspec", 1, "None [T=0, 8GB]", "MT-Bench tau", "Llama-3.1-8B-Instruct", 1, 0.5),
    ],
)
def test_printed_values_have_their_numbers_and_tolerances(paper, table, row, col, model, number, tolerance):
    result = cell(paper, table, row, col, model)
    assert result.number == number
    assert result.tolerance == pytest.approx(tolerance)


def test_out_of_memory_is_blank_with_a_note():
    oom = [c for c in papers.printed("spqt", 2) if c.note.startswith("OOM")]
    assert oom and all(c.number is None and c.value == "" for c in oom)


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_claims_and_audit(paper):
    claims = papers.claims(paper)
    assert {c["consistent"] for c in claims.values()} <= {"yes", "no", "partly", "na", "not_checkable"}
    audit = papers.audit(paper)
    assert len({finding.id for finding in audit}) == len(audit)


def test_claims_of_both_formats():
    counts = {"spear": (119, 102), "bitbybit": (37, 36), "flexquant": (20, 21), "spqt": (25, 29), "subspec": (32, 50)}
    assert {p: (len(papers.claims(p)), len(papers.audit(p))) for p in papers.PAPERS} == counts
    assert papers.claims("spear")["C001"]["printed"] == "56-75 %"
    assert papers.claims("subspec")["S01"]["values"] == "9.1x"
    for paper in papers.PAPERS:
        first, *_ = papers.audit(paper)
        assert first.recomputed


def test_figure_parts_are_one_figure():
    assert [f.number for f in papers.data_figures("flexquant")] == ["2", "3", "4", "5", "6", "7"]
    assert {f.number: f.parts for f in papers.data_figures("subspec")} == {"1": (), "2": ("2a", "2b", "2c"), "6": ()}
    assert [f.number for f in papers.data_figures("spear")] == ["1", "4", "8", "9", "10", "11", "12", "13"]


@pytest.mark.parametrize(
    "ask,message",
    [
        (lambda: papers.printed("spear", 26), "unknown table of spear '26'; did you mean '6'"),
        (lambda: papers.printed("flexquant", "table1"), "unknown table of flexquant 'table1'"),
        (lambda: papers.tables("spaer"), "did you mean 'spear'"),
        (lambda: papers.claims("sub-spec"), "did you mean 'subspec'"),
    ],
)
def test_unknown_names_say_what_there_is(ask, message):
    with pytest.raises(UserError, match="choose from: ") as caught:
        ask()
    assert message in str(caught.value)


def test_import_is_light():
    code = "import sys, repro.papers; sys.exit(bool({'torch', 'pandas', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_a_metric_is_measured_or_has_a_reason_and_not_both(paper):
    """The reasons are of printed metrics."""
    printed = set()
    for number in papers.tables(paper):
        printed |= {cell.metric for cell in papers.printed(paper, number)}
    reasons = papers.unmeasured(paper)
    assert reasons.keys() <= printed and not reasons.keys() & tables.measures(paper).keys()
    assert all(reasons.values())


@pytest.mark.parametrize("paper", ["subspec", "flexquant", "bitbybit"])
def test_every_claim_has_a_predicate_or_a_line_among_the_papers_own_numbers_or_a_reason(paper):
    judged = set()
    for both in tables.specified():
        if both[0] == paper:
            judged |= set(chain.from_iterable(claim.claim.split()[1:] for claim in tables.table(*both).claims))
    arithmetic = set()
    for name, line in papers.claims(paper).items():
        if line["consistent"] in ("yes", "partly", "no") and line["recomputed"]:
            arithmetic.add(name)
    reasons = unjudged(paper)
    assert papers.claims(paper).keys() == judged | arithmetic | reasons.keys()
    assert not reasons.keys() & (judged | arithmetic) and all(reasons.values())
