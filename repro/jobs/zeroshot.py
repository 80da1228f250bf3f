"""Per-item zero-shot results of a run."""

import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from repro import models, provenance
from repro import zeroshot as harness
from repro.errors import UserError
from repro.files import atomic
from repro.jobs.compress import load


def zeroshot(
    model: str,
    tasks: list[str],
    out: Path,
    weights: Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    device: str = "cpu",
    dtype: str = "float32",
    hub: bool = False,
    code: str = "",
) -> None:
    """Score a run on lm-eval tasks from the data folder in `$REPRO_DATA`.

    Raises:
        UserError: the folder is not set or lacks a task's file, damaged inputs, an unknown task.
    """
    data = os.environ.get("REPRO_DATA")
    if not data:
        raise UserError(f"zero-shot tasks need their files: set REPRO_DATA to the data folder ({', '.join(tasks)})")
    lm = load(model, weights, device, dtype, hub)
    with tempfile.TemporaryDirectory() as folder:
        harness.prepare(tasks, Path(data), Path(folder))
        frame = harness.run(
            lm.model, models.tokenizer(model, hub), tasks, Path(folder), limit=limit, batch_size=batch_size
        )
    meta = {
        **provenance.origin(device, code),
        "protocol": f"lm-eval {frame['harness_version'].iloc[0]}" + (f" n{limit}" if limit else ""),
    }
    with atomic(out) as temporary:
        pq.write_table(pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(meta), temporary)
