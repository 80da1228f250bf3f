"""Processes that compute together: what the first returns, sums over all, and how the failure of one ends all."""

import atexit
import os
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

from repro.core.errors import NotMeasurable, UserError
from repro.engine import parallel, ranks
from repro.engine.parallel import Group, RowParallel


def summed(facts, device):
    """The product of all inputs on ranks that have some of them each."""
    link = Group(dist.group.WORLD)
    weight = torch.arange(24.0).view(4, 6)
    x = torch.tensor([facts["x"]])
    share = 6 // link.ranks
    mine = slice(link.rank * share, (link.rank + 1) * share)
    part = torch.nn.Linear(share, 4, bias=False)
    part.weight = torch.nn.Parameter(weight[:, mine])
    with torch.inference_mode():
        return RowParallel(part, link)(x[:, mine]).tolist()


def done_before_an_abort(facts, device):
    """What ends well, in a process that the end of its interpreter would abort."""
    atexit.register(os.abort)
    return dist.get_rank()


def second_fails(facts, device):
    """An error of one rank, for which the other would wait."""
    errors = {"bad": UserError("x is 3; give 4"), "odd": ZeroDivisionError("by zero")}
    errors["none"] = NotMeasurable("oom", "7 GB")
    if dist.get_rank() == 1:
        raise errors[facts["kind"]]
    dist.barrier()


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Ranks import this file as it is imported here."""
    monkeypatch.setenv("PYTHONPATH", str(__import__("pathlib").Path(__file__).parent))


def test_ranks_are_processes_that_add_up():
    x = [1.0, -2.0, 3.0, 0.5, 0.0, 4.0]
    want = (torch.tensor([x]) @ torch.arange(24.0).view(4, 6).T).tolist()
    assert ranks.run(summed, {"x": x}, 2, "cpu") == want


def test_a_rank_that_is_done_is_not_failed_by_the_end_of_its_interpreter():
    assert ranks.run(done_before_an_abort, {}, 2, "cpu") == 0


@pytest.mark.parametrize(
    "kind, error, message",
    [("bad", UserError, "rank 1: x is 3; give 4"), ("odd", RuntimeError, "rank 1: ZeroDivisionError: by zero"),
     ("none", NotMeasurable, "7 GB")],
)  # fmt: skip
def test_a_rank_that_fails_ends_all(kind, error, message):
    began = time.monotonic()
    with pytest.raises(error, match=message) as raised:
        ranks.run(second_fails, {"kind": kind}, 2, "cpu")
    assert time.monotonic() - began < ranks.PATIENCE.total_seconds() / 2
    assert getattr(raised.value, "status", "oom") == "oom"


def environments(monkeypatch, device):
    """Those with which two ranks are started."""
    seen = []

    class Ended:
        returncode, stdin = 0, open(__file__)

        def __init__(self, command, env, **how):
            seen.append(env)

        def poll(self):
            return 0

        def kill(self):
            pass

        wait = kill

    monkeypatch.setattr(subprocess, "Popen", Ended)
    with pytest.raises(FileNotFoundError):
        ranks.run(summed, {}, 2, device)
    assert len(seen) == 2
    return seen


def test_multicast_is_off_on_every_rank(monkeypatch):
    off = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
    assert all(off.items() <= environment.items() for environment in environments(monkeypatch, "cpu"))


@pytest.mark.parametrize("device, of_user, want", [("cpu", None, "1"), ("cpu", "3", "3"), ("cuda", None, None)])
def test_ranks_on_processors_have_a_thread_each_unless_told_otherwise(device, of_user, want, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if of_user:
        monkeypatch.setenv("OMP_NUM_THREADS", of_user)
    for environment in environments(monkeypatch, device):
        assert environment.get("OMP_NUM_THREADS") == want


def test_too_few_gpus_are_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(NotMeasurable, match="over 4 ranks needs 4 GPUs, and 1 can be seen here; run it without --gpus"):
        ranks.gpus_for(4)
    ranks.gpus_for(1)


def shared_out(facts, device):
    """Which kernels each rank compiles, of five of which the second is in the cache."""
    compiled = []

    class Pool:
        def __init__(self, workers, context):
            assert 1 <= workers <= 3, "no more than there are kernels"

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def map(self, call, jobs):
            return map(call, jobs)

    parallel.ProcessPoolExecutor = Pool
    parallel.nvrtc.jobs_of = lambda calls: [call() for call in calls]
    parallel.nvrtc.is_compiled = lambda job: job == "b"
    parallel.nvrtc.compile_job = compiled.append
    parallel.compile_on_ranks([lambda name=name: name for name in facts["names"]])
    of_all = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, compiled)
    return of_all


@pytest.mark.parametrize("names, compiled", [("abcde", [["a", "c", "e"], ["d"]]), ("b", [[], []])])
def test_ranks_share_out_what_is_compiled(names, compiled):
    assert ranks.run(shared_out, {"names": list(names)}, 2, "cpu") == compiled
