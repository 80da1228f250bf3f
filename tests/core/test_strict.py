"""Strict configuration: what is not exactly right stops with the key's place and the nearest right one."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from repro.core import strict
from repro.core.errors import UserError, sentence, unknown
from repro.core.files import HOME
from repro.core.strict import build, load_yaml, parse_yaml


@dataclass(frozen=True)
class Inner:
    corpus: str
    windows: int | None = None


@dataclass(frozen=True)
class Small:
    size: int

    def __post_init__(self):
        if self.size < 1:
            raise UserError(f"size is {self.size}; it must be 1 or more")


@dataclass(frozen=True)
class Outer:
    name: str
    rate: float
    inner: Inner
    kind: Literal["cpu", "cuda"] = "cpu"
    flag: bool = False
    tasks: tuple[str, ...] = ()
    table: dict[str, Inner] = field(default_factory=dict)
    cases: tuple[str | dict[str, str], ...] = ()
    anything: Any = None
    small: Small | None = None


GOOD = {"name": "n", "rate": 2, "inner": {"corpus": "c4"}}


def test_builds_nested_and_keeps_defaults():
    made = build(Outer, GOOD | {"tasks": ["a", "b"], "table": {"x": {"corpus": "y", "windows": 3}}}, "f")
    assert made == Outer("n", 2.0, Inner("c4"), tasks=("a", "b"), table={"x": Inner("y", 3)})
    assert type(made.rate) is float and made.inner.windows is None


def test_unions_take_either_form():
    made = build(Outer, GOOD | {"cases": ["7B", {"model": "13B", "tp": 2}]}, "f")
    assert made.cases == ("7B", {"model": "13B", "tp": "2"})
    assert build(Outer, GOOD | {"inner": {"corpus": "c4", "windows": None}}, "f").inner.windows is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"nmae": "n"}, "f: unknown key 'nmae'; did you mean 'name'? choose from: anything, cases, flag"),
        (
            {"inner": {"corpsu": "c4"}},
            "f: inner: unknown key 'corpsu'; did you mean 'corpus'? choose from: corpus, windows",
        ),
        ({"inner": {"windows": 3}}, "f: inner: key 'corpus' is missing"),
        ({"inner": {"corpus": "c4", "windows": 2.5}}, "f: inner: windows: expected int, got float 2.5"),
        ({"inner": {"corpus": "c4", "windows": True}}, "f: inner: windows: expected int, got bool True"),
        ({"inner": "c4"}, "f: inner: expected a mapping with keys of Inner, got str 'c4'"),
        ({"table": {"x": {"corpus": 1, "window": 3}}}, "f: table.x: unknown key 'window'; did you mean 'windows'?"),
        ({"table": ["x"]}, "f: table: expected a mapping, got list ['x']"),
        ({"rate": "fast"}, "f: rate: expected float, got str 'fast'"),
        ({"rate": True}, "f: rate: expected float, got bool True"),
        ({"rate": float("nan")}, "f: rate: nan is not a finite number"),
        ({"table": {"x" * 500: 1}}, f"f: table.{'x' * 59}…: expected a mapping with keys of Inner, got int 1"),
        ({"small": {"size": 0}}, "f: small: size is 0; it must be 1 or more"),
        ({"name": True}, "f: name: expected str, got bool True"),
        ({"name": None}, "f: name: expected str, got NoneType None"),
        ({"flag": 1}, "f: flag: expected bool, got int 1"),
        ({"kind": "cude"}, "f: kind: unknown value 'cude'; did you mean 'cuda'? choose from: cpu, cuda"),
        ({"tasks": "piqa"}, "f: tasks: expected a list, got str 'piqa'"),
        ({"tasks": ["piqa", None]}, "f: tasks[1]: expected str, got NoneType None"),
        ({"cases": [["7B"]]}, "f: cases[0]: expected a mapping, got list ['7B']"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(change, sentence):
    with pytest.raises(UserError) as error:
        build(Outer, GOOD | change, "f")
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize("key", ["name", "rate", "inner"])
def test_a_missing_key_is_named(key):
    with pytest.raises(UserError, match=f"^f: key '{key}' is missing$"):
        build(Outer, {k: v for k, v in GOOD.items() if k != key}, "f")


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_only_a_mapping_is_a_configuration(data):
    with pytest.raises(UserError, match="^f: expected a mapping with keys of Outer, got"):
        build(Outer, data, "f")


def test_long_values_are_cut_in_messages():
    with pytest.raises(UserError) as error:
        build(Outer, GOOD | {"rate": "x" * 500}, "f")
    assert len(str(error.value)) < 120 and str(error.value).endswith("...")


@given(st.text(min_size=1, max_size=12).filter(lambda t: t not in Outer.__dataclass_fields__))
def test_no_unknown_key_passes(key):
    with pytest.raises(UserError, match="unknown key"):
        build(Outer, GOOD | {key: 1}, "f")


def test_unknown_says_what_is_close_and_what_there_is():
    assert (
        str(unknown("verb", "maek", ["make", "show"]))
        == "unknown verb 'maek'; did you mean 'make'? choose from: make, show"
    )
    assert str(unknown("verb", "zzz", [])) == "unknown verb 'zzz'; choose from: none yet"
    assert str(unknown("verb", "x", ["make", "make"])) == "unknown verb 'x'; choose from: make"
    many = str(unknown("verb", "x" * 5000, [f"verb{i:03}" for i in range(60)]))
    assert "verb000, verb001, " in many and many.endswith(", …") and len(many) < 350


def test_one_line_of_at_most_400_characters():
    assert sentence(UserError("a\n  b")) == "error: a b"
    assert len(sentence(UserError("x" * 5000))) < 400


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a: [1", "not valid YAML"),
        (b"a: \xff", "not valid YAML"),
        (b"a: !!python/object/apply:os.getcwd []", "not valid YAML"),
        (b"rows:\n  RTN pc: rtn-w4-pc\n  RTN pc: rtn-w3-pc\n", "line 2: key 'RTN pc' is given twice"),
        (b"a:\n\tb: 1\n", "line 2: found character"),
        (b"\x00", "unacceptable character #x0000"),
        (b"a: *b", "line 1: found undefined alias 'b'"),
        (b"a: 2024-99-99", "line 1: '2024-99-99' is no timestamp that can be read"),
        (b"a: " + b"9" * 5000, "is no int that can be read"),
        (b"a: 0x" + b"f" * 5000, "is no int that can be read"),
        (b"a: 9223372036854775808", "'9223372036854775808' is no int that can be read"),
        (b'a: !!int ""', "line 1: '' is no int that can be read"),
        (b"a: !!bool x", "line 1: 'x' is no bool that can be read"),
        (b"a: !!timestamp x", "line 1: 'x' is no timestamp that can be read"),
        (b"a: !!map [1]", "line 1: expected a mapping node"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path, content, reason):
    path = tmp_path / "f.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        load_yaml(path)
    assert str(error.value).startswith(f"{path}: ") and reason in str(error.value)
    assert "\n" not in str(error.value)


def test_the_parser_in_c_reads_the_same_and_what_is_wrong_is_said_by_the_other(monkeypatch):
    text = (HOME / "tables" / "spear" / "table1.yaml").read_text()
    text += "base: &b {<<: {1: 2024-01-01}}\nmore: [*b, 0x1f, ~, 1_000, 'ä\u2028']\n"
    assert yaml.load(text, strict.FastLoader) == yaml.load(text, strict.Loader) == parse_yaml(text, "f")
    with pytest.raises(UserError, match="expected the node content"):
        parse_yaml("a: [", "f")
    monkeypatch.setattr(strict, "Loader", None)
    assert not yaml.__with_libyaml__ or parse_yaml("a: [1]", "f") == {"a": [1]}


def test_a_file_that_is_absent_or_a_folder(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        load_yaml(tmp_path / "absent.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        load_yaml(tmp_path)


def test_good_yaml_reads_as_ever(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_text("base: &b {x: 1, y: [1, 2]}\nother: {<<: *b, x: 2}\n3: {x: a}\n")
    assert load_yaml(path) == yaml.safe_load(path.read_text()) == {
        "base": {"x": 1, "y": [1, 2]}, "other": {"x": 2, "y": [1, 2]}, 3: {"x": "a"},
    }  # fmt: skip
