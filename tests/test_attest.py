"""`attest`: what code changes leave standing, what they make stale, and how a replay carries results forward."""

import json
import re
import shutil
import sys
from dataclasses import replace

import dag
import numpy as np
import pytest
from tiny_results import COMMIT, MODEL, refusal, rewrite, scale

from repro.__main__ import main
from repro.errors import UserError
from repro.jobs import runner
from repro.jobs.job import distinct
from repro.record import accepted, attest, measure, observations, provenance, recorded
from repro.record.accept import accept
from repro.record.measurement import from_csv
from repro.record.observations import FILE, Series
from repro.spec.workflow import Workflow

OLD = "0" * 12  # a unit that no module has today


@pytest.fixture
def aged(house, tiny_jobs, monkeypatch):
    """Accepted results that another version of the grid made: all rows but FP16 are stale by their code alone.

    A replay is what today's code made of the same jobs before; the last tests of this file run them anew.
    """

    def replay(jobs, folder, side_by_side):
        assert side_by_side == 0
        for job in jobs:
            shutil.copytree(tiny_jobs / job.folder, attest.FOLDER / job.id)

    monkeypatch.setattr(attest.pool, "rebuild", replay)
    cells = [cell for cell in house.flow.cells("spear", "1") if house.flow.is_measured(cell)]
    for job in distinct([job for cell in cells for each in house.flow.jobs(cell) for job in each.values()]):
        noted = runner.origin(job)
        if "baselines/grid.py" in (units := json.loads(noted.get("units", "{}"))):
            units["baselines/grid.py"] = OLD
            if (refusal := job.folder / runner.REFUSED).is_file():
                facts = json.loads(refusal.read_text())
                facts["origin"]["units"] = json.dumps(units)
                refusal.write_text(json.dumps(facts))
            else:
                rewrite(job.folder / FILE, units=json.dumps(units))
    accept(house.table())
    return house


def changed(house, **fields):
    """Other fields in every accepted row."""
    (path,) = house.results.glob("*/spear-table1.csv")
    rows = [replace(row, **fields) for row in from_csv(path)]
    folder = accepted.path_of(rows[0]).parent
    if folder != path.parent:
        path.parent.rename(folder)
    (folder / path.name).write_text(accepted.to_csv(rows))
    accepted.forget()


def lines(house):
    """The lines of attested.csv."""
    return list(accepted.attested(house.results))


# --- replays ----------------------------------------------------------------------------------------------------------


def test_byte_equal_replays_carry_a_group_forward(aged, capsys):
    assert (aged.recorded().status, aged.recorded("FP16").live) == ("stale", "recorded")
    assert attest.attest(cells=1) == 0
    said = capsys.readouterr().out
    groups = {(row.units, recorded.units(aged.flow, measure.cell_of(aged.flow, row))) for row in accepted.every()}
    moved = {(before, after) for before, after in groups if before != after}
    assert {(line["before"], line["after"]) for line in lines(aged)} == moved and len(moved) == 6
    for line in lines(aged):
        assert (line["device"], line["commit"], line["scale"]) == (aged.recorded().device, COMMIT, "")
        assert re.fullmatch(r"1 cells: spear/table1 / .* / Llama-3.2-1B / \w+ at tiny", line["replayed"])
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", line["date"])
    for row in accepted.every():
        shown = measure.one(Workflow(aged.scale, recorded=True), measure.cell_of(aged.flow, row))
        assert (shown.live, shown.status) == ("recorded" if row.row == "FP16" else "carried", row.status)
    assert aged.recorded("+SPEAR pc on RTN").status == "unsupported"  # a refusal is replayed too
    assert "3 accepted rows stand; 12 accepted rows were made by other code" in said
    assert "changed since: baselines/grid.py" in said and "6 of 6 groups attested, 0 belong to other machines" in said
    assert attest.attest() == 0 and "15 accepted rows stand\n" in capsys.readouterr().out  # nothing is left to do


def test_a_difference_names_the_cell_and_the_module(house, aged, capsys, monkeypatch):
    file = aged.job("GPTQ g128").folder / FILE
    held = observations.load(file)
    moved = {name: Series(np.nextafter(one.values, 9), one.units, one.group) for name, one in held.series.items()}
    observations.save(file, moved, {k: v for k, v in held.meta.items() if k not in ("checksum", "made")})
    accept(aged.table(rows=["GPTQ g128"]))
    assert attest.attest(cells=9) == 1
    said = capsys.readouterr().out
    assert re.search(r"differs: spear/table1 / GPTQ g128 / Wiki / .*: its observations were \w{16} \w{16}, now ", said)
    assert re.search(r"differs: .*; changed since: baselines/grid.py\n", said)
    assert aged.recorded("GPTQ g128").status == "stale" and aged.recorded("RTN pc").live == "carried"


def test_other_weights_with_equal_scores_are_a_difference(aged, capsys):
    changed(aged, artifacts=OLD)
    assert attest.attest(cells=1) == 1
    assert f"its artifacts were {OLD}, now " in capsys.readouterr().out and not lines(aged)


def test_what_cannot_be_run_anew_is_no_success(aged, capsys, monkeypatch):
    monkeypatch.setattr(attest.pool, "rebuild", lambda *_: shutil.rmtree(attest.FOLDER, ignore_errors=True))
    assert attest.attest(cells=1) == 1
    assert "could not be run anew" in capsys.readouterr().out and not lines(aged)


def test_a_replay_takes_as_many_workers_as_are_asked_for(aged, monkeypatch):
    taken = []
    monkeypatch.setattr(attest.pool, "rebuild", lambda jobs, folder, workers: taken.append(workers))
    assert main(["attest", "--cells", "1", "--side-by-side", "7"]) == 1 and taken == [7]


def test_the_commit_chooses_the_cells(aged, monkeypatch):
    chosen = []
    monkeypatch.setattr(attest.pool, "rebuild", lambda *_: chosen.append([]))
    monkeypatch.setattr(attest, "_judge", lambda group, rows, *_: bool(chosen[-1].append(rows[0].name)))
    for commit in ("a" * 10, "a" * 10, "b" * 10, "c" * 10, "d" * 10):
        monkeypatch.setenv("REPRO_COMMIT", commit)
        provenance.commit.cache_clear()
        attest.attest(cells=1)
    assert chosen[0] == chosen[1] and len({*map(tuple, chosen)}) > 1


@pytest.mark.parametrize("commit", ["0123456789+", "unknown"])
def test_uncommitted_code_attests_nothing(aged, monkeypatch, commit):
    monkeypatch.setenv("REPRO_COMMIT", commit)
    provenance.commit.cache_clear()
    assert f"the code is at commit '{commit}'; commit it first" in refusal(attest.attest)


def test_bad_options(aged):
    assert "replay at least one cell" in refusal(attest.attest, 0)
    assert "unknown scale 'tinny'" in refusal(attest.attest, 3, "tinny")


def test_nothing_accepted(house, capsys):
    assert attest.attest() == 0 and capsys.readouterr().out == "nothing is accepted yet\n"


# --- other machines ---------------------------------------------------------------------------------------------------


def never(jobs, folder):
    raise AssertionError("nothing may be replayed")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"device": "Another CPU"}, "this machine is "),
        ({"device": "NVIDIA H200", "device_class": "cuda"}, "this machine has no CUDA device"),
        ({"environment": '{"torch": "9.9", "transformers": "1", "numpy": "1"}'}, " here, and was "),
        ({"environment": "?"}, " here, and was unknown"),
    ],
    ids=["device", "class", "versions", "environment"],
)
def test_another_machine_gets_the_command(aged, monkeypatch, capsys, fields, why):
    monkeypatch.setattr(attest.pool, "rebuild", never)
    monkeypatch.setattr(attest, "has_cuda", lambda: False)
    changed(aged, **fields)
    assert attest.attest() == 0
    said = capsys.readouterr().out
    assert why in said and "0 of 6 groups attested, 6 belong to other machines" in said and not lines(aged)
    assert said.count("    python -m repro run spear/table1 --scale tiny\n") == 6
    if "environment" in fields:
        assert "15 accepted rows were measured with other library versions than this machine's" in said


def test_the_command_of_cells_that_belong_to_another_device(aged, monkeypatch, capsys):
    at = replace(aged.scale, recorded={"gptq": (aged.scale.models[MODEL],)}, recorded_on="cpu")
    monkeypatch.setattr("repro.spec.scale.load", lambda config=None, name=None, path=None: at)
    changed(aged, device="Another CPU")
    attest.attest()
    assert "    python -m repro run spear/table1 --scale tiny --recorded\n" in capsys.readouterr().out


def test_only_rows_of_the_recorded_versions_are_replayed(aged, monkeypatch, capsys):
    """One row was made with another torch: it is never chosen, and the others speak for the code."""
    (path,) = aged.results.glob("*/spear-table1.csv")
    rows = [replace(row, environment="{}") if row.col == "Wiki" else row for row in from_csv(path)]
    path.write_text(accepted.to_csv(rows))
    accepted.forget()
    assert attest.attest(cells=9) == 0
    assert not any("Wiki" in line["replayed"] for line in lines(aged)) and aged.recorded(col="Wiki").live == "carried"
    assert "4 accepted rows were measured with other library versions" in capsys.readouterr().out


# --- what is not a matter of code -------------------------------------------------------------------------------------


def test_other_inputs_are_never_carried(aged, tiny_jobs, monkeypatch, capsys):
    other = scale(tiny_jobs / "tiny-llama", perplexity={"length": 32, "windows": 99, "kl_windows": 8})
    monkeypatch.setattr("repro.spec.scale.load", lambda config=None, name=None, path=None: other)
    assert attest.attest(cells=1) == 0
    said = capsys.readouterr().out
    assert "11 accepted rows are stale for other reasons than code: measure them again" in said
    assert {line["replayed"].partition(" / ")[2].split(" / ")[1] for line in lines(aged)} == {"BPW"}


def test_rows_that_outlive_their_spec_or_scale(aged, capsys, monkeypatch):
    changed(aged, scale="gone")
    assert attest.attest() == 0
    assert "15 accepted rows are stale for other reasons than code" in capsys.readouterr().out
    changed(aged, scale="tiny", number="99")
    (path,) = aged.results.glob("*/spear-table1.csv")
    path.rename(path.with_name("spear-table99.csv"))
    accepted.forget()
    assert attest.attest() == 0 and not lines(aged)


# --- attested.csv -----------------------------------------------------------------------------------------------------

LINE = {"before": "a", "after": "b", "device": "A CPU", "scale": "", "commit": COMMIT, "date": "2026-11-22"}


def test_lines_are_followed_over_several_changes(house):
    assert not accepted.carried("a", "c", "A CPU", "tiny")
    for change in (
        {},
        {"before": "b", "after": "c"},
        {"before": "c", "after": "a"},
        {"before": "x", "scale": "pocket"},
    ):
        path = accepted.attest(LINE | {"replayed": '1 cells: a, "quoted" one'} | change)
    assert path == house.results / "a-cpu" / "attested.csv" and len(lines(house)) == 4
    assert accepted.carried("a", "c", "A CPU", "tiny") and accepted.carried("a", "c", "a cpu", "pocket")
    assert not accepted.carried("a", "d", "A CPU", "tiny") and not accepted.carried("a", "c", "NVIDIA H200", "tiny")
    assert accepted.carried("x", "c", "A CPU", "pocket") and not accepted.carried("x", "c", "A CPU", "tiny")


def test_a_damaged_file_of_attested_changes(house):
    path = accepted.attest(LINE | {"replayed": "1 cells: one"})
    for text in ("", "before,after\na,b\n", path.read_text() + "a,b\n"):
        path.write_text(text)
        accepted.forget()
        with pytest.raises(UserError, match="not a file of attested changes"):
            accepted.carried("a", "b", "A CPU", "tiny")


def test_with_a_scale_only_that_scale_is_carried(aged):
    assert attest.attest(cells=1, scale="tiny") == 0
    assert {line["scale"] for line in lines(aged)} == {"tiny"} and aged.recorded().live == "carried"
    one = lines(aged)[0]
    assert not accepted.carried(one["before"], one["after"], one["device"], "pocket")


# --- end to end, on edited code ---------------------------------------------------------------------------------------

SPEC = "title: two rows\nrows: {FP16: fp16, RTN pc: rtn-w4-pc}\ncolumns: [Wiki, ZS]\nbeside: {BPW: {kind: storage}}\n"
STANDING = """\
import json
from repro.record import accepted, measure
from repro.spec import scale as scales
from repro.spec.workflow import Workflow
flow = Workflow(scales.load(name="tiny"), recorded=True)
rows = {}
for row in accepted.every():
    shown = measure.one(flow, measure.cell_of(flow, row))
    rows[f"{row.row} {row.col}"] = [shown.live, shown.status, shown.value]
with_tasks = Workflow(scales.load(name="tasks"), recorded=False)
jobs = sorted(job.id for job in with_tasks.every_job(with_tasks.cells("spear", "1")))
print(json.dumps({"rows": rows, "jobs": jobs}))
"""


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """A copy of the checkout whose tiny table was built and accepted; tests edit its code, one after the other."""
    place = dag.folder(dag.copy_checkout(tmp_path_factory.mktemp("attest") / "house", SPEC))
    tasks = {"name": "tasks", "base": "tiny", "zeroshot": {"limit": 2}}
    (place / "config" / "tasks.yaml").write_text(json.dumps(tasks))
    words = [["run", "spear/table1"], ["table", "spear/table1"], ["accept", dag.TARGET]]
    script = f"from repro.__main__ import main; print([main(words) for words in {words}])"
    done = dag.quick([sys.executable, "-c", script], place, place, REPRO_COMMIT=COMMIT)
    assert done.out.endswith("[0, 0, 0]\n"), done.text
    shutil.rmtree(place / "build")
    return place


@pytest.fixture(scope="module")
def at_first(edited):
    """The standing of the accepted rows before any edit."""
    return standing(edited)


def standing(place):
    """Every accepted row as a table shows it today, and the ids of all jobs of a scale with zero-shot tasks."""
    done = dag.quick([sys.executable, "-c", STANDING], place, place)
    assert done.code == 0, done.text
    return json.loads(done.out)


def edit(path, old, new):
    """Replace a text that is there."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_comments_moved_files_and_new_entries_change_nothing(edited, at_first):
    rows = at_first["rows"]
    assert len(rows) == 4 and {tuple(row[:2]) for row in rows.values()} == {("recorded", "ok")}
    assert any(job.startswith("zeroshot/") for job in at_first["jobs"])
    grid = edited / "baselines" / "grid.py"
    grid.write_text(grid.read_text().replace('"""', '"""Another docstring. ', 1) + "\n\n# a comment\n")
    (edited / "repro" / "models" / "bits.py").rename(edited / "repro" / "data" / "bits.py")
    for reader in (edited / "repro" / name for name in ("jobs/compress.py", "jobs/own_text.py", "engine/weights.py")):
        others = r"from repro.data import bits\1\nfrom repro.models import \2"
        pattern = r"^from repro\.models import bits( as \w+)?(?:, (.+))?$"
        text, count = re.subn(pattern, others, reader.read_text(), flags=re.MULTILINE)
        assert count == 1
        reader.write_text(re.sub(r"^from repro.models import $", "", text, flags=re.MULTILINE))
    text = {"description": "new", "reader": "embedded", "source": "a", "licence": "none", "joining": "", "split": "all"}
    task = {
        "folder": "piqa",
        "version": "1.0",
        "metric": "acc",
        "chance": 0.5,
        "files": {"a.jsonl": "0" * 64},
        "convert": "piqa",
        "form": "original",
    }
    for file, entry in (("corpora.yaml", {"new-text": text}), ("tasks.yaml", {"new_task": task})):
        with open(edited / "repro" / "data" / file, "a") as out:
            out.write(json.dumps(entry)[1:-1] + "\n")
    edit(edited / "config" / "pocket-models.yaml", "models:\n", "models:\n  pocket-9m: {layers: 9, tokens: 1000}\n")
    edit(edited / "config" / "tiny.yaml", '"models": {', f'"models": {{"Llama-3.2-3B": "{dag.MODEL}", ')
    after = standing(edited)
    assert after["rows"] == rows and set(after["jobs"]) == set(at_first["jobs"])


def test_a_renamed_variable_is_carried_forward(edited, at_first):
    grid = edited / "baselines" / "grid.py"
    grid.write_text(re.sub(r"\bgroups\b", "parts", grid.read_text()))
    done = dag.quick(dag.repro("attest", "--cells", 1), edited, edited, REPRO_COMMIT="abcdef0123")
    assert "2 accepted rows stand; 2 accepted rows were made by other code\n" in done.out, done.text
    assert done.code == 0 and "2 of 2 groups attested" in done.out, done.text
    carried = standing(edited)["rows"]
    assert {name: row[1:] for name, row in carried.items()} == {name: row[1:] for name, row in at_first["rows"].items()}
    assert {name for name, row in carried.items() if row[0] == "carried"} == {"RTN pc Wiki", "RTN pc BPW"}


def test_a_changed_number_in_the_grid_is_refused_by_name(edited):
    edit(edited / "baselines" / "grid.py", "((high - low) / levels)", "((high - low) / levels + 1e-6)")
    done = dag.run(dag.repro("attest", "--cells", 2), edited, edited, REPRO_COMMIT="abcdef0124")
    assert done.code == 1, done.text
    for metric in ("Wiki", "BPW"):
        assert re.search(
            rf"differs: spear/table1 / RTN pc / {metric} / .*: its \w+ were .*changed since: baselines/grid.py",
            done.out,
        )
    assert "0 of 2 groups attested" in done.out
