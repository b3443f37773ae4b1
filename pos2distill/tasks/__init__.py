"""Data sets, document permutations, prompts and metrics."""
