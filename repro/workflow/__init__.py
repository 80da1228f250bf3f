"""Workflow: from specs and a scale to jobs, the runner and the pool that run them, and code versions."""
