"""Measurements on a GPU that are programs of their own: offloading, switching, sparse products."""
