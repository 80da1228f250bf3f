"""Measurements of a study: one file each, made once, and only where they are asked for."""

import json
import sys

import pytest

from repro.studies import prefill, space, steps
from repro.studies.measurement_folder import MeasurementFolder


def test_a_measurement_is_due_once_and_has_the_facts_and_its_seconds(tmp_path, capsys):
    files = MeasurementFolder(tmp_path / "new", {"device": "none"})
    assert files.is_due("step")
    files.write("step", lambda: {"ms": 1.5, "name": "x"})
    assert not files.is_due("step")
    stored = files.read("step")
    assert stored == json.loads((tmp_path / "new" / "step.json").read_text())
    assert stored.pop("wall_s") >= 0
    assert stored == {"device": "none", "ms": 1.5, "name": "x"}
    printed = capsys.readouterr().out
    assert printed.startswith("step (0 s): ") and '"ms": 1.5' in printed and "device" not in printed


def test_words_choose_measurements_by_a_part_of_their_names(tmp_path):
    files = MeasurementFolder(tmp_path, {}, ["step", "whole"])
    assert files.is_due("step-16-128") and files.is_due("whole")
    assert not files.is_due("signal")


def test_one_that_fails_leaves_no_file(tmp_path):
    files = MeasurementFolder(tmp_path, {})
    with pytest.raises(ZeroDivisionError):
        files.write("step", lambda: {"ms": 1 / 0})
    assert files.is_due("step")


@pytest.mark.parametrize("study", [prefill, space, steps])
def test_a_study_records_its_file_in_the_folder_of_the_command_line(study, tmp_path, monkeypatch):
    recorded = []

    def fake(path):
        assert path.parent.is_dir()
        recorded.append(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "record", fake)
    monkeypatch.setattr(sys, "argv", ["study", "--out", str(tmp_path / "new")])
    with pytest.raises(KeyboardInterrupt):
        study.main()
    assert recorded == [tmp_path / "new" / f"{study.__name__.rpartition('.')[2]}.json"]
