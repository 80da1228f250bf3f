"""Measurements: what is written is read back, and a file of another shape is one sentence."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro import papers
from repro.core.errors import UserError
from repro.store import measurement
from repro.store.measurement import COLUMNS, Measurement, from_csv, inputs_hash, to_csv
from repro.store.stored_row import slug

CELL = next(c for c in papers.printed("spear", "1") if (c.row, c.col, c.model) == ("RTN pc", "Wiki", "Llama-3.2-3B"))
GOOD = Measurement(
    "spear", "table", "1", CELL.row, CELL.col, CELL.model, CELL.metric, CELL.value,
    value=12.5, lo=12.25, hi=12.75, covers="windows only", n=16, unit="ppl", status="ok", grade="C", source="fresh",
    scale="pocket", stand_in="pocket-5m", recipe="rtn-w4-pc", seeds="0 1", protocol="gptq-2048-v1 on tiny-wikitext",
    device="A CPU (8 cores)", device_class="cpu", commit="0123456789", inputs="abcdef01", versions="perplexity=1 rtn=1",
    artifacts="0a1b2c3d4e5f", observations="5d6c59b4f1e08897 1831142177815f64", environment='{"python": "3.11"}',
    note='a "note", with, commas',
)  # fmt: skip

numbers = st.none() | st.floats(-1e30, 1e30).map(lambda x: float(f"{x:.7g}"))
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)


@pytest.fixture
def file(tmp_path):
    """Write measurements, or a text, to a file of the test's own."""

    def write(*rows, text=None):
        path = tmp_path / "in.csv"
        path.write_text(to_csv(rows) if text is None else text, encoding="utf-8")
        return path

    return write


@given(numbers, numbers, st.none() | st.integers(0, 10**9), texts, texts, st.sampled_from(measurement.STATUSES))
def test_a_measurement_is_read_back_as_it_was_written(tmp_path_factory, value, floor, n, row, note, status):
    made = Measurement(
        "p", "table", "1", row, "c", "m", "ppl", value=value, lower_bound=floor, n=n, note=note, status=status
    )
    path = tmp_path_factory.getbasetemp() / "round.csv"
    path.write_text(to_csv([made, GOOD]), encoding="utf-8", newline="")
    assert from_csv(path) == [made, GOOD]


def test_seven_digits_and_empty_for_nothing():
    line = to_csv([dataclasses.replace(GOOD, value=1 / 3, lo=1e-9 / 3, hi=2e8 / 3, n=None)]).splitlines()[1]
    assert ",0.3333333,3.333333e-10,6.666667e+07,windows only,,ppl," in line


@pytest.mark.parametrize("name", ["value", "lo", "hi", "lower_bound"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_no_number_that_is_not_finite_is_written_or_read(file, name, bad):
    with pytest.raises(UserError, match="not finite is a status"):
        to_csv([dataclasses.replace(GOOD, **{name: bad})])
    text = to_csv([dataclasses.replace(GOOD, **{name: 77.5})]).replace("77.5", str(bad))
    with pytest.raises(UserError, match=f"line 2: {name} is {bad}"):
        from_csv(file(text=text))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: "", "its columns differ in "),
        (lambda t: t.replace("paper,kind", "paper,sort", 1), "its columns differ in kind, sort"),
        (lambda t: t.replace("paper,kind", "kind,paper", 1), "its columns differ in order"),
        (lambda t: t.replace(",observations,", ",scores,", 1), "its columns differ in observations, scores"),
        (lambda t: t[:-60], "line 2: 2"),
        (lambda t: t.replace("12.5,", "12,5,", 1), f"line 2: {len(COLUMNS) + 1} values for {len(COLUMNS)} columns"),
        (lambda t: t.replace("12.5,", "a lot,", 1), "line 2: value is 'a lot', not a number"),
        (lambda t: t.replace(",16,", ",16.5,", 1), "line 2: n is '16.5', not a number"),
        (lambda t: t.replace(",ok,", ",okay,", 1), "line 2: unknown status 'okay'; did you mean 'ok'?"),
        (lambda t: t + "x" * 200_000, "not a CSV file"),
    ],
)
def test_a_file_of_another_shape(file, change, reason):
    path = file(text=change(to_csv([GOOD])))
    with pytest.raises(UserError) as error:
        from_csv(path)
    assert str(error.value).startswith(str(path)) and reason in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_absent_binary_or_a_folder(tmp_path):
    (tmp_path / "f").write_bytes(b"\xff\xfe\x00")
    for name, reason in (("absent.csv", "cannot be read"), ("", "cannot be read"), ("f", "not a text file in UTF-8")):
        with pytest.raises(UserError, match=reason):
            from_csv(tmp_path / name)


def test_columns_are_the_fields():
    assert COLUMNS == tuple(f.name for f in dataclasses.fields(Measurement))
    assert GOOD.key == ("spear", "table", "1", "RTN pc", "Wiki", "Llama-3.2-3B", GOOD.metric, "pocket")
    assert GOOD.where == "spear table 1 / RTN pc / Wiki / Llama-3.2-3B / wikitext2_ppl"


def test_declared_inputs_are_hashed_by_value():
    assert (
        inputs_hash({"a": 1, "b": [2, 3]}) == inputs_hash({"b": [2, 3], "a": 1}) != inputs_hash({"a": 1, "b": [3, 2]})
    )


def test_a_device_names_its_folder():
    assert slug("NVIDIA H200") == "nvidia-h200"
    assert slug("../../etc passwd") == "etc-passwd"
