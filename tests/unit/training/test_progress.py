from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pos2distill.errors import UserError
from pos2distill.training.batches import Batch
from pos2distill.training.progress import TrainingProgress


def test_training_progress_load_restores_what_save_wrote(tmp_path: Path) -> None:
    progress = TrainingProgress(7, 1, np.array([True, False, True] * 5))
    progress.save(tmp_path)
    again = TrainingProgress.load(tmp_path, 15, "s3://state")
    assert (again.step, again.epoch, again.done.tolist()) == (7, 1, progress.done.tolist())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "", r"corrupt \(Expecting value.*\)"),
        (lambda text: "{}", r"corrupt \('done'\)"),
        (lambda text: text.replace('"done": "', '"done": "!'), r"corrupt \(.*\)"),
        (lambda text: text.replace('"step": 7', '"step": 8'), r"corrupt \(it does not match its checksum\)"),
        (lambda text: text.replace('"done": "', '"done": "AAAA'), r"corrupt \(it does not match its checksum\)"),
    ],
)
def test_training_progress_load_rejects_a_damaged_file(
    tmp_path: Path, damage: Callable[[str], str], message: str
) -> None:
    """Otherwise other samples would be trained on, and nobody would see it."""
    TrainingProgress(7, 1, np.array([True, False, True] * 5)).save(tmp_path)
    file = tmp_path / "progress.json"
    file.write_text(damage(file.read_text()))
    with pytest.raises(UserError, match=rf"^s3://state/{file.name}: {message}$"):
        TrainingProgress.load(tmp_path, 15, "s3://state")


def test_training_progress_load_rejects_a_file_that_is_missing_or_of_another_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^s3://state/progress.json: missing$"):
        TrainingProgress.load(tmp_path, 15, "s3://state")
    TrainingProgress(7, 1, np.ones(15, bool)).save(tmp_path)
    with pytest.raises(UserError, match=r"^s3://state/progress.json: is of a run with 15 samples, expected 16$"):
        TrainingProgress.load(tmp_path, 16, "s3://state")


def test_training_progress_add_starts_a_new_epoch_with_nothing_done() -> None:
    progress = TrainingProgress(7, 0, np.array([True, True, True]))
    progress.add(Batch(1, np.array([2]), (), 0.7))
    assert (progress.step, progress.epoch, progress.done.tolist()) == (7, 1, [False, False, True])
