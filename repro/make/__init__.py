"""Builds: what Snakemake asks of specs and a scale, and one build from its jobs to what is drawn of them."""
