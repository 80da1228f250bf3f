"""A paper's page: the committed one is what specs and accepted results give; its parts, for any paper."""

import dataclasses
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from repro import papers
from repro.core.errors import UserError
from repro.core.files import ROOT
from repro.render import content, own_numbers, page
from repro.render import table_files as rendered
from repro.render.sheet import read_markdown
from repro.results import measure, stored_rows
from repro.results.measured import Measured
from repro.specs import figures, scale, tables
from repro.store import accepted
from repro.store.measurement import Measurement
from repro.store.stored_row import text
from repro.verdicts import coverage, judging, table_results
from repro.verdicts.judging import Case, CrossCheck, Judged
from repro.workflow.workflow import Workflow

CLAIM = next(claim for claim in tables.table("spear", "1").claims if claim.claim == "spear C001 C004")
ONE, TWO, _ = (keys["model"] for keys, _ in CLAIM.case_cells())


def specified_claims(paper):
    """The claims of all specs of a paper's tables."""
    result = []
    for other, number in tables.specified():
        if other == paper:
            result += tables.table(paper, number).claims
    return result


@pytest.fixture(scope="module")
def flow():
    return Workflow(scale.load(name="pocket"))


@pytest.fixture(scope="module")
def spear(stored, tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    return page.build(stored, "spear", folder), folder


@pytest.fixture(scope="module")
def bitbybit(stored, tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    return page.build(stored, "bitbybit", folder), folder


def test_the_committed_page_is_what_specs_and_results_give(spear):
    text, folder = spear
    for name in ("spear.md", "spear.svg"):
        same = (folder / name).read_bytes() == (ROOT / "docs" / name).read_bytes()
        assert same, f"docs/{name}: rebuild it with python -m repro make docs/spear.md and read what has changed"
    assert (folder / "spear.md").read_text(encoding="utf-8") == text


def test_the_committed_page_of_bitbybit_is_what_specs_and_results_give(bitbybit):
    text, folder = bitbybit
    same = (folder / "bitbybit.md").read_bytes() == (ROOT / "docs" / "bitbybit.md").read_bytes()
    assert same, "docs/bitbybit.md: rebuild it with python -m repro make docs/bitbybit.md and read what has changed"
    assert not (folder / "bitbybit.svg").exists(), "a picture without a spec would be a blank one"
    written = specified_claims("bitbybit")
    assert all(claim.says in text for claim in written)
    grid = (folder / "bitbybit" / "table1.md").read_text(encoding="utf-8")
    notes = tables.table("bitbybit", "1").notes
    assert any("baselines saw" in note for note in notes), "what they were trained on is a line of the page"
    assert all(f": {note}\n" in text and note in grid for note in notes) and "\n- Table 1: Trained rows see " in text


@pytest.fixture(scope="module")
def of_others(stored, tmp_path_factory):
    """The pages of the other three papers."""
    folder = tmp_path_factory.mktemp("docs")
    return {paper: (page.build(stored, paper, folder), folder) for paper in ("flexquant", "spqt", "subspec")}


@pytest.fixture
def page_of_paper(paper, request):
    """The page of the parameter `paper` as text, and the folder that it was written to."""
    others = request.getfixturevalue("of_others")
    return others[paper] if paper in others else request.getfixturevalue(paper)


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_the_committed_grids_are_those_of_the_results(paper, page_of_paper):
    """Every measured table has a page that is linked; those that are gone have none."""
    text, folder = page_of_paper
    assert (ROOT / "docs" / f"{paper}.md").read_text(encoding="utf-8") == text, f"rebuild docs/{paper}.md"
    built, committed = (_files(at / paper) for at in (folder, ROOT / "docs"))
    assert built.keys() == committed.keys()
    changed = [name for name in built if built[name] != committed[name]]
    assert not changed, f"docs/{paper}/{changed}: rebuild with python -m repro make docs/{paper}.md"
    assert set(re.findall(rf"\]\({paper}/(table\d+\.md)\)", text)) == {name for name in built if name[:5] == "table"}


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_every_data_figure_is_drawn_on_one_page_and_linked(paper, page_of_paper):
    text, folder = page_of_paper
    numbers = page._figure_numbers(paper)
    assert {re.match(r"\d+", number)[0] for number in numbers} == {one.number for one in papers.data_figures(paper)}
    shown = (folder / paper / "figures.md").read_text(encoding="utf-8")
    assert re.findall(r"^## Figure (\w+)$", shown, re.MULTILINE) == numbers
    assert re.findall(r"^!\[.+\]\(figure(\w+)\.svg\)$", shown, re.MULTILINE) == numbers
    assert re.findall(rf"\]\({paper}/figures\.md#figure-(\w+)\)", text) == numbers
    assert {path.stem.removeprefix("figure") for path in (folder / paper).glob("*.svg")} == set(numbers)
    assert "nothing yet" not in shown and shown.count("Measured on ") == len(numbers)


def _files(folder):
    """The bytes of each file of a folder, of none where there is none."""
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}


def test_a_grid_shows_every_measured_cell(spear):
    grid = (spear[1] / "spear" / "table4.md").read_text(encoding="utf-8")
    rows = [row for row in accepted.of_table("spear/table4") if row.printed and row.value]
    assert rows and all(row.printed in grid and content.number(row.value) in grid for row in rows)
    assert read_markdown(grid.partition("\n\n")[2].partition("\n\n")[2]).paired


def test_the_grid_of_a_table_that_is_not_measured_any_more_goes(stored, tmp_path):
    (tmp_path / "flexquant").mkdir()
    (tmp_path / "flexquant" / "table99.md").write_text("old", encoding="utf-8")
    page._grids(stored, "flexquant", tmp_path)
    assert not (tmp_path / "flexquant" / "table99.md").exists()


def test_a_figure_of_which_nothing_is_measured_is_not_on_the_page(flow, tmp_path, monkeypatch):
    (tmp_path / "spqt").mkdir()
    (tmp_path / "spqt" / "figure7.svg").write_text("old", encoding="utf-8")
    monkeypatch.setattr(page.table_results, "table_results", lambda *_: SimpleNamespace(measurements=()))
    assert page._figures(flow, "spqt", tmp_path) == []
    assert not any((tmp_path / "spqt").iterdir())


def test_what_was_asked_once_is_remembered_by_results_alone(flow):
    once, again = Workflow.of_results(flow.scale), Workflow(flow.scale, stored=True)
    numbers = iter(range(9))
    assert [at.once(("x",), lambda: next(numbers)) for at in (once, once, again, again)] == [0, 0, 1, 2]


def test_claims_of_tables_1_to_6_have_a_predicate_or_arithmetic(bitbybit):
    """Those of the sections on kernels, hardware and others' papers belong to Tables 7 and 8, or to none."""
    written = specified_claims("bitbybit")
    named = set(re.findall(r"B\d{2}", " ".join(claim.claim for claim in written)))
    about = {f"B{i:02}" for i in range(2, 18)} | {f"B{i}" for i in range(22, 30)}
    assert about <= named
    by_arithmetic = re.search(r"^Of these by arithmetic on printed numbers \(\d+\): (.*)\.$", bitbybit[0], re.MULTILINE)
    assert {"B20", "B21"} <= set(re.findall(r"B\d{2}", by_arithmetic[1]))
    audited = [one for one in papers.audit("bitbybit") if {"1", "4"} & set(one.table.split("; "))]
    assert any("73.21" in f"{one.printed} {one.recomputed}" for one in audited), "the text's number for 4 bits"


def test_a_claim_of_bitbybit_that_is_not_seen_names_what_changes_it_or_that_no_cause_was_found(stored, bitbybit):
    for claim in own_numbers.claims_of("bitbybit"):
        result = table_results.judge(stored, claim)
        if result.measured and result.verdict in judging.DIRECTIONS:
            why = page._why_it_fails(stored, claim)
            assert why.startswith(("; changed by: ", "; cause not found")) and why in bitbybit[0], (
                f"{claim.claim}, {claim.says}: run what could be the cause, name it in `ablations` or `causes`"
            )


def test_an_ablation_that_the_claim_does_not_fail_with_is_what_changes_it(stored):
    """Of the master's 8 and 4 bits by models of one width; a comparison that still fails is only tried."""
    claim = next(c for c in tables.table("bitbybit", "4").claims if c.claim == "bitbybit B10")
    name = "OmniQuant, for each width"
    holds = dataclasses.replace(claim, ablations={name: claim.ablations[name]}, causes=())
    assert page._why_it_fails(stored, holds).startswith(
        f"; changed by: {name} (holds on the stand-ins (2 of 2 cases): -0"
    )
    same = dataclasses.replace(holds, ablations={"itself": {"b": claim.cells["b"]}})
    values = content.measured(table_results.judge(stored, claim))
    assert page._why_it_fails(stored, same) == f"; cause not found; tried: itself (holds in 0 of 2 cases: {values})"
    assert page._why_it_fails(stored, dataclasses.replace(claim, ablations={})) == ""
    with pytest.raises(UserError, match="ablations: itself: unknown cell 'q'"):
        dataclasses.replace(claim, ablations={"itself": {"q": "bfloat16 | C4 ppl"}})


def test_a_note_of_several_tables_stands_on_the_page_once(bitbybit):
    (line,) = [line for line in bitbybit[0].splitlines() if "counted on one training of it" in line]
    assert line.startswith("- Table 1, Table 3, Table 4, Table 6: Tokens and BPW of a trained row")


def test_an_ablation_may_lie_in_another_table(stored):
    claim = next(c for c in tables.table("bitbybit", "4").claims if c.claim == "bitbybit B11")
    elsewhere = table_results.judge(stored, claim.ablated("a model of 2 bits alone"))
    assert elsewhere.cells[0].number == "1" and 0.47 < elsewhere.cases[0].measured < 0.52


def test_a_row_that_was_run_to_find_a_cause_is_one(bitbybit):
    assert page._cause("bitbybit/choices | no split") == "no split (choices)"
    with pytest.raises(UserError, match="causes: bitbybit/choices: unknown row 'no splitt'"):
        page._cause("bitbybit/choices | no splitt")


def test_stale_rows_of_a_question_are_shown_with_their_mark(bitbybit):
    section = bitbybit[0].partition("## Full-budget")[2].partition("\n## ")[0]
    assert re.search(r"^\| BitDistiller \|.* 24\.98†", section, re.MULTILINE) and "of its first version" in section
    assert "Not measured yet" not in section


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="no LaTeX here")
def test_the_headline_is_one_page(stored, tmp_path):
    rendered.build(stored, "table1", tmp_path)
    done = subprocess.run(["pdflatex", "-interaction=batchmode", "table1.tex"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0 and "(1 page" in (tmp_path / "table1.log").read_text(errors="replace")


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_a_page_opens_with_five_findings(paper):
    text = (ROOT / "docs" / f"{paper}.md").read_text(encoding="utf-8")
    first = text.partition("## First\n")[2].partition("\nEvery measured cell")[0]
    assert sum(line.startswith("- ") and "**" in line for line in first.splitlines()) == page.FIRST == 5


SECTIONS = ("Verdicts", "The paper's own numbers")


def test_every_predicate_has_its_line_and_every_other_claim_is_named(spear):
    text = spear[0]
    written = [claim for claim in tables.headline().claims if claim.claim.startswith("spear ")]
    written += specified_claims("spear")
    verdicts, numbers = (text.partition(f"## {head}")[2].partition("\n## ")[0] for head in SECTIONS)
    judged = [line for line in verdicts.splitlines() if re.match(r"\| spear (C|\|)", line)]  # a figure's has no id
    assert all(claim.says in verdicts or claim.says in numbers for claim in written)
    summed = [int(n) for n in re.findall(r"^- [a-z0-9,: -]+ \((\d+)\): ", text, re.MULTILINE)]
    assert sum(summed) == len(judged) and len(judged) < len(written), "what is printed alone has no verdict"
    printed = [claim for claim in written if claim.judged_on_printed]
    assert printed and all(claim.says in numbers and claim.says not in verdicts for claim in printed)
    assert not re.search(r"grade D|\| D \|", text)
    bare = re.search(r"^Without a predicate \((\d+)\): (.*)\.$", text, re.MULTILINE)
    named = set(re.findall(r"C\d{3}", " ".join(claim.claim for claim in written)))
    left_out = {name for name in papers.claims("spear") if name not in named} - {"C019"}  # in C018-C020
    assert set(re.findall(r"(?:^|; )(C\d{3}) ", bare[2])) == left_out and int(bare[1]) == len(left_out)


@pytest.mark.parametrize(
    ("how", "where", "carrier"),
    [
        ("Table 7: BF16/W2A2, max over shapes", "abstract", "Table 7"),
        ("", "App. A.1, Table 6 caption", "Table 6"),
        ("", "4.5 vs Fig. 7", "Figure 7"),
        ("", "5.2", "the text alone"),
    ],
)
def test_a_claim_without_a_predicate_names_what_would_carry_it(how, where, carrier):
    assert page._carrier({"how_to_recompute": how, "where": where}) == carrier


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_every_claim_of_a_paper_has_a_line_with_a_verdict_or_what_is_known_instead(paper):
    """On the committed page, which another test compares with what is built."""
    text = (ROOT / "docs" / f"{paper}.md").read_text(encoding="utf-8").partition("Claims in the paper's order")[2]
    section = text.partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if re.match(r"\| [A-Z]\d+ \| ", line)]
    assert [row[0] for row in rows] == list(papers.claims(paper))
    written = own_numbers.claims_of(paper)
    for name, *_, verdict in rows:
        named = any(own_numbers.names(claim, name) for claim in written)
        assert not (named and verdict.startswith("no predicate")), "a predicate without a verdict says why"
    if paper in ("flexquant", "subspec"):
        assert all(row[-2] != "–" or not row[-1].startswith("no predicate") for row in rows)


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_every_finding_of_the_audit_is_a_footnote_that_is_named(paper, page_of_paper):
    """For any paper by its name."""
    text, folder = page_of_paper
    result = {one.id for one in papers.audit(paper)}
    defined = re.findall(r"^\[\^(\w+)\]: ", text, re.MULTILINE)
    used = re.findall(r"\[\^(\w+)\](?!:)", text)
    assert set(defined) == set(used) == result and len(defined) == len(result)
    assert text.startswith(f"# {papers.ABOUT[paper].title}\n") and "\n\n\n" not in text
    assert (folder / f"{paper}.svg").exists() == ((paper, page.PICTURE) in figures.specified())


def test_an_unknown_paper_is_a_sentence(flow, tmp_path):
    with pytest.raises(UserError, match="unknown paper 'spaer'"):
        page.build(flow, "spaer", tmp_path)
    assert not any(tmp_path.iterdir())


def judged(*cases, **changes):
    return Judged(CLAIM, cases, "C", "holds on the stand-ins", True, "", "test", **changes)


def case(model, value, verdict, *cross_checks):
    facts = {"on": f"of {model}", "cross_checks": cross_checks, "verdict": verdict}
    return Case(model, ">= 0.5", 0.7, value, value - 0.1, value + 0.1, **facts)


def test_a_claim_on_no_model_names_none(stored):
    line = content.verdict_line(table_results.judge(stored, tables.table("subspec", "targets").claims[0]))
    assert "grade B; measured: 1.06, 1.07" in line


def test_a_claim_says_what_its_values_are_in():
    one = judged(case(ONE, 0.3, "holds"))
    spec = dataclasses.replace(one.spec, percent=False, unit="PPL below the best of them")
    assert content.measured(dataclasses.replace(one, spec=spec)) == "0.300 [0.200, 0.400] PPL below the best of them"


def test_a_question_shows_the_rows_with_a_measured_cell_and_names_the_others(flow, monkeypatch):
    def measured(flow, cell):
        facts = {"status": "ok", "value": 1.5, "source": "stored", "device": "a GPU", "commit": "0123456"}
        m = Measurement(**stored_rows.of_cell(cell), **(facts if cell.row == "LoftQ" else {}))
        return Measured(cell, m)

    monkeypatch.setattr(measure, "one_measured", measured)
    text = page.section("questions", page._questions(flow, "spear")).partition("## Memory")[2].partition("## ")[0]
    assert "| LoftQ |" in text and "| LQER |" not in text and "Measured on a GPU, commit 0123456." in text
    assert re.search(r"^Not measured yet: SPEAR, effort .25; gate off, effort .25; .*LQER", text, re.MULTILINE)
    assert not re.search(r"^[. ]*\.$", text, re.MULTILINE), "no remark is empty: stored bits have no protocol"


def cross_checks(paper, *claims):
    """The section of the page that says whether measures agree."""
    return page.section("cross_checks", **page._cross_checks(paper, claims))


def summary(claim):
    """The section of SPEAR's page that counts verdicts."""
    return page.section("summary", **page._summary("spear", [claim]))


def test_cross_checks_that_are_apart_are_marked_and_counted_by_model():
    kl = CrossCheck("KL", 0.3, 0.25, 0.35, judging.FAILS, True)
    c4 = CrossCheck("C4", 0.6, 0.5, 0.7, judging.HOLDS, False)
    one = judged(case(ONE, 0.7, judging.HOLDS, kl, c4), case(TWO, 0.6, judging.HOLDS, kl._replace(apart=False)))
    again = dataclasses.replace(one, spec=dataclasses.replace(CLAIM, says="the same again"))
    text = cross_checks("spear", one, again)
    assert f"| of {ONE} | 70.0 % [60.0, 80.0] | 30.0 % [25.0, 35.0] ≠ | 60.0 % [50.0, 70.0] |" in text
    assert f"| of {TWO} | 60.0 % [50.0, 70.0] | 30.0 % [25.0, 35.0] | – |" in text
    assert f"KL on of {ONE} in 1 of 1 case; C4 on of {ONE} in 0 of 1 case; KL on of {TWO} in 0 of 1 case." in text
    assert "tables/spear/tokens.yaml asks it by token class" in text, "what names the tokens is said"
    assert "no spec asks it" in cross_checks("spqt", one)
    assert "the same again" not in text, "a case is shown once"
    assert "Not measured yet: held-out." in text
    calm = cross_checks("spear", judged(case(ONE, 0.7, judging.HOLDS, c4)))
    assert "token class" not in calm and "≠ |" not in calm
    assert "No case with a cross-check is measured yet." in cross_checks("spear", judged(case(ONE, 0.7, 0)))


def test_the_class_of_tokens_that_makes_two_measures_differ_is_named(spear):
    """The table on the page against the accepted numbers by class, by its own arithmetic; the mark at the largest."""
    table = spear[0].partition("Which tokens make the difference")[2].partition("\n\n## ")[0]
    lines = []
    for line in table.splitlines():
        if line.startswith("| "):
            lines.append([part.strip() for part in line.strip("|").split("|")])
    head, rows = lines[0], lines[2:]
    known = {m.cell_key: m for m in accepted.every() if (m.paper, m.number) == ("spear", "tokens")}
    names = {m.stand_in: m.model for m in known.values()}
    assert len(rows) == 9 and head[2:] == list(dict.fromkeys(cell.row for cell in tables.cells("spear", "tokens")))

    def points(model, text, damage, gain):
        whole = sum(known[(name, text, model, damage)].value for name in head[2:])
        return [100 * known[(name, text, model, gain)].value / whole for name in head[2:]]

    for label, total, *classes in rows:
        stand_in, _, what = label.partition(" ")
        text, pair = ("corpus wikitext2", ("KL", "KL recovered")) if what == "KL" else (what, ("gap", "recovered"))
        model = names[stand_in]
        first = points(model, "corpus wikitext2", "gap", "recovered")
        want = [x - y for x, y in zip(points(model, text, *pair), first)]
        shown = [float(one.split()[0]) for one in classes]
        assert shown == pytest.approx(want, rel=0.005, abs=0.001)
        assert float(total.split()[0]) == pytest.approx(sum(want), rel=0.005, abs=0.001)
        assert [one.endswith("←") for one in classes] == [abs(x) == max(map(abs, want)) for x in want], label


def test_the_summary_counts_verdicts_and_leaves_out_what_is_printed_alone():
    part = judged(case(ONE, 0.7, judging.HOLDS), Case(TWO, ">= 0.5", 0.6, missing="not_run"))
    part = dataclasses.replace(part, verdict="undecided, 1 of 2 hold")
    text = summary(part)
    assert f"- undecided (1): C001 C004 (Table 1), {CLAIM.says}\n" in text
    bare = dataclasses.replace(part, measured=False, verdict="no verdict: not run")
    assert "- no verdict: not run (1): C001 C004 (Table 1)\n" in summary(bare)
    alone = dataclasses.replace(bare, verdict="", own_numbers="consistent")
    text = summary(alone)
    assert "C001 C004" not in text
    assert "C002 " in text and "C001 share" not in text, "claims without a predicate are named"
    numbers = page._own_numbers([alone, part])
    assert numbers.count(CLAIM.says) == 1 and "| consistent" in numbers


# --- what else is said of all that is stored ------------------------------------------------------------------------


WHOLE_AND_PARTIAL = (("fresh", "stored"), ("partial",))


def test_the_readme_counts_the_tables_that_are_measured(stored):
    lines = coverage.coverage(stored)
    of_tables = [line for line in lines if line.kind == "table"]
    whole = {(line.paper, line.number) for line in of_tables if line.status in WHOLE_AND_PARTIAL[0]}
    partial = [line for line in of_tables if line.status in WHOLE_AND_PARTIAL[1]]
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    sentence = re.search(r"(\d+) of 45 tables \((.*?)\) and (\d+) more in part", text)
    assert (int(sentence[1]), int(sentence[3])) == (len(whole), len(partial))
    named = set()
    for one in sentence[2].split("; "):
        paper, numbers = one.split("'s ")
        for span in numbers.split(", "):
            ends = [int(end) for end in span.split(" to ")]
            named |= {(paper.lower().replace("-", ""), str(n)) for n in range(ends[0], ends[-1] + 1)}
    assert named == whole
    drawn = [line for line in lines if line.kind == "figure"]
    count = {1: "one"}.get(n := sum(line.status in WHOLE_AND_PARTIAL[0] for line in drawn), str(n))
    assert f"{count} of {len(drawn)} figures" in text
    of_flexquant = {line.number for line in drawn if line.paper == "flexquant" and line.status not in ("missing",)}
    assert "Figures 2 to 7" in text and of_flexquant == {"2", "3", "4", "5", "6", "7"}
    cells = re.search(r"([\d,]+) of ([\d,]+) printed cells", text)
    tables = [line for line in lines if line.kind == "table"]
    wanted = (sum(line.measured for line in tables), sum(line.printed for line in tables))
    assert tuple(int(number.replace(",", "")) for number in cells.groups()) == wanted


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_what_is_stored_is_what_its_observations_say(stored, every):
    """Every accepted row of this checkout is readable, in its place, and its value recomputed from its series.

    An interval is that of the day of acceptance; what is shown has today's, from the same series.
    """
    rows = accepted.every()
    assert {row.scale for row in rows} == {stored.scale.name}
    for row in rows[::every]:
        cell = measure.cell_if_specified(stored, row)
        if cell is None:
            continue  # its spec is gone
        shown = measure.measurement_of(stored, cell)
        # Else another recipe has its place by now, or fewer seeds of what is the same for every seed.
        if shown.status != "stale" and (shown.recipe, shown.seeds) == (row.recipe, row.seeds):
            assert [text(shown.value), shown.n] == [text(row.value), row.n]
            assert (shown.lo is None) == (row.lo is None)
