"""The command line, the Python API, stages, executors, results, jobs and recipes.

Ray is imported in `executors/ray` and `jobs` only.
"""
