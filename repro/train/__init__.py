"""Trainers: a block at a time, end to end, and the pocket models."""
