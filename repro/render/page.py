"""One page per paper, `docs/<paper>.md`: what was reproduced and what was not, what is open, where numbers differ.

It is made of specs and accepted results alone, so that it comes out the same wherever it is built; a test compares the
committed copy with them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

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
WORDS = """## Words

- holds on the stand-ins: in every case that has a stand-in, the whole 95 % interval satisfies the predicate
- same direction, smaller (or larger); no effect; opposite direction: it fails, by Holm's procedure over its cases
- undecided, k of n hold: neither; no verdict: nothing that is measured can decide it, and why
- grade A: the paper's model and protocol; B: its shapes and real kernels; C: a scaled analogue
- rtn-w4-g128: rounding to 4 bits, a scale for each 128 weights; pc: one a channel; w2a2: 2-bit inputs, too
- here: what was measured by this project; stand-in: the small model that stands in for one of the paper's
- one seed: a cell rests on a single draw of calibration text or initialization; an interval over pooled seeds adds what
  three seeds of SPEAR and its quantizers vary (repro/workflow/draws.py), one of accuracy covers items alone"""
OF_CAUSES = """
- changed by: what was exchanged so that the claim no longer fails; cause not found: nothing that was tried does that"""
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
    parts = [
        f"# {papers.ABOUT[paper].title}",
        f"What this project has seen of arXiv {papers.ABOUT[paper].arxiv}, and what not. `make docs/{paper}.md` makes "
        f"it from the accepted results of scale {at.name}: {at.about}. Grades and words: README.md.",
        *_first(paper, judged),
        *_picture(flow, paper, out),
        *_measured_grids(paper, grids),
        *_notes(paper),
        WORDS + OF_CAUSES * any(one.spec.ablations for one in judged),
        *_verdicts(flow, paper, judged, grids),
        *_own_numbers(paper, judged),
        *_summary(paper, judged),
        *_folded("Every claim of the paper in its order, with its verdicts", _every(paper, judged)),
        *_folded("Every case with its cross-checks", _cross_checks(paper, judged), _classes(flow, paper)),
        *_questions(flow, paper),
        *_findings(paper, shown),
    ]
    text = "\n\n".join(part.strip("\n") for part in parts) + "\n"
    write_text(out / f"{paper}.md", text)
    return text


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


def _measured_grids(paper: str, grids: Sequence[str]) -> Iterator[str]:
    """Links to the pages of the tables that are measured."""
    if grids:
        yield f"Every measured cell, table by table: {', '.join(_link(paper, number) for number in grids)}."


def _notes(paper: str) -> Iterator[str]:
    """What the specs of printed tables note of them, such as what is trained on; once what several note."""
    about: dict[str, list[str]] = {}
    for number in papers.tables(paper):
        for note in tables.table(paper, number).notes:
            about.setdefault(note, []).append(own_numbers.title(number))
    if about:
        yield "\n".join(f"- {', '.join(titles)}: {note}" for note, titles in about.items())


def _link(paper: str, number: str) -> str:
    return f"[{own_numbers.title(number)}]({paper}/table{number}.md)"


def _first(paper: str, judged: Sequence[Judged]) -> Iterator[str]:
    """What a reader should know first: measured claims, the headline's, then others of the paper's tables."""
    of = {id(one.spec): one for one in judged}
    headline = [of[id(claim)] for claim in tables.headline_claims() if id(claim) in of]
    others = [one for one in judged if one not in headline and not one.spec.target]
    first = [one for one in (*headline, *others) if one.measured]
    yield "## First"
    if not first:
        yield "No claim of it is measured yet; what its own numbers say is below."
        return
    lines = []
    for one in first[:FIRST]:
        shown = content.measured(one)
        lines.append(f"- {one.spec.says}: **{one.said}**, {shown}. Printed: {one.spec.printed}.")
    yield "\n".join(lines)


def _folded(summary: str, *parts: Iterator[str]) -> Iterator[str]:
    """Parts that are shown when they are asked for; a heading in them stays outside."""
    every = list(chain(*parts))
    while every and every[0].startswith("## "):
        yield every.pop(0)
    yield f"<details>\n<summary>{summary}</summary>"
    yield from every
    yield "</details>"


def _summary(paper: str, judged: Sequence[Judged]) -> Iterator[str]:
    """How many claims have which verdict, and which have none."""
    yield "## What was seen, and what not"
    words: dict[str, list[Judged]] = {}
    for one in judged:
        if one.verdict:
            word = (
                judging.PLAIN[judging.UNDECIDED]
                if one.verdict.startswith(judging.PLAIN[judging.UNDECIDED])
                else one.verdict
            )
            words.setdefault(word, []).append(one)
    order = [judging.ON_STAND_INS, *judging.PLAIN, *reversed(judging.DIRECTIONS)]
    lines = []
    for word in sorted(words, key=lambda word: order.index(word) if word in order else len(order)):
        said = (f"{_ids(one)}{f', {one.spec.says}' * one.measured}" for one in words[word])
        lines.append(f"- {word} ({len(words[word])}): {'; '.join(said)}")
    yield "\n".join(lines)
    bare = own_numbers.without_predicate(paper, [one.spec for one in judged])
    if bare:
        listed = (f"{line['id']} {line['statement']} ({line['where']}; {_carrier(line)})" for line in bare)
        yield f"Without a predicate ({len(bare)}): {'; '.join(listed)}."
    known = own_numbers.by_formula(bare)
    if known:
        lines = (f"{line['id']} {line['recomputed']} ({own_numbers.WORDS[line['consistent']]})" for line in known)
        yield f"Of these by arithmetic on printed numbers ({len(known)}): {'; '.join(lines)}."
    reasons = judging.unjudged(paper)
    left = [line["id"] for line in bare if line["id"] in reasons]
    if left:
        lines = (f"{name} {reasons[name]}" for name in left)
        yield f"Of these nothing can judge ({len(left)}): {'; '.join(lines)}."


def _every(paper: str, judged: Sequence[Judged]) -> Iterator[str]:
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
    yield markdown(Sheet("Claims in the paper's order", head, rows, left=len(head)))


def _carrier(line: Mapping[str, str]) -> str:
    """The table or figure of the paper that a claim without a predicate would be judged on."""
    named = re.search(r"\b(Table|Figure|Fig\.) (\d+)", f"{line['how_to_recompute']} {line['where']}")
    if not named:
        return "the text alone"
    return f"{'Table' if named[1] == 'Table' else 'Figure'} {named[2]}"


def _ids(one: Judged) -> str:
    bare = "a target" if one.spec.target else "a statement"
    return f"{one.spec.claim.partition(' ')[2] or bare} ({own_numbers.title(_numbers(one)[0])})"


def _picture(flow: Workflow, paper: str, out: Path) -> Iterator[str]:
    path = out / f"{paper}.svg"
    if (paper, PICTURE) in drawn.specified():
        figure_files.draw(flow, f"{paper}/{PICTURE}", [path])
        spec = drawn.figure(paper, PICTURE)
        yield f"![{spec.title}]({path.name})"
        yield f"{spec.title}. Printed: {spec.printed or 'no numbers'}."


def _numbers(one: Judged) -> list[str]:
    """The tables that a claim is about, as the audit names them; the one that it stands under comes first."""
    return [tables.split(name)[1] for name in (one.spec.table, *one.spec.more)]


def _verdicts(flow: Workflow, paper: str, judged: Sequence[Judged], grids: Sequence[str]) -> Iterator[str]:
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
    yield "## Verdicts"
    yield markdown(Sheet("One line a claim; 95 % intervals", HEAD, rows, left=len(HEAD)))


def _own_numbers(paper: str, judged: Sequence[Judged]) -> Iterator[str]:
    """What arithmetic on the paper's own cells says of its claims; no verdict on the method, and without a grade."""
    rows = list(own_numbers.rows(judged))
    if rows:
        yield "## The paper's own numbers"
        head = own_numbers.HEAD
        yield markdown(Sheet("Arithmetic on printed cells, each within its rounding", head, rows, left=len(head)))


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


def _cross_checks(paper: str, judged: Sequence[Judged]) -> Iterator[str]:
    """Every measured case that has cross-checks, once: its value and theirs, and by model how many are apart."""
    yield "## Do the measures agree?"
    seen: set[frozenset] = set()
    count: dict[tuple[str, str], list[bool]] = {}
    for one in sorted(judged, key=lambda j: -len(j.cases)):
        measured: set[str] = set()
        for case in one.cases:
            measured |= {check.name for check in case.cross_checks}
        names, rows = [name for name in one.spec.cross_checks if name in measured], []
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
            yield markdown(Sheet(f"{one.spec.claim}: {one.spec.says}", head, rows, left=len(head)))
    if not seen:
        yield "No case with a cross-check is measured yet."
        return
    by_model = (f"{name} on {on} in {judging.counted(apart)}" for (on, name), apart in count.items())
    said = "the 95 % interval of the difference to the claim's own value, on the windows that both have, excludes 0"
    yield f"≠: {said}: {'; '.join(by_model)}."
    if any(map(any, count.values())):
        asked = (paper, CLASSES) in tables.own()
        more = f"tables/{paper}/{CLASSES}.yaml asks it by token class" if asked else "no spec asks it"
        yield f"Windows do not say which tokens make the difference; {more}."
    wanted = set(chain.from_iterable(one.spec.cross_checks for one in judged))
    bare = sorted(wanted - {name for _, name in count})
    if bare:
        yield f"Not measured yet: {', '.join(bare)}."


def _classes(flow: Workflow, paper: str) -> Iterator[str]:
    """By model and cross-check, what each class of tokens adds to the difference of two recovered shares.

    The spec CLASSES has a class a row, a text a column, and two pairs of measures, damage and what of it is recovered:
    of the loss, and of KL. A share is recovered damage over damage, each summed over classes; the first text's loss is
    what the cross-checks are compared with.
    """
    if (paper, CLASSES) not in tables.own():
        return
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
    if rows:
        title = "Which tokens make the difference: points of the recovered share, by class; ← at the largest"
        yield markdown(Sheet(title, [f"less that of {texts[0]}", "all tokens", *classes], rows, left=1))


def _questions(flow: Workflow, paper: str) -> Iterator[str]:
    """The specs of our own, such as what the paper leaves open; of rows without any measured cell their names."""
    for one, name in tables.own():
        if one != paper:
            continue
        results = table_results.table_results(flow, paper, name)
        yield f"## {name[0].upper()}{name[1:]}"
        measured = {m.row for m in results.measurements if m.status in SHOWN}
        if measured:
            yield markdown(content.sheet(results, only=measured))
        if rows := "; ".join(dict.fromkeys(cell.row for cell in results.cells if cell.row not in measured)):
            yield f"{tables.table(paper, name).title}. " * (not measured) + f"Not measured yet: {rows}."


def _findings(paper: str, shown: set[str]) -> Iterator[str]:
    """The audit, as footnotes by id; those of tables without a claim are named here."""
    findings = papers.audit(paper)
    yield "## Where the paper and its own numbers differ"
    rest = [f"[^{f.id}]" for f in findings if not shown & set(f.table.split("; "))]
    yield f"{len(findings)} findings; at the tables above, and elsewhere: {' '.join(rest) or 'none'}."
    notes = []
    for f in findings:
        where = f"Table {f.table}" if f.table[:1].isdigit() else f.table
        text = f"{where}, {f.cell}: printed {f.printed}; recomputed {f.recomputed}; difference {f.difference}."
        notes.append(f"[^{f.id}]: " + text.replace("<", "\\<"))
    yield "\n".join(notes)
