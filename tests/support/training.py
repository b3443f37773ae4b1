"""Training without requests to stop, and without checkpoints."""

from pos2distill.training.loader import BatchLoader
from pos2distill.training.loop import Action, TrainingLoop
from pos2distill.training.progress import TrainingProgress
from pos2distill.training.step_record import StepRecord


def continue_training(step: int, in_step: bool) -> Action:
    """The action that a rank without a request asks for."""
    return Action.CONTINUE


def save_nothing(progress: TrainingProgress) -> None:
    """For a run whose state is not saved."""
    raise AssertionError("no checkpoint and no stop was requested, so nothing must be saved")


def train_to_end(trainer: TrainingLoop, loader: BatchLoader, progress: TrainingProgress) -> list[StepRecord]:
    """Train from `progress` to the end. Returns the records of all steps."""
    records: list[StepRecord] = []
    assert trainer.train(loader, progress, records.append, continue_training, save_nothing)
    return records
