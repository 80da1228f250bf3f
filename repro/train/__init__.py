"""Training of the pocket models."""
