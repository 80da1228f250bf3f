"""A build: what Snakemake asks of specs and a scale, its plan, the progress line."""
