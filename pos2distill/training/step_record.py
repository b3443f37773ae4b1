"""What one training step did. Without torch, since stages read the records of finished trainings."""

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did.

    Attributes:
        step: its number, from 0.
        epoch: its epoch, from 0.
        examples: ids of the examples trained on; all records together say what was trained on when.
        fraction: how much of the run is completed after the step, in (0, 1].
        rows: the rows of the global batch, without padding.
        loss: the objective.
        loss_trivial: mean loss of the trivial rows, in nats, unweighted; None if there are none.
        loss_anchor: the same for anchor rows.
        grad_norm: the gradient's norm before clipping.
        learning_rate: the step's learning rate.
        weight_by_slot: sum of the weights of the rows with each `Row.slot_id`.
    """

    step: int
    epoch: int
    examples: tuple[str, ...]
    fraction: float
    rows: int
    loss: float
    loss_trivial: float | None
    loss_anchor: float | None
    grad_norm: float
    learning_rate: float
    weight_by_slot: dict[int, float]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a log line."""
        return asdict(self)


STEP_FIELDS = tuple(field.name for field in fields(StepRecord))
