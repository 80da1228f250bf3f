"""From specs and a scale to jobs, and what runs them: one runner, one pool, code versions."""
