"""Recipe text: names with options, in either of two spellings, and YAML values.

    gptq-w4-g128-act_order-percdamp=5e-05        gptq(w=4, g=128, act_order, percdamp=5e-05)

    w4 → bits=4    a8 → act_bits=8    g128 → group=128    r8 → rank=8    pc → group=0    sym / asym → symmetric
    g-1, g=-1 → group=0 (as GPTQ's own code spells it)
    w2a16 → w2 and a16                act_order → act_order=True           percdamp=0.05 → percdamp=0.05

A recipe is such names joined by `+`; a schedule of precisions and a draft are one name.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, get_type_hints

import yaml

from repro.core import strict
from repro.core.errors import UserError, unknown

C = TypeVar("C")

SHORT = {"w": "bits", "a": "act_bits", "g": "group", "r": "rank"}
WORDS = {"pc": ("group", 0), "sym": ("symmetric", True), "asym": ("symmetric", False)}
PER_CHANNEL = -1  # a group elsewhere, such as in GPTQ's own code; here it is 0
SHOWN = 60  # characters of a text in a message
PAIRS = {"(": ")", "[": "]", "{": "}"}
EXPONENT = r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE]"


# --- names and their options ------------------------------------------------------------------------------------------


def names(text: str) -> list[tuple[str, list[str]]]:
    """The names of a text that are joined by `+`, each with the text of its options.

    Raises:
        ValueError: brackets or quotes are unbalanced, or something follows a closing bracket.
    """
    return [_name(part.strip()) for part in _split(text, "+")]


def _name(part: str) -> tuple[str, list[str]]:
    call = re.match(r"([^-=()\[\]{}'\"]*)\(", part)
    if call is None:
        name, *options = _split(part, "-")
        return name, options
    if not part.endswith(")"):
        raise ValueError(f"{cut(part[part.rindex(')') + 1 :])!r} follows the closing bracket of {cut(call[1])!r}")
    inside = part[call.end() : -1]
    return call[1].strip(), [option.strip() for option in _split(inside, ",")] if inside.strip() else []


def _split(text: str, separator: str) -> list[str]:
    """The parts of `text` between separators, except those in brackets, in quotes or in a number such as 5e-05."""
    parts = []
    start = 0
    closing = []
    quote = ""
    previous = " "
    i = 0
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
        elif c in PAIRS.values():
            if not closing or closing.pop() != c:
                raise ValueError(f"unbalanced brackets: {c!r} closes nothing")
        elif c == separator and not closing and not (c in "+-" and _is_sign(text, i)):
            parts.append(text[start:i])
            start = i + 1
        previous = previous if c.isspace() else c
        i += 1
    if quote or closing:
        raise ValueError(f"unbalanced brackets or quotes: {(quote or closing[-1])!r} is missing")
    return [*parts, text[start:]]


def _is_sign(text: str, i: int) -> bool:
    """Whether the sign at `i` belongs to a number, as in `g-1`, `key=-2` and `key=5e-05`."""
    before, after = text[:i], text[i + 1 :]
    if re.search(f"-[{''.join(SHORT)}]$", before):
        return bool(re.match("[0-9]{1,9}(-|$)", after))
    _, equals, value = before.rpartition("=")
    if not equals:
        return False
    if not value:
        return bool(re.match(r"\.?[0-9]|\.inf", after))
    return bool(re.fullmatch(EXPONENT, value)) and after[:1] in tuple("0123456789")


def options(name: str, words: list[str], config: type) -> dict[str, Any]:
    """The fields of a config that options set, with their values, which are not yet checked for their types.

    Args:
        name: whose options they are, for messages.
        words: as `names` gives them.
        config: the dataclass.

    Raises:
        ValueError: no such option, one that is given twice, or a value that is none.
    """
    hints = get_type_hints(config)
    values = {}
    for word in words:
        for option in _single(word, hints):
            key, value = _option(name, option, config, hints)
            if key in values:
                raise ValueError(f"{key} of {name} is given twice")
            values[key] = value
    return values


def _single(word: str, hints: Mapping[str, Any]) -> list[str]:
    """An option with `w2a16` as `w2` and `a16`; the latter only where inputs are quantized."""
    weights_and_inputs = None if word in hints else re.fullmatch("(w[0-9]{1,9})(a[0-9]{1,9})", word)
    if weights_and_inputs is None:
        return [word]
    plain_inputs = weights_and_inputs[2] == "a16" and "act_bits" not in hints
    return [weights_and_inputs[1]] if plain_inputs else [weights_and_inputs[1], weights_and_inputs[2]]


def _option(name: str, word: str, config: type, hints: Mapping[str, Any]) -> tuple[str, Any]:
    """The field that an option sets, and its value."""
    key, equals, raw = (part.strip() for part in word.partition("="))
    short = re.fullmatch("([a-z])(-?[0-9]{1,9})", word)
    if equals:
        key, field = key, key if key in hints else SHORT.get(key, key)
        check_option(name, field, key, config)
        value = _read_value(raw, field, name)
    elif word in WORDS and word not in hints:
        field, value = WORDS[word]
    elif short and short[1] in SHORT and word not in hints:
        field = SHORT[short[1]]
        value = int(short[2])
    else:
        field, value = word, True
    check_option(name, field, key, config)
    if field == word:
        try:
            strict.convert(hints[field], True, field)
        except UserError:
            raise ValueError(f"option {field!r} of {name} needs a value: {field}=...") from None
    return field, 0 if field == "group" and type(value) is int and value == PER_CHANNEL else value


def check_option(name: str, field: str, word: str, config: type) -> None:
    """ValueError where a config has no such field; `word` is the option as it is written."""
    fields = sorted(f.name for f in dataclasses.fields(config) if f.init)
    if field not in fields:
        raise ValueError(f"{name} has no option {cut(word)!r}; options: {', '.join(fields) or 'none'}")


def read_one(text: str, known: Mapping[str, type[C]], what: str) -> C:
    """The config of a text that is one name with options.

    Args:
        text: such as `flexquant(threshold=2.0, layers=4)`.
        known: name to the dataclass of its options.
        what: is named, for messages, such as `draft`.

    Raises:
        UserError: another name, an unknown option, or a value that it cannot have.
    """
    where = f"{what} {cut(text)!r}"
    try:
        ((name, words), *more) = names(text)
        if more or name not in known:
            raise unknown(what, cut(text), known)
        return strict.build(known[name], options(name, words, known[name]), where)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


# --- values -----------------------------------------------------------------------------------------------------------


class _Loader(strict.Loader):
    """YAML values with floats such as 5e-05, and without dates."""

    yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
        for first, pairs in strict.Loader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(EXPONENT + "[-+]?[0-9]+$"), list("-+.0123456789"))


def _read_value(raw: str, field: str, name: str) -> Any:
    """The YAML value of an option; None where there is no text."""
    try:  # read in brackets, where YAML has no block collections
        values = _bracketed(raw)
        if len(values) > 1:
            raise ValueError
        return _clean(values[0]) if values else None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ValueError(f"{cut(raw)!r} is no value for {field} of {name}") from None


@cache
def _bracketed(raw: str) -> list:
    """The values of text between brackets, read once: recipes say the same few options thousands of times."""
    return yaml.load(f"[{raw}]", _Loader)


def _clean(value: Any) -> Any:
    """A copy of a YAML value that JSON can hold; ValueError for NaN, infinity and bytes."""
    if isinstance(value, list):
        return [_clean(v) for v in value]
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    if isinstance(value, float) and math.isfinite(value):
        return value + 0.0  # -0.0 becomes 0.0, which it equals
    if not (value is None or isinstance(value, str | int)):
        raise ValueError
    return value


def write_value(value: Any) -> str:
    """A value as YAML that is read back as the same; text is quoted only where it must be."""
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
