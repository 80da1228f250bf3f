"""Snakemake script of a job: calls the runner, logs its output, prints one sentence if it fails."""

from repro.workflow.fork_server import call

if "snakemake" in globals():
    call("repro.workflow.runner:run_logged", [snakemake.params.job, snakemake.log[0]])  # noqa: F821
