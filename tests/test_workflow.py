"""The whole DAG on a tiny model: what is built, that it is the same every time, and what an edit rebuilds."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import dag
import pandas as pd
import pytest

from repro import papers, profile
from repro.files import ROOT
from repro.workflow import Workflow

GPTQ = r"(compress|perplexity) build/runs/tiny-llama/gptq-"
TABLE = r"table tables/spear/table1\.csv"


@contextlib.contextmanager
def edited(*paths: Path, add: str = "\n# edited\n") -> Iterator[None]:
    """Files with something added to them, or new, until the block ends."""
    before = {path: path.read_text() if path.is_file() else None for path in paths}
    try:
        for path, text in before.items():
            path.write_text((text or "") + add)
        yield
    finally:
        for path, text in before.items():
            path.unlink() if text is None else path.write_text(text)


def test_every_file_of_the_table_appears(built):
    assert set(built.tables) == {f"tables/spear/table1{kind}" for kind in dag.BUILT}
    assert "GPTQ g128" in built.done.out and "written: tables/spear/table1.tex" in built.done.out
    frame = pd.read_csv(built.place / dag.TARGET, dtype=str, keep_default_na=False)
    live = frame[frame["live"] == "live"]
    assert set(live["row"]) == {"FP16", "RTN pc", "GPTQ g128"}
    assert set(live["status"]) == {"ok"} and set(live["stand_in"]) == {dag.MODEL}
    shown = {(c.row, c.col, c.model) for c in papers.printed("spear", "1")}
    assert shown <= set(zip(frame["row"], frame["col"], frame["model"]))  # nothing is dropped
    assert not [p for p in built.place.rglob("*.tmp*")]


def test_one_core_and_a_clean_folder_give_the_same_bytes(built, tmp_path):
    dag.folder(tmp_path)
    done = dag.run(dag.snakemake(built.place, "--cores", 1, dag.TARGET), tmp_path, built.place)
    assert done.code == 0, done.text
    assert dag.outputs(tmp_path) == built.tables


def test_nothing_changed_and_nothing_runs(built):
    before = {p: p.stat().st_mtime_ns for p in (built.place / "tables").rglob("*.*")}
    done = dag.run(["make", "CORES=2", f"PYTHON={sys.executable}", dag.TARGET], built.place, built.place)
    assert done.code == 0, done.text
    assert "Nothing to be done" in done.text and "GPTQ g128" in done.out
    assert {p: p.stat().st_mtime_ns for p in (built.place / "tables").rglob("*.*")} == before


def test_a_touch_and_an_edit_of_plumbing_change_nothing(built):
    for folder in ("repro", "baselines", "methods", "tables/spear", "config", dag.MODEL):
        for path in (built.place / folder).rglob("*.*"):
            if path.suffix in (".py", ".yaml", ".json", ".safetensors"):
                os.utime(path)
    plumbing = ("repro/recipe.py", "repro/pretrain.py", "baselines/__init__.py", "methods/__init__.py")
    with edited(*(built.place / file for file in plumbing)):
        assert dag.dry_run(built.place, built.place, dag.TARGET) == set()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["baselines/gptq.py"], [GPTQ, GPTQ, TABLE]),
        (["repro/render.py", "repro/table.py"], [TABLE]),
        (["repro/bits.py"], [*3 * ["perplexity build/runs/tiny-llama/"], TABLE]),
    ],
    ids=["method", "table", "measure"],
)
def test_an_edit_rebuilds_its_own_runs_and_nothing_else(built, files, expected):
    with edited(*(built.place / file for file in files)):
        found = sorted(dag.dry_run(built.place, built.place, dag.TARGET))
    assert len(found) == len(expected), found
    for job, pattern in zip(found, sorted(expected)):
        assert re.match(pattern, job), found


def test_everything_is_planned(built):
    found = dag.dry_run(built.place, built.place, "all")
    tables = {f"table tables/{p}/table{n}.csv" for p in papers.PAPERS for n in papers.tables(p)} - {
        "table tables/spear/table1.csv"  # built already
    }
    own = {"headline tables/table1.csv", "leaderboard tables/table2.csv", "audit tables/audit.csv"}
    assert tables | own <= found and len(tables) == 44


@pytest.mark.parametrize("name", profile.names())
def test_every_profile_has_a_plan(name, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # else a profile for a GPU draws from results/
    flow = Workflow(None, name)
    needed = {*flow.headline_inputs(), *flow.leaderboard_inputs()}
    runs = {f.split("/ppl-")[0].split("/zeroshot-")[0].removeprefix("build/runs/") for f in needed if "build/runs" in f}
    assert runs and all(flow.perplexity_options(flow.the(run)) for run in runs)


def test_a_profile_file_stands_for_a_profile(built, tmp_path):
    dag.folder(tmp_path)
    (tmp_path / "mine.yaml").write_text("base: tiny\nname: mine\nabout: the same with fewer windows\n")
    words = dag.snakemake(built.place, "-n", "--configfile", "mine.yaml", "--", dag.TARGET)
    done = dag.run(words, tmp_path, built.place)
    assert done.code == 0, done.text
    assert len(dag.jobs(done.text)) == 7


def test_the_report(built):
    done = dag.run(dag.snakemake(built.place, "--report", "build/report.html", dag.TARGET), built.place, built.place)
    assert done.code == 0, done.text
    assert "table1.tex" in (built.place / "build" / "report.html").read_text()


# --- the example of the README ----------------------------------------------------------------------------------------


def example() -> dict[str, str]:
    """File to text of the README's worked example."""
    blocks = re.compile(r"<!-- example: (\S+) -->.*?\n```\w*\n(.*?)```", re.DOTALL)
    return dict(blocks.findall((ROOT / "README.md").read_text(encoding="utf-8")))


def test_the_example_of_the_readme(built):
    steps = example()
    registry, spec = built.place / "baselines" / "__init__.py", built.place / "tables" / "spear" / "table1.yaml"
    (made,) = (file for file in steps if (file.startswith("baselines/") and not file.endswith("__init__.py")))
    name = Path(made).stem
    assert set(steps) == {made, "baselines/__init__.py", "tables/spear/table1.yaml"}
    assert len(steps["baselines/__init__.py"].strip().splitlines()) == 1  # one dict line, beside its import
    assert len(steps["tables/spear/table1.yaml"].strip().splitlines()) == 1  # one word in a spec
    before = registry.read_text()
    with edited(built.place / made, add=steps[made]), edited(registry, add=""):
        after = before.replace("import ", f"import {name}, ", 1)
        registry.write_text(after.replace("BASELINES = {", "BASELINES = {" + steps["baselines/__init__.py"].strip(), 1))
        assert dag.dry_run(built.place, built.place, dag.TARGET) == set()  # a new baseline alone rebuilds nothing
        with edited(spec, add=steps["tables/spear/table1.yaml"]):
            found = sorted(dag.dry_run(built.place, built.place, dag.TARGET))
            assert [job.split()[0] for job in found] == ["compress", "perplexity", "table"]
            assert all(f"{dag.MODEL}/{name}-" in job for job in found[:2])
            done = dag.run(dag.repro("make", dag.TARGET, "--cores", 2), built.place, built.place)
            assert done.code == 0, done.text
    frame = pd.read_csv(built.place / dag.TARGET, dtype=str)
    own = frame[frame["recipe"].fillna("").str.startswith(f"{name}-")]
    assert set(own["row"]) == set(own["recipe"]) and {"ok"} == set(own["status"])
    assert {"Wiki", "C4", "KL", "Top-1", "BPW", "MB"} <= set(own["col"])
    bits = pd.to_numeric(own.loc[own["col"] == "BPW", "value"]).item()
    assert 3 < bits < 3.5


# --- the time of the headline table -----------------------------------------------------------------------------------


@pytest.mark.skipif(not os.environ.get("HEADLINE_BUILT"), reason="`.ci/run` times a build of its own")
def test_the_headline_table_takes_ten_minutes_on_two_cores():
    """On the checkout's own build, which `.ci/run` makes first; the sum is over one-thread jobs, two at a time."""
    assert (ROOT / "tables" / "table1.csv").is_file(), "run `make tables/table1.tex` first"
    flow, seconds = Workflow(), {}
    needed = [f.removeprefix("build/runs/") for f in flow.headline_inputs() if f.startswith("build/runs/")]
    for file in needed:
        run = flow.the("/".join(file.split("/")[:2]))
        kind = "zeroshot" if flow.zs in file else "perplexity"
        seconds |= dict.fromkeys([f"{kind}/{run.id}", *([f"compress/{run.id}"] if run.weights else [])])
        texts = [*flow.texts, flow.profile.calibration.corpus]
        places = [flow.tokens(run.model, text).removeprefix("build/tokens/") for text in texts]
        seconds |= dict.fromkeys(f"tokens/{place.removesuffix('.safetensors').replace('/', '-')}" for place in places)
    seconds |= dict.fromkeys([*(f"tables/{paper}-1" for paper in papers.PAPERS), "tables/headline"])
    for job in seconds:
        path = ROOT / "build" / "benchmarks" / f"{job}.tsv"
        assert path.is_file(), f"{path.relative_to(ROOT)} is not there: another version or profile built the table"
        seconds[job] = float(path.read_text().splitlines()[1].split("\t")[0])
    slowest = sorted(seconds.items(), key=lambda item: -item[1])[:5]
    assert sum(seconds.values()) <= 2 * 600, f"{sum(seconds.values()):.0f} core seconds; the slowest are {slowest}"
