"""A stored row that was edited is never shown: each edit is refused in a sentence that names the row and the field."""

import csv
import json
import shutil
from dataclasses import replace

import pytest
from tiny_results import MODEL, refusal

from repro.core.files import atomic, csv_text, read_text, write_text
from repro.results.accept import accept
from repro.store import accepted, observations, row_list
from repro.store.measurement import COLUMNS, from_csv
from repro.store.observations import FILE
from repro.workflow import runner
from repro.workflow.workflow import Workflow

ROW = ("RTN pc", "Wiki", MODEL)  # an ordinary row
SEVERAL = ("GPTQ g128", "Wiki", MODEL)  # one of two seeds
REFUSED = ("+SPEAR pc on RTN", "Wiki", MODEL)  # one without a value
OTHER = {  # what a field is edited to
    "paper": "spqt",
    "kind": "figure",
    "number": "2",
    "value": "-5",
    "lo": "1",
    "hi": "1000000",
    "n": "7",
    "status": "at_chance",
    "grade": "A",
    "source": "fresh",
    "scale": "gpu",
    "recipe": "rtn-w8-pc",
    "seeds": "3",
    "device": "NVIDIA H200",
    "device_class": "cuda",
    "commit": "fedcba9876",
    "inputs": "00000000",
    "versions": "rtn=2",
    "artifacts": "",
    "observations": "",
    "environment": "{}",
    "lower_bound": "3",
    "note": "measured by hand",
    "digest": "0" * 16,
}


@pytest.fixture
def stored(house):
    """`house` with everything accepted."""
    accept(house.table())
    return house


def lines_of(house) -> tuple:
    """The path and the lines of the accepted file."""
    (path,) = house.results.glob("*/spear-table1.csv.xz")
    return path, list(csv.reader(read_text(path).splitlines()))


def at(lines, key) -> list[str]:
    """The line of a row, column and model."""
    start = COLUMNS.index("row")
    return next(line for line in lines if tuple(line[start : start + 3]) == key)


def refused(house, path, lines) -> str:
    """What is said when the file holds these lines."""
    write_text(path, csv_text(lines))
    accepted.forget()
    return refusal(accepted.every)


@pytest.mark.parametrize("of_row", [ROW, SEVERAL, REFUSED], ids=["one seed", "two seeds", "refused"])
def test_an_edit_of_any_field_is_named_by_row_and_field(stored, of_row):
    path, lines = lines_of(stored)
    for i, name in enumerate(COLUMNS):
        edited = [list(line) for line in lines]
        line = at(edited, of_row)
        line[i] = OTHER.get(name, "edited") if line[i] != OTHER.get(name) else "edited"
        message = refused(stored, path, edited)
        assert str(path) in message, message
        assert ("digest" if name == "digest" else f"{name} is {line[i]!r}") in message, message
        seen = [line[COLUMNS.index(key)] for key in ("row", "col", "model")]
        assert " / ".join(seen) in message, message


@pytest.mark.parametrize(
    "names",
    [
        ("observations",),
        ("value",),
        ("seeds",),
        ("commit", "environment"),
        ("recipe", "inputs"),
        ("value", "lo", "hi", "n", "observations"),
        ("digest",),
    ],
    ids=" ".join,
)
def test_rows_whose_fields_were_exchanged_are_noticed(stored, names):
    path, lines = lines_of(stored)
    edited = [list(line) for line in lines]
    one, other = at(edited, ROW), at(edited, SEVERAL)
    if names == ("commit", "environment"):  # the same everywhere here
        one[COLUMNS.index("commit")] = "abcdef0123"
    for i in map(COLUMNS.index, names):
        one[i], other[i] = other[i], one[i]
    message = refused(stored, path, edited)
    assert "GPTQ g128" in message or "RTN pc" in message
    assert names == ("digest",) or any(f"{name} is " in message for name in names)


def test_a_value_whose_observations_were_cleared_is_no_traceback(stored):
    path, lines = lines_of(stored)
    for value in ("-5", "", "14.2"):
        edited = [list(line) for line in lines]
        line = at(edited, ROW)
        line[COLUMNS.index("observations")], line[COLUMNS.index("value")] = "", value
        message = refused(stored, path, edited)
        assert "observations is ''" in message and f"value is {value!r}" in message


def test_a_row_that_is_gone_twice_or_new_is_noticed(stored):
    path, lines = lines_of(stored)
    gone = at(lines, ROW)
    for edited, what in (
        ([line for line in lines if line is not gone], "other rows than were accepted"),
        (lines[:-1], "other rows than were accepted"),
        (lines[:1], "other rows than were accepted"),
        ([*lines, gone], "is given twice"),
    ):
        message = refused(stored, path, edited)
        assert what in message and str(path) in message
    path.unlink()
    accepted.forget()
    assert str(path) in refusal(accepted.every) and str(path) in refusal(stored.stored_row)


def test_what_rows_a_file_has_is_listed(stored):
    path, _ = lines_of(stored)
    listed = path.with_name(row_list.NAME)
    whole = listed.read_text()
    for text in (whole.replace(path.name, "spear-table2.csv.xz"), "{}", "[", json.dumps({path.name: "0"})):
        listed.write_text(text)
        accepted.forget()
        message = refusal(accepted.every)
        assert str(listed) in message or "spear-table2.csv.xz" in message
    listed.unlink()
    accepted.forget()
    assert str(listed) in refusal(accepted.every)


def test_a_folder_under_another_devices_name_is_noticed(stored):
    path, lines = lines_of(stored)
    moved = path.parent.rename(path.parent.with_name("nvidia-h200")) / path.name
    accepted.forget()
    assert "does not belong in this file" in refusal(accepted.every)
    edited = [list(line) for line in lines]
    for line in edited[1:]:
        line[COLUMNS.index("device")] = "NVIDIA H200"
    message = refused(stored, moved, edited)
    assert "device is 'NVIDIA H200'" in message


def test_declared_inputs_are_those_of_their_hash(stored):
    path, lines = lines_of(stored)
    facts = path.with_name(accepted.INPUTS)
    write_text(facts, read_text(facts).replace('"act_order":false', '"act_order":true', 1))
    accepted.forget()
    message = refusal(lambda: [accepted.inputs_of(row) for row in accepted.every()])
    assert str(facts) in message and "does not match its hash" in message


def test_a_row_that_was_signed_anew_still_has_to_be_what_its_observations_give(stored):
    path, _ = lines_of(stored)
    rows = from_csv(path)
    for changes, what in (
        ({"value": 10.0}, "is 10, but its observations give"),
        ({"observations": ""}, "has no observations"),
        ({"observations": "0" * 16}, "are not in"),
    ):
        accepted.store(path, [replace(m, **changes) if m.cell_key[:3] == ROW else m for m in rows])
        accepted.forget()
        assert what in refusal(stored.stored_row)


def test_rewrite_changes_and_removes_rows_and_signs_the_others_anew(stored, monkeypatch):
    before = {row.key: row for row in accepted.every()}
    count = len(list((lines_of(stored)[0].parent / "observations").iterdir()))

    def renamed(old):
        kept = old.row.row != "FP16"
        return replace(old, row=replace(old.row, scale="other")) if kept else None

    (rewritten,) = accepted.rewrite(renamed).values()
    after = {row.key: row for row in accepted.every()}
    assert rewritten == len(after) == sum(row.row != "FP16" for row in before.values())
    for key, row in after.items():
        was = before[*key[:-1], "tiny"]
        assert row == replace(was, scale="other")
        assert [observations.digest(one) for one in accepted.series(row)] == was.observations.split()
        assert accepted.inputs_of(row)
    assert len(list((lines_of(stored)[0].parent / "observations").iterdir())) == count
    assert Workflow(stored.scale).scale.name == "tiny" and stored.stored_row().status == "not_run"
    accepted.rewrite(lambda old: None)
    assert accepted.every() == []
    assert not list(stored.results.rglob("*.csv.xz")) + list(stored.results.rglob("*.parquet"))


def test_rewrite_makes_no_two_rows_one(stored):
    message = refusal(accepted.rewrite, lambda old: replace(old, row=replace(old.row, row="one")))
    assert "would be stored twice" in message
    rows = accepted.every()
    assert len(rows) == len({row.key for row in rows}) > 5


def test_what_a_killed_build_left_is_no_input(stored, tmp_path):
    job = stored.job("GPTQ g128")
    (role, need) = next((role, need) for role, need in job.needs if (need.folder / "data.safetensors").is_file())
    needs = {role: need.folder}
    right = observations.origin(job, {}, needs)["artifacts"]
    left = need.folder / ".data.safetensors.abc.tmp.safetensors"
    shutil.copy(need.folder / "data.safetensors", left)
    assert observations.origin(job, {}, needs)["artifacts"] == right
    assert left not in observations.stored(need.folder) and len(observations.stored(need.folder)) == 1
    built = observations.load(need.folder / FILE)
    observations.save(
        need.folder / FILE, built.series, {k: v for k, v in built.meta.items() if k not in ("checksum", "made")}
    )
    assert runner.origin(need)["made"] == built.meta["made"]
    rows, _ = lines_of(stored)
    with atomic(rows) as leftover:
        shutil.copy(rows, leftover)
        accepted.forget()
        assert accepted.every() and leftover not in accepted.files()


def test_the_digest_covers_every_field(stored):
    row = from_csv(lines_of(stored)[0])[0]
    assert (*row.signed(), "digest") == COLUMNS
