"""Where the teacher's hidden states come from while training: the store, or a frozen model beside the student."""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from pos2distill.errors import UserError
from pos2distill.models.responses import ResponseBatch, collate
from pos2distill.training.rows import Row


class TeacherStates(Protocol):
    """Gives the hidden states (T, H) of the rows' responses, laid end to end."""

    def __call__(self, rows: Sequence[Row]) -> Tensor: ...


def cached_states(rows: Sequence[Row]) -> Tensor:
    """The states that the teacher stage stored with the samples."""
    states = [row.teacher_TH for row in rows if row.teacher_TH is not None]
    if len(states) != len(rows):
        raise UserError("the samples hold no teacher states; sample again with method.teacher=cached")
    return torch.cat(states)


class ResidentStates:
    """The frozen model's states, computed once for each example among the rows.

    Args:
        frozen: the initial model's states for a batch.
        alignment: as the student's.
    """

    def __init__(self, frozen: Callable[[ResponseBatch], Tensor], *, alignment: Literal["shifted", "official"]) -> None:
        self.frozen = frozen
        self.alignment = alignment

    def __call__(self, rows: Sequence[Row]) -> Tensor:
        distinct = {row.example_id: row for row in rows}
        batch = collate(
            [row.teacher_prompt_ids for row in distinct.values()],
            [row.response_ids for row in distinct.values()],
            alignment=self.alignment,
        )
        states = self.frozen(batch).split([len(row.response_ids) for row in distinct.values()])
        of = dict(zip(distinct, states, strict=True))
        return torch.cat([of[row.example_id] for row in rows])
