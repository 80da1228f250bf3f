"""Storage: jobs by the hash of their inputs, observations, result rows, and their provenance."""
