"""Processes that run jobs: workers side by side, and a server that forks for each job of Snakemake."""
