"""Strict parsing of YAML and JSON into frozen dataclasses: unknown keys, missing keys and wrong types are errors."""

import contextlib
import dataclasses
import math
import types
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from yaml.constructor import SafeConstructor

from repro.core.errors import UserError, shortened, unknown
from repro.core.files import HOME, regular, unreadable

T = TypeVar("T")


class Strict(SafeConstructor):
    """YAML in which a key that is given twice is an error, as it would hide the first, and no code is run."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """A value; for one that PyYAML cannot read, the error names its line."""
        try:
            value = super().construct_object(node, deep)
            if not isinstance(value, int) or abs(value) < 2**63:
                return value
        except (ValueError, LookupError, AttributeError):  # 2024-99-99, 5,000 digits, `!!int ""`, `!!timestamp x`
            pass
        kind = node.tag.rpartition(":")[2]
        line = node.start_mark.line + 1
        raise yaml.YAMLError(f"line {line}: {shortened(node.value)!r} is no {kind} that can be read")

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """A mapping with each key once."""
        if not isinstance(node, yaml.MappingNode):  # such as `!!map [1]`
            return super().construct_mapping(node, deep)
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if twice := [key for key, count in Counter(keys).items() if count > 1]:
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: key {shortened(twice[0])!r} is given twice")
        return super().construct_mapping(node, deep)


class Loader(Strict, yaml.SafeLoader):
    """A strict loader with PyYAML's own parser."""


class FastLoader(Strict, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """A strict loader with the parser in C, if PyYAML has it: five times as fast."""


def load_yaml(path: Path) -> Any:
    """Parse a YAML file.

    Raises:
        UserError: the file is missing, unreadable or not YAML.
    """
    try:
        text = regular(path, shown(path)).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{shown(path)}: no such file") from None
    except OSError as error:
        raise unreadable(shown(path), error, "name a YAML file") from None
    except ValueError as error:  # not UTF-8, or a path with a NUL character
        raise UserError(f"{shown(path)}: not valid YAML ({shortened(error, 120)})") from None
    return parse_yaml(text, shown(path))


def shown(path: Path) -> str:
    """A file as messages name it: relative to the checkout if it is inside."""
    return shortened(path.relative_to(HOME) if path.is_relative_to(HOME) else path, 200)


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML text; `where` names it in messages.

    Raises:
        UserError: it is not YAML.
    """
    with contextlib.suppress(yaml.YAMLError):
        return yaml.load(text, FastLoader)
    try:
        return yaml.load(text, Loader)  # errors are in the words of this parser everywhere
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UserError(f"{where}: not valid YAML ({line}{shortened(error.problem, 120)})") from None
    except yaml.YAMLError as error:
        raise UserError(f"{where}: not valid YAML ({shortened(str(error).splitlines()[0], 160)})") from None


def build(cls: type[T], data: Any, where: str) -> T:
    """Build dataclass `cls` from a mapping; `where` names the file and key in messages.

    Raises:
        UserError: a key that `cls` does not have, a required key that is missing, or a value of another type.
    """
    if not isinstance(data, Mapping):
        raise UserError(f"{where}: expected a mapping with keys of {cls.__name__}, got {_described(data)}")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            raise UserError(f"{where}: {unknown('key', key, fields)}")
    hints = _hints(cls)
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = convert(hints[name], data[name], f"{where}: {name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UserError(f"{where}: key {name!r} is missing")
    try:
        return cls(**values)
    except UserError as error:  # what the dataclass itself checks
        raise UserError(f"{where}: {error}") from None


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def convert(kind: Any, value: Any, where: str) -> Any:
    """Convert one value to the annotated type `kind`, recursively, without guessing."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_to_any_of(args, value, where)
    if origin is typing.Literal:
        if value not in args:
            raise UserError(f"{where}: {unknown('value', value, args)}")
        return value
    if dataclasses.is_dataclass(kind):
        return build(kind, value, where)  # type: ignore[arg-type]
    if origin in (dict, Mapping):
        return _convert_mapping(args, value, where)
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            raise UserError(f"{where}: expected a list, got {_described(value)}")
        return origin(convert(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    return _convert_scalar(kind, value, where)


def _convert_to_any_of(kinds: Sequence[Any], value: Any, where: str) -> Any:
    """Convert to the first type of a union that fits; the error is that of the last one."""
    if value is None and type(None) in kinds:
        return None
    *earlier, last = [kind for kind in kinds if kind is not type(None)]
    for kind in earlier:
        with contextlib.suppress(UserError):
            return convert(kind, value, where)
    return convert(last, value, where)


def _convert_mapping(kinds: Sequence[Any], value: Any, where: str) -> dict[Any, Any]:
    """Convert keys to the first type and values to the second."""
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: expected a mapping, got {_described(value)}")
    key_kind, value_kind = kinds
    converted = {}
    for key, inner in value.items():
        new_key = convert(key_kind, key, f"{where} key")
        converted[new_key] = convert(value_kind, inner, f"{where}.{shortened(key)}")
    return converted


def _convert_scalar(kind: type, value: Any, where: str) -> Any:
    """A number, text or truth value; an integer is also taken for a float, and a number for a text."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}: {value} is not a finite number")
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(f"{where}: expected {kind.__name__}, got {_described(value)}")
    return value


def _described(value: Any) -> str:
    """The type of a value and the start of its text."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 60 else text[:57] + '...'}"
