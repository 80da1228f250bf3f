"""A table's cells: what the paper printed, beside what this profile measured, recorded, or did not run, and why."""

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from repro import papers, perplexity, provenance, record, statistics, zeroshot
from repro.errors import UserError
from repro.record import Measurement
from repro.workflow import Place, Run, Workflow

# What is measured beside the printed columns: label, metric, unit; KL and top-1 on the text behind the first column.
COMPANIONS = (("KL", "kl", "nats"), ("Top-1", "top1", "%"), ("BPW", "bpw", "bits"), ("MB", "model_mb", "MB"))


@cache
def scores(path: str) -> tuple[pd.DataFrame, dict[str, str]]:
    """Per-window scores and their metadata."""
    frame = perplexity.load_frame(path)
    return frame, frame.attrs


@cache
def items(path: str) -> tuple[pd.DataFrame, dict[str, str]]:
    """Per-item zero-shot results and their metadata.

    Raises:
        UserError: the file is missing or cut short.
    """
    try:
        table = pq.read_table(path, partitioning=None)
    except (OSError, pa.ArrowException) as error:
        first = str(error).partition("\n")[0]
        raise UserError(f"{path}: not a whole Parquet file ({first}); delete it and build it again") from None
    meta = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
    return table.to_pandas(), meta


def measure(flow: Workflow, paper: str, number: str, only: Collection[Place] | None = None) -> list[Measurement]:
    """Every cell of a table, in printed order, then the user's own rows, then the companions of each row.

    With `only`, no other cell's scores are read.

    A printed cell is live when this profile measures it, else recorded when an accepted measurement of it exists, else
    it carries the status that says why there is none. Where a place holds several metrics, the first is measured.
    """
    blank = [
        Measurement(
            paper, "table", number, c.row, c.col, c.model, c.metric, c.value, unit=c.unit, profile=flow.profile.name
        )
        for c in papers.printed(paper, number)
    ]
    printed: dict[Place, Measurement] = {}
    for m in blank:
        printed.setdefault((m.row, m.col, m.model), m)
    cells = dict(printed)
    companions: dict[tuple[str, str, str], Measurement] = {}
    like = {(c.col, c.model): c for c in printed.values()}
    for row, col, column, model, run in flow.cells(paper, number):
        if only is not None and (row, col, model) not in only:
            continue
        twin = like[col, model]
        cell = replace(cells.get((row, col, model)) or replace(cells[twin.row, col, model], printed=""), row=row)
        if run is None:
            cell = replace(cell, status="no_stand_in")
        else:
            cell = replace(cell, **_facts(flow, run))
            path = flow.source(column, run)
            if path is None:
                cell = replace(cell, note=f"profile {flow.profile.name} does not measure {column.measure} of this here")
            elif not Path(path).is_file():
                cell = replace(cell, note="its scores are not built")
            elif column.measure == "perplexity":
                cell = replace(cell, **perplexity_cell(path))
                for companion in companion_cells(cell, path):
                    companions.setdefault((row, companion.col, model), companion)
            else:
                cell = replace(cell, **zeroshot_cell(path, flow.items(flow.run(run.model, "fp16")), twin.unit))
        cells[row, col, model] = cell
    accepted = [m for m in record.accepted(paper, "table", number) if m.profile == flow.profile.name]
    stored = {(m.row, m.col, m.model): replace(m, live="recorded", status=_still(flow, m)) for m in accepted}
    for key, cell in cells.items():
        if flow.stand_in(cell.model) is None and cell.model:
            cells[key] = replace(cell, status="no_stand_in")
        elif cell.status == "not_run" and key in stored:
            cells[key] = replace(stored[key], printed=cell.printed)
    labels = {label for label, *_ in COMPANIONS}
    companions = {key: m for key, m in stored.items() if m.col in labels} | companions
    shown = []
    for m in blank:
        cell = cells[m.row, m.col, m.model]
        missing = "no_stand_in" if cell.status == "no_stand_in" else "not_run"
        shown.append(cell if m is printed[m.row, m.col, m.model] else replace(m, status=missing))
    own = [m for place, m in cells.items() if place not in printed]
    return [*shown, *own, *companions.values()]


def _facts(flow: Workflow, run: Run) -> dict[str, Any]:
    """What every measured cell of a run carries."""
    p = flow.profile
    seed = str(p.calibration.seed) if run.recipe.calibrated else ""
    return {"stand_in": run.model, "recipe": run.recipe.name, "grade": p.grade, "profile": p.name, "seed": seed}


def _origin(meta: Mapping[str, str], protocol: str) -> dict[str, Any]:
    keys = ("device", "commit", "code", "environment")
    return {"live": "live", "protocol": protocol} | {key: meta[key] for key in keys}


def perplexity_cell(path: str) -> dict[str, Any]:
    """Value, interval and origin of a perplexity."""
    frame, meta = scores(path)
    low, high = statistics.interval(frame["nll"].to_numpy(), np.exp)
    origin = _origin(meta, f"{meta['protocol']} on {meta['label']}")
    value = perplexity.perplexity(frame)
    return {"value": value, "lo": low, "hi": high, "n": len(frame), "status": "ok", "scores": path} | origin


def companion_cells(cell: Measurement, path: str) -> list[Measurement]:
    """KL, top-1, bits per block weight and megabytes of the whole model, for the row and model of `cell`."""
    frame, meta = scores(path)
    bits = json.loads(meta["bits"])
    values: dict[str, dict[str, Any]] = {
        "bpw": {"value": bits["bpw"], "note": json.dumps(bits["block"])},
        "model_mb": {"value": bits["bytes"] / 1e6},
    }
    for name, factor in (("kl", 1.0), ("top1", 100.0)):
        measured = frame[name].dropna().to_numpy(dtype=float) * factor
        if len(measured) > 1:
            low, high = statistics.interval(measured)
            values[name] = {"value": float(measured.mean()), "lo": low, "hi": high, "n": len(measured)}
    bare = {"printed": "", "lo": None, "hi": None, "n": None, "note": "", "scores": ""}
    return [
        replace(cell, **(bare | values[metric]), col=col, metric=metric, unit=unit, status="ok")
        for col, metric, unit in COMPANIONS
        if metric in values
    ]


def ratio_cell(path: str, reference: str) -> dict[str, Any]:
    """Perplexity over that of full precision on the same windows, with its paired interval."""
    frame, meta = scores(path)
    arrays = {"q": frame["nll"].to_numpy(), "p": scores(reference)[0]["nll"].to_numpy()}
    low, high = statistics.paired(arrays, lambda mean: np.exp(mean["q"] - mean["p"]))
    value = float(np.exp(arrays["q"].mean() - arrays["p"].mean()))
    protocol = f"{meta['protocol']} on {meta['label']}"
    return {"value": value, "lo": low, "hi": high, "n": len(frame), "status": "ok"} | _origin(meta, protocol)


def zeroshot_cell(path: str, reference: str, unit: str) -> dict[str, Any]:
    """Value, interval and origin of the plain mean accuracy over the tasks; `floor`: full precision is at chance."""
    frame, meta = items(path)
    average = zeroshot.summary(frame, items(reference)[0]).set_index("task").loc["average"]
    by_task = {task: rows["correct"].to_numpy(dtype=float) for task, rows in frame.groupby("task")}
    tasks = {task: task for task in by_task}
    low, high = statistics.paired(by_task, lambda means: np.mean([means[t] for t in tasks], axis=0), tasks)
    scale = 100.0 if unit == "%" else 1.0
    origin = _origin(meta, f"{meta['protocol']}, {len(tasks)} tasks")
    values = {"value": scale * float(average["accuracy"]), "lo": scale * low, "hi": scale * high}
    return values | {"n": len(frame), "status": str(average["status"])} | origin


def _still(flow: Workflow, old: Measurement) -> str:
    """The status of a recorded cell today: `stale` when the code that made it has changed since."""
    verb = "zeroshot" if old.protocol.startswith("lm-eval") else "perplexity"
    try:
        run = flow.run(old.stand_in, old.recipe)
    except UserError:
        return "stale"
    today = provenance.code_hash([Path(p) for p in flow.code(verb, run)])
    return old.status if today == old.code else "stale"
