"""Snakemake script of a table or figure."""

from repro.render import draw

if "snakemake" in globals():
    ((kind, name),) = snakemake.wildcards.items()  # noqa: F821
    draw.draw(snakemake.params.scale, kind, name, snakemake.log[0])  # noqa: F821
