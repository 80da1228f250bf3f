"""A build lists its jobs, runs them and draws; where nothing had to run, what was read for the list is drawn."""

import gc
import subprocess
import sys

import pytest

from repro.core.files import ROOT
from repro.make import build
from repro.specs import scale


@pytest.mark.parametrize(("is_done", "workflows"), [(True, 1), (False, 2)])
def test_results_are_read_again_only_where_a_job_ran(tmp_path, monkeypatch, is_done, workflows):
    monkeypatch.chdir(tmp_path)
    made, drawn = [], []

    def workflow(at, remember):
        made.append(object())
        return made[-1]

    monkeypatch.setattr(build, "Workflow", workflow)
    monkeypatch.setattr(build, "drawn_for", lambda flow, targets: [("table", "spear/table1")])
    monkeypatch.setattr(build, "jobs_behind", lambda flow, wanted: ["a job"])
    monkeypatch.setattr(build.runner, "done", lambda job: is_done)
    monkeypatch.setattr(build.pool, "run_on_machine", lambda jobs, cores: 0)
    monkeypatch.setattr(build, "DRAWN", {"table": lambda flow, name: drawn.append(flow)})
    gc.unfreeze()
    assert build.build(["tables/spear/table1.tex"], 1, scale.load(name="pocket")) == 0
    assert drawn == [made[-1]] and len(made) == workflows
    assert (tmp_path / "build" / "benchmarks" / "tables" / "spear" / "table1.tsv").is_file()
    assert gc.get_freeze_count() > 10_000, "what stays is gone through again and again"
    gc.unfreeze()


def test_a_build_of_tables_draws_no_picture_and_loads_nothing_for_one():
    code = "import sys, repro.make.build; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(("what", "module"), [("figure", "figure_files"), ("page", "page")])
def test_what_draws_pictures_is_loaded_where_it_is_asked_for(monkeypatch, what, module):
    drawn = []
    monkeypatch.setattr(f"repro.render.{module}.build", lambda *arguments: drawn.append(arguments))
    build.DRAWN[what]("flow", "spear/figure13")
    assert drawn == [("flow", "spear/figure13")]
