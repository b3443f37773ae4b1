"""Answers of models whose true accuracies are known."""

import numpy as np
import numpy.typing as npt


def answers(probability_S: npt.ArrayLike, examples: int, seed: int) -> npt.NDArray[np.float64]:
    """(E, S) 1 where an answer is correct, which it is with this probability at each slot, else 0."""
    probabilities = np.asarray(probability_S)
    return (np.random.default_rng(seed).random((examples, len(probabilities))) < probabilities).astype(float)
