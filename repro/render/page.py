"""One page per paper, `docs/<paper>.md`: what was reproduced and what was not, what is open, where numbers differ.

It is made of specs and accepted results alone, so that it comes out the same wherever it is built; a test compares the
committed copy with them. Its sentences are in `page.md.jinja` and `page_sections.md.jinja`; here are their data.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from repro import papers
from repro.core.errors import UserError, unknown
from repro.core.files import write_text
from repro.render import content, figure_files, own_numbers
from repro.render.sheet import Sheet, markdown
from repro.specs import figures as drawn
from repro.specs import tables
from repro.specs.claims import ClaimSpec
from repro.stats.quantity import compose
from repro.store.measurement import MEASURED, SHOWN
from repro.verdicts import judging, table_results
from repro.verdicts.judging import Judged
from repro.workflow.workflow import Workflow

PICTURE = "summary"  # figures/<paper>/summary.yaml is the page's picture
CLASSES = "tokens"  # tables/<paper>/tokens.yaml says which tokens make two measures disagree
FIRST = 5  # claims at the top
HEAD = ("claim", "what it says", "printed", "measured here", "verdict", "grade")


def build(flow: Workflow, paper: str, out: Path = Path("docs")) -> str:
    """Write a paper's page, one of each of its tables that is measured in `docs/<paper>/`, and its picture, if any.

    All of it comes from accepted results: of a workflow of these alone (`Workflow.of_results`) what it has computed.

    Returns:
        The paper's page.

    Raises:
        UserError: there is no such paper, or what a spec says wrongly.
    """
    at = flow.scale
    flow = flow if flow.is_of_results else Workflow.of_results(at)
    grids = _grids(flow, paper, out)
    judged = table_results.judged(flow, own_numbers.claims_of(paper))
    shown: set[str] = set()
    for one in judged:
        if one.verdict:
            shown.update(_numbers(one))
    facts = {
        "paper": paper,
        "about": papers.ABOUT[paper],
        "scale": at,
        "first": _first(paper, judged),
        "measured": content.measured,
        "picture": _picture(flow, paper, out),
        "grids": [_link(paper, number) for number in grids],
        "notes": _notes(paper),
        "ablated": any(one.spec.ablations for one in judged),
        "verdicts": _verdicts(flow, paper, judged, grids),
        "own_numbers": _own_numbers(judged),
        "summary": _summary(paper, judged),
        "every_claim": _every(paper, judged),
        "cross_checks": _cross_checks(paper, judged),
        "classes": _classes(flow, paper),
        "questions": _questions(flow, paper),
        "findings": _findings(paper),
        "elsewhere": [f"[^{f.id}]" for f in papers.audit(paper) if not shown & set(f.table.split("; "))],
    }
    text = re.sub(r"\n{3,}", "\n\n", _templates().get_template("page.md.jinja").render(facts))
    write_text(out / f"{paper}.md", text)
    return text


def section(name: str, *data: Any, **named: Any) -> str:
    """A section of a page as Markdown: a macro of `page_sections.md.jinja` with its data."""
    sections = _templates().get_template("page_sections.md.jinja").module
    return getattr(sections, name)(*data, **named)


@cache
def _templates() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent)
    how = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True, "undefined": StrictUndefined}
    return Environment(loader=loader, **how)


def _grids(flow: Workflow, paper: str, out: Path) -> list[str]:
    """Write the grid of every printed table of which something is measured here; return the tables' numbers."""
    written = []
    for number in papers.tables(paper):
        results = table_results.table_results(flow, paper, number)
        if not any(m.status in MEASURED and m.source != "arithmetic" for m in results.measurements):
            continue
        grid = markdown(content.sheet(results))
        head = f"# {paper}, Table {number}\n\n[All of this paper, and its words](../{paper}.md). How to read a cell: "
        head += "[README](../../README.md). Above or left what the paper printed, under it or right of it what was "
        head += f"measured here. From stored results, by `make docs/{paper}.md`."
        write_text(out / paper / f"table{number}.md", f"{head}\n\n{grid}")
        written.append(number)
    for old in sorted((out / paper).glob("table*.md")):
        if old.stem.removeprefix("table") not in written:
            old.unlink()
    return written


def _notes(paper: str) -> dict[str, list[str]]:
    """What the specs of printed tables note, such as what is trained on, with the titles of the tables that note it."""
    titles_by_note: dict[str, list[str]] = {}
    for number in papers.tables(paper):
        for note in tables.table(paper, number).notes:
            titles_by_note.setdefault(note, []).append(own_numbers.title(number))
    return titles_by_note


def _link(paper: str, number: str) -> str:
    return f"[{own_numbers.title(number)}]({paper}/table{number}.md)"


def _first(paper: str, judged: Sequence[Judged]) -> list[Judged]:
    """What a reader should know first: measured claims, the headline's, then others of the paper's tables."""
    of = {id(one.spec): one for one in judged}
    headline = [of[id(claim)] for claim in tables.headline_claims() if id(claim) in of]
    others = [one for one in judged if one not in headline and not one.spec.target]
    return [one for one in (*headline, *others) if one.measured][:FIRST]


def _summary(paper: str, judged: Sequence[Judged]) -> dict[str, list]:
    """Which claims have which verdict, and which have none."""
    by_word: dict[str, list[str]] = {}
    undecided = judging.PLAIN[judging.UNDECIDED]
    for one in judged:
        if one.verdict:
            word = undecided if one.verdict.startswith(undecided) else one.verdict
            says = f", {one.spec.says}" if one.measured else ""
            by_word.setdefault(word, []).append(_ids(one) + says)
    order = [judging.ON_STAND_INS, *judging.PLAIN, *reversed(judging.DIRECTIONS)]
    words = sorted(by_word, key=lambda word: order.index(word) if word in order else len(order))
    bare = own_numbers.without_predicate(paper, [one.spec for one in judged])
    reasons = judging.unjudged(paper)
    by_formula = []
    for line in own_numbers.by_formula(bare):
        by_formula.append(f"{line['id']} {line['recomputed']} ({own_numbers.WORDS[line['consistent']]})")
    return {
        "verdicts": [{"word": word, "claims": by_word[word]} for word in words],
        "bare": [f"{line['id']} {line['statement']} ({line['where']}; {_carrier(line)})" for line in bare],
        "by_formula": by_formula,
        "unjudged": [f"{line['id']} {reasons[line['id']]}" for line in bare if line["id"] in reasons],
    }


def _every(paper: str, judged: Sequence[Judged]) -> str:
    """One line a claim of the paper: what it prints, what its own numbers say, every verdict or why there is none."""
    reasons = judging.unjudged(paper)
    rows = []
    for name, line in papers.claims(paper).items():
        own = [one for one in judged if own_numbers.names(one.spec, name)]
        by_cells = list(dict.fromkeys(one.own_numbers for one in own if one.own_numbers))
        if not by_cells and line["recomputed"]:
            by_cells = [own_numbers.WORDS[each["consistent"]] for each in own_numbers.by_formula([line])]
        said = [f"{one.said or one.why} ({own_numbers.title(_numbers(one)[0])})" for one in own]
        printed = line.get("printed") or line.get("values", "")
        verdict = "; ".join(said) or reasons.get(name) or f"no predicate ({_carrier(line)})"
        rows.append([name, line["statement"], printed, "; ".join(by_cells) or "–", verdict])
    head = ("claim", "what it says", "printed", "its own numbers", "verdict here, or why none")
    return _table(Sheet("Claims in the paper's order", head, rows, left=len(head)))


def _carrier(line: Mapping[str, str]) -> str:
    """The table or figure of the paper that a claim without a predicate would be judged on."""
    named = re.search(r"\b(Table|Figure|Fig\.) (\d+)", f"{line['how_to_recompute']} {line['where']}")
    if not named:
        return "the text alone"
    return f"{'Table' if named[1] == 'Table' else 'Figure'} {named[2]}"


def _ids(one: Judged) -> str:
    bare = "a target" if one.spec.target else "a statement"
    return f"{one.spec.claim.partition(' ')[2] or bare} ({own_numbers.title(_numbers(one)[0])})"


def _picture(flow: Workflow, paper: str, out: Path) -> drawn.FigureSpec | None:
    """The spec of the page's picture, which is drawn; None where there is none."""
    if (paper, PICTURE) not in drawn.specified():
        return None
    figure_files.draw(flow, f"{paper}/{PICTURE}", [out / f"{paper}.svg"])
    return drawn.figure(paper, PICTURE)


def _numbers(one: Judged) -> list[str]:
    """The tables that a claim is about, as the audit names them; the one that it stands under comes first."""
    return [tables.split(name)[1] for name in (one.spec.table, *one.spec.more)]


def _verdicts(flow: Workflow, paper: str, judged: Sequence[Judged], grids: Sequence[str]) -> str:
    """Every verdict by table with a link to its grid, the audit's findings on the table as footnotes at its title."""
    with_verdict = [one for one in judged if one.verdict]
    about: dict[str, set[str]] = {}  # by table all that its claims are about
    for one in with_verdict:
        numbers = _numbers(one)
        about.setdefault(numbers[0], set()).update(numbers)
    rows: list[list[str]] = []
    last = ""
    for one in with_verdict:
        number = _numbers(one)[0]
        if number != last:
            marks = [f"[^{f.id}]" for f in papers.audit(paper) if about[number] & set(f.table.split("; "))]
            where = _link(paper, number) if number in grids else own_numbers.title(number)
            rows.append([f"{where}: {tables.table(paper, number).title} {''.join(marks)}"])
            last = number
        here = content.measured(one) if one.measured else "–"
        word = "; ".join(filter(None, [one.said, "one seed" * one.one_seed, *content.cross_checks(one)]))
        word += f"; {one.why}" * bool(one.why)
        word += f"; predicate changed after the runs: {one.spec.changed}" * bool(one.spec.changed)
        if one.verdict in judging.DIRECTIONS:
            word += _why_it_fails(flow, one.spec)
        rows.append([one.spec.claim, one.spec.says, one.spec.printed, here, word, one.grade or "–"])
    return _table(Sheet("One line a claim; 95 % intervals", HEAD, rows, left=len(HEAD)))


def _own_numbers(judged: Sequence[Judged]) -> str:
    """What arithmetic on the paper's own cells says of its claims; no verdict on the method, and without a grade."""
    rows = list(own_numbers.rows(judged))
    head = own_numbers.HEAD
    title = "Arithmetic on printed cells, each within its rounding"
    return _table(Sheet(title, head, rows, left=len(head))) if rows else ""


def _why_it_fails(flow: Workflow, claim: ClaimSpec) -> str:
    """The ablations that change the verdict of a claim that fails, or that no cause was found; then what else was run.

    Empty where the spec names neither ablations nor causes.
    """
    changed, tried, left = [], [], []
    ablated = [claim.ablated(name) for name in claim.ablations]
    for name, one in zip(claim.ablations, table_results.judged(flow, ablated)):
        if not one.measured:
            left.append(name)
        elif one.verdict in judging.DIRECTIONS:
            tried.append(f"{name} (holds in {one.count}: {content.measured(one)})")
        else:
            changed.append(f"{name} ({one.said}: {content.measured(one)})")
    tried += map(_cause, claim.causes)
    if not claim.ablations and not claim.causes:
        return ""
    word = f"; changed by: {', '.join(changed)}" if changed else "; cause not found"
    word += f"; tried: {', '.join(tried)}" * bool(tried)
    return word + f"; not run yet: {', '.join(left)}" * bool(left)


def _cause(text: str) -> str:
    """A row that was run to find a cause, with its table.

    Raises:
        UserError: there is no such table or row.
    """
    name, _, row = text.partition(" | ")
    rows = {cell.row for cell in tables.cells(*tables.split(name))}
    if row not in rows:
        raise UserError(f"causes: {name}: {unknown('row', row, rows)}")
    return f"{row} ({own_numbers.title(tables.split(name)[1])})"


def _cross_checks(paper: str, judged: Sequence[Judged]) -> dict[str, Any]:
    """Every measured case that has cross-checks, once: its value and theirs, and by model how many are apart."""
    cases = []
    seen: set[frozenset] = set()
    count: dict[tuple[str, str], list[bool]] = {}
    for one in sorted(judged, key=lambda j: -len(j.cases)):
        measured: set[str] = set()
        for case in one.cases:
            measured |= {check.name for check in case.cross_checks}
        names = [name for name in one.spec.cross_checks if name in measured]
        rows = []
        for (keys, named), case in zip(one.spec.case_cells(), one.cases):
            key = frozenset(named.values())
            if not case.cross_checks or key in seen:
                continue
            seen.add(key)
            of = {r.name: content.quantity(*r[1:4], one.spec.percent) + " ≠" * r.apart for r in case.cross_checks}
            for check in case.cross_checks:
                count.setdefault((case.on, check.name), []).append(check.apart)
            label = " ".join([case.on, *(str(value) for key, value in keys.items() if key != "model")])
            own = content.quantity(case.measured, case.lo, case.hi, one.spec.percent)
            rows.append([label, own, *(of.get(name, "–") for name in names)])
        if rows:
            head = ["case", "its own", *names]
            cases.append(_table(Sheet(f"{one.spec.claim}: {one.spec.says}", head, rows, left=len(head))))
    by_class = f"tables/{paper}/{CLASSES}.yaml" if (paper, CLASSES) in tables.own() else ""
    wanted = set(chain.from_iterable(one.spec.cross_checks for one in judged))
    return {
        "cases": cases,
        "apart": [f"{name} on {on} in {judging.counted(apart)}" for (on, name), apart in count.items()],
        "classes_in": by_class if any(map(any, count.values())) else None,
        "missing": sorted(wanted - {name for _, name in count}),
    }


def _classes(flow: Workflow, paper: str) -> str:
    """By model and cross-check, what each class of tokens adds to the difference of two recovered shares.

    The spec CLASSES has a class a row, a text a column, and two pairs of measures, damage and what of it is recovered:
    of the loss, and of KL. A share is recovered damage over damage, each summed over classes; the first text's loss is
    what the cross-checks are compared with.
    """
    if (paper, CLASSES) not in tables.own():
        return ""
    by_key = table_results.table_results(flow, paper, CLASSES).by_key
    cells = [one.cell for one in by_key.values()]
    rows = []
    for model in dict.fromkeys(cell.model for cell in cells):
        mine = {cell.cell_key: cell for cell in cells if cell.model == model}
        if not all(by_key[key].measurement.status in MEASURED for key in mine):
            continue
        of = {key: by_key[key].quantity for key in mine}
        classes, texts, measures = (list(dict.fromkeys(key[i] for key in mine)) for i in (0, 1, 3))
        readings = [(texts[0], *measures[2:]), *((text, *measures[:2]) for text in texts[1:])]
        for text, damage, gain in readings:
            first = (texts[0], measures[0]), (texts[0], measures[1])
            compared = dict(zip("grhs", ((text, damage), (text, gain), *first)))
            parts = {}
            for i, row in enumerate(classes):
                for letter, (col, metric) in compared.items():
                    parts[f"{letter}{i}"] = of[row, col, model, metric]
            here, there = (" + ".join(f"{letter}{i}" for i in range(len(classes))) for letter in "gh")
            terms = [f"100 * (r{i} / ({here}) - s{i} / ({there}))" for i in range(len(classes))]
            values = [compose(term, parts).interval() for term in [" + ".join(terms), *terms]]
            most = max(values[1:], key=lambda one: abs(one.value))
            shown = [content.quantity(one.value, one.lo, one.hi) + " ←" * (one is most) for one in values]
            rows.append([f"{next(iter(mine.values())).stand_in} {measures[2] if text == texts[0] else text}", *shown])
    title = "Which tokens make the difference: points of the recovered share, by class; ← at the largest"
    return _table(Sheet(title, [f"less that of {texts[0]}", "all tokens", *classes], rows, left=1)) if rows else ""


def _questions(flow: Workflow, paper: str) -> list[dict[str, Any]]:
    """The specs of our own, such as what the paper leaves open; of rows without any measured cell their names."""
    asked = []
    for one, name in tables.own():
        if one != paper:
            continue
        results = table_results.table_results(flow, paper, name)
        measured = {m.row for m in results.measurements if m.status in SHOWN}
        facts = {"name": name, "title": tables.table(paper, name).title}
        facts["table"] = _table(content.sheet(results, only=measured)) if measured else ""
        facts["missing"] = list(dict.fromkeys(cell.row for cell in results.cells if cell.row not in measured))
        asked.append(facts)
    return asked


def _findings(paper: str) -> list[dict[str, str]]:
    """The audit, as the text of footnotes by id."""
    notes = []
    for f in papers.audit(paper):
        where = f"Table {f.table}" if f.table[:1].isdigit() else f.table
        text = f"{where}, {f.cell}: printed {f.printed}; recomputed {f.recomputed}; difference {f.difference}."
        notes.append({"id": f.id, "text": text.replace("<", "\\<")})
    return notes


def _table(sheet: Sheet) -> str:
    return markdown(sheet).strip("\n")
