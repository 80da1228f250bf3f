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
    """Write a paper's page and its picture, and in `docs/<paper>/` one of each measured table and one of its figures.

    All of it comes from accepted results: of a workflow of these alone (`Workflow.of_results`) what it has computed.

    Returns:
        The paper's page.

    Raises:
        UserError: there is no such paper, or what a spec says wrongly.
    """
    scale = flow.scale
    flow = flow if flow.is_of_results else Workflow.of_results(scale)
    grids = _grids(flow, paper, out)
    figures = _figures(flow, paper, out)
    judged = table_results.judged(flow, own_numbers.claims_of(paper))
    tables_shown: set[str] = set()
    for claim in judged:
        if claim.verdict:
            tables_shown.update(_numbers(claim))
    facts = {
        "paper": paper,
        "about": papers.ABOUT[paper],
        "scale": scale,
        "first": _first(paper, judged),
        "measured": content.measured,
        "picture": _picture(flow, paper, out),
        "grids": [_link(paper, number) for number in grids],
        "figures": [f"[Figure {number}]({paper}/figures.md#figure-{number})" for number in figures],
        "notes": _notes(paper),
        "ablated": any(claim.spec.ablations for claim in judged),
        "verdicts": _verdicts(flow, paper, judged, grids),
        "own_numbers": _own_numbers(judged),
        "summary": _summary(paper, judged),
        "every_claim": _every(paper, judged),
        "cross_checks": _cross_checks(paper, judged),
        "classes": _classes(flow, paper),
        "questions": _questions(flow, paper),
        "findings": _findings(paper),
        "elsewhere": [f"[^{f.id}]" for f in papers.audit(paper) if not tables_shown & set(f.table.split("; "))],
    }
    text = re.sub(r"\n{3,}", "\n\n", _templates().get_template("page.md.jinja").render(facts))
    write_text(out / f"{paper}.md", text)
    return text


def section(name: str, *data: Any, **options: Any) -> str:
    """A section of a page as Markdown: a macro of `page_sections.md.jinja` with its data."""
    sections = _templates().get_template("page_sections.md.jinja").module
    return getattr(sections, name)(*data, **options)


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
    for outdated in sorted((out / paper).glob("table*.md")):
        if outdated.stem.removeprefix("table") not in written:
            outdated.unlink()
    return written


def _figures(flow: Workflow, paper: str, out: Path) -> list[str]:
    """Draw every data figure of which something is measured here, on a page of its own; return their numbers."""
    folder = out / paper
    head = f"# {paper}, figures\n\n[All of this paper, and its words](../{paper}.md). Drawn from stored results, by "
    head += f"`make docs/{paper}.md`; `make figures/{paper}/figure<N>.svg` writes one with its points as CSV."
    sections = [head]
    numbers = []
    for number in _figure_numbers(paper):
        measurements = table_results.table_results(flow, paper, number, "figure").measurements
        if not any(m.status in MEASURED for m in measurements):
            continue
        spec = drawn.figure(paper, number)
        figure_files.draw(flow, f"{paper}/figure{number}", [folder / f"figure{number}.svg"])
        image = f"![{spec.title}](figure{number}.svg)"
        printed = f"{spec.title}. Printed: {spec.printed or 'no numbers'}. {figure_files.measured_on(measurements)}"
        sections.append(f"## Figure {number}\n\n{image}\n\n{printed}")
        numbers.append(number)
    if numbers:
        write_text(folder / "figures.md", "\n\n".join(sections) + "\n")
    for old in sorted(folder.glob("figure*.svg")):
        if old.stem.removeprefix("figure") not in numbers:
            old.unlink()
    return numbers


def _figure_numbers(paper: str) -> list[str]:
    """The numbers of a paper's data figures that have a spec, of those in parts these of the parts."""
    numbers = []
    for figure in papers.data_figures(paper):
        numbers += [figure.number, *figure.parts]
    return [number for number in numbers if drawn.path_of(paper, number).is_file()]


def _notes(paper: str) -> dict[str, list[str]]:
    """The notes of printed tables' specs, each with the titles of the tables that have it."""
    titles_by_note: dict[str, list[str]] = {}
    for number in papers.tables(paper):
        for note in tables.table(paper, number).notes:
            titles_by_note.setdefault(note, []).append(own_numbers.title(number))
    return titles_by_note


def _link(paper: str, number: str) -> str:
    return f"[{own_numbers.title(number)}]({paper}/table{number}.md)"


def _first(paper: str, judged: Sequence[Judged]) -> list[Judged]:
    """The claims at the top of a page: measured ones, the headline's first, then others of the paper's tables."""
    by_spec = {id(verdict.spec): verdict for verdict in judged}
    headline = [by_spec[id(claim)] for claim in tables.headline_claims() if id(claim) in by_spec]
    others = [verdict for verdict in judged if verdict not in headline and not verdict.spec.target]
    return [verdict for verdict in (*headline, *others) if verdict.measured][:FIRST]


def _summary(paper: str, judged: Sequence[Judged]) -> dict[str, list]:
    """Which claims have which verdict, and which have none."""
    by_word: dict[str, list[str]] = {}
    undecided = judging.PLAIN[judging.UNDECIDED]
    for claim in judged:
        if claim.verdict:
            word = undecided if claim.verdict.startswith(undecided) else claim.verdict
            says = f", {claim.spec.says}" if claim.measured else ""
            by_word.setdefault(word, []).append(_ids(claim) + says)
    order = [judging.ON_STAND_INS, *judging.PLAIN, *reversed(judging.DIRECTIONS)]
    words = sorted(by_word, key=lambda word: order.index(word) if word in order else len(order))
    bare = own_numbers.without_predicate(paper, [claim.spec for claim in judged])
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
        predicates = [predicate for predicate in judged if own_numbers.names(predicate.spec, name)]
        by_cells = list(dict.fromkeys(predicate.own_numbers for predicate in predicates if predicate.own_numbers))
        if not by_cells and line["recomputed"]:
            by_cells = [own_numbers.WORDS[formula["consistent"]] for formula in own_numbers.by_formula([line])]
        verdicts = [
            f"{predicate.said or predicate.why} ({own_numbers.title(_numbers(predicate)[0])})"
            for predicate in predicates
        ]
        printed = line.get("printed") or line.get("values", "")
        verdict = "; ".join(verdicts) or reasons.get(name) or f"no predicate ({_carrier(line)})"
        rows.append([name, line["statement"], printed, "; ".join(by_cells) or "–", verdict])
    head = ("claim", "what it says", "printed", "its own numbers", "verdict here, or why none")
    return _table(Sheet("Claims in the paper's order", head, rows, left=len(head)))


def _carrier(line: Mapping[str, str]) -> str:
    """The table or figure of the paper that a claim without a predicate would be judged on."""
    named = re.search(r"\b(Table|Figure|Fig\.) (\d+)", f"{line['how_to_recompute']} {line['where']}")
    if not named:
        return "the text alone"
    return f"{'Table' if named[1] == 'Table' else 'Figure'} {named[2]}"


def _ids(judged: Judged) -> str:
    bare = "a target" if judged.spec.target else "a statement"
    return f"{judged.spec.claim.partition(' ')[2] or bare} ({own_numbers.title(_numbers(judged)[0])})"


def _picture(flow: Workflow, paper: str, out: Path) -> drawn.FigureSpec | None:
    """The spec of the page's picture, which is drawn; None where there is none."""
    if (paper, PICTURE) not in drawn.specified():
        return None
    figure_files.draw(flow, f"{paper}/{PICTURE}", [out / f"{paper}.svg"])
    return drawn.figure(paper, PICTURE)


def _numbers(judged: Judged) -> list[str]:
    """The tables that a claim is about, as the audit names them; the one that it stands under comes first."""
    return [tables.split(name)[1] for name in (judged.spec.table, *judged.spec.more)]


def _verdicts(flow: Workflow, paper: str, judged: Sequence[Judged], grids: Sequence[str]) -> str:
    """Every verdict by table with a link to its grid, the audit's findings on the table as footnotes at its title."""
    with_verdict = [claim for claim in judged if claim.verdict]
    about: dict[str, set[str]] = {}  # by table all that its claims are about
    for claim in with_verdict:
        numbers = _numbers(claim)
        about.setdefault(numbers[0], set()).update(numbers)
    rows: list[list[str]] = []
    last = ""
    for claim in with_verdict:
        number = _numbers(claim)[0]
        if number != last:
            marks = [f"[^{f.id}]" for f in papers.audit(paper) if about[number] & set(f.table.split("; "))]
            where = _link(paper, number) if number in grids else own_numbers.title(number)
            rows.append([f"{where}: {tables.table(paper, number).title} {''.join(marks)}"])
            last = number
        values = content.measured(claim) if claim.measured else "–"
        word = "; ".join(filter(None, [claim.said, "one seed" * claim.one_seed, *content.cross_checks(claim)]))
        word += f"; {claim.why}" * bool(claim.why)
        word += f"; predicate changed after the runs: {claim.spec.changed}" * bool(claim.spec.changed)
        if claim.verdict in judging.DIRECTIONS:
            word += _why_it_fails(flow, claim.spec)
        rows.append([claim.spec.claim, claim.spec.says, claim.spec.printed, values, word, claim.grade or "–"])
    return _table(Sheet("One line a claim; 95 % intervals", HEAD, rows, left=len(HEAD)))


def _own_numbers(judged: Sequence[Judged]) -> str:
    """The table of arithmetic on the paper's own cells: no verdict on the method, and without a grade."""
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
    for name, ablation in zip(claim.ablations, table_results.judged(flow, ablated)):
        if not ablation.measured:
            left.append(name)
        elif ablation.verdict in judging.DIRECTIONS:
            tried.append(f"{name} (holds in {ablation.count}: {content.measured(ablation)})")
        else:
            changed.append(f"{name} ({ablation.said}: {content.measured(ablation)})")
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
    for judged_claim in sorted(judged, key=lambda j: -len(j.cases)):
        measured: set[str] = set()
        for case in judged_claim.cases:
            measured |= {check.name for check in case.cross_checks}
        names = [name for name in judged_claim.spec.cross_checks if name in measured]
        rows = []
        for (keys, named), case in zip(judged_claim.spec.case_cells(), judged_claim.cases):
            key = frozenset(named.values())
            if not case.cross_checks or key in seen:
                continue
            seen.add(key)
            value_of = {
                r.name: content.quantity(*r[1:4], judged_claim.spec.percent) + " ≠" * r.apart for r in case.cross_checks
            }
            for check in case.cross_checks:
                count.setdefault((case.on, check.name), []).append(check.apart)
            label = " ".join([case.on, *(str(value) for key, value in keys.items() if key != "model")])
            own_value = content.quantity(case.measured, case.lo, case.hi, judged_claim.spec.percent)
            rows.append([label, own_value, *(value_of.get(name, "–") for name in names)])
        if rows:
            head = ["case", "its own", *names]
            cases.append(
                _table(Sheet(f"{judged_claim.spec.claim}: {judged_claim.spec.says}", head, rows, left=len(head)))
            )
    by_class = f"tables/{paper}/{CLASSES}.yaml" if (paper, CLASSES) in tables.own() else ""
    named_checks = set(chain.from_iterable(judged_claim.spec.cross_checks for judged_claim in judged))
    return {
        "cases": cases,
        "apart": [f"{name} on {on} in {judging.counted(apart)}" for (on, name), apart in count.items()],
        "classes_in": by_class if any(map(any, count.values())) else None,
        "missing": sorted(named_checks - {name for _, name in count}),
    }


def _classes(flow: Workflow, paper: str) -> str:
    """How much each class of tokens adds to the difference of two recovered shares, by model and cross-check.

    The spec CLASSES has a class a row, a text a column, and two pairs of measures, damage and what of it is recovered:
    of the loss, and of KL. A share is recovered damage over damage, each summed over classes; the first text's loss is
    what the cross-checks are compared with.
    """
    if (paper, CLASSES) not in tables.own():
        return ""
    by_key = table_results.table_results(flow, paper, CLASSES).by_key
    cells = [measured.cell for measured in by_key.values()]
    rows = []
    for model in dict.fromkeys(cell.model for cell in cells):
        mine = {cell.cell_key: cell for cell in cells if cell.model == model}
        if not all(by_key[key].measurement.status in MEASURED for key in mine):
            continue
        of = {key: by_key[key].quantity for key in mine}
        classes = list(dict.fromkeys(key[0] for key in mine))
        texts = list(dict.fromkeys(key[1] for key in mine))
        measures = list(dict.fromkeys(key[3] for key in mine))
        readings = [(texts[0], *measures[2:]), *((text, *measures[:2]) for text in texts[1:])]
        for text, damage, gain in readings:
            first = (texts[0], measures[0]), (texts[0], measures[1])
            compared = dict(zip("grhs", ((text, damage), (text, gain), *first)))
            parts = {}
            for i, row in enumerate(classes):
                for letter, (col, metric) in compared.items():
                    parts[f"{letter}{i}"] = of[row, col, model, metric]
            loss_damage = " + ".join(f"g{i}" for i in range(len(classes)))
            kl_damage = " + ".join(f"h{i}" for i in range(len(classes)))
            terms = [f"100 * (r{i} / ({loss_damage}) - s{i} / ({kl_damage}))" for i in range(len(classes))]
            values = [compose(term, parts).interval() for term in [" + ".join(terms), *terms]]
            most = max(values[1:], key=lambda measured: abs(measured.value))
            texts_of_values = [
                content.quantity(measured.value, measured.lo, measured.hi) + " ←" * (measured is most)
                for measured in values
            ]
            rows.append(
                [f"{next(iter(mine.values())).stand_in} {measures[2] if text == texts[0] else text}", *texts_of_values]
            )
    title = "Which tokens make the difference: points of the recovered share, by class; ← at the largest"
    return _table(Sheet(title, [f"less that of {texts[0]}", "all tokens", *classes], rows, left=1)) if rows else ""


def _questions(flow: Workflow, paper: str) -> list[dict[str, Any]]:
    """The specs of our own, such as what the paper leaves open; of rows without any measured cell their names."""
    questions = []
    for owner, name in tables.own():
        if owner != paper:
            continue
        results = table_results.table_results(flow, paper, name)
        measured = {m.row for m in results.measurements if m.status in SHOWN}
        facts = {"name": name, "title": tables.table(paper, name).title}
        facts["table"] = _table(content.sheet(results, only=measured)) if measured else ""
        facts["missing"] = list(dict.fromkeys(cell.row for cell in results.cells if cell.row not in measured))
        questions.append(facts)
    return questions


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
