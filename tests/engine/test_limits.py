"""What a process holds of a GPU beside its tensors; the GPU is a stand-in."""

import gc

import pytest
import torch

from repro.engine import limits
from repro.workflow import pool


class Cycle:
    """Holds itself, as an engine does whose methods are wrapped."""

    def __init__(self, gone):
        self.itself, self.gone = self, gone

    def __del__(self):
        self.gone.append("engine")


def test_what_nobody_holds_is_given_back_before_the_next_job(monkeypatch):
    """Cycles first, then cuBLAS's workspaces, which the allocator then has no use for."""
    done = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: done.append("workspaces"), raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("cache"))
    monkeypatch.setattr(pool, "_begin", lambda *arguments: None)
    monkeypatch.setattr(pool, "_end_with_parent", lambda: None)
    monkeypatch.setattr(pool, "_run", lambda job: done.append(job) or Cycle(done) and "ran")

    class Pipe:
        jobs = ["first", "second"]

        def recv(self):
            if not self.jobs:
                raise EOFError
            return self.jobs.pop(0)

        def send(self, result):
            """Nobody listens."""

    gc.disable()
    try:
        pool._serve(Pipe(), (), 0, 0, None)
    finally:
        gc.enable()
    assert done == ["first", "engine", "workspaces", "cache", "second", "engine", "workspaces", "cache"]


def test_a_process_without_a_gpu_spends_nothing_on_it(monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("a collection takes a tenth of a second a job"))
    limits.release()
