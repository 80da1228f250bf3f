"""The README's list of files from a spec to LaTeX: at most 12, each there; and its figures are those of results/."""

import csv
import re

from repro import papers
from repro.core.files import ROOT, read_text


def test_from_spec_to_latex_there_are_at_most_twelve_files():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\d+\. `([^`]+)`", text.split("From a spec to LaTeX")[1], re.MULTILINE)
    assert 8 <= len(listed) <= 12
    assert [name for name in listed if not (ROOT / name).is_file()] == []


def accepted(name, scale="pocket"):
    """What is accepted of a table of SPEAR."""
    lines = read_text(ROOT / "results" / "nvidia-h200" / f"spear-{name}.csv.xz").splitlines()
    return [row for row in csv.DictReader(lines) if row["scale"] == scale]


def readme():
    return " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def test_what_the_readme_says_is_recovered_is_what_was_accepted():
    rows = {(r["model"], r["row"], r["col"]): r for r in accepted("table1") if r["status"] == "ok"}
    kl, printed = [], []
    for model, row, column in rows:
        if column == "Wiki" and row.startswith("+SPEAR"):
            group, quantizer = row.removeprefix("+SPEAR ").split(" on ")
            bare = f"{quantizer} {group}"
            b, s = (float(rows[model, label, "KL"]["value"]) for label in (bare, row))
            kl.append(100 * (1 - s / b))
            full, b, s = (float(rows[model, label, "Wiki"]["printed"]) for label in ("FP16", bare, row))
            printed.append(100 * (b - s) / (b - full))
    text = readme()
    assert f"SPEAR recovers {min(kl):.0f} to {max(kl):.0f} % of the KL divergence" in text and min(kl) > 0
    assert (
        f"in {len(kl)} of {len(kl)} settings (printed, of perplexity: {min(printed):.0f} to {max(printed):.0f} %)"
        in text
    )


def test_what_the_readme_says_of_training_gate_and_coverage_is_what_was_accepted():
    """Perplexities on WikiText-2 of the memory sweep: two widths, three models, up to four budgets."""
    found = {
        (row["row"], row["col"], row["model"]): float(row["value"])
        for row in accepted("memory")
        if row["metric"] == "recovered: s" and row["value"]
    }

    def better(one, other):
        settings = [key[1:] for key in found if key[0] == one and (other, *key[1:]) in found]
        return f"{sum(found[one, *at] < found[other, *at] for at in settings)} of {len(settings)}"

    text = readme()
    assert f"untrained start of the same bytes in {better('SPEAR', 'static')} settings" in text
    assert f"without it, at equal bytes, perplexity is lower in {better('gate off', 'SPEAR')}," in text
    assert f"adapter in every layer is better than SPEAR in {better('uniform', 'SPEAR')}." in text


def test_what_the_readme_says_of_other_papers_is_what_is_judged():
    page = (ROOT / "docs" / "bitbybit.md").read_text(encoding="utf-8")
    line = next(line for line in page.splitlines() if line.startswith("| bitbybit B03 | Table 1 "))
    assert "in 7 of 8 columns" in line and "| inconsistent |" in line and "at w2a2 is 7 of 8" in readme()
    cells = {
        (cell.row, cell.col): cell.number for cell in papers.printed("flexquant", "1") if cell.model == "Vicuna-7B"
    }
    lost = [100 * (1 - cells["FlexQuant", task] / cells["Baseline-h", task])
            for task in ("CNN/DM Rouge-L", "DialogSum Rouge-L", "IWSLT BLEU")]  # fmt: skip
    assert f"switching costs {min(lost):.1f} to {max(lost):.0f} %" in readme()


def test_what_the_readme_says_of_accuracies():
    status = [row["status"] for number in range(19, 25) for row in accepted(f"table{number}")]
    assert f"Of the accuracies {status.count('floor')} of {len(status)} are at chance" in readme()
