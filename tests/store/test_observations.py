"""Observations in their files: what is exact, what is rounded, and that both ways round once."""

import disk_errors
import numpy as np
import pytest

from repro.core.errors import UserError
from repro.store import observations
from repro.store.observations import Series

BYTES = 2.0**40 + 1  # a whole number that single precision does not hold


def test_whole_numbers_are_exact_and_others_in_single_precision(tmp_path):
    memory = Series(np.array([BYTES, 0.0, -3.0]), "model")
    series = {"memory": memory, "nll": Series(np.array([1 / 3, 1e-9]), "windows")}
    path = tmp_path / observations.FILE
    observations.save(path, series, {})
    loaded = observations.load(path).series
    assert loaded["memory"].values.tolist() == [BYTES, 0.0, -3.0]
    assert loaded["nll"].values.tolist() == [float(np.float32(1 / 3)), float(np.float32(1e-9))]
    assert loaded["nll"].axis == "windows"


def test_what_was_rounded_once_stays(tmp_path):
    rounded = observations.as_kept(Series(np.linspace(0, 1, 99), "items"))
    again = observations.as_kept(rounded)
    assert again.values.tolist() == rounded.values.tolist()


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr(observations.pq, "read_metadata", disk_errors.refuse)
    with pytest.raises(UserError, match=r"results.parquet: cannot be read \(Permission denied\)$"):
        observations.load(tmp_path / "results.parquet")
