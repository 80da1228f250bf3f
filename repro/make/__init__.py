"""Builds: what Snakemake asks of specs and a scale, the plan of a build, its progress line."""
