"""Recipe text below the level of steps: split outside brackets, read and write YAML values."""

import json
import math
import re
from collections.abc import Container, Iterable
from functools import cache
from typing import Any

import yaml

from repro.core import strict

DEEPEST = 20  # brackets; PyYAML recurses
SHOWN = 60  # characters of a text in a message
PAIRS = {"(": ")", "[": "]", "{": "}"}
EXPONENT = r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE]"


class _Loader(strict.Loader):
    """YAML values with floats such as 5e-05, and without dates and aliases."""

    yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
        for first, pairs in strict.Loader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        """A node; an alias is refused, as a few of them make a value of any size."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias is not allowed")
        return super().compose_node(parent, index)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(EXPONENT + "[-+]?[0-9]+$"), list("-+.0123456789"))


def split(text: str, separator: str) -> list[str]:
    """The parts of `text` between separators, except those in brackets, in quotes or in a number such as 5e-05.

    Raises:
        ValueError: brackets or quotes are unbalanced, or brackets are nested too deep.
    """
    parts, start, closing, quote, previous, i = [], 0, [], "", " ", 0
    while i < len(text):
        c = text[i]
        if quote:
            if c == "\\" and quote == '"' or text[i : i + 2] == "''" and quote == "'":
                i += 1
            elif c == quote:
                quote = ""
        elif c in "'\"" and previous in "=([{,:":
            quote = c
        elif c in PAIRS:
            closing.append(PAIRS[c])
            if len(closing) > DEEPEST:
                raise ValueError(f"brackets are nested more than {DEEPEST} deep")
        elif c in PAIRS.values():
            if not closing or closing.pop() != c:
                raise ValueError(f"unbalanced brackets: {c!r} closes nothing")
        elif c == separator and not closing and not (c in "+-" and _in_number(text, i)):
            parts.append(text[start:i])
            start = i + 1
        previous = previous if c.isspace() else c
        i += 1
    if quote or closing:
        raise ValueError(f"unbalanced brackets or quotes: {(quote or closing[-1])!r} is missing")
    return [*parts, text[start:]]


def widths(words: Iterable[str], fields: Container[str]) -> list[str]:
    """The options of a step with `w2a16` as `w2` and `a16`; the latter only where a step quantizes its inputs."""
    options = []
    for word in words:
        both = None if word in fields else re.fullmatch("(w[0-9]{1,9})(a[0-9]{1,9})", word)
        options += [word] if both is None else [both[1], both[2]]
        if both and both[2] == "a16" and "act_bits" not in fields:
            options.pop()
    return options


def _in_number(text: str, i: int) -> bool:
    """Whether the sign at `i` belongs to a number, as in `key=-2` and `key=5e-05`."""
    _, equals, value = text[:i].rpartition("=")
    if not equals:
        return False
    if not value:
        return bool(re.match(r"\.?[0-9]|\.inf", text[i + 1 :]))
    return bool(re.fullmatch(EXPONENT, value)) and text[i + 1 : i + 2] in tuple("0123456789")


def read_value(raw: str, name: str, step: str) -> Any:
    """The YAML value of an option; None where there is no text.

    Raises:
        ValueError: it is not one YAML value that JSON can hold.
    """
    try:  # read in brackets, where YAML has no block collections: those would nest without brackets
        values = _bracketed(raw)
        if len(values) > 1:
            raise ValueError
        return _clean(values[0]) if values else None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
        raise ValueError(f"{cut(raw)!r} is no value for {name} of {step}") from None


@cache
def _bracketed(raw: str) -> list:
    """The values of text between brackets, read once: recipes say the same few options thousands of times."""
    return yaml.load(f"[{raw}]", _Loader)


def _clean(value: Any) -> Any:
    """A copy of a YAML value that JSON can hold; ValueError for NaN, infinity and integers of more than 64 bits."""
    if isinstance(value, list):
        return [_clean(v) for v in value]
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    if isinstance(value, float) and math.isfinite(value):
        return value + 0.0  # -0.0 becomes 0.0, which it equals
    if isinstance(value, str):
        value.encode()  # a lone surrogate raises, a ValueError too
    elif value is not None and not (isinstance(value, int) and abs(value) < 2**63):
        raise ValueError
    return value


def write_value(value: Any) -> str:
    """A value as YAML that `read_value` reads back as the same; text is quoted only where it must be."""
    if isinstance(value, list):
        return f"[{', '.join(map(write_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{write_value(k)}: {write_value(v)}' for k, v in value.items())}}}"
    if not isinstance(value, str):
        return json.dumps(value)
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", value) and yaml.load(value, _Loader) == value:
        return value
    quoted = re.sub(r'(["\\])', r"\\\1", value)
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted) + '"'


def cut(text: str, length: int = SHOWN) -> str:
    """`text`, shortened for a message."""
    return text if len(text) <= length else text[: length - 3] + "..."
