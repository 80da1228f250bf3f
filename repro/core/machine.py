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
    """Free bytes of the GPUs of `visible_gpus`, by number; a GPU that nvidia-smi does not list is left out."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    words = [program, "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"]
    listing = subprocess.run(words, capture_output=True, text=True).stdout
    free = {}
    for line in listing.splitlines():
        index, uuid, mebibytes = (column.strip() for column in line.split(","))
        if mebibytes.isdecimal():  # `[N/A]` where memory is the host's
            free |= dict.fromkeys((index, uuid), int(mebibytes) * 2**20)
    return {i: free[name] for i, name in enumerate(visible_gpus(max(1, most))) if name in free}
