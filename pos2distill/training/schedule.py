"""The learning rate as a pure function of how much of the run is completed."""

import math

from pos2distill.config import TrainingSection


def learning_rate(fraction: float, settings: TrainingSection) -> float:
    """Linear warm-up, then cosine decay to `min_lr_ratio` of the rate.

    A function of a fraction and not of the step, because a streamed run learns only at its end how many samples are
    kept, and so how many steps there are.

    Args:
        fraction: how much of the run is completed after the step, in (0, 1]: samples processed, whether trained on or
            not kept.
        settings: the peak rate and the two ratios.
    """
    warmup = settings.warmup_ratio
    # Never true for a ratio of 0, so this does not divide by zero.
    if fraction < warmup:
        return settings.learning_rate * fraction / warmup
    floor = settings.min_lr_ratio
    cosine = 0.5 * (1 + math.cos(math.pi * (fraction - warmup) / (1 - warmup)))
    return settings.learning_rate * (floor + (1 - floor) * cosine)
