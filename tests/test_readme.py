"""The README's list of files from a spec to LaTeX: at most 12, each there; and its figures are those of results/.

No number of the first screen stands there without a computation: each is part of a phrase that is computed here from
results, the pages that are built of them, or the settings, or of one of the names in `NAMES`.
"""

import csv
import re
from itertools import chain

import pytest
import yaml

from repro import papers
from repro.core.files import ROOT, read_text
from repro.results import replicate
from repro.specs import scale as scales


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


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def cells_of(line):
    """The cells of a table's row in Markdown."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def row_of(name, start):
    """The cells of the first line of a page that begins so."""
    line = next(line for line in page(name).splitlines() if line.startswith(start))
    return cells_of(line)


def of_recovery():
    """What SPEAR recovers in Table 1."""
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
    assert min(kl) > 0
    yield f"SPEAR recovers {min(kl):.0f} to {max(kl):.0f} % of the KL divergence of 4-bit RTN, GPTQ, AWQ and OmniQuant"
    yield f"{len(kl)} of {len(kl)} settings (printed, of perplexity: {min(printed):.0f} to {max(printed):.0f} %)"


def of_training_and_gate():
    """Perplexities on WikiText-2 of the memory sweep: two widths, three models, up to four budgets.

    Ranks are Table 8's.
    """
    result = {
        (row["row"], row["col"], row["model"]): float(row["value"])
        for row in accepted("memory")
        if row["metric"] == "recovered: s" and row["value"]
    }

    def better(one, other):
        settings = [key[1:] for key in result if key[0] == one and (other, *key[1:]) in result]
        return f"{sum(result[one, *at] < result[other, *at] for at in settings)} of {len(settings)}"

    yield f"untrained start of the same bytes in {better('SPEAR', 'static')} settings"
    yield f"without it, at equal bytes, perplexity is lower in {better('gate off', 'SPEAR')},"
    yield f"adapter in every layer is better than SPEAR in {better('uniform', 'SPEAR')}."
    ranks = [float(row["value"]) for row in accepted("table8") if row["metric"] == "rank" and row["value"]]
    printed = [cell.number for cell in papers.printed("spear", "8") if cell.metric == "rank" and cell.number]
    yield (
        f"Ranks are {min(ranks):.1f} to {max(ranks):.1f} on average here where the paper has {min(printed):.0f} to "
        f"{max(printed):.0f}"
    )


def of_serving():
    """Table 3's claim on the latency targets, and that first tokens come no earlier than with static chunks."""
    verdict = row_of("spear", "| spear C009 ")[4]
    holding, cases = map(int, re.fullmatch(r"undecided, (\d+) of (\d+) hold", verdict).groups())
    assert cases - holding == 2
    yield f"its scheduler keeps its latency targets in {holding} of {cases} cases (two are undecided:"
    assert row_of("spear", "| spear C044 ")[4].startswith("opposite direction")
    yield "with later first tokens than static chunks that keep them"


def of_any_card(name):
    """What is accepted of a table, of whichever device; of two rows of a cell the one of today's recipe is last."""
    paths = sorted((ROOT / "results").glob(f"*/{name}.csv.xz"), reverse=True)
    rows = list(chain.from_iterable(csv.DictReader(read_text(path).splitlines()) for path in paths))
    return {(row["model"], row["row"], row["col"], row["metric"]): float(row["value"]) for row in rows if row["value"]}


def of_bitbybit():
    result = of_any_card("bitbybit-table1")
    ours = {key: value for key, value in result.items() if key[1] == "Bit-by-Bit [w2a16 g32]" and "ppl" in key[3]}
    behind = [value > result[model, "BitDistiller [w2a16 g32]", *rest] for (model, _, *rest), value in ours.items()]
    line = row_of("bitbybit", "| bitbybit B04 | at w2a16 ")
    assert line[2] == "in 8 of 8 columns"
    title = yaml.safe_load(read_text(ROOT / "tables" / "bitbybit" / "table1.yaml"))["title"]
    assert title.endswith("at 1/64 of the paper's tokens")
    yield "at 1/64 of the tokens"
    yield f"behind BitDistiller at w2a16 in {sum(behind)} of {len(behind)} columns,"
    yield "where the paper has it ahead in 8 of 8"
    faster = {row: f"{value:.1f}" for (_, row, _, _), value in of_any_card("kernels-two-bit-decode").items()}
    whole, split = faster["W2A2"], faster["W2A2, a tenth of the channels split"]
    yield f"a W2A2 step at Llama 3 8B's shape is {whole} times as fast as bf16, with split channels {split} times"


def of_flexquant():
    line = row_of("flexquant", "| flexquant F01 ")
    speed = yaml.safe_load(read_text(ROOT / "tables" / "flexquant" / "speed.yaml"))
    longest = max(speed["sweep"]["tokens"])
    yield f"up to {longest:,} tokens at best {float(line[3].split()[0]):.1f} times as fast as 16 bits,"
    assert row_of("flexquant", "| flexquant F17 ")[4].startswith("opposite direction")
    yield "and slower than 8;"
    left = {key[1]: value for key, value in of_any_card("flexquant-table2").items() if key[3] == "bits"}
    yield f"leave {left['FQ-2.5']:.1f} to {left['FQ-1.3']:.1f} of 16 bits"


def of_spqt():
    speeds = {key[1:3]: value for key, value in of_any_card("spqt-decode").items()}
    columns = [f"shape Llama-{name}" for name in ("2-70B", "2-13B", "2-7B", "3-8B")]
    ratios = [f"{speeds['50 %', column] / speeds['Q4_K in rows', column]:.2f}" for column in columns]
    yield (
        f"50 % sparsity decodes {', '.join(ratios[:3])} and {ratios[3]} times as fast as dense Q4_K "
        "at the shapes of 70B, 13B, 7B and 8B"
    )
    assert row_of("spqt", "| spqt Q01 ")[2] == "up to 1.55x"
    yield "(printed: up to 1.55)"
    cost = row_of("spqt", "| spqt Q07 ")
    every = float(cost[3].split(" %")[0])
    half = float(re.search(r"second half: ([\d.]+) %", cost[4])[1])
    yield f"costs {every:.0f} % of perplexity on pocket-10m (printed: 7 %), {half:.0f} % with a dense first half"
    cells = {(cell.row, cell.col): cell.number for cell in papers.printed("spqt", "3")}
    sizes = dict.fromkeys(column for _, column in cells)
    more = [cells["Unified 50%", size] - cells["Baseline-Q4K", size] > 0.4 for size in sizes]
    yield f'50 % sparsity adds more than the "typically below 0.4" of the text on {sum(more)} of {len(more)} models'


def of_subspec():
    """Greedy acceptance of the one model with a stand-in: what is measured stands under what is printed."""
    lines = page("subspec/table1").splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("| *Qwen2.5-7B-Instruct; here: pocket-10m"))
    at += next(i for i, line in enumerate(lines[at:]) if line.startswith("| SubSpec [T=0, 8GB] |"))
    paper, here = (cells_of(line) for line in lines[at : at + 2])
    head = row_of("subspec/table1", "|  | MT-Bench")
    assert here[0] == "*here*"
    further = less = 0
    sets = [i for i, column in enumerate(head) if column.endswith(" tau") and column != "Mean tau"]
    columns = [i for i in sets if "[" in here[i]]
    for i in columns:
        low, high = re.search(r"\[(.*), (.*)\]", here[i]).groups()
        further += float(low) > float(paper[i])
        less += float(high) < float(paper[i])
    assert less == 1
    yield f"accepted further than printed on {further} of {len(columns)} prompt sets and less far on one"
    repeated = float(here[head.index("repeated 4-grams")].split()[0])
    yield f"{100 * repeated:.0f} % of the 4-grams of its MT-Bench texts are repeated"
    speed = row_of("subspec", "| subspec S01 ")
    printed, measured = speed[2].removesuffix("x"), speed[3].split()[0]
    shape = re.search(r"Qwen2.5-\d+B", read_text(ROOT / "tables" / "subspec" / "table2.yaml"))[0]
    yield f"{shape}'s shape decodes {measured} times as fast as synchronous offloading (printed: {printed}),"


def of_accuracies():
    status = []
    for number in range(19, 25):
        status += [row["status"] for row in accepted(f"table{number}")]
    yield f"Of the accuracies {status.count('at_chance')} of {len(status)} are at chance"


def of_cells():
    cell = row_of("spear/table1", "| +SPEAR pc on RTN")
    lines = page("spear/table1").splitlines()
    here = lines[next(i for i, line in enumerate(lines) if line.startswith("| +SPEAR pc on RTN")) + 1]
    (shown,) = re.findall(r"`(×[^`]*)`", first_screen())
    assert cell[3] == "12.40" and shown in here
    yield f"`{shown}`: {shown[1:6]} times full precision's perplexity"


def of_tables():
    """Every table that has a page is named; `test_page` counts the measured ones."""
    for paper in papers.PAPERS:
        folder = ROOT / "docs" / paper
        numbers = {int(path.stem.removeprefix("table")) for path in folder.glob("table*.md")}
        phrase_of_tables = next(
            line for line in first_screen(False).splitlines() if line.startswith("| [") and f"docs/{paper}.md" in line
        )
        named = set()
        for phrase in re.finditer(r"Tables? ([\d, toand]*\d)", phrase_of_tables):
            for span in re.split(", | and ", phrase[1]):
                low, _, high = span.partition(" to ")
                named |= set(range(int(low), int(high or low) + 1))
            yield phrase[0]
        assert named == numbers, paper


def of_settings():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    yield f"Python {re.search(r'requires-python = .>=([0-9.]+)', text)[1]} or newer"
    at = scales.load(name="pocket")
    yield f"the first {at.replicate.windows} windows or {at.replicate.items} items"
    yield "marked, as in `27.1*8` for 8 windows"
    rounds, trains = replicate.BOUNDS["nats"]
    yield f"within {rounds:g} nats a token, what calibrates or trains within {trains:g}"


# What `test_page` compares with the coverage of results, and names.
COUNTED = r"\d+ of \d+ tables \([^)]*\) and \d+ more in part; [\d,]+ of [\d,]+ printed cells; \d+ of \d+ figures"
COUNTED += "|Figures 2 to 7"
NAMES = (
    "nvidia-h200-bars",
    "H200",
    "C4",
    "WikiText-2",
    "Bit-by-Bit's Table 1",
    "what 4 bits cost",
    "2-bit",
    "4-bit",
    "95 % interval",
    "exits with 1",
)


def first_screen(joined=True):
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What comes out")[0]
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)  # commands
    return " ".join(text.split()) if joined else text


OF = (
    *(
        of_recovery,
        of_training_and_gate,
        of_serving,
        of_bitbybit,
        of_flexquant,
        of_spqt,
        of_subspec,
        of_accuracies,
        of_cells,
    ),
    *(of_tables, of_settings),
)


@pytest.mark.parametrize("computed", OF)
def test_what_the_readme_says_is_what_results_say(computed):
    for phrase in computed():
        assert phrase in first_screen(), phrase


def test_no_number_of_the_first_screen_is_there_without_a_computation():
    text = re.sub(r"\]\([^)]*\)", "]", first_screen())
    text = re.sub(COUNTED, "", text)
    for phrase in sorted(chain.from_iterable(computed() for computed in OF), key=len, reverse=True):
        text = text.replace(phrase, "")
    (shown,) = re.findall(r"`×[^`]*`", first_screen())
    for name in (shown, *NAMES):
        text = text.replace(name, "")
    left = [text[max(0, at.start() - 30) : at.end() + 30] for at in re.finditer(r"\d+", text)]
    assert not left, "say in this file how it is computed"
