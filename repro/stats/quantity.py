"""Quantities: the series behind a value, one set per seed, and the expression of their means.

A cell is a quantity, and so is any arithmetic over cells: a ratio to full precision, a recovered share, a claim. Series
of one group (a corpus under a protocol, a task) are paired wherever they meet.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from itertools import chain, product
from typing import Any

import numpy as np

from repro.core.errors import UserError, shortened, unknown
from repro.stats import statistics
from repro.store.observations import Series

OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
}
FUNCTIONS = {
    "min": lambda *v: np.minimum.reduce(np.broadcast_arrays(*v) if len(v) > 1 else v[0]),  # of one: over its layers
    "max": lambda *v: np.maximum.reduce(np.broadcast_arrays(*v) if len(v) > 1 else v[0]),
    "geomean": lambda *v: np.exp(np.mean(np.log(np.broadcast_arrays(*v) if len(v) > 1 else v[0]), axis=0)),
}


@dataclass(frozen=True, eq=False)
class Quantity:
    """The series and the expression from which a value is computed.

    Attributes:
        seeds: name to series, one mapping per seed; a single one if no seed matters.
        value: maps the means by name, numbers or arrays, to the value.
        compares: whether it is itself a comparison of two models on the same units (KL); None leaves that to the
            number of series.
        known: results of which only value and interval are known (a recorded time), by name.
        limits: the least and the greatest possible value; intervals are cut off there.
        draws: random draws of which one seed ran, by the name of their source; cells of one compressed model share
            them.
        branches: returns the expressions of which the value is the least or the greatest, if it has a `min` or `max`
            of several arguments; otherwise nothing.
    """

    seeds: Sequence[Mapping[str, Series]]
    value: Callable[[Mapping[str, Any]], Any]
    compares: bool | None = None
    known: Mapping[str, statistics.Interval] | None = None
    limits: tuple[float, float] = (-math.inf, math.inf)
    draws: Mapping[str, statistics.Draw] = field(default_factory=dict)
    branches: Callable[[], Sequence[Callable[[Mapping[str, Any]], Any]]] = tuple

    def interval(self) -> statistics.Interval:
        """The value with its interval.

        Raises:
            UserError: seeds with different series or numbers of units, or a value that is no finite number.
        """
        return self._interval

    @cached_property
    def _interval(self) -> statistics.Interval:
        """The cached interval: resampling takes long, and verdicts, tables, figures and pages all need it."""
        draws = list(self.draws.values())
        interval = statistics.interval(self.seeds, self.value, self.compares, self.known, draws, self.branches())
        if interval.lo is None or interval.hi is None:
            return interval
        return replace(interval, lo=max(interval.lo, self.limits[0]), hi=min(interval.hi, self.limits[1]))


def compose(expression: str, operands: Mapping[str, Quantity]) -> Quantity:
    """Arithmetic over quantities; an operand with one seed takes part in every seed.

    Raises:
        UserError: a name that is no identifier, or operands with different numbers of seeds. An error in the expression
            itself is raised when its value is computed.
    """
    for name in operands:
        if not name.isidentifier():
            raise UserError(f"{expression}: {name!r} is not a name; use letters, digits and underscores")
    counts = {name: len(operand.seeds) for name, operand in operands.items()}
    seeds = max(counts.values(), default=1)
    if set(counts.values()) - {0, 1, seeds}:
        raise UserError(f"{expression}: its cells have different numbers of seeds: {counts}")
    merged: list[dict[str, Series]] = [{} for _ in range(seeds)]
    for name, operand in operands.items():
        for i, target in enumerate(merged):
            if operand.seeds:
                series = operand.seeds[i if len(operand.seeds) > 1 else 0]
                target |= {f"{name}:{key}": of_key for key, of_key in series.items()}
    known_intervals: dict[str, statistics.Interval] = {}
    for name, operand in operands.items():
        known_intervals |= {f"{name}:{key}": interval for key, interval in (operand.known or {}).items()}

    def value_of(text: str) -> Callable[[Mapping[str, Any]], Any]:
        def value(mean: Mapping[str, Any]) -> Any:
            split: dict[str, dict[str, Any]] = {name: {} for name in operands}
            for key, of_key in mean.items():
                name, _, inner = key.partition(":")
                split[name][inner] = of_key
            return evaluate(text, {name: operand.value(split[name]) for name, operand in operands.items()})

        return value

    def branches() -> list[Callable[[Mapping[str, Any]], Any]]:
        return [value_of(text) for text in choices(expression)]

    alone = next(iter(operands.values())).compares if len(operands) == 1 else None
    compares = True if any(operand.compares for operand in operands.values()) else alone
    limits = operands[expression].limits if expression in operands else Quantity.limits
    return Quantity(merged, value_of(expression), compares, known_intervals or None, limits, _draws(operands), branches)


def _draws(operands: Mapping[str, Quantity]) -> dict[str, statistics.Draw]:
    """The draws of all operands; the effects of a draw that several share are joined."""
    merged: dict[str, statistics.Draw] = {}
    for name, operand in operands.items():
        for source, draw in operand.draws.items():
            effects = {f"{name}:{key}": effect for key, effect in draw.effects.items()}
            before = merged[source].effects if source in merged else {}
            merged[source] = statistics.Draw({**before, **effects}, draw.df)
    return merged


def on_same_windows(quantities: Sequence[Quantity]) -> list[Quantity]:
    """Quantities cut to the windows that all of them have: if one is of `TEXT, first 32`, those of TEXT are cut to 32.

    They are then paired, and compared on the same text.
    """
    first: dict[str, int] = {}
    for quantity in quantities:
        for seed in quantity.seeds:
            for series in seed.values():
                if match := re.fullmatch(r"(.*), first (\d+)", series.group):
                    first[match[1]] = min(int(match[2]), first.get(match[1], len(series.values)))

    def cut(series: Series) -> Series:
        base = series.group.partition(", first ")[0]
        if base not in first:
            return series
        return Series(series.values[: first[base]], series.axis, f"{base}, first {first[base]}")

    trimmed = []
    for quantity in quantities:
        seeds = []
        for seed in quantity.seeds:
            seeds.append({name: cut(series) for name, series in seed.items()})
        trimmed.append(replace(quantity, seeds=seeds))
    return trimmed


def constant(x: float) -> Quantity:
    """A number without spread."""
    return Quantity([{"x": Series(np.asarray([x], dtype=float), "model")}], lambda mean: mean["x"])


def evaluate(expression: str, values: Mapping[str, Any]) -> Any:
    """Arithmetic and comparisons over named numbers or arrays; nothing else is allowed.

    Raises:
        UserError: an unknown name, or anything that is not arithmetic.
    """
    try:
        tree = ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise UserError(f"predicate {shortened(expression)!r}: not an expression") from None
    try:
        with np.errstate(all="ignore"):  # what is not finite is refused where a number is needed
            return _value_of(tree.body, values, expression)
    except ZeroDivisionError:
        raise UserError(f"predicate {shortened(expression)!r}: divides by zero") from None
    except RecursionError:
        raise UserError(f"predicate {shortened(expression)!r}: nested too deeply") from None
    except (TypeError, ValueError) as error:  # shapes, or a number of arguments, that a function does not take
        raise UserError(f"predicate {shortened(expression)!r}: cannot be computed ({error!s:.80})") from None


def _value_of(node: ast.AST, values: Mapping[str, Any], expression: str) -> Any:
    """The value of a node of an expression's syntax tree.

    Args:
        node: the node.
        values: by name.
        expression: the whole text, for messages.

    Raises:
        UserError: an unknown name, or anything that is not arithmetic.
    """
    value = partial(_value_of, values=values, expression=expression)
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.Name(id=name):
            if name not in values:
                raise UserError(f"predicate {shortened(expression)!r}: {unknown('name', name, values)}")
            return values[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(left), value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value(operand)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS and args:
            return FUNCTIONS[name](*map(value, args))
        case ast.BoolOp(op=ast.And(), values=parts):
            return reduce(np.logical_and, map(value, parts))
        case ast.Compare(left=left, ops=ops, comparators=rights) if all(type(op) in OPERATORS for op in ops):
            sides = [value(left), *map(value, rights)]
            pairs = zip(ops, sides, sides[1:])
            return reduce(np.logical_and, (OPERATORS[type(op)](a, b) for op, a, b in pairs))
    raise UserError(
        f"predicate {shortened(expression)!r}: only arithmetic, {', '.join(FUNCTIONS)} and comparisons are allowed"
    )


def names_in(expression: str) -> set[str]:
    """The names in an expression, functions included: `min(a, 1 / t)` has min, a and t."""
    return set(re.findall(r"[A-Za-z_]\w*", expression))


def choices(expression: str) -> list[str]:
    """An expression with each `min` and `max` of several arguments replaced by one of them, in every combination.

    `max(a, b) / min(a, b)` becomes a / a, a / b, b / a and b / b; empty where there is no such call.
    """
    branches = [ast.unparse(tree) for tree in _alternatives(ast.parse(expression, mode="eval").body)]
    return list(dict.fromkeys(branches)) if len(branches) > 1 else []


def _alternatives(node: ast.expr) -> list[ast.expr]:
    """The trees in which each `min` and `max` of several arguments is replaced by one of them."""
    match node:
        case ast.Call(func=ast.Name(id="min" | "max"), args=[_, _, *_] as args):
            return list(chain.from_iterable(map(_alternatives, args)))
        case ast.BinOp(left=left, op=op, right=right):
            pairs = product(_alternatives(left), _alternatives(right))
            return [ast.BinOp(left_branch, op, right_branch) for left_branch, right_branch in pairs]
        case ast.UnaryOp(op=op, operand=operand):
            return [ast.UnaryOp(op, tree) for tree in _alternatives(operand)]
    return [node]


def satisfied(holds: str, x: Any) -> Any:
    """Whether `x` satisfies a comparison such as `>= 0.5` or `0.1 <= x <= 0.2`."""
    result = evaluate(holds if re.search(r"\bx\b", holds) else f"x {holds}", {"x": x})
    if np.asarray(result).dtype != bool:
        raise UserError(f"predicate {shortened(holds)!r}: not a comparison; write one such as >= 0.5")
    return result
