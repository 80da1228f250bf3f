"""Measurements: what is written is read back, and `accept` takes whole and well-founded files or nothing."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro import papers, record
from repro.errors import UserError
from repro.files import ROOT
from repro.record import COLUMNS, Measurement, accept, accepted, from_csv, to_csv

CELL = next(c for c in papers.printed("spear", "1") if (c.row, c.col, c.model) == ("RTN pc", "Wiki", "Llama-3.2-3B"))
GOOD = Measurement(
    "spear", "table", "1", CELL.row, CELL.col, CELL.model, CELL.metric, CELL.value,
    value=12.5, lo=12.25, hi=12.75, n=16, unit="ppl", status="ok", grade="C", live="live", stand_in="pocket-5m",
    recipe="rtn-w4-pc", protocol="gptq-2048-v1 on pocket-sample", profile="pocket", device="A CPU (8 cores)",
    commit="0123456789", code="abcdef01", environment='{"python": "3.11"}', note='a "note", with, commas',
)  # fmt: skip
OTHER = dataclasses.replace(GOOD, row="RTN g128", printed="", value=11.0, lo=None, hi=None)


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results"


@pytest.fixture
def file(tmp_path):
    """Write measurements, or a text, to a file of the test's own."""

    def write(*rows, text=None):
        path = tmp_path / "in.csv"
        path.write_text(to_csv(rows) if text is None else text, encoding="utf-8")
        return path

    return write


def everything(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def refused(path, results):
    with pytest.raises(UserError) as error:
        accept(path, results)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)
    return str(error.value)


# --- reading and writing ----------------------------------------------------------------------------------------------

numbers = st.none() | st.floats(-1e30, 1e30).map(lambda x: float(f"{x:.7g}"))
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)


@given(numbers, numbers, st.none() | st.integers(0, 10**9), texts, texts, st.sampled_from(record.STATUSES))
def test_round_trip(tmp_path_factory, value, floor, n, row, note, status):
    made = Measurement("p", "table", "1", row, "c", "m", "ppl", value=value, floor=floor, n=n, note=note, status=status)
    path = tmp_path_factory.getbasetemp() / "round.csv"
    path.write_text(to_csv([made, GOOD]), encoding="utf-8", newline="")
    assert from_csv(path) == [made, GOOD]


def test_seven_digits_and_empty_for_nothing():
    line = to_csv([dataclasses.replace(GOOD, value=1 / 3, lo=1e-9 / 3, hi=2e8 / 3, n=None)]).splitlines()[1]
    assert ",0.3333333,3.333333e-10,6.666667e+07,,ppl," in line


def test_rounding_keeps_the_value_inside_its_interval(file, results):
    ends = dict(value=1.23456789, lo=1.23456788, hi=1.23456790)
    assert accept(file(dataclasses.replace(GOOD, **ends)), results)


@pytest.mark.parametrize("name", ["value", "lo", "hi", "floor"])
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
        (lambda t: t.replace("paper,kind", "kind,paper", 1), "its columns differ in their order"),
        (lambda t: t.replace(",scores\n", "\n", 1), "its columns differ in scores"),
        (lambda t: t[:-60], "line 2: 2"),
        (lambda t: t.replace("12.5,", "12,5,", 1), "line 2: 29 values for 28 columns"),
        (lambda t: t.replace("12.5,", "a lot,", 1), "line 2: value is 'a lot', not a number"),
        (lambda t: t.replace(",16,", ",16.5,", 1), "line 2: n is '16.5', not a number"),
        (lambda t: t.replace(",ok,", ",okay,", 1), "line 2: unknown status 'okay': did you mean 'ok'?"),
        (lambda t: t + "x" * 200_000, "not a CSV file"),
    ],
)
def test_a_file_of_another_shape(file, results, change, reason):
    path = file(text=change(to_csv([GOOD])))
    assert reason in refused(path, results)
    assert not results.exists()


def test_a_file_that_is_absent_binary_or_a_folder(tmp_path, results):
    assert "no such file" in refused(tmp_path / "absent.csv", results)
    assert "no such file" in refused(tmp_path, results)
    (tmp_path / "f").write_bytes(b"\xff\xfe\x00")
    assert "not a CSV file" in refused(tmp_path / "f", results)


# --- accept -----------------------------------------------------------------------------------------------------------


def test_accepts_and_reads_back(file, results):
    assert accept(file(GOOD, OTHER), results) == {str(results / "a-cpu--8-cores" / "spear-table1.csv"): 2}
    assert sorted(accepted("spear", "table", "1", results), key=lambda m: m.row) == [OTHER, GOOD]
    assert accepted("spear", "table", "2", results) == [] and len(accepted(results=results)) == 2


def test_what_was_not_measured_here_is_left_out(file, results):
    rows = [
        dataclasses.replace(GOOD, status="not_run", live="", value=None, lo=None, hi=None),
        dataclasses.replace(GOOD, row="x", printed="", live="recorded"),
        dataclasses.replace(GOOD, row="y", printed="", status="stale"),
    ]
    assert "no measured row" in refused(file(*rows), results)
    assert list(accept(file(*rows, OTHER), results).values()) == [1]
    assert accepted(results=results) == [OTHER]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"paper": "spaer"}, "unknown paper 'spaer': did you mean 'spear'?"),
        ({"number": "99"}, "unknown table '99'"),
        ({"kind": "picture"}, "unknown kind 'picture'"),
        ({"kind": "../../x"}, "unknown kind '../../x'"),
        ({"kind": "figure", "number": "99"}, "unknown figure '99'"),
        ({"printed": "9.99"}, "the paper did not print 9.99 there"),
        ({"row": "RTN pcs"}, "the paper did not print"),
        ({"grade": "E"}, "unknown grade 'E'"),
        ({"grade": ""}, "unknown grade ''"),
        *(
            ({name: ""}, f"{name} is empty; a number without its origin")
            for name in record.PROVENANCE
            if name != "grade"
        ),
        ({"commit": "0123456789+"}, "measured at commit '0123456789+'; commit the code, then measure"),
        ({"commit": "unknown"}, "measured at commit 'unknown'"),
        ({"value": None, "lo": None, "hi": None}, "status ok without a value"),
        ({"value": 12.0}, "12.0 lies outside its interval 12.25 … 12.75"),
        ({"value": 13.0}, "13.0 lies outside its interval"),
        ({"floor": 12.6}, "12.5 is less than the 12.6 that the device allows"),
    ],
)
def test_every_refusal_names_the_cell_and_takes_nothing(file, results, change, reason):
    text = refused(file(OTHER, dataclasses.replace(GOOD, **change)), results)
    assert reason in text and " / Wiki / Llama-3.2-3B: " in text
    assert not results.exists()


def test_a_cell_that_is_given_twice(file, results):
    assert "given twice" in refused(file(GOOD, dataclasses.replace(GOOD, value=12.6)), results)
    assert not results.exists()


def test_a_time_at_the_roofline_is_possible(file, results):
    assert accept(file(dataclasses.replace(GOOD, floor=12.5)), results)


def test_a_figure_is_accepted(file, results):
    number = papers.data_figures("spear")[0].number
    row = dataclasses.replace(GOOD, kind="figure", number=number, printed="")
    assert list(accept(file(row), results)) == [str(results / "a-cpu--8-cores" / f"spear-figure{number}.csv")]


def test_new_values_replace_old_ones_and_nothing_else(file, results):
    full = dataclasses.replace(GOOD, profile="pocket-full", value=12.3)
    accept(file(GOOD, OTHER, full), results)
    again = dataclasses.replace(GOOD, value=12.6, commit="9876543210")
    assert list(accept(file(again), results).values()) == [1]
    assert sorted(accepted(results=results), key=lambda m: m.key) == sorted([OTHER, full, again], key=lambda m: m.key)


def test_devices_and_tables_have_their_own_files(file, results):
    gpu = dataclasses.replace(GOOD, device="NVIDIA H200")
    second = next(c for c in papers.printed("spear", "2"))
    other = dataclasses.replace(
        GOOD, number="2", row=second.row, col=second.col, model=second.model, metric=second.metric, printed=second.value
    )
    accept(file(GOOD, gpu, other), results)
    assert everything(results) == [
        "a-cpu--8-cores/spear-table1.csv", "a-cpu--8-cores/spear-table2.csv", "nvidia-h200/spear-table1.csv",
    ]  # fmt: skip


def test_the_same_file_twice_gives_the_same_bytes(file, results):
    accept(file(OTHER, GOOD), results)
    first = (results / "a-cpu--8-cores" / "spear-table1.csv").read_bytes()
    accept(file(GOOD, OTHER), results)
    assert (results / "a-cpu--8-cores" / "spear-table1.csv").read_bytes() == first


def test_damaged_results_are_not_overwritten(file, results):
    accept(file(GOOD), results)
    stored = results / "a-cpu--8-cores" / "spear-table1.csv"
    stored.write_text("half a file")
    with pytest.raises(UserError, match="not a file of measurements"):
        accept(file(OTHER), results)
    assert stored.read_text() == "half a file"


def test_a_full_disk_leaves_what_was_there(file, results, monkeypatch):
    accept(file(GOOD), results)
    before = (results / "a-cpu--8-cores" / "spear-table1.csv").read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    path = file(OTHER)
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UserError, match="the disk is full"):
        accept(path, results)
    assert everything(results) == ["a-cpu--8-cores/spear-table1.csv"]
    assert (results / "a-cpu--8-cores" / "spear-table1.csv").read_bytes() == before


def test_what_is_stored_was_accepted(tmp_path):
    """Every row under results/ passes `accept` again."""
    for path in (path for paper in papers.PAPERS for path in sorted((ROOT / "results").glob(f"*/{paper}-*.csv"))):
        rows = from_csv(path)
        assert sum(accept(path, tmp_path).values()) == len(rows)


def test_columns_are_the_fields():
    assert COLUMNS == tuple(f.name for f in dataclasses.fields(Measurement))
    assert GOOD.key == ("spear", "table", "1", "RTN pc", "Wiki", "Llama-3.2-3B", GOOD.metric, "pocket")


def test_scores_are_kept_beside_their_row(tmp_path, results):
    frame = tmp_path / "scores.parquet"
    frame.write_bytes(b"per-window scores")
    path = tmp_path / "in.csv"
    path.write_text(to_csv([dataclasses.replace(GOOD, scores=str(frame))]))
    accept(path, results)
    (row,) = accepted(results=results)
    assert (results / row.scores).read_bytes() == b"per-window scores"
    frame.unlink()
    assert "are not there" in refused(path, results)
