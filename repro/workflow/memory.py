"""GPU memory: what jobs declare, and how much there is; only jobs that fit together run side by side.

A training recipe's bytes are those of `repro.train.training_cost`; any other job's are its model, in full precision and
compressed, and room to compute. They follow from what a job says of itself, and decide nothing but its turn.
"""

import os
import shutil
import subprocess

from repro import models
from repro.core.errors import UserError
from repro.recipes import recipe
from repro.store.job import Job
from repro.train import training_cost

ROOM = 2 * 2**30  # bytes of logits and hidden states that a job without training computes at once
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def gpu_bytes(job: Job) -> int:
    """Bytes that a job takes of a GPU at most, as far as they can be said beforehand; 0 for a job on a CPU.

    A model that is not here, or not yet, has none to say.
    """
    given = job.given()
    if given.get("device", "cpu") == "cpu" or not given.get("model"):
        return 0
    size, name = ITEMSIZE.get(given.get("dtype", ""), 4), given["model"]
    try:
        if models.folder(name) is None:  # on the hub
            return 0
        weights = training_cost.CONTEXT + ROOM + 2 * training_cost.shape(name).parameters * size
    except UserError:  # the job itself says what is wrong
        return 0
    crops = given.get("calibration")
    if job.kind != "compress" or not crops:
        return weights
    steps, before = recipe.parse(given["recipe"]).steps, "start" in dict(job.needs)
    done = steps[-1:] if before else steps
    text = crops["sequences"], crops["length"]
    return max(weights, training_cost.estimate(done, training_cost.shape(name), *text, size, "cuda", before).gpu)


def visible(gpus: int) -> list[str]:
    """The names of the GPUs that workers are spread over, at most `gpus` of those that are visible."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    return named.split(",")[:gpus]  # the driver lists all GPUs of a machine, also those that are not visible


def free(gpus: int) -> dict[int, int]:
    """Free bytes of the GPUs of `visible`, by number; one that the driver does not tell of is left out."""
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
    return {i: known[name] for i, name in enumerate(visible(max(1, gpus))) if name in known}
