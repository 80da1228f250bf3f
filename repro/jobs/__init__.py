"""What runs: a job is one frozen dataclass; one runner executes it for Snakemake, `repro run` and a person."""
