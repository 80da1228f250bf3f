"""`accept` believes nothing that a CSV says: it recomputes, checks, takes all or nothing. results/ notices damage."""

import json
import shutil
import subprocess
from itertools import chain

import numpy as np
import pyarrow.parquet as pq
import pytest
from tiny_results import COMMIT, MODEL, SPEC, UNKNOWN, refusal, rewrite, scale

from repro.core.errors import UserError
from repro.core.files import ROOT
from repro.metrics import KINDS
from repro.results import accept as accepting
from repro.results import measure, stored_rows
from repro.results.accept import accept
from repro.specs import tables
from repro.store import accepted, observations, provenance, row_list
from repro.store.job import distinct
from repro.store.measurement import COLUMNS, from_csv, to_csv
from repro.store.observations import FILE, Series
from repro.store.stored_row import text
from repro.workflow import runner
from repro.workflow.workflow import Workflow

ROWS = 15
REALLY_KNOWN = provenance.has_commit.__wrapped__  # the fixture `house` replaces it


def stored(house):
    """The accepted CSV."""
    (path,) = house.results.glob("*/spear-table1.csv.xz")
    return path


# --- what is taken ----------------------------------------------------------------------------------------------------


def test_an_accepted_value_is_read_back_exactly(house):
    fresh = {cell.cell_key: measure.measurement_of(house.flow, cell) for cell in house.flow.cells("spear", "1")}
    assert list(accept(house.table()).values()) == [ROWS]
    flow = Workflow(house.scale, stored=True)
    for cell in flow.cells("spear", "1"):
        old, new = fresh[cell.cell_key], measure.measurement_of(flow, cell)
        if old.source == "fresh":
            assert new == measure.replace(old, source="stored")  # every number, exact
            seeds = accepted.series(accepted.find("tiny", cell))
            assert [observations.digest(seed) for seed in seeds] == old.observations.split()
    statuses = {new.status for new in from_csv(stored(house))}
    assert statuses == {"ok", "unsupported"}
    assert {row.seeds for row in from_csv(stored(house)) if row.row == "GPTQ g128"} == {"0 1"}


def test_what_the_hashes_stand_for_is_kept(house):
    accept(house.table())
    folder = stored(house).parent
    inputs = accepted._facts(folder / "inputs.json.xz")
    rows = from_csv(stored(house))
    assert inputs.keys() == {row.inputs for row in rows}
    row = next(row for row in rows if row.row == "RTN pc" and row.col == "Wiki")
    assert inputs[row.inputs]["recipe"][0][0][0] == "rtn"
    assert row.versions == "compress=1 perplexity=1 rtn=1 tokens=1"


def test_twice_gives_the_same_bytes_and_new_rows_replace_old_ones(house):
    accept(house.table())
    first = house.files()
    accept(house.table(rows=["RTN pc", "FP16"]))
    assert house.files() == first
    (house.folder / "build").rename(house.folder / "other")
    assert list(accepted._rows(house.results, "spear-table1")) and len(from_csv(stored(house))) == ROWS


def test_files_are_packed_by_kind_and_split(house, monkeypatch):
    monkeypatch.setattr(observations, "LARGEST", 1_000)
    accept(house.table())
    names = [path.name for path in stored(house).parent.glob("observations/*")]
    assert len(names) > 3 and {name.split("-")[2] for name in names} == {"perplexity", "storage"}
    monkeypatch.setattr(observations, "LARGEST", 900_000)
    accept(house.table())
    assert len(list(stored(house).parent.glob("observations/*"))) == 2  # the old parts are gone
    assert house.stored_row().status == "ok"


def test_what_was_not_measured_here_is_left_out(house):
    kept = house.table(lambda t: t.replace(",fresh,tiny,", ",stored,tiny,"))
    assert "no measured row to accept" in refusal(accept, kept)
    refused = house.table(rows=["+SPEAR pc on RTN"])
    assert "no measured row to accept" in refusal(accept, refused)
    assert not house.results.exists()


# --- nothing that a CSV says is believed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"value": 10.0}, {"lo": 9.0}, {"hi": None}, {"n": 99}, {"grade": "A"}, {"device": "NVIDIA H200"},
        {"device_class": "cuda"}, {"commit": "9876543210"}, {"stand_in": "pocket-5m"}, {"recipe": "rtn-w8-pc"},
        {"seeds": "0 1 2"}, {"inputs": "abcdef01"}, {"versions": "rtn=7"}, {"artifacts": "/etc/passwd"},
        {"observations": "/etc/passwd"}, {"environment": "{}"}, {"note": "as good as new"}, {"status": "at_chance"},
        {"printed": "9.99"}, {"unit": "nats"}, {"lower_bound": 1.0}, {"covers": "windows and seeds"},
        {"protocol": "mine"},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_an_edited_row_is_refused_by_name(house, change):
    (name,) = change
    sentence = refusal(accept, house.edited("RTN pc", "Wiki", **change))
    value = text(*change.values())
    assert (
        f"spear table 1 / RTN pc / Wiki / {MODEL} / wikitext2_ppl: {name} is {value!r}, but its jobs give" in sentence
    )
    assert not house.results.exists()


def test_every_column_is_compared():
    assert {*accepting.COMPARED, "source"} == set(COLUMNS)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (",fresh,tiny,", ",fresh,gpu,", "is not built here"),  # another scale has other jobs
        (",fresh,tiny,", ",fresh,tinny,", "unknown scale 'tinny'; did you mean 'tiny'?"),
        ("spear,table,1,RTN pc,Wiki", "spaer,table,1,RTN pc,Wiki", "unknown table 'spaer/table1'"),
        ("spear,table,1,RTN pc,Wiki", "spear,table,99,RTN pc,Wiki", "unknown table 'spear/table99'"),
        ("spear,table,1,RTN pc,Wiki", "spear,../../x,1,RTN pc,Wiki", "unknown kind of result '../../x'"),
        ("spear,table,1,RTN pc,Wiki", "spear,figure,99,RTN pc,Wiki", "unknown figure with a spec 'spear/figure99'"),
        ("spear,table,1,RTN pc,Wiki", "spear,table,1,RTN pcs,Wiki", "has no cell RTN pcs / Wiki"),
        ("spear,table,1,RTN pc,Wiki", "spear,table,1,FP16,Wiki", "given twice"),
    ],
)
def test_a_row_of_another_cell_or_scale(house, old, new, reason):
    sentence = refusal(accept, house.table(lambda t: t.replace(old, new)))
    assert reason in sentence and sentence.startswith(str(house.folder / "table1.csv"))
    assert not house.results.exists()


def test_no_path_in_a_row_is_followed(house, monkeypatch):
    opened, real = [], observations.load
    monkeypatch.setattr(observations, "load", lambda path: opened.append(str(path)) or real(path))
    secret = house.folder / "secret.parquet"
    shutil.copyfile(house.job("GPTQ g128").folder / FILE, secret)
    for name in ("observations", "artifacts", "stand_in", "note", "environment"):
        refusal(accept, house.edited("RTN pc", "Wiki", **{name: str(secret)}))
    assert opened == [] or all(path.startswith("build/") for path in opened)


# --- the folders of jobs are checked ----------------------------------------------------------------------------------


def test_without_its_job_folders_nothing_is_accepted(house):
    path = house.table()
    shutil.rmtree(house.job().folder)
    assert f"{house.job().folder} is not built here" in refusal(accept, path)


def test_a_folder_that_was_copied_over_is_refused(house):
    path = house.table()
    mine, other = house.job("RTN pc").folder, house.job("GPTQ g128").folder
    shutil.rmtree(mine)
    shutil.copytree(other, mine)
    assert f"these are results of the job {other.relative_to('build')}" in refusal(accept, path)
    assert "these are results of the job" in refusal(house.table)  # a table is not made from them either


def test_other_declared_inputs_under_the_same_name_are_refused(house):
    path = house.table()
    rewrite(house.job().folder / FILE, inputs=json.dumps(house.job().parsed_inputs() | {"windows": 7}))
    assert "with other declared inputs" in refusal(accept, path)


def test_a_flipped_bit_is_one_sentence(house):
    path, file = house.table(), house.job().folder / FILE
    whole, right = file.read_bytes(), observations.load(file)
    for position in np.random.default_rng(0).integers(0, len(whole), 100):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 16]) + whole[position + 1 :])
        try:
            result = observations.load(file)  # a byte that decides nothing, such as padding
            assert (result.digest, result.meta) == (right.digest, right.meta)
        except UserError as error:
            assert str(file) in str(error) and "\n" not in str(error)
    file.write_bytes(whole)
    table = pq.read_table(file)
    values = table["value"].to_numpy().copy()
    values[3] += 64  # the checksums of its pages fit, that of its contents does not
    pq.write_table(table.set_column(table.schema.get_field_index("value"), table.field("value"), [values]), file)
    assert "build it again" in refusal(accept, path) and not house.results.exists()


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ({"commit": f"{COMMIT}+"}, f"measured at commit '{COMMIT}+'; commit the code, then measure"),
        ({"commit": "unknown"}, "measured at commit 'unknown'"),
        ({"commit": "--help"}, "measured at commit '--help'"),
        ({"commit": UNKNOWN}, f"measured at commit {UNKNOWN}, which this checkout does not have"),
        ({"device_class": "cuda"}, "measured on 'cuda', but its scale runs it on 'cpu'"),
    ],
)
def test_where_and_from_which_code_observations_come(house, meta, reason):
    rewrite(house.job().folder / FILE, **meta)
    assert reason in refusal(accept, house.table()) and not house.results.exists()


def test_seeds_of_two_machines_are_no_measurement(house):
    second = house.flow.jobs(house.cell("GPTQ g128"))[1]["scores"]
    rewrite(second.folder / FILE, device="NVIDIA H200")
    assert "measured on " in (sentence := refusal(accept, house.table())) and " and on NVIDIA H200" in sentence


def test_cards_of_one_architecture_are_one_device_where_no_time_is_measured(house, monkeypatch):
    for seed, device in enumerate(("NVIDIA H100 80GB HBM3", "NVIDIA H200")):
        for job in house.flow.jobs(house.cell("GPTQ g128"))[seed].values():
            rewrite(job.folder / FILE, device=device)
    assert accept(house.table(rows=["GPTQ g128"]))
    (path,) = house.results.glob("nvidia-h100-80gb-hbm3/spear-table1.csv.xz")
    wiki = next(row for row in from_csv(path) if row.col == "Wiki")
    assert wiki.device == "NVIDIA H100 80GB HBM3 + NVIDIA H200" and house.stored_row("GPTQ g128").status == "ok"
    monkeypatch.setattr(KINDS["perplexity"], "TIMES", True)
    assert " and on NVIDIA H200; run its jobs on one of them" in refusal(accept, house.table())


def test_scores_of_other_weights_than_those_that_lie_there(house):
    job = house.job("GPTQ g128")
    read = json.loads(observations.load(job.folder / FILE).meta["artifacts"])
    rewrite(job.folder / FILE, artifacts=json.dumps(read | {"weights/data.safetensors": "0" * 16}))
    assert f"{job.id} read another weights than " in refusal(accept, house.table())


def test_a_commit_is_looked_up(monkeypatch, tmp_path):
    known = REALLY_KNOWN
    for words in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    head = subprocess.run(["git", "-C", tmp_path, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert known(head) and known(head[:10]) and not known("f" * 10)
    monkeypatch.setattr(provenance, "ROOT", tmp_path / "elsewhere")  # no history there
    assert known("f" * 10)


# --- the versions under which observations were made ------------------------------------------------------------------


def older(house, *rows):
    """Job folders of rows as another commit with an earlier version of RTN made them."""
    cells = [cell for cell in house.flow.cells("spear", "1") if cell.row in rows and house.flow.is_measured(cell)]
    for job in distinct(chain.from_iterable(stored_rows.jobs(house.flow, cell) for cell in cells)):
        made_with = runner.origin(job).get("versions", "")
        if "rtn=1" in made_with:
            rewrite(job.folder / FILE, versions=made_with.replace("rtn=1", "rtn=0"), commit="9999999999")


def test_rows_carry_the_versions_that_made_them(house):
    older(house, "RTN pc")
    built = house.table()
    (row,) = [m for m in from_csv(built) if (m.row, m.col, m.model) == ("RTN pc", "Wiki", MODEL)]
    assert (row.status, row.source, row.commit) == ("stale", "fresh", "9999999999") and row.value is not None
    accept(built)
    (row,) = [m for m in from_csv(stored(house)) if (m.row, m.col) == ("RTN pc", "Wiki")]
    assert row.status == "ok" and row.versions == "compress=1 perplexity=1 rtn=0 tokens=1"
    shown = house.stored_row()
    assert (shown.status, shown.source) == ("stale", "stored") and shown.note == "other versions: rtn was 0, is 1"
    assert house.stored_row("FP16").status == "ok"


def test_seeds_of_two_versions_are_no_measurement(house):
    second = house.flow.jobs(house.cell("GPTQ g128"))[1]["scores"]
    made_with = runner.origin(second)["versions"]
    rewrite(second.folder / FILE, versions=made_with.replace("gptq=1", "gptq=2"))
    assert "were built with different versions of gptq (1 and 2)" in refusal(house.table)


def test_a_job_is_not_run_on_what_another_version_made(house):
    older(house, "RTN pc")
    job = house.job("RTN pc")
    assert not runner.done(job) and runner.done(house.job("FP16"))
    assert "not built with today's versions" in refusal(runner.run, job)


# --- results/ ---------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_results_is_one_sentence(house):
    accept(house.table())
    cell = house.cell()
    for path in sorted(stored(house).parent.glob("observations/*-perplexity-*.parquet")):
        whole = path.read_bytes()
        for position in np.random.default_rng(1).integers(0, len(whole), 40):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
            accepted.forget()
            try:
                assert house.stored_row().value == measure.measurement_of(house.flow, cell).value
            except UserError as error:
                assert str(path) in str(error) and "\n" not in str(error)
        path.write_bytes(whole)


def test_units_of_a_pack_are_stored_as_differences():
    """Items of zero-shot tasks are zeros and ones; what numbers them may not take ten times as much as they do."""
    rng = np.random.default_rng(0)
    series = {("a", seed): {"right": Series(rng.integers(0, 2, 14_000).astype(float), "items")} for seed in range(5)}
    ((_, data),) = observations.pack(series)
    assert len(data) < 2 * 5 * 14_000 // 8


def test_series_that_cells_share_are_stored_once(tmp_path):
    """Two numbers of one job are two cells with the same series; each is found by its digest."""
    rng = np.random.default_rng(0)
    one, other = ({"x": Series(rng.normal(size=5_000), "windows")} for _ in range(2))
    ((_, data),) = observations.pack({("b", 0): one, ("a", 0): one, ("a", 1): other, ("c", 0): other})
    (tmp_path / "a.parquet").write_bytes(data)
    unpacked, _ = observations.unpack(tmp_path / "a.parquet")
    assert unpacked.keys() == {("a", 0), ("a", 1)} and unpacked["a", 0]["x"].values.tolist() == one["x"].values.tolist()
    assert len(data) < 0.97 * 2 * 5_000 * 8, "the first bytes of numbers repeat"


def test_a_series_that_many_seeds_share_takes_its_bytes_once(tmp_path):
    """A derived cell has the series of its operands: a column is one page, in which zstd finds what repeats."""
    rng = np.random.default_rng(0)
    shared = Series(rng.normal(size=15_000), "windows")
    series = {("a", seed): {"shared": shared, "own": Series(rng.normal(size=9), "windows")} for seed in range(6)}
    ((_, data),) = observations.pack(series)
    assert len(data) < 1.1 * 15_000 * 8
    (tmp_path / "a.parquet").write_bytes(data)
    result, _ = observations.unpack(tmp_path / "a.parquet")
    assert {key: observations.digest(one) for key, one in result.items()} == {
        key: observations.digest(one) for key, one in series.items()
    }
    table, _ = observations.read(tmp_path / "a.parquet", *observations.PACKED)
    assert len(table["cell"].combine_chunks().dictionary) == 1, "a word of a column is read once, not in every row"


def test_answers_and_their_log_probabilities_are_packed_apart(tmp_path):
    """Bits between numbers of single precision cost neither more: together in doubles they take 1.4 times as much."""
    rng = np.random.default_rng(0)
    by_key = {}
    for seed in range(30):
        right = Series(rng.integers(0, 2, 4_000).astype(float), "items")
        by_key["a", seed] = {
            "choice": Series(np.round(rng.normal(-6, 3, 1_000) * 1024) / 1024, "items"),
            "right": right,
        }
    ((_, data),) = observations.pack(by_key)
    assert len(data) < 30 * (1_000 * 2.1 + 4_000 / 8 * 1.1)
    (tmp_path / "a.parquet").write_bytes(data)
    result, _ = observations.unpack(tmp_path / "a.parquet")
    assert [*result["a", 7]] == ["choice", "right"]
    for key, series in by_key.items():
        assert observations.digest(result[key]) == observations.digest(series)


def forms(by_key) -> list[bytes]:
    """The file of packed series in every exact form and encoding."""
    files = []
    for table in observations._packed_tables([*by_key.items()]):
        table = table.replace_schema_metadata({"digest": observations.packed_digest(by_key)})
        files += [observations._written(table, encoding) for encoding in observations.ENCODINGS]
    return files


@pytest.mark.parametrize(
    "values",
    [
        [0.1, 1 / 3],  # doubles
        [0.5, 0.25],  # exact in single precision
        [1.0, 0.0],
        [-0.0, 1.0],
        [-0.0, 0.5],
        [2.0**53, 2.0**53 + 2],
        [1e300, -1e300],
        [2.0**24 + 1, 0.5],
        [5e-324, 0.0],
    ],
    ids=str,
)
def test_packed_values_keep_every_bit(tmp_path, values):
    plain, answers = Series(np.array([0.5, 0.25]), "windows"), Series(np.arange(200) % 2.0, "items")
    for beside in ({}, {"b": plain}, {"b": answers}, {"b": plain, "c": answers}):
        by_key = {
            ("cell", 0): {"a": Series(np.array(values), "windows"), **beside},
            ("cell", 1): beside or {"d": plain},
        }
        for data in forms(by_key):
            (tmp_path / "a.parquet").write_bytes(data)
            result, _ = observations.unpack(tmp_path / "a.parquet")
            for key, series in by_key.items():
                assert result[key].keys() == series.keys()
                for name, stored in series.items():
                    assert result[key][name].values.tobytes() == stored.values.tobytes()


def test_the_smallest_form_of_a_pack_is_written():
    rng = np.random.default_rng(0)
    singles = rng.normal(size=2_000).astype(np.float32).astype(float)
    kinds = {"singles": singles, "doubles": rng.normal(size=2_000), "few": np.repeat([1 / 3, 1e-9, 7.5], 900)}
    smallest = set()
    for name, values in kinds.items():
        for answers in ({}, {"right": Series(rng.integers(0, 2, 5_000).astype(float), "items")}):
            by_key = {("cell", 0): {name: Series(values, "windows"), **answers}}
            sizes = [len(data) for data in forms(by_key)]
            ((_, data),) = observations.pack(by_key)
            assert len(data) == min(sizes)
            smallest.add((len(sizes), sizes.index(min(sizes))))
    assert len(smallest) > 3, "another form for another kind"


def test_packed_files_with_another_name_or_gone(house):
    accept(house.table())
    (path,) = stored(house).parent.glob("observations/*-perplexity-*.parquet")
    path.rename(path.with_name("spear-table1-perplexity-00000000.parquet"))
    accepted.forget()
    assert "its name is not that of its contents" in refusal(house.stored_row)
    path.with_name("spear-table1-perplexity-00000000.parquet").unlink()
    accepted.forget()
    assert "the observations of spear table 1 / RTN pc / Wiki" in refusal(house.stored_row)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda m: {"value": 10.0},
            "the value of spear table 1 / RTN pc / Wiki / Llama-3.2-1B / wikitext2_ppl is 10, but ",
        ),
        (lambda m: {"device": "NVIDIA H200"}, "on NVIDIA H200 does not belong in this file"),
        (lambda m: {"number": "2"}, "does not belong in this file"),
        (lambda m: {"row": "FP16"}, "is given twice"),
        (lambda m: {"observations": m.observations[::-1]}, "are not in "),
    ],
)
def test_an_edited_result_is_noticed(house, change, reason):
    accept(house.table())
    path = stored(house)
    rows = [measure.replace(m, **change(m)) if (m.row, m.col) == ("RTN pc", "Wiki") else m for m in from_csv(path)]
    accepted.store(path, rows)
    accepted.forget()
    assert reason in (sentence := refusal(house.stored_row)) and str(path) in sentence


def test_intervals_of_recorded_cells_come_from_their_observations(house):
    accept(house.table())
    path, right = stored(house), house.stored_row()
    rows = [measure.replace(m, lo=1.0, hi=2.0, n=3, covers="") for m in from_csv(path)]
    accepted.store(path, rows)
    accepted.forget()
    assert house.stored_row() == right


def test_what_a_table_says_is_at_chance_is_stored_as_it_was_measured(house, monkeypatch):
    monkeypatch.setattr(measure, "_at_chance", lambda flow, cell: cell.row == "RTN pc")
    table = house.table()
    assert measure.NO_BETTER in table.read_text()
    accept(table)
    assert {row.status for row in from_csv(stored(house)) if row.row == "RTN pc"} == {"ok"}


def test_another_grade_is_stale(house, monkeypatch):
    accept(house.table())
    house.scale = measure.replace(house.scale, grade="B")
    assert (house.stored_row().status, house.stored_row().note) == (
        "stale",
        "it was accepted as grade C, and scale tiny is B",
    )


@pytest.mark.parametrize(
    ("module", "broken"),
    [(row_list, "to_csv"), (accepted, "write_text"), (accepted, "atomic")],
    ids=["rows", "inputs", "series"],
)
def test_nothing_is_half_taken(house, monkeypatch, module, broken):
    """Wherever writing stops, every row that is there has its series, and running it again completes it."""
    accept(house.table(rows=["FP16"]))
    older(house, "RTN pc")  # other digests are not needed: other rows, files and facts are
    before = from_csv(stored(house))
    whole, count = house.table(), 0
    real = getattr(module, broken)
    while True:
        left = [count]

        def failing(*args, left=left, **kwargs):
            if left[0] == 0:
                raise RuntimeError("the power is off")
            left[0] -= 1
            return real(*args, **kwargs)

        monkeypatch.setattr(module, broken, failing)
        try:
            accept(whole)
            break
        except RuntimeError:
            count += 1
        monkeypatch.setattr(module, broken, real)
        accepted.forget()
        rows = from_csv(stored(house))
        assert rows == before or len(rows) == ROWS
        for row in rows:
            seeds = accepted.series(row)
            assert " ".join(map(observations.digest, seeds)) == row.observations
    assert count >= 1 and len(from_csv(stored(house))) == ROWS


def test_changed_series_leave_the_old_ones_until_their_row_is_written(house, monkeypatch):
    accept(house.table())
    before = house.stored_row().value
    file = house.job().folder / FILE
    built = observations.load(file)
    moved = {name: Series(one.values + 0.5, one.axis, one.group) for name, one in built.series.items()}
    observations.save(file, moved, {k: v for k, v in built.meta.items() if k not in ("checksum", "made")})
    whole = house.table()
    with monkeypatch.context() as patcher, pytest.raises(ZeroDivisionError):
        patcher.setattr(accepted, "write_text", lambda *_: 1 / 0)
        accept(whole)
    accepted.forget()
    rows = {(row.row, row.col): row for row in from_csv(stored(house))}
    (seed,) = accepted.series(rows["RTN pc", "Wiki"])
    assert np.exp(seed["nll"].values.mean()) == before


# --- what makes a recorded row stale ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ({"perplexity": {"length": 32, "windows": 99, "kl_windows": 8}}, "RTN pc"),
        ({"calibration": {"corpus": "tiny-held-out", "sequences": 5, "length": 64}}, "GPTQ g128"),
        ({"dtype": "bfloat16"}, "RTN pc"),
    ],
    ids=["windows", "budget", "dtype"],
)
def test_other_inputs_are_stale(house, tiny_jobs, change, row):
    accept(house.table())
    assert house.stored_row(row).status == "ok"
    house.scale = scale(tiny_jobs / "tiny-llama", **change)
    assert (house.stored_row(row).status, house.stored_row(row).note) == ("stale", "its declared inputs have changed")
    if "calibration" in change:
        assert house.stored_row("RTN pc").status == "ok"  # it takes no calibration text


def test_another_model_is_stale(house, monkeypatch):
    accept(house.table())
    monkeypatch.setattr("repro.models.fingerprint", lambda name: "abcdef01")
    assert (house.stored_row().status, house.stored_row().note) == ("stale", "its declared inputs have changed")


def test_another_environment_alone_makes_nothing_stale(house, monkeypatch):
    accept(house.table())
    monkeypatch.setattr("repro.store.provenance.environment", lambda: '{"torch": "9.9"}')
    assert house.stored_row().status == "ok"


# --- cells that another machine measures ------------------------------------------------------------------------------


def test_what_was_measured_on_any_device_is_accepted_from_brought_folders(house, monkeypatch):
    """The scale leaves the device open; the folders were made on a CPU, and this machine has a GPU."""
    at = measure.replace(house.scale, device="any")
    monkeypatch.setattr("repro.specs.scale.has_cuda", lambda: True)
    monkeypatch.setattr("repro.specs.scale.load", lambda config=None, name=None, path=None: at)
    cell = house.cell("GPTQ g128")
    assert measure.measurement_of(Workflow(at), cell).status == "not_run", "on this GPU nothing is built"
    brought = measure.measurement_of(Workflow(at.on("cpu"), stored=False), cell)
    assert brought.status == "ok" and brought.device_class == "cpu"
    path = house.folder / "built.csv"
    path.write_text(to_csv([brought]))
    assert list(accept(path).values()) == [1]
    shutil.rmtree(house.folder / "build")
    for flow in (Workflow(at), Workflow(at, stored=True), Workflow(at, stored=False)):
        shown = measure.measurement_of(flow, cell)
        assert (shown.status, shown.source, shown.value) == ("ok", "stored", brought.value)


def test_a_cell_without_a_job_is_live_everywhere_and_never_accepted(house, monkeypatch):
    spec = measure.replace(
        SPEC, extra_columns={"bits": {"kind": "setting", "step": "rtn", "option": "bits"}}, rows={"RTN pc": "rtn-w4-pc"}
    )
    monkeypatch.setattr(tables, "table", lambda paper, number: spec)
    result = house.stored_row("RTN pc", "bits")
    assert (result.value, result.source, result.status) == (4.0, "fresh", "ok")
    accept(house.table())
    assert {row.col for row in from_csv(stored(house))} == {"Wiki", "C4"}


# --- the format -------------------------------------------------------------------------------------------------------


def test_observations_round_trip(tmp_path):
    path = tmp_path / FILE
    series = {"b": Series(np.array([1.0, -0.0, 0.1875]), "windows", "g"), "a": Series(np.array([2.0]), "model")}
    (tmp_path / "data.safetensors").write_bytes(b"weights")
    observations.save(path, series, {"job": "x/y"})
    loaded = observations.load(path)
    assert list(loaded.series) == ["b", "a"] and loaded.digest == observations.digest(series)
    assert loaded.series["b"].values.tobytes() == series["b"].values.tobytes()
    assert list(json.loads(loaded.meta["made"])) == ["data.safetensors"]


@pytest.mark.parametrize(
    "change",
    [
        lambda s: {**s, "a": Series(s["a"].values[::-1].copy(), "windows", "g")},
        lambda s: {**s, "a": Series(s["a"].values, "items", "g")},
        lambda s: {**s, "a": Series(s["a"].values, "windows", "h")},
        lambda s: {"b": s["a"]},
        lambda s: {**s, "c": s["a"]},
        lambda s: {**s, "a": Series(np.nextafter(s["a"].values, 9), "windows", "g")},
    ],
)
def test_a_digest_sees_everything(change):
    series = {"a": Series(np.array([1.0, 2.0]), "windows", "g")}
    assert observations.digest(change(series)) != observations.digest(series)


def test_values_that_are_not_finite_are_not_written(tmp_path):
    with pytest.raises(UserError, match="a has values that are not finite"):
        observations.save(tmp_path / FILE, {"a": Series(np.array([1.0, np.nan]), "windows")}, {})
    assert not (tmp_path / FILE).exists()


def test_rows_out_of_order_are_noticed(tmp_path):
    path = tmp_path / FILE
    table = observations.to_table({"a": Series(np.array([1.0, 2.0]), "windows", "g")})
    for odd in (table.take([1, 0]), table.take([0, 0])):
        pq.write_table(odd, path)
        assert "is not one value per unit" in refusal(observations.load, path)
    pq.write_table(table, path)
    assert "do not match its checksum" in refusal(observations.load, path)
    pq.write_table(table.drop_columns(["group"]), path)
    assert "its columns are not those of observations" in refusal(observations.load, path)


def test_no_file_of_results_is_above_a_megabyte():
    """Weights are the only larger files of the repository; what outgrows this is split or folded."""
    sizes = {path.name: path.stat().st_size for path in (ROOT / "results").rglob("*") if path.is_file()}
    assert sizes and {name: size for name, size in sizes.items() if size > 2**20} == {}
