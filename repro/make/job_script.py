"""Snakemake's hand-over of a job to the runner: its output goes to its log, a sentence of what failed to stderr."""

from repro.workflow.fork_server import call

if "snakemake" in globals():
    call("repro.workflow.runner:run_logged", [snakemake.params.job, snakemake.log[0]])  # noqa: F821
