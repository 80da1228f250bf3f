"""Snakemake script of a table or figure."""

from repro.workflow.fork_server import call

if "snakemake" in globals():
    ((what, name),) = snakemake.wildcards.items()  # noqa: F821
    call("repro.render.draw:draw", [snakemake.params.scale, what, name, snakemake.log[0]])  # noqa: F821
