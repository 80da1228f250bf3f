"""Templates of specs: labels with variables, texts that they fill in, and what measures a printed metric."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from repro import papers
from repro.core.errors import UserError, shortened, unknown
from repro.core.files import ROOT
from repro.core.strict import build, convert, load_yaml
from repro.metrics import KINDS
from repro.papers.cell import Cell
from repro.recipes.recipe import parse

NAMED = re.compile(r"\{([^\W\d]\w*)\}")
Value = bool | int | float | str
Variables = dict[str, Value]
Labels = dict[str, str | Variables] | tuple[str, ...]


def check_pattern(label: str, where: str) -> None:
    """Raise unless the names in a pattern are at most four words, each once.

    Raises:
        UserError: they are not.
    """
    names = re.findall(r"\{(\w+)\}", label)
    if len(set(names)) < len(names) or len(names) > 4 or not all(name.isidentifier() for name in names):
        raise UserError(f"{where}: label {shortened(label)!r}: at most four names in braces, each a word, given once")


def bind(label: str, printed: str) -> dict[str, str] | None:
    """Match a label, or a pattern with `{name}`s, with a printed label: the variables; None if it does not match."""
    parts = re.split(r"\{(\w+)\}", label)
    pattern = "".join(f"(?P<{part}>.+?)" if i % 2 else re.escape(part) for i, part in enumerate(parts))
    match = re.fullmatch(pattern, printed)
    return match.groupdict() if match else None


def variables(labels: Labels, printed: str) -> Variables | None:
    """The variables of the first label or pattern that matches a printed label; None if none does."""
    exact = labels.get(printed) if isinstance(labels, Mapping) else None
    for label in [printed] if exact is not None else labels:
        if (matched := bind(label, printed)) is not None:
            values = labels[label] if isinstance(labels, Mapping) else {}
            values = {"recipe": values} if isinstance(values, str) else dict(values)
            for key, value in values.items():
                names = NAMED.findall(value) if isinstance(value, str) else []
                # A name that the label does not give is one of the column or the model; `fill_in` knows them all.
                if matched.keys() >= set(names):
                    values[key] = fill(value, matched, label)
            return values | matched
    return None


def bound(values: Variables, template: str, tuned: Mapping[str, Value | None]) -> Variables | None:
    """The variables, extended by the tuned ones that the recipe or its template names.

    Args:
        tuned: variable to value, None for one that is not selected yet (`tables.selected_values`).

    Returns:
        None if a variable that is named is not selected yet.
    """
    named = {*NAMED.findall(f"{values.get('recipe')} {template}")} - {"recipe"}
    values = {name: tuned[name] for name in named & tuned.keys()} | values
    return None if None in values.values() else values


def fill(template: Any, values: Mapping[str, Any], where: str) -> Any:
    """Fill in the `{name}`s of a text, or of every text in lists and mappings.

    A text that is nothing but one `{name}` becomes the value with its type; in a longer text, numbers are written as in
    YAML.

    Raises:
        UserError: a name that no row or column gives.
    """
    if isinstance(template, str):
        if (alone := NAMED.fullmatch(template)) and alone[1] in values:
            return values[alone[1]]
        try:
            return filled(template, {key: plain(value) for key, value in values.items()})
        except (KeyError, ValueError) as error:
            problem = f"{where}: the template {shortened(template)!r} names {error}, which is no variable there"
            raise UserError(f"{problem}; choose from: {', '.join(values) or 'none'}") from None
    if isinstance(template, Mapping):
        return {key: fill(value, values, where) for key, value in template.items()}
    if isinstance(template, list | tuple):
        return [fill(value, values, where) for value in template]
    return template


def filled(template: str, values: Mapping[str, Any]) -> str:
    """Fill in the `{name}`s of a text.

    Raises:
        KeyError: a name without a value.
        ValueError: any other use of braces, such as a width or an attribute.
    """
    for odd in re.findall("[^{}]{0,20}[{}][^{}]{0,20}", NAMED.sub("", template)):
        raise ValueError(repr(odd))
    return template.format(**values)


def plain(value: Any) -> Any:
    """A value as a template writes it: short numbers, YAML's true and false."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else value


@cache
def measures(paper: str) -> dict[str, dict[str, Any]]:
    """The measure of each printed metric of a paper: the metric's name here and its parameters.

    Raises:
        UserError: a metric that the paper does not have.
    """
    path = ROOT / "repro" / "papers" / paper / "measures.yaml"
    by_metric = load_yaml(path) if path.is_file() else {}
    by_metric = convert(dict[str, dict[str, Any]], by_metric, str(path.relative_to(ROOT)))
    for metric in by_metric:
        if metric not in papers.metrics(paper):
            raise UserError(f"{path.relative_to(ROOT)}: {unknown('metric', metric, papers.metrics(paper))}")
    return by_metric


@cache
def log_probabilities(paper: str) -> dict[str, dict[str, Any]]:
    """The measure of the log probability next to an accuracy of a paper, by metric or label of a column of our own.

    Raises:
        UserError: the file holds anything else.
    """
    path = ROOT / "repro" / "papers" / paper / "log_probability.yaml"
    by_metric = load_yaml(path) if path.is_file() else {}
    return convert(dict[str, dict[str, Any]], by_metric, str(path.relative_to(ROOT)))


def params_of(measure: Mapping[str, Any], values: Mapping[str, Any], where: str) -> tuple[str, Any]:
    """The kind of a measure and its metric, variables filled in.

    Raises:
        UserError: unknown kind, or a key or value that it does not have.
    """
    if not isinstance(measure, Mapping):
        raise UserError(f"{where}: a measure is a mapping with `kind`, not {shortened(measure)!r}")
    given = fill(measure, values, where)
    kind = given.pop("kind", None)
    if kind not in KINDS:
        raise UserError(f"{where}: {unknown('kind of cell', kind, KINDS)}")
    return kind, build(KINDS[kind], given, f"{where}: {kind}")


def fill_in(
    bare: Cell, template: str, values: Variables, measure: Mapping[str, Any], seeds: tuple[int, ...], where: str
) -> Cell:
    """A cell with its recipe and what measures it; the template of one without variables is of no recipe.

    Raises:
        UserError: as `fill`, `params_of` and `recipe.parse`.
    """
    values = {key: fill(value, values, where) if isinstance(value, str) else value for key, value in values.items()}
    text = parse(fill(template, values, where)).name if template and ("{" not in template or values) else ""
    values = values | {"recipe": text, "model": bare.model}
    kind, params = params_of(measure, values, where)
    drawn = {"seeds": seeds, "calibration": str(values.get("calibration", ""))}
    return replace(bare, measure=kind, params=params, recipe=text, variables=tuple(sorted(values.items())), **drawn)
