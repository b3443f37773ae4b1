"""What a training run is told: settings, and where its data comes from and its results go."""

from dataclasses import dataclass

from pos2distill.config import Runtime, Study
from pos2distill.store.artifacts import Artifact

# In a checkpoint: the model in Hugging Face format, what each step did, and the training state while training runs.
MODEL_FOLDER, STEPS_FOLDER, STATE_FOLDER = "model", "steps", "training"


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """One training run. Can be pickled to its workers.

    name: of the run, for trackers. study: what defines the result. runtime: where and how it runs.
    storage: of the run, for trackers. examples, examples_file: the training examples, whose order numbers them.
    samples: the sample store. checkpoint: the artifact that is written.
    """

    name: str
    study: Study
    runtime: Runtime
    storage: str
    examples: Artifact
    examples_file: str
    samples: Artifact
    checkpoint: Artifact
