"""Snakemake script of a job: calls the runner, logs its output, prints one sentence if it fails."""

from repro.workflow import runner

if "snakemake" in globals():
    runner.run_logged(snakemake.params.job, snakemake.log[0])  # noqa: F821
