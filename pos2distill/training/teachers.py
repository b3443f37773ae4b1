"""The frozen model while training: what is known of it at the rows' response positions, and the KL that follows.

    cached     hidden states of the teacher stage, from the store      with the initial lm_head: exact
    resident   hidden states of a frozen model beside the student      with the initial lm_head: exact
    topk       the sampler's log-probabilities of K tokens, from the store: a lower bound

Shapes: T response positions of all rows of a micro-batch, laid end to end, S of one example; H hidden size;
V vocabulary; K tokens of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pos2distill.config import Study
from pos2distill.errors import UserError
from pos2distill.losses.kl import forward_kl, topk_kl
from pos2distill.models.head import FrozenHead
from pos2distill.models.hidden_states import hidden_from_bytes
from pos2distill.models.load import torch_dtype
from pos2distill.models.packing import ResponseBatch, collate
from pos2distill.training.rows import Row


class TeacherView(Protocol):
    """What is known of the frozen model at T response positions."""

    def to(self, device: torch.device) -> "TeacherView":
        """The same view on a device."""

    def split(self, size: int) -> Sequence["TeacherView"]:
        """Views at so many positions each, in order."""

    def kl(self, student_TV: Tensor) -> Tensor:
        """KL(teacher || student) at each position, (T,) float32, nats. Gradients flow to the student's logits."""


TeacherSource = Callable[[Sequence[Row]], TeacherView]
"""Gives the view at the rows' responses, laid end to end."""


@dataclass(frozen=True, slots=True)
class HiddenStatesView:
    """Exact: the states that enter lm_head, and the initial lm_head."""

    hidden_TH: Tensor
    head: FrozenHead

    def to(self, device: torch.device) -> "HiddenStatesView":
        return replace(self, hidden_TH=self.hidden_TH.to(device))

    def split(self, size: int) -> list["HiddenStatesView"]:
        return [replace(self, hidden_TH=part_TH) for part_TH in self.hidden_TH.split(size)]

    def kl(self, student_TV: Tensor) -> Tensor:
        return forward_kl(self.head(self.hidden_TH), student_TV)

    def cross_entropy(self, target_T: Tensor) -> Tensor:
        """The frozen model's own loss on the response tokens, (T,) float32, nats."""
        teacher_TV = self.head(self.hidden_TH)
        return cross_entropy(teacher_TV, target_T.to(teacher_TV.device), reduction="none")


@dataclass(frozen=True, slots=True)
class TopKView:
    """A lower bound: the K likeliest tokens one by one, all others together."""

    ids_TK: Tensor
    logprobs_TK: Tensor

    def to(self, device: torch.device) -> "TopKView":
        return TopKView(self.ids_TK.to(device), self.logprobs_TK.to(device))

    def split(self, size: int) -> list["TopKView"]:
        return list(map(TopKView, self.ids_TK.split(size), self.logprobs_TK.split(size)))

    def kl(self, student_TV: Tensor) -> Tensor:
        return topk_kl(self.ids_TK, self.logprobs_TK, student_TV)


class CachedTeacher:
    """The states that the teacher stage stored with the samples."""

    def __init__(self, head: FrozenHead) -> None:
        self.head = head

    def __call__(self, rows: Sequence[Row]) -> HiddenStatesView:
        """Raises UserError where the samples hold no states."""
        return HiddenStatesView(torch.cat([_stored_states(row) for row in rows]), self.head)


class ResidentTeacher:
    """The frozen model's states, computed once for each example among the rows.

    Args:
        frozen: the initial model's states for a batch.
        alignment: as the student's.
    """

    def __init__(
        self,
        head: FrozenHead,
        frozen: Callable[[ResponseBatch], Tensor],
        *,
        alignment: Literal["shifted", "official"] = "shifted",
    ) -> None:
        self.head = head
        self.frozen = frozen
        self.alignment = alignment

    def __call__(self, rows: Sequence[Row]) -> HiddenStatesView:
        distinct = {row.sample.example.example_id: row for row in rows}
        responses = [row.response_ids for row in distinct.values()]
        prompts = [row.sample.prompt_ids for row in distinct.values()]
        states = self.frozen(collate(prompts, responses, alignment=self.alignment)).split(list(map(len, responses)))
        of = dict(zip(distinct, states, strict=True))
        return HiddenStatesView(torch.cat([of[row.sample.example.example_id] for row in rows]), self.head)


class TopKTeacher:
    """What the sampler told of the K likeliest tokens, stored with the samples."""

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, rows: Sequence[Row]) -> TopKView:
        """The rows end where the sampler's knowledge does."""
        ids_T, logprobs_T = (
            torch.from_numpy(np.concatenate([getattr(row.sample, name) for row in rows]))
            for name in ("top_ids", "top_logprobs")
        )
        return TopKView(ids_T.view(-1, self.k), logprobs_T.view(-1, self.k))


def build_teacher(
    study: Study, frozen: Callable[[ResponseBatch], Tensor], device: torch.device
) -> TeacherSource | None:
    """The teacher that the method names; None where the method looks at none.

    Args:
        frozen: the initial model's states for a batch; called for a resident teacher only.
        device: the student's.
    """
    method = study.method
    if method.teacher == "none":
        return None
    if method.teacher == "topk":
        return TopKTeacher(method.teacher_topk)
    head = FrozenHead.from_checkpoint(study.model, torch_dtype(study.model.dtype)).to(device)
    if method.teacher == "resident":
        return ResidentTeacher(head, frozen, alignment=method.alignment)
    return CachedTeacher(head)


def _stored_states(row: Row) -> Tensor:
    sample = row.sample
    if sample.hidden is None or sample.hidden_dtype is None:
        raise UserError("the samples hold no teacher states; sample again with method.teacher=cached")
    return hidden_from_bytes(sample.hidden, sample.hidden_dtype, len(row.response_ids))
