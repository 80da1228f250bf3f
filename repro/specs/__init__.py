"""Specs: tables, figures, claims, and the scales that they are measured at."""
