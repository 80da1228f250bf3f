"""Verdicts on claims, and how much is measured."""
