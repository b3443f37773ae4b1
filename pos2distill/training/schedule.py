"""The learning rate as a pure function of the step."""

import math

from pos2distill.config import TrainingSection


def learning_rate(step: int, total_steps: int, settings: TrainingSection) -> float:
    """Linear warm-up, then cosine to `final_rate_share` of the rate.

    Args:
        step: from 0. total_steps: of the whole run.
    """
    warmup = math.ceil(settings.warmup_share * total_steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - 1 - warmup)
    floor = settings.final_rate_share
    return settings.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
