"""Snakemake script of the page of one table, or of all figures, which is written with its paper's page."""

from pathlib import Path

from repro.render import draw

if "snakemake" in globals():
    part = Path(snakemake.output[0])  # noqa: F821
    if part.is_file():
        part.touch()  # newer than its paper's page, as outputs are newer than inputs
    else:  # removed since
        draw.draw(snakemake.params.scale, "page", snakemake.wildcards.page, snakemake.log[0])  # noqa: F821
