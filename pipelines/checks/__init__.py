"""Checks and warnings before a run."""
