"""The README's list of files from a spec to LaTeX: at most 12, each there; and its figures are those of results/."""

import csv
import re

from repro.files import ROOT
from repro.judge import coverage
from repro.spec import scale
from repro.spec.workflow import Workflow


def test_from_spec_to_latex_there_are_at_most_twelve_files():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\d+\. `([^`]+)`", text.split("From a spec to LaTeX")[1], re.MULTILINE)
    assert 8 <= len(listed) <= 12
    assert [name for name in listed if not (ROOT / name).is_file()] == []


WORDS = [
    ("Wiki", "Wiki", "value"),
    ("printed", "Wiki", "printed"),
    ("C4", "C4", "value"),
    ("held-out", "held-out", "value"),
]


def test_what_the_readme_says_is_measured_is_what_was_accepted():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    with open(ROOT / "results" / "nvidia-h200" / "spear-table1.csv", encoding="utf-8", newline="") as file:
        full = [r for r in csv.DictReader(file) if (r["status"], r["scale"]) == ("ok", "pocket")]
    rows = {(r["model"], r["row"], r["col"]): r for r in full}
    shares = {"Wiki": [], "printed": [], "C4": [], "held-out": [], "KL": []}
    ratios = {"bare": [], "spear": []}
    for model, row, column in rows:
        if column == "Wiki" and row.startswith("+SPEAR"):
            group, quantizer = row.removeprefix("+SPEAR ").split(" on ")
            bare = f"{quantizer} {group}"
            for name, of, key in WORDS:
                full, b, s = (float(rows[model, label, of][key]) for label in ("FP16", bare, row))
                shares[name].append(100 * (b - s) / (b - full))
                if name == "Wiki":
                    ratios["bare"].append(b / full)
                    ratios["spear"].append(s / full)
            b, s = (float(rows[model, label, "KL"]["value"]) for label in (bare, row))
            shares["KL"].append(100 * (1 - s / b))
    span = {key: f"{min(values):.0f} to {max(values):.0f} %" for key, values in shares.items()}
    times = {key: f"{min(values):.3f} to {max(values):.3f} times" for key, values in ratios.items()}
    count = len(shares["KL"])
    assert min(shares["KL"]) > 0 and f"SPEAR recovers {span['KL']} of the KL divergence" in text
    assert f"from full precision, in {count} of {count} settings." in text
    assert f"falls from {times['bare']} that of full precision to {times['spear']}, which is {span['Wiki']}" in text
    assert (
        f"(printed for these: {span['printed']}); on C4 it is {span['C4']}, on held-out text {span['held-out']}."
        in text
    )
    tuned = {"+SPEAR pc on RTN": [], "RTN pc + SPEAR, tuned rates (ours)": []}
    for model in {model for model, *_ in rows}:
        for label, found in tuned.items():
            full, b, s = (float(rows[model, of, "Wiki"]["value"]) for of in ("FP16", "RTN pc", label))
            found.append(100 * (b - s) / (b - full))
    paper, ours = (f"{min(found):.0f} to {max(found):.0f} %" for found in tuned.values())
    assert f"RTN per channel gets back {ours} instead of {paper} (WikiText-2)" in text
    page = (ROOT / "docs" / "spear.md").read_text(encoding="utf-8")
    cases = [line.split(" | ") for line in page.splitlines() if re.match(r"\| pocket-\w+ ", line)]
    cases = [case for case in cases if len(case) == 5]  # with KL, C4 and held-out text
    (gate,) = [line.split(" | ") for line in page.splitlines() if line.startswith("| spear C050 ")]
    assert f"without its gate SPEAR's C4 perplexity changes by {gate[3]} (printed: 2.3 to 5.7 % worse)" in text
    apart = {name: sum("≠" in case[i] for case in cases) for i, name in ((2, "KL"), (3, "C4"), (4, "held-out"))}
    assert len(cases) == count and f"in {apart['KL']} of the {count} settings, C4 in {apart['C4']}," in text
    assert f"held-out text in {apart['held-out']}." in text


WHOLE_AND_PARTIAL = (("live", "recorded"), ("partial",))


def recorded(number):
    """What is accepted of a table of SPEAR at scale `pocket`."""
    with open(ROOT / "results" / "nvidia-h200" / f"spear-table{number}.csv", encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["scale"] == "pocket"]


def test_what_the_readme_says_of_static_corrections_and_of_accuracies():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    found = {}  # by table and setting: the perplexity of each method
    for number, setting, method in ((2, "model", "row"), (11, "model", "row"), (13, "row", "col")):
        for row in recorded(number):
            name = row[method].removesuffix(" pc on RTN")
            if row["metric"] == "c4_ppl" and name in ("LoftQ", "LQER", "QERA", "EoRA", "ASER", "SPEAR"):
                found.setdefault((number, row[setting]), {})[name] = float(row["value"])
    assert len(found) == 12 and all(len(methods) == 6 for methods in found.values())
    lowest = sum(min(methods, key=methods.get) == "SPEAR" for methods in found.values())
    said = "Against LoftQ, LQER, QERA, EoRA and ASER of the paper's rank it has the lowest C4 perplexity"
    assert f"{said} in {lowest} of 12 settings" in text
    status = [row["status"] for number in range(19, 25) for row in recorded(number)]
    assert f"Of the accuracies {status.count('floor')} of {len(status)} are at chance" in text


def test_the_readme_counts_the_tables_that_are_measured():
    lines = coverage.coverage(Workflow(scale.load(name="pocket"), recorded=True))
    whole, partial = ({x.number for x in lines if x.kind == "table" and x.status in s} for s in WHOLE_AND_PARTIAL)
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    said = re.search(r"(\d+) of 45 tables, all SPEAR's \(([^)]*)\), and (\d+) more in part", text)
    assert (int(said[1]), int(said[3])) == (len(whole), len(partial))
    cells = re.search(r"([\d,]+) of ([\d,]+) printed cells", text)
    tables = [line for line in lines if line.kind == "table"]
    wanted = (sum(line.measured for line in tables), sum(line.printed for line in tables))
    assert tuple(int(number.replace(",", "")) for number in cells.groups()) == wanted
    spans = [re.split(" to ", span) for span in said[2].split(", ")]
    assert {str(n) for span in spans for n in range(int(span[0]), int(span[-1]) + 1)} == whole
