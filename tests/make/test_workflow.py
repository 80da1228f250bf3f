"""The whole DAG on a tiny model: what is built, that it is the same every time, and what an edit rebuilds."""

import contextlib
import os
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import dag
import pandas as pd
import pytest
import yaml

from repro import papers
from repro.core.files import ROOT
from repro.render import draw
from repro.results import replicate
from repro.specs import scale
from repro.workflow.workflow import Workflow

NAME = "tiny_touch_x_llama"  # the model's folder as part of a file name
GPTQ = rf"(make build/compress|measure build/perplexity)/{NAME}/gptq-"
TABLE = r"table tables/spear/table1\.csv"
FIGURE = r"figure figures/spear/figure13\.svg"
TARGETS = (dag.TARGET, dag.PLOT)


@contextlib.contextmanager
def edited(*paths: Path, add: str = "\n# edited\n", start: str = "") -> Iterator[None]:
    """Files with something added to them, or new, until the block ends."""
    before = {path: path.read_text() if path.is_file() else None for path in paths}
    try:
        for path, text in before.items():
            path.write_text(start + (text or "") + add)
        yield
    finally:
        for path, text in before.items():
            path.unlink() if text is None else path.write_text(text)


def planned(built, *words: object) -> list[str]:
    """What Snakemake would run for the table and the figure."""
    return sorted(dag.dry_run(built.folder, built.folder, *words, *TARGETS))


def matches(jobs: list[str], expected: list[str]) -> bool:
    """Whether each found job matches the expected pattern at its place, both sorted."""
    return len(jobs) == len(expected) and all(re.match(p, job) for job, p in zip(jobs, sorted(expected)))


def test_every_file_of_the_table_and_the_figure_appears(built):
    assert set(built.tables) == {
        *(f"tables/spear/table1{kind}" for kind in dag.BUILT), *(f"figures/spear/figure13{kind}" for kind in dag.DRAWN),
    }  # fmt: skip
    frame = pd.read_csv(built.folder / dag.TARGET, dtype=str, keep_default_na=False)
    fresh = frame[frame["source"] == "fresh"]
    assert set(fresh["row"]) == {"FP16", "RTN pc", "GPTQ g128", "+SPEAR pc on RTN"}
    assert set(fresh.loc[fresh["row"] != "+SPEAR pc on RTN", "status"]) == {"ok"}
    assert set(fresh["stand_in"]) == {dag.MODEL}
    assert {"Wiki", "C4", "KL", "BPW"} == set(fresh["col"])
    shown = {(c.row, c.col, c.model) for c in papers.printed("spear", "1")}
    assert shown <= set(zip(frame["row"], frame["col"], frame["model"]))  # nothing is dropped
    drawn = pd.read_csv(built.folder / "figures/spear/figure13.csv")
    assert sorted(drawn["x"]) == [3, 4] and set(drawn["series"]) == {"pc"}
    assert not [p for p in built.folder.rglob("*.tmp*")]


def test_names_in_paths_run_nothing_and_every_job_has_its_log(built):
    """The checkout lies in a folder with blanks, quotes and `$(…)`, the model too."""
    assert not [p for p in built.folder.parent.rglob("*") if p.name in ("x", "y", "x)", "y)")]
    folders = built.observed
    assert len(folders) == 11 and all(f"/{NAME}/" in folder for folder in folders if "/tokens/" not in folder)
    for folder in folders:
        name = folder.removeprefix("build/")
        assert (built.folder / "build" / name / "log.txt").is_file()
        assert (built.folder / "build" / "benchmarks" / f"{name}.tsv").is_file()


def test_make_runs_nothing_anew_and_prints_the_table(built):
    before = {p: p.stat().st_mtime_ns for p in (built.folder / "build").rglob("observations.parquet")}
    done = dag.run(["make", "CORES=2", f"PYTHON={sys.executable}", dag.TARGET, dag.PLOT], built.folder, built.folder)
    assert done.code == 0 and done.err == "", done.text
    assert "GPTQ g128" in done.out and "written: tables/spear/table1.tex" in done.out
    assert {p: p.stat().st_mtime_ns for p in before} == before and dag.outputs(built.folder) == built.tables


def test_a_copied_and_a_moved_checkout_rebuild_nothing(built, tmp_path):
    """As CI caches and containers have them: another place, and all files as new as their copy."""
    for name, copy in (("dated", shutil.copy2), ("new", shutil.copyfile)):
        checkout = tmp_path / name / "a checkout"
        shutil.copytree(built.folder, checkout, symlinks=True, copy_function=copy)
        assert dag.dry_run(checkout, checkout, *TARGETS) == set(), name
    moved = checkout.rename(tmp_path / "moved")
    assert dag.dry_run(moved, moved, *TARGETS) == set()
    (moved / dag.MODEL / "config.json").write_text((moved / dag.MODEL / "config.json").read_text() + " ")
    assert dag.dry_run(moved, moved, *TARGETS) != set(), "another model is seen there as well"


def test_touches_and_edits_of_steps_and_memory_measure_nothing_anew(built):
    for folder in ("repro", "baselines", "methods", "tables/spear", "figures/spear", "config", dag.MODEL):
        for path in (built.folder / folder).rglob("*.*"):
            if path.suffix in (".py", ".yaml", ".json", ".safetensors"):
                os.utime(path)
    steps = [built.folder / "baselines" / name for name in ("gptq.py", "grid.py")]
    with edited(*steps, add="\nEDITED = 1\n"):
        assert planned(built) == []
        assert matches(planned(built, "--config", "memory_mb=5000", "--"), [FIGURE, TABLE])


@pytest.mark.parametrize(
    ("file", "added", "expected"),
    [
        ("baselines/gptq.py", "VERSION = 2", [GPTQ, GPTQ, TABLE]),
        ("repro/models/bits.py", "EDITED = 1", [TABLE, FIGURE]),
        (
            "repro/jobs/compress.py",
            "VERSION = 2",
            [*5 * [rf"make build/compress/{NAME}/"], *3 * ["measure"], TABLE, FIGURE],
        ),
    ],
    ids=["step", "drawing", "shared job"],
)
def test_a_new_version_rebuilds_its_own_jobs_and_an_edit_only_draws(built, file, added, expected):
    with edited(built.folder / file, add=f"\n{added}\n"):
        result = planned(built)
    assert matches(result, expected), result


def test_a_renamed_model_folder_is_another_label_with_the_same_hash(built):
    """What decides a result is hashed; the folder's name is only shown."""
    other = built.folder / "renamed"
    (built.folder / dag.MODEL).rename(other)
    try:
        words = yaml.safe_dump({"Llama-3.2-1B": "renamed"}, default_flow_style=True).strip()
        result = planned(built, "--config", f"models={words}", "--")
    finally:
        other.rename(built.folder / dag.MODEL)
    files = [job.split()[1].removeprefix("build/") for job in result if " build/" in job and "/tokens/" not in job]
    ids = {file.rsplit("/", 1)[0] for file in files}
    known = {folder.removeprefix("build/") for folder in built.observed if "/tokens/" not in folder}
    assert {name.replace("renamed", NAME) for name in ids} == known


def test_everything_is_planned(built):
    result = dag.dry_run(built.folder, built.folder, "all")
    printed = set()
    for paper in papers.PAPERS:
        printed |= {f"table tables/{paper}/table{number}.csv" for number in papers.tables(paper)}
    own = {"table tables/table1.csv", "table tables/table2.csv", "table tables/audit.csv", "page docs/spear.md"}
    own |= {"table tables/own-numbers.csv"}
    own |= {"figure figures/leaderboard.svg"}
    assert printed - {f"table {dag.TARGET}"} | own <= result and len(printed) == 45  # that one is built already


def test_a_page_of_a_table_or_of_figures_is_planned_with_its_papers(tmp_path):
    """In this checkout, whose pages are there."""
    parts = ("docs/spear/figures.md", "docs/spear/table3.md")
    done = dag.quick(dag.snakemake(ROOT, "-n", *parts), tmp_path, ROOT, SCALE="pocket")
    assert done.code == 0, done.text
    assert dag.jobs(done.text) == {f"page_part {part} (update)" for part in parts} | {"page docs/spear.md"}
    done = dag.quick(dag.snakemake(ROOT, "-n", "docs/spear/table99.md"), tmp_path, ROOT, SCALE="pocket")
    assert done.code == 1 and "Traceback" not in done.text, done.text
    assert "error: unknown target 'docs/spear/table99.md'; did you mean 'docs/spear.md'" in done.err


def test_a_page_of_figures_keeps_what_its_papers_page_has_written_and_is_drawn_where_it_was_removed(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    figures, log, drawn = Path("figures.md"), "log.txt", []
    monkeypatch.setattr(draw, "draw", lambda *words: drawn.append(words) or figures.write_text("drawn"))
    asked = SimpleNamespace(output=[figures], log=[log], params=SimpleNamespace(scale="{}"))
    asked.wildcards = SimpleNamespace(page="spear", part="figures")
    script = ROOT / "repro" / "make" / "part_script.py"
    runpy.run_path(script, {"snakemake": asked})
    assert drawn == [("{}", "page", "spear", log)] and figures.read_text() == "drawn"
    figures.write_text("of the paper's page")
    os.utime(figures, (0, 0))
    runpy.run_path(script, {"snakemake": asked})
    assert figures.read_text() == "of the paper's page" and figures.stat().st_mtime > 0 and len(drawn) == 1


@pytest.mark.parametrize("name", ["pocket", "gpu", pytest.param("paper", marks=pytest.mark.slow)])
def test_every_scale_has_a_plan(name):
    flow = Workflow(scale.load(None, name), stored=False)
    cells = flow.table_cells("table2")
    jobs = flow.every_job(cells)
    assert jobs and len({job.id for job in jobs}) == len(jobs)
    assert {job.kind for job in jobs} >= {"tokens", "compress", "perplexity"}
    seen = set()
    for job in jobs:  # needs come first
        assert {need.id for _, need in job.needs} <= seen
        seen.add(job.id)


def test_snakemake_reports_on_a_built_table(built):
    done = dag.quick(
        dag.snakemake(built.folder, "--report", "build/report.html", dag.TARGET), built.folder, built.folder
    )
    assert done.code == 0, done.text
    assert "table1.tex" in (built.folder / "build" / "report.html").read_text()


# --- scales on the command line ---------------------------------------------------------------------------------------


def test_one_key_by_config_and_a_file_by_configfile(built, tmp_path):
    dag.folder(tmp_path)
    done = dag.quick(
        dag.snakemake(built.folder, "-n", "--config", "threads=2", "--", dag.TARGET), tmp_path, built.folder
    )
    assert done.code == 0 and len(dag.jobs(done.text)) == 11, done.text
    threads = {line.strip() for line in done.text.splitlines() if "threads:" in line}
    assert threads == {"threads: 2"}
    (tmp_path / "mine.yaml").write_text("base: tiny\nname: mine\nabout: the same with fewer windows\n")
    words = dag.snakemake(built.folder, "-n", "--configfile", "mine.yaml", "--", dag.TARGET)
    done = dag.quick(words, tmp_path, built.folder)
    assert done.code == 0 and len(dag.jobs(done.text)) == 11, done.text


@pytest.mark.parametrize(
    ("words", "text", "env", "sentence"),
    [
        (["--configfile", "other.yaml"], "threads: 2\n", {}, "a scale is named like its file"),
        ([], "", {"SCALE": "nope"}, "unknown scale 'nope'; choose from: "),
    ],
    ids=["another name", "SCALE"],
)
def test_a_bad_scale_is_one_sentence(built, tmp_path, words, text, env, sentence):
    (tmp_path / "other.yaml").write_text(text)
    make = dag.quick(dag.repro("make", dag.TARGET, *words), tmp_path, built.folder, **env)
    assert make.code == 2 and make.err.strip().splitlines()[-1].startswith("error: "), make.text
    assert sentence in make.err.strip().splitlines()[-1]
    raw = dag.quick(dag.snakemake(built.folder, "-n", *words, "--", dag.TARGET), tmp_path, built.folder, **env)
    assert raw.code == 1 and "Traceback" not in raw.text, raw.text
    (line,) = [line for line in raw.err.splitlines() if line.startswith("error: ")]
    assert sentence in line


def test_a_bad_key_is_the_last_line_of_make(built, tmp_path):
    done = dag.quick(dag.repro("make", dag.TARGET, "--config", "thread=2"), tmp_path, built.folder)
    assert done.code == 2 and "Traceback" not in done.text, done.text
    assert "unknown key 'thread'; did you mean 'threads'?" in done.err.strip().splitlines()[-1]


# --- what fails -------------------------------------------------------------------------------------------------------


def test_a_failed_jobs_sentence_comes_last(built, tmp_path):
    folder = tmp_path / "work"
    for name in (dag.MODEL, "build/tokens", "build/compress", "build/versions"):  # with their times
        shutil.copytree(built.folder / name, folder / name)
    config = {"base": "tiny", "name": "far", "about": "too far", "perplexity": {"length": 300}}
    with edited(built.folder / "config" / "far.yaml", add=yaml.safe_dump(config)):
        done = dag.quick(dag.repro("make", dag.TARGET, "--scale", "far", "--cores", 1), folder, built.folder)
        raw = dag.quick(dag.snakemake(built.folder, "--", dag.TARGET), folder, built.folder, SCALE="far")
    last = done.err.strip().splitlines()[-1]
    assert done.code == 2 and last.startswith("error: ") and "256" in last and "Traceback" not in done.err, done.text
    name, _, why = last.removeprefix("error: ").partition(": ")
    assert why in (folder / "build" / name / "log.txt").read_text()
    assert raw.code == 1 and why in raw.err, raw.text
    logs = [log.read_text() for log in (folder / "build" / "logs" / "perplexity" / NAME).glob("*.txt")]
    assert any(why in log for log in logs)
    assert not (folder / dag.TARGET).exists()
    scores = (folder / "build" / "perplexity").rglob("observations.parquet")
    assert not any(file.stat().st_size for file in scores)  # a refusal leaves an empty file


# --- the example of the README ----------------------------------------------------------------------------------------


def example() -> dict[str, str]:
    """File to text of the README's worked example."""
    blocks = re.compile(r"<!-- example: (\S+) -->.*?\n```\w*\n(.*?)```", re.DOTALL)
    return dict(blocks.findall((ROOT / "README.md").read_text(encoding="utf-8")))


def test_the_example_of_the_readme(built):
    steps = example()
    registry, spec = built.folder / "baselines" / "__init__.py", built.folder / "tables" / "spear" / "table1.yaml"
    (made,) = (file for file in steps if (file.startswith("baselines/") and not file.endswith("__init__.py")))
    name = Path(made).stem
    assert set(steps) == {made, "baselines/__init__.py", "tables/spear/table1.yaml"}
    assert len(steps["baselines/__init__.py"].strip().splitlines()) == 1  # one dict line, beside its import
    assert len(steps["tables/spear/table1.yaml"].strip().splitlines()) == 1  # one word in a spec
    before = registry.read_text()
    with edited(built.folder / made, add=steps[made]), edited(registry, add=""):
        after = before.replace("from repro", f"from repro.baselines import {name}\nfrom repro", 1)
        registry.write_text(after.replace("BASELINES = {", "BASELINES = {" + steps["baselines/__init__.py"].strip(), 1))
        assert planned(built) == []  # a new baseline alone rebuilds nothing
        with edited(spec, add=steps["tables/spear/table1.yaml"]):
            result = planned(built)
            assert [job.split()[0] for job in result] == ["make", "measure", "table"]
            assert all(f"/{NAME}/{name}-" in job for job in result[:2])
            done = dag.quick(dag.repro("make", dag.TARGET, "--cores", 2), built.folder, built.folder)
            assert done.code == 0, done.text
    frame = pd.read_csv(built.folder / dag.TARGET, dtype=str)
    own = frame[frame["recipe"].fillna("").str.startswith(f"{name}-")]
    assert set(own["row"]) == set(own["recipe"]) and {"ok"} == set(own["status"])
    assert {"Wiki", "C4", "KL", "BPW"} <= set(own["col"])
    (bits,) = set(pd.to_numeric(own.loc[own["col"] == "BPW", "value"]))  # also by public shapes
    assert 3 < bits < 3.5


# --- the time of the headline table -----------------------------------------------------------------------------------


@pytest.mark.skipif(not os.environ.get("HEADLINE_BUILT"), reason="`.ci/run` times a build of its own")
def test_the_headline_table_takes_seven_minutes_on_two_cores():
    """On the checkout's own build, which `.ci/run` makes first; the sum is over its one-thread jobs, two at a time."""
    assert (ROOT / "tables" / "table1.csv").is_file(), "run `make tables/table1.tex` first"
    flow = Workflow(scale.load())
    firsts = [f"{paper}/table1" for paper in flow.beside_headline()]
    jobs = set()
    for table in ("table1", *firsts):
        jobs |= {job.id for job in replicate.jobs(flow, table)}
    names = [*sorted(jobs), *(f"tables/{table}" for table in ("table1", *firsts))]
    seconds = {}
    for name in names:
        path = ROOT / "build" / "benchmarks" / f"{name}.tsv"
        assert path.is_file(), f"{path.relative_to(ROOT)} is not there: another version or scale built the table"
        seconds[name] = float(path.read_text().splitlines()[1].split("\t")[0])
    slowest = sorted(seconds.items(), key=lambda item: -item[1])[:5]
    assert len(seconds) > 20 and sum(seconds.values()) <= 2 * 420, (
        f"{sum(seconds.values()):.0f} core seconds; the slowest are {slowest}"
    )
