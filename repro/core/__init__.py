"""Errors that users read, atomic file writes, configuration files, what this machine has."""
