"""Hardware of this machine, detected without importing torch."""

import os
import shutil
import subprocess
from pathlib import Path


def gpus() -> int:
    """The number of GPUs that the driver lists."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def visible_gpus(most: int) -> list[str]:
    """The names of the GPUs that workers are spread over, at most `most` of those that are visible."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(most)))
    return named.split(",")[:most]  # the driver lists all GPUs of a machine, also those that are not visible


def free_bytes(most: int) -> dict[int, int]:
    """Free bytes of the GPUs of `visible_gpus`, by number; one that the driver does not tell of is left out."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    words = [program, "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"]
    said = subprocess.run(words, capture_output=True, text=True).stdout
    known = {}
    for line in said.splitlines():
        index, uuid, amount = (part.strip() for part in line.split(","))
        if amount.isdecimal():  # `[N/A]` where memory is the host's
            known |= dict.fromkeys((index, uuid), int(amount) * 2**20)
    return {i: known[name] for i, name in enumerate(visible_gpus(max(1, most))) if name in known}
