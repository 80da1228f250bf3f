"""Measurements: where they come from, how they are kept, accepted and judged."""
