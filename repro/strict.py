"""YAML or JSON meets a frozen dataclass once, strictly: an unknown key, a missing key or a wrong type stops here."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from repro.errors import UserError, unknown

T = TypeVar("T")


class Loader(yaml.SafeLoader):
    """YAML in which a key that is given twice is an error, as it would hide the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """A mapping with each key once."""
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"line {node.start_mark.line + 1}: key {key!r} is given twice")
        return super().construct_mapping(node, deep)


def load_yaml(path: Path) -> Any:
    """Parse a YAML file.

    Raises:
        UserError: the file is missing, unreadable or not YAML.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{path}: not valid YAML ({first})") from None


def build(cls: type[T], data: Any, where: str) -> T:
    """Build dataclass `cls` from a mapping; `where` names the file and key in messages.

    Raises:
        UserError: a key that `cls` does not have, a required key that is missing, or a value of another type.
    """
    if not isinstance(data, Mapping):
        raise UserError(f"{where}: expected a mapping with keys of {cls.__name__}, got {_say(data)}")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            raise UserError(f"{where}: {unknown('key', key, fields)}")
    hints = typing.get_type_hints(cls)
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = convert(hints[name], data[name], f"{where}: {name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UserError(f"{where}: key {name!r} is missing")
    return cls(**values)


def convert(kind: Any, value: Any, where: str) -> Any:
    """Convert one value to the annotated type `kind`, recursively, without guessing."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        inner = [a for a in args if a is not type(None)]
        for choice in inner:
            try:
                return convert(choice, value, where)
            except UserError:
                if choice is inner[-1]:
                    raise
    if origin is typing.Literal:
        if value not in args:
            raise UserError(f"{where}: {unknown('value', value, args)}")
        return value
    if dataclasses.is_dataclass(kind):
        return build(kind, value, where)  # type: ignore[arg-type]
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise UserError(f"{where}: expected a mapping, got {_say(value)}")
        return {convert(args[0], k, f"{where} key"): convert(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            raise UserError(f"{where}: expected a list, got {_say(value)}")
        return origin(convert(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(f"{where}: expected {kind.__name__}, got {_say(value)}")
    return value


def _say(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 60 else text[:57] + '...'}"
