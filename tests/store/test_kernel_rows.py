"""The file of kernel times: what may enter results/, and what is said of the rest."""

import csv
import dataclasses

import pytest

from repro.__main__ import main
from repro.core.errors import UserError
from repro.core.files import csv_text, read_text, write_text
from repro.results import accept as accepting
from repro.store import accepted, kernel_rows, provenance, row_list, stored_row
from repro.store.kernel_rows import KernelRow

ORIGIN = {"device": "NVIDIA H200", "commit": "0123456789", "environment": "torch 2", "date": "2026-01-01"}


@pytest.fixture(autouse=True)
def known_commit(monkeypatch):
    """The commit of `good` is one of this project, and no other is."""
    monkeypatch.setattr(provenance, "has_commit", lambda commit: commit == ORIGIN["commit"])


def good(**changes):
    row = KernelRow("w4-g128", "wna16_gemv", "fp16", 4096, 4096, 1, "cold", "ok", 4.2, 4.1, 4.3, 8912896, 3.86, 0.92)
    row = dataclasses.replace(row, copy_fraction=0.5, relerr=2e-4, rounds=25, copies=23, **ORIGIN)
    return dataclasses.replace(row, **changes)


def written(path, *rows):
    path.write_text(kernel_rows.to_csv(rows))
    return path


def accept(path, results):
    """Accept a file into another folder than results/."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accepted, "RESULTS", results)
        return accepting.accept(path)


def test_accept_merges_newer_rows_and_leaves_the_rest(tmp_path, capsys, monkeypatch):
    results = tmp_path / "results"
    monkeypatch.setattr(accepted, "RESULTS", results)
    assert main(["accept", str(written(tmp_path / "a.csv", good(), good(M=4)))]) == 0
    assert main(["accept", str(written(tmp_path / "b.csv", good(us=4.25, fraction=3.86 / 4.25, note="again")))]) == 0
    assert "1 rows into" in capsys.readouterr().out
    rows = kernel_rows.from_csv(results / "nvidia-h200" / "kernels.csv.xz")
    assert [(r.M, r.us, r.note) for r in rows] == [(1, 4.25, "again"), (4, 4.2, "")]
    assert (results / "nvidia-h200" / "kernels.csv.xz").is_file()


def test_times_are_written_like_every_result_and_leave_the_rest_of_their_folder(tmp_path):
    """They have no series and no declared inputs; what measurements of the device have is not touched."""
    results = tmp_path / "results"
    accept(written(tmp_path / "a.csv", good()), results)
    folder = results / "nvidia-h200"
    assert sorted(path.name for path in folder.iterdir()) == ["kernels.csv.xz", "rows.json"]
    inputs = folder / accepted.INPUTS
    inputs.write_text("not read")
    accept(written(tmp_path / "b.csv", good(M=4)), results)
    assert inputs.read_text() == "not read" and len(row_list.read(folder / "kernels.csv.xz", KernelRow)) == 2


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"us": 1.8, "p20": 1.7}, r"less than the 1\.86 us that 4\.8 TB/s of memory allows"),
        (
            {
                "kernel": "bf16",
                "dtype": "bf16",
                "M": 4096,
                "bytes": 33554432,
                "us": 90.0,
                "p80": 90.0,
                "fraction": 3.86 / 90,
            },
            "990 T operations/s",
        ),
        ({"us": None}, "us is empty"),
        ({"bytes": None}, "bytes is empty"),
        ({"p20": 4.25}, "is not between its p20 and p80"),
        ({"copies": 1}, "cold with 1 copy"),
        ({"commit": "0123456789+"}, "commit the code, then measure"),
        ({"commit": "unknown"}, "commit the code, then measure"),
        ({"device": ""}, "device is empty"),
        ({"date": ""}, "date is empty"),
        ({"mode": "tepid"}, "unknown mode"),
        ({"relerr": 0.9}, "relerr is 0.9; an output that is off by more than 0.01 has no time"),
        ({"relerr": -1.0}, "relerr is -1.0"),
        ({"bytes": 0}, "bytes is 0; its weights alone are 8388608"),
        ({"bytes": -5}, "bytes is -5"),
        ({"bytes": 100}, "bytes is 100"),
        ({"device": "A GPU", "us": 1e-9, "p20": 1e-9, "p80": 1e-9}, "A GPU has no listed peaks"),
        ({"device": "../../etc"}, "device is '../../etc', which is not a name of a GPU"),
        ({"commit": "ffffffffff"}, "which this checkout does not have"),
        ({"commit": "main"}, "measured at commit 'main'"),
        ({"floor_us": None}, "floor_us is None and fraction 0.92"),
        ({"floor_us": 386.0}, "fraction is 0.92, but floor_us over us is"),
        ({"fraction": 0.5}, "fraction is 0.5, but floor_us over us is 0.919"),
        ({"us": 0.0, "p20": 0.0, "p80": 0.0}, "0.0 us is not between"),
        ({"floor_us": -1.0}, "floor_us is -1.0"),
        ({"M": 0}, "M is 0; it must be 1 or more"),
        ({"N": -4096}, "N is -4096; it must be 1 or more"),
        ({"rounds": 0}, "rounds is 0; it must be 1 or more"),
    ],
)
def test_what_is_not_accepted(tmp_path, changes, message):
    path = written(tmp_path / "a.csv", good(M=8), good(**changes))
    with pytest.raises(UserError, match=message):
        accept(path, tmp_path / "results")
    assert not (tmp_path / "results").exists()


H100 = ORIGIN | {"device": "NVIDIA H100 80GB HBM3"}
OTHER = ORIGIN | {"device": "NVIDIA Unlisted"}


def a_run(origin):
    """Rows of a whole run on a device that reads 3 TB/s and multiplies at 700 T operations/s."""
    ceiling = {"floor_us": None, "fraction": None, "relerr": 1e-3, "copies": 2, "rounds": 9}
    shape = {"N": 8192, "K": 8192, "M": 8192, "bytes": 1 << 27, "us": 1571.0, "p20": 1570.0, "p80": 1572.0}
    read = {"N": None, "K": None, "M": None, "bytes": 1 << 30, "us": 358.0, "p20": 357.0, "p80": 359.0, "relerr": 0.0}
    rows = [
        good(kernel="bf16", provider="torch.matmul", dtype="bf16", **ceiling | shape),
        good(kernel="read_floor", provider="read_floor", dtype="uint8", **ceiling | read),
        good(us=4.2, floor_us=3.9),
        good(
            kernel="w8a8",
            provider="w8a8_gemm",
            dtype="bf16",
            M=2048,
            us=60.0,
            p20=59.0,
            p80=61.0,
            floor_us=5.0,
            bytes=1 << 24,
        ),
        good(
            kernel="bf16",
            provider="torch.matmul",
            dtype="bf16",
            M=2048,
            us=98.0,
            p20=97.0,
            p80=99.0,
            floor_us=11.0,
            bytes=1 << 25,
        ),
    ]
    return [shared(dataclasses.replace(row, **origin)) for row in rows]


def shared(row):
    """With the share of the floor that follows from its times."""
    return dataclasses.replace(row, fraction=row.floor_us / row.us if row.floor_us else None)


def faster(rows, factor):
    times = ("us", "p20", "p80", "floor_us")
    changed = []
    for row in rows:
        measured = [name for name in times if getattr(row, name)]
        changed.append(dataclasses.replace(row, **{name: getattr(row, name) / factor for name in measured}))
    return changed


@pytest.mark.parametrize("origin", [ORIGIN, H100, OTHER], ids=["H200", "H100", "unlisted"])
def test_a_run_of_any_device_is_accepted_and_refused_with_all_times_divided_by_ten(tmp_path, origin):
    rows, results = a_run(origin), tmp_path / "results"
    accept(written(tmp_path / "a.csv", *rows), results)
    assert len(kernel_rows.from_csv(next(results.glob("*/kernels.csv.xz")))) == len(rows)
    with pytest.raises(UserError, match="allows; measure again|above the .* of any listed GPU"):
        accept(written(tmp_path / "b.csv", *faster(rows, 10)), tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "row, factor, message",
    [(2, 2, "3.3 TB/s of memory, by the ceilings of this file,"), (3, 1.6, "1750 T"), (4, 1.3, "875 T")],
)
def test_an_unlisted_device_is_judged_by_its_own_ceilings(tmp_path, row, factor, message):
    rows = a_run(OTHER)
    rows[row : row + 1] = faster(rows[row : row + 1], factor)
    with pytest.raises(UserError, match=f"{message}"):
        accept(written(tmp_path / "a.csv", *rows), tmp_path / "results")
    for missing in (0, 1):
        some = [each for i, each in enumerate(a_run(OTHER)) if i != missing]
        with pytest.raises(UserError, match="NVIDIA Unlisted has no listed peaks, and the file lacks its read"):
            accept(written(tmp_path / "a.csv", *some), tmp_path / "results")


def test_nothing_is_faster_than_reading_its_bytes(tmp_path):
    with pytest.raises(UserError, match=r"4\.2 us, less than the 4\.4 us of reading its bytes"):
        accept(written(tmp_path / "a.csv", shared(good(floor_us=4.4))), tmp_path / "results")
    accept(written(tmp_path / "a.csv", shared(good(floor_us=4.25))), tmp_path / "results")


@pytest.mark.parametrize("factor, taken", [(10, False), (1.5, False), (1.1, True)])
def test_floors_are_those_that_the_device_was_found_to_have(tmp_path, factor, taken):
    """Few bytes take the time of a launch, which no peak bounds; a file that is scaled whole agrees with itself."""
    few = shared(
        good(kernel="argmax", provider="argmax", N=128256, K=None, bytes=256520, us=9.8, p20=9.8, p80=9.9, floor_us=1.8)
    )
    results = tmp_path / "results"
    accept(written(tmp_path / "a.csv", few), results)
    more = dataclasses.replace(few, M=2, bytes=513040)  # took as long; more bytes never take less
    for row in (few, more):
        path = written(tmp_path / "b.csv", *faster([row], factor))
        if taken:
            accept(path, results)
        else:
            with pytest.raises(UserError, match=r"for \d+ bytes, but reading 256520 took 1.8 us on NVIDIA H200 \(2026"):
                accept(path, results)
    for other in ({"bytes": 128256}, {"mode": "warm", "copies": 1}, H100):
        accept(written(tmp_path / "c.csv", *faster([dataclasses.replace(few, M=3, **other)], factor)), results)


def test_a_choice_of_tokens_has_logits_and_no_columns(tmp_path):
    choice = good(kernel="argmax", provider="argmax", dtype="bf16", N=128256, K=None, M=1, bytes=256520, us=4.2)
    accept(written(tmp_path / "a.csv", shared(choice)), tmp_path / "results")
    with pytest.raises(UserError, match="of memory allows"):
        quick = {"us": 0.04, "p20": 0.04, "p80": 0.04, "floor_us": 0.04}
        accept(written(tmp_path / "b.csv", shared(dataclasses.replace(choice, **quick))), tmp_path / "no")


@pytest.mark.parametrize(
    "note, whose",
    [
        ("x, recorded 5.379 us on 2026-11-20 (NVIDIA H200), times 1.02", "NVIDIA H200"),
        ("", "a device that its note does not name"),
    ],
)
def test_peers_rescaled_from_another_device_are_refused(tmp_path, note, whose):
    peer = good(provider="awq_gemv", status="rescaled", p20=None, p80=None, copies=None, note=note)
    rows = [*a_run(H100), shared(dataclasses.replace(peer, us=6.0, **H100))]
    with pytest.raises(UserError, match=f"rescaled from a time of {whose}, which says nothing of NVIDIA H100"):
        accept(written(tmp_path / "a.csv", *rows), tmp_path / "results")
    if note:
        accept(written(tmp_path / "a.csv", good(), peer), tmp_path / "results")


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """The file of two accepted rows, and its lines."""
    monkeypatch.setattr(kernel_rows, "RESULTS", tmp_path / "results")
    accept(written(tmp_path / "a.csv", good(), good(M=4)), tmp_path / "results")
    path = tmp_path / "results" / "nvidia-h200" / "kernels.csv.xz"
    assert kernel_rows.files() == [path]
    return path, list(csv.reader(read_text(path).splitlines()))


def refused(path, lines):
    """What is said when the file holds these lines, by whoever shows times and by whoever accepts more."""
    write_text(path, csv_text(lines))
    with pytest.raises(UserError) as shown:
        kernel_rows.timed(kernel_rows.stamps())
    before = path.read_bytes()
    with pytest.raises(UserError) as merged:
        accept(written(path.with_name("new.csv"), good(M=8)), path.parents[1])
    assert str(shown.value) == str(merged.value) and path.read_bytes() == before
    return str(shown.value)


def test_an_edit_of_any_field_of_an_accepted_time_is_named_by_row_and_field(stored):
    path, lines = stored
    for i, name in enumerate(kernel_rows.COLUMNS):
        edited = [list(line) for line in lines]
        number = name in stored_row.numbers(KernelRow)
        edited[1][i] = "2" if number else "unsupported" if name == "status" else "edited"
        message = refused(path, edited)
        assert str(path) in message
        assert ("digest" if name == "digest" else f"{name} is {edited[1][i]!r}") in message
        assert name in ("kernel", "provider") or "wna16_gemv (w4-g128, " in message, message


def test_accepted_times_that_were_exchanged_removed_or_moved_are_noticed(stored):
    path, lines = stored
    us, digest = map(kernel_rows.COLUMNS.index, ("us", "digest"))
    for i, what in ((us, "us is "), (digest, "edited after it was accepted")):
        edited = [list(line) for line in lines]
        edited[1][us] = "4.25"
        edited[1][i], edited[2][i] = edited[2][i], edited[1][i]
        assert what in refused(path, edited)
    assert "other rows than were accepted" in refused(path, lines[:-1])
    assert "given twice" in refused(path, [*lines, lines[1]])
    write_text(path, csv_text(lines))
    listed = path.with_name(row_list.NAME)
    listed.rename(listed.with_suffix(".aside"))
    assert "other rows than were accepted" in refused(path, lines)
    listed.with_suffix(".aside").rename(listed)
    path.unlink()
    with pytest.raises(
        UserError, match="cannot be read .No such file or directory.; name a file of python -m repro bench"
    ):
        kernel_rows.timed(kernel_rows.stamps())
    with pytest.raises(
        UserError, match="cannot be read .No such file or directory.; name a file of python -m repro bench"
    ):
        accept(written(path.with_name("new.csv"), good(M=8)), path.parents[1])
    write_text(path, csv_text(lines))
    moved = path.parent.rename(path.parent.with_name("nvidia-b200")) / path.name
    with pytest.raises(UserError, match="on NVIDIA H200 does not belong in this file"):
        row_list.read(moved, KernelRow)


def test_every_accepted_time_is_signed_and_possible():
    """All that is in results/, by the checks of `accept`."""
    for path in kernel_rows.RESULTS.glob("*/kernels.csv.xz"):
        rows = row_list.read(path, KernelRow)
        for row in rows:
            if row.status in kernel_rows.WITH_TIME:
                kernel_rows._check(row, row.where, *kernel_rows.peaks_of(row.device, rows))
        assert rows and not any(map(kernel_rows.broken_of_ours, rows))
        kernel_rows.check_floors(rows, rows)


@pytest.mark.parametrize("status, what", [("wrong", "its result is wrong"), ("failed", "it failed")])
def test_a_kernel_of_ours_that_is_wrong_or_failed_is_refused(tmp_path, capsys, monkeypatch, status, what):
    """With the whole file, whatever else is right in it; nothing of it enters."""
    monkeypatch.setattr(accepted, "RESULTS", tmp_path / "results")
    path = written(tmp_path / "a.csv", good(M=8), good(status=status, us=None, note="off by 3"))
    assert main(["accept", str(path)]) == 2
    message = "wna16_gemv (w4-g128, fp16) at 4096 x 4096, M = 1, cold: "
    message += f"{what} (off by 3); fix it, measure it again with --resume, or leave it out with --only"
    assert message in capsys.readouterr().err and not (tmp_path / "results").exists()


@pytest.mark.parametrize("status", ["wrong", "failed"])
def test_a_peer_that_is_wrong_or_failed_is_a_finding(tmp_path, status):
    wrong = {"status": status, "us": None, "note": "off by 1"}
    accept(written(tmp_path / "a.csv", good(), good(provider="gemlite", **wrong)), tmp_path / "results")
    assert [r.status for r in kernel_rows.from_csv(tmp_path / "results" / "nvidia-h200" / "kernels.csv.xz")] == [
        status,
        "ok",
    ]


def test_given_twice_and_nothing_measured(tmp_path):
    with pytest.raises(UserError, match="given twice"):
        accept(written(tmp_path / "a.csv", good(), good()), tmp_path)
    with pytest.raises(UserError, match="no measured row"):
        accept(written(tmp_path / "a.csv", good(status="oom", us=None)), tmp_path)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda text: text.replace("provider", "who", 1), "its columns differ"),
        (lambda text: text[:-40], "cut short"),
        (lambda text: text.replace("4.2,", "fast,", 1), "us is 'fast', not a number"),
        (lambda text: text.replace("4.2,", "nan,", 1), "not finite"),
        (lambda text: text.replace(",ok,", ",great,"), "unknown status 'great'"),
        (lambda text: None, "cannot be read .No such file or directory.; name a file of python -m repro bench"),
    ],
)
def test_a_damaged_file_is_a_sentence(tmp_path, spoil, message):
    path = written(tmp_path / "a.csv", good())
    text = spoil(path.read_text())
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(UserError, match=message):
        kernel_rows.from_csv(path)
