"""The interface of a training strategy."""

from pathlib import Path
from typing import Protocol

from torch import Tensor

from pos2distill.models.packing import ResponseBatch
from pos2distill.training.state import Shapes, StoredState
from pos2distill.training.student import Student
from pos2distill.training.teachers import TeacherDistribution


class Strategy(Protocol):
    """Forward, backward and update for one worker's rows of a global batch.

    The losses passed to `backward` add up over micro-batches and ranks; their sum is the global loss. Every rank calls
    the same methods in the same order.
    """

    student: Student

    def forward(self, batch: ResponseBatch, teacher: TeacherDistribution | None) -> Tensor:
        """Row losses (B,) in nats; with a graph unless under `torch.no_grad`."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the loss's gradient. `last`: the global batch's last micro-batch on this rank."""

    def step(self, learning_rate: float) -> float:
        """Clip the gradient, update the weights, clear the gradient. Returns its norm before clipping."""

    def base_states(self, batch: ResponseBatch) -> Tensor:
        """The base model's hidden states (T, H): of a copy, or of the student without its adapters."""

    def save(self, folder: Path) -> float:
        """Write the weights of a plain model in Hugging Face format. Called on every rank; rank 0 writes.

        Each weight has the dtype that it has in the base model as transformers loads it in `model.dtype`.

        Returns: on rank 0 the relative error of the adapters' update by this rounding (`lora.merge`), else 0.
        """

    def save_adapter(self, folder: Path) -> None:
        """Write the adapters of a student that has some, in fp32, in peft's format. As `save`, and before it."""

    def save_state(self, folder: Path) -> None:
        """Write trained weights and optimizer state. Called on every rank; each writes its own files."""

    def state_shapes(self) -> Shapes:
        """The shapes of the trained parameters, which a saved state must have."""

    def load_state(self, stored: StoredState) -> None:
        """Restore a saved state: of any number of ranks, of either strategy. Called on every rank.

        Args:
            stored: a state with `state_shapes`, whose files are known to be intact.
        """
