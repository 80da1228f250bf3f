"""A compressed model as a folder, which takes the place of a model in every command that measures or generates.

`python -m repro compress MODEL --recipe R --out FOLDER` writes it. It holds what the recipe stores, and facts in JSON:
the model that it was made from, which is still needed, the recipe, the text, tokens seen and loss curve.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from repro import models
from repro.baselines import load
from repro.core.errors import UserError
from repro.core.files import atomic, making, reading, sha256, write_text
from repro.jobs import compress
from repro.recipes.recipe import parse
from repro.recipes.recipe_text import write_value
from repro.store import observations
from repro.store.job import Job

FACTS, WEIGHTS = "compressed.json", "model.safetensors"  # in the folder


def opened(name: str, recipe: str) -> tuple[str, str]:
    """Model and recipe for a folder that `compress` wrote; any other name and its recipe as given.

    Raises:
        UserError: the folder is damaged, or its model is gone or another.
    """
    folder = Path(name)
    try:
        if not (folder / FACTS).is_file():
            return name, recipe
    except (OSError, ValueError):  # too long, or a zero byte
        return name, recipe
    facts = _read(folder / FACTS)
    try:
        fingerprint = models.fingerprint(facts["model"])
    except UserError as error:
        raise UserError(f"{name}: its model is needed too, and cannot be read ({error})") from None
    if fingerprint != facts["fingerprint"]:
        raise UserError(f"{name}: made from another model than {facts['model']} is now; restore that model")
    options = [f"file={write_value(str(folder.resolve() / WEIGHTS))}", f"digest={write_value(facts['digest'])}"]
    if recipe == "fp16":
        return facts["model"], f"load({', '.join(options)})"
    if not any(step.rescales for step in parse(facts["recipe"]).steps):
        options.append("full")
    return facts["model"], f"load({', '.join(options)}) + {recipe}"


def _read(path: Path) -> dict[str, Any]:
    try:
        with reading(path):
            facts = json.loads(path.read_text(encoding="utf-8"))
        if all(isinstance(facts[key], str) for key in ("model", "fingerprint", "recipe", "digest")):
            return facts
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{path}: damaged; remove the folder and compress again")


def is_of(out: Path, job: Job) -> bool:
    """Whether a folder holds the result of a job already; else it can be made.

    Raises:
        UserError: something else is there, or no folder can be made there.
    """
    if not os.path.lexists(out):
        with making(out / FACTS):
            out.mkdir(parents=True)
        out.rmdir()  # until there is something to put into it
        return False
    if not (out / FACTS).is_file():
        raise UserError(f"--out {out}: it exists, and compress did not write it; choose another folder")
    if _read(out / FACTS).get("job") != job.id:
        raise UserError(f"--out {out}: another result is there; remove it, or choose another folder")
    return True


def write(out: Path, job: Job) -> dict[str, Any]:
    """Copy the result of a `compress` job to the folder `out`; returns its facts.

    Raises:
        UserError: a file or folder that cannot be written.
    """
    options, inputs = job.parsed_options(), job.parsed_inputs()
    model = models.folder(options["model"])
    ours = model is None or model.parent == models.POCKET
    steps = [_training(needed) for needed in job.every() if needed.kind == job.kind]
    observed = observations.load(job.folder / observations.FILE)
    with atomic(out / WEIGHTS) as temporary:
        shutil.copyfile(job.folder / compress.OUTPUTS[0], temporary)
    facts = {
        "model": options["model"] if ours else str(model),
        "fingerprint": inputs["model"],
        "recipe": options["recipe"],
        "seed": options["seed"],
        "calibration": inputs.get("calibration"),
        "device": options["device"],
        "dtype": options["dtype"],
        "steps": steps,
        "bits per block weight": float(observed.series["bits/bpw"].values.mean()),
        "bytes": int(observed.series["bits/bytes"].values.mean()),
        "digest": sha256(out / WEIGHTS)[: load.DIGITS],
        "job": job.id,
        "commit": observed.meta["commit"],
        "environment": json.loads(observed.meta["environment"]),
    }
    write_text(out / FACTS, json.dumps(facts, indent=1) + "\n")
    return facts


def _training(job: Job) -> dict[str, Any]:
    """The training of a `compress` job: the steps that it applied, tokens and loss curve."""
    before = {role: need for role, need in job.needs}.get("start")
    applied = job.steps[len(before.steps) :] if before else job.steps
    series = observations.load(job.folder / observations.FILE).series
    values = {}
    for name in ("tokens", "loss", "end-to-end loss"):
        recorded = series.get(f"training/{name}")
        values[name] = [] if recorded is None else recorded.values.tolist()
    loss = values["loss"] or values["end-to-end loss"]
    return {"steps": list(applied), "tokens": sum(values["tokens"]), "loss": loss}
