"""Data sets, document permutations, prompts and judged answers."""
