"""Snakemake's hand-over of a job to the runner: its output goes to its log, a sentence of what failed to stderr."""

import json

from repro.errors import logged
from repro.jobs import runner
from repro.jobs.job import from_json

if "snakemake" in globals():
    job = from_json(json.loads(snakemake.params.job))  # noqa: F821
    with logged(snakemake.log[0], job.id):  # noqa: F821
        runner.run(job)
