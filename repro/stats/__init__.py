"""Intervals, and the quantities that have them."""
