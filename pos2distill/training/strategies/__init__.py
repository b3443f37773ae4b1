"""Training strategies: `torch`, with the whole model on every rank, and `zero3` (DeepSpeed), which divides it."""

from typing import assert_never

import torch

from pos2distill.config import ModelSection, Study, TrainersSection
from pos2distill.training.strategies.protocol import Strategy


def build_strategy(
    study: Study, trainers: TrainersSection, device: torch.device, student_start: ModelSection
) -> Strategy:
    """The strategy that `runtime.trainers.strategy` names. DeepSpeed is imported only for `zero3`.

    Args:
        study: its model is the base model.
        student_start: what the student is at the beginning (`TrainingJob`).
    """
    if trainers.strategy == "zero3":
        from pos2distill.training.strategies.zero3 import Zero3Strategy

        return Zero3Strategy(study, trainers, device, student_start)
    if trainers.strategy == "torch":
        from pos2distill.training.strategies.torch import TorchStrategy

        return TorchStrategy(study, trainers, device, student_start)
    assert_never(trainers.strategy)
