"""The inputs of a training run (settings, where data comes from, where results go), and how it ended."""

from dataclasses import dataclass
from typing import Any

from pos2distill.config import ModelSection, Runtime, Study
from pos2distill.store.artifacts import Artifact


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """How training ended.

    Attributes:
        finished: all epochs are done; else it stopped on request, with a checkpoint.
        peak_memory_gib: that of the worker which needed most, since it started (`hardware.peak_memory_gib`).
        warnings: what the user should know of the model, each in one line.
    """

    finished: bool
    steps: int
    peak_memory_gib: float
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """One training run. Can be pickled to its workers.

    Attributes:
        name: the run's name, for trackers.
        logged_settings: all settings of the study, for trackers.
        study: what defines the result; its model is the base model.
        runtime: where and how it runs.
        student_start: what the student is at the beginning: the base model, or the checkpoint of an earlier round.
        examples, examples_file: the training examples, whose order numbers them.
        samples: the sample store.
        checkpoint: the artifact that is written.
    """

    name: str
    logged_settings: dict[str, Any]
    study: Study
    runtime: Runtime
    student_start: ModelSection
    examples: Artifact
    examples_file: str
    samples: Artifact
    checkpoint: Artifact
