"""What a checkpoint holds: its folders, and the URL of its model."""

from pos2distill.store.artifacts import Artifact

# The model in Hugging Face format, what each step did, and the training state while training runs.
MODEL_FOLDER, STEPS_FOLDER, STATE_FOLDER = "model", "steps", "training"
# In the folder of a training state: which files it has.
STATE_FILE = "state.json"
# In the folder of the model, once the study is reported.
MODEL_CARD = "README.md"
# With `training.lora` also the adapters by themselves, in peft's format.
ADAPTER_FOLDER = "adapter"


def train_again_hint(checkpoint: Artifact, folder: str = STATE_FOLDER) -> str:
    """For a message on training states that cannot be used: what to do.

    Args:
        folder: the folder of the states in the checkpoint.
    """
    return f"remove {checkpoint.url}/{folder} to train again from the samples"


def model_url(checkpoint: Artifact) -> str:
    """The folder of the model that a checkpoint holds."""
    return f"{checkpoint.url}/{MODEL_FOLDER}"
