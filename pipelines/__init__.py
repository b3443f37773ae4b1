"""Stages, executors, jobs and recipes; Ray is imported in `executors/ray` and `jobs` only."""
