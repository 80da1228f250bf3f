"""Processes that compute together, one a rank and a GPU: `run` starts them and gives what the first one returns.

A rank is `python -m repro.engine.ranks FOLDER RANK`: a program of its own, since a worker of the pool may fork none and
CUDA survives no fork. They meet through a file. When one fails, the others are ended, and its last words are raised;
when the process that started them ends, they end, too.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from repro.core.errors import NotMeasurable, UserError, shortened
from repro.core.files import ROOT, write_text

GIVEN, RESULT, FAILED = "given.json", "result.json", "failed-{rank}.json"
# NVLink multicast is off: a program that uses it may put GPUs that others share out of service.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
PATIENCE = timedelta(minutes=5)  # that a rank waits for another
THREADS_ON_CPU = {"OMP_NUM_THREADS": "1"}  # of a rank, unless it is set, as with torchrun: ranks share the processors
WATCHED = 0.1  # seconds between looks at the processes


def gpus_for(ranks: int) -> None:
    """Raise unless this process sees a GPU for each rank.

    Raises:
        NotMeasurable: it does not.
    """
    visible = torch.cuda.device_count()
    if visible < ranks:
        said = f"tensor parallelism over {ranks} ranks needs {ranks} GPUs, and {visible} can be seen here"
        raise NotMeasurable("unsupported", f"{said}; run it without --gpus on a machine that has them")


def run(work: Callable[[dict[str, Any], torch.device], Any], given: Mapping[str, Any], ranks: int, device: str) -> Any:
    """The result of `work(given, device)` on the first rank.

    Args:
        work: a function of a module, the same on all ranks; within it `torch.distributed` has them as its default
            group. What it returns is JSON.
        given: JSON as well.
        ranks: processes.
        device: "cuda" or "cpu".

    Raises:
        NotMeasurable: a rank's own, or one ran out of memory.
        UserError: a rank's own.
        RuntimeError: any other error of a rank, or that it died.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        facts = {"module": work.__module__, "work": work.__qualname__, "ranks": ranks, "device": device, "given": given}
        (folder / GIVEN).write_text(json.dumps(facts))
        environment = os.environ | ENVIRONMENT
        if device == "cpu":
            environment = THREADS_ON_CPU | environment
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        started = []
        try:
            for rank in range(ranks):
                command = [sys.executable, "-m", "repro.engine.ranks", name, str(rank)]
                started.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=environment))
            _wait(started, folder)
        finally:
            for process in started:
                process.kill()
                process.wait()
                process.stdin.close()
        return json.loads((folder / RESULT).read_text())


def _wait(started: list[subprocess.Popen], folder: Path) -> None:
    """Until all have ended; raise as `run` once one failed."""
    while any(process.poll() is None for process in started):
        if any(process.returncode for process in started):
            break
        time.sleep(WATCHED)
    failed = [rank for rank, process in enumerate(started) if process.returncode]
    if not failed:
        return
    words = sorted(folder.glob(FAILED.format(rank="*")), key=lambda path: path.stat().st_mtime_ns)
    if not words:
        raise RuntimeError(f"rank {failed[0]} died with exit code {started[failed[0]].returncode}")
    facts = json.loads(words[0].read_text())  # of the first; the others lost their peer
    if facts["status"]:
        raise NotMeasurable(facts["status"], facts["said"])
    raise (UserError if facts["kind"] == "UserError" else RuntimeError)(f"rank {facts['rank']}: {facts['said']}")


# --- a rank -----------------------------------------------------------------------------------------------------------


def main(folder: Path, rank: int) -> int:
    """Do the work of one rank; 1 if it failed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    facts = json.loads((folder / GIVEN).read_text())
    try:
        result = _work(facts, folder, rank)
    except Exception as error:
        traceback.print_exc()
        status = error.status if isinstance(error, NotMeasurable) else ""
        if "OutOfMemory" in type(error).__name__:
            status = "oom"
        reason = shortened(" ".join(f"{type(error).__name__}: {error}".split()), 400)
        if isinstance(error, UserError):
            reason = str(error)
        kind = "UserError" if isinstance(error, UserError) else type(error).__name__
        words = {"rank": rank, "status": status, "kind": kind, "said": reason}
        write_text(folder / FAILED.format(rank=rank), json.dumps(words))
        sys.stderr.flush()
        os._exit(1)  # a communicator whose peers are gone would be waited for
    if rank == 0:
        (folder / RESULT).write_text(json.dumps(result))
    return 0


def _work(facts: Mapping[str, Any], folder: Path, rank: int) -> Any:
    ranks = facts["ranks"]
    on_gpu = facts["device"] == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    meeting = {"init_method": f"file://{folder / 'meeting'}", "rank": rank, "world_size": ranks, "timeout": PATIENCE}
    dist.init_process_group("nccl" if on_gpu else "gloo", **meeting, **({"device_id": device} if on_gpu else {}))
    work = getattr(importlib.import_module(facts["module"]), facts["work"])
    result = work(facts["given"], device)
    dist.barrier()
    dist.destroy_process_group()
    return result


def _end_with_parent() -> None:
    """End this process when the one that started it does, which closes its standard input."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a library's thread that still runs when the interpreter ends may abort a rank that is done
