"""What a training strategy is: forward, backward and update of one worker's part of a global batch."""

from pathlib import Path
from typing import Protocol

from torch import Tensor

from pos2distill.models.packing import ResponseBatch
from pos2distill.training.student import Student
from pos2distill.training.teachers import TeacherView


class Strategy(Protocol):
    """Forward, backward and update of one worker's share of a global batch.

    Losses given to `backward` add up over micro-batches and dist: the sum is the global loss, so is its gradient.
    """

    student: Student

    def forward(self, batch: ResponseBatch, teacher: TeacherView | None) -> Tensor:
        """Row losses (B,); with a graph, unless under `torch.no_grad`."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the loss's gradient. `last`: the global batch's last micro-batch on this rank."""

    def step(self, learning_rate: float) -> float:
        """Clip, update, clear. Returns the gradient's norm before clipping."""

    def frozen_states(self, batch: ResponseBatch) -> Tensor:
        """The resident teacher's hidden states (T, H): of a frozen model, or of the student without its adapters."""

    def save(self, folder: Path) -> None:
        """Write the weights of a plain model in Hugging Face format. Called on every rank; rank 0 writes."""

    def save_state(self, folder: Path) -> None:
        """Write trained weights and optimizer state to go on from. Called on every rank; each writes its own files."""

    def load_state(self, folder: Path) -> None:
        """Go on from a saved state: of any number of ranks, of either strategy. Called on every rank.

        Raises:
            UserError: naming the file that is missing, damaged or of another model.
        """
