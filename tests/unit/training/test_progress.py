from pathlib import Path

import numpy as np

from pos2distill.training.batches import Batch
from pos2distill.training.progress import TrainingProgress


def test_training_progress_load_restores_what_save_wrote(tmp_path: Path) -> None:
    progress = TrainingProgress(7, 1, np.array([True, False, True] * 5))
    progress.save(tmp_path)
    again = TrainingProgress.load(tmp_path)
    assert (again.step, again.epoch, again.done.tolist()) == (7, 1, progress.done.tolist())


def test_training_progress_add_starts_a_new_epoch_with_nothing_done() -> None:
    progress = TrainingProgress(7, 0, np.array([True, True, True]))
    progress.add(Batch(1, np.array([2]), (), 0.7))
    assert (progress.step, progress.epoch, progress.done.tolist()) == (7, 1, [False, False, True])
