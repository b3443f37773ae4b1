"""How weights are updated: `torch` in one process, `zero3` (DeepSpeed) in any number, behind one protocol."""

import torch

from pos2distill.config import Study, TrainersSection
from pos2distill.training.strategies.protocol import Strategy


def build_strategy(study: Study, trainers: TrainersSection, device: torch.device) -> Strategy:
    """The strategy that the runtime names; DeepSpeed is imported only for its own."""
    if trainers.strategy == "zero3":
        from pos2distill.training.strategies.zero3 import Zero3Strategy

        return Zero3Strategy(study, trainers, device)
    from pos2distill.training.strategies.torch import TorchStrategy

    return TorchStrategy(study, trainers, device)
