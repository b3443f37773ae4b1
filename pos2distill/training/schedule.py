"""The learning rate as a pure function of how much of the run is done."""

import math

from pos2distill.config import TrainingSection


def learning_rate(share: float, settings: TrainingSection) -> float:
    """Linear warm-up, then cosine to `min_lr_ratio` of the rate.

    A share and not a step, because a streamed run learns only at its end how many samples are kept, and so how many
    steps there are.

    Args:
        share: of the run that is done after the step, in (0, 1]: examples dealt with, trained on or not kept.
    """
    warmup = settings.warmup_ratio
    if share < warmup:
        return settings.learning_rate * share / warmup
    floor = settings.min_lr_ratio
    cosine = 0.5 * (1 + math.cos(math.pi * (share - warmup) / (1 - warmup)))
    return settings.learning_rate * (floor + (1 - floor) * cosine)
