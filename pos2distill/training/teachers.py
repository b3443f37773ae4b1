"""The base model during training: what is known of it at the rows' response positions, and the KL to it.

    cached     hidden states that sampling stored, with the base model's lm_head: the whole distribution
    resident   hidden states of the base model in memory, with the base model's lm_head: the same
    topk       log-probabilities of the K most likely tokens that sampling stored: a lower bound of the KL

Shapes: T response positions of all rows of a micro-batch, concatenated; H hidden size; V vocabulary; K tokens of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pos2distill.config import Study
from pos2distill.config.method import Alignment, Divergence
from pos2distill.errors import UserError
from pos2distill.losses.kl import forward_kl, reverse_kl, topk_kl
from pos2distill.models.architecture import torch_dtype
from pos2distill.models.head import FrozenHead
from pos2distill.models.hidden_states import hidden_from_bytes
from pos2distill.models.packing import ResponseBatch, collate
from pos2distill.training.rows import Row


class TeacherDistribution(Protocol):
    """What is known of the base model at T response positions."""

    def to(self, device: torch.device) -> "TeacherDistribution":
        """The same distribution on a device."""

    def __getitem__(self, chunk: slice) -> "TeacherDistribution":
        """The distribution at some of the positions."""

    def kl(self, student_TV: Tensor) -> Tensor:
        """The method's KL at each position, (T,) float32, nats. Gradients flow to the student's logits."""


TeacherSource = Callable[[Sequence[Row]], TeacherDistribution]
"""Returns the distribution at the rows' responses, concatenated."""


@dataclass(frozen=True, slots=True)
class FullDistribution:
    """The states that enter lm_head, and the base model's lm_head: the distribution over the whole vocabulary.

    divergence: `forward`, KL(teacher || student), or `reverse`, KL(student || teacher).
    """

    hidden_TH: Tensor
    head: FrozenHead
    divergence: Divergence = "forward"

    def to(self, device: torch.device) -> "FullDistribution":
        return replace(self, hidden_TH=self.hidden_TH.to(device))

    def __getitem__(self, chunk: slice) -> "FullDistribution":
        return replace(self, hidden_TH=self.hidden_TH[chunk])

    def kl(self, student_TV: Tensor) -> Tensor:
        # The teacher's logits are computed here, for the caller's chunk of tokens, so (T, V) of them never exists.
        teacher_TV = self.head(self.hidden_TH)
        if self.divergence == "reverse":
            return reverse_kl(student_TV, teacher_TV)
        return forward_kl(teacher_TV, student_TV)

    def cross_entropy(self, target_T: Tensor) -> Tensor:
        """The base model's own loss on the response tokens, (T,) float32, nats."""
        teacher_TV = self.head(self.hidden_TH)
        return cross_entropy(teacher_TV, target_T.to(teacher_TV.device), reduction="none")


@dataclass(frozen=True, slots=True)
class TopKDistribution:
    """Log-probabilities of the K most likely tokens; all other tokens count as one."""

    ids_TK: Tensor
    logprobs_TK: Tensor

    def to(self, device: torch.device) -> "TopKDistribution":
        return TopKDistribution(self.ids_TK.to(device), self.logprobs_TK.to(device))

    def __getitem__(self, chunk: slice) -> "TopKDistribution":
        return TopKDistribution(self.ids_TK[chunk], self.logprobs_TK[chunk])

    def kl(self, student_TV: Tensor) -> Tensor:
        return topk_kl(self.ids_TK, self.logprobs_TK, student_TV)


class CachedTeacher:
    """The hidden states that were stored with the samples.

    Args:
        head: the base model's lm_head.
        divergence: see `FullDistribution`.
    """

    def __init__(self, head: FrozenHead, divergence: Divergence = "forward") -> None:
        self.head = head
        self.divergence = divergence

    def __call__(self, rows: Sequence[Row]) -> FullDistribution:
        """The states of each row's sample.

        Raises:
            UserError: if a sample has none.
        """
        return FullDistribution(torch.cat([_stored_states(row) for row in rows]), self.head, self.divergence)


class ResidentTeacher:
    """The base model's hidden states, computed once for each response among the rows.

    Args:
        head: the base model's lm_head.
        base_states: computes the base model's hidden states for a batch.
        alignment: the student's.
        divergence: see `FullDistribution`.
    """

    def __init__(
        self,
        head: FrozenHead,
        base_states: Callable[[ResponseBatch], Tensor],
        *,
        alignment: Alignment = "shifted",
        divergence: Divergence = "forward",
    ) -> None:
        self.head = head
        self.divergence = divergence
        self.base_states = base_states
        self.alignment = alignment

    def __call__(self, rows: Sequence[Row]) -> FullDistribution:
        # Rows of an example differ in the student's prompt; on-policy, also in their responses. The teacher's prompt is
        # the same.
        row_of = {_response_key(row): row for row in rows}
        prompts = [row.sample.teacher_prompt_ids for row in row_of.values()]
        responses = [row.response_ids for row in row_of.values()]
        # On-policy, the answers to one example have one teacher prompt, which is computed once.
        groups = [row.group for row in row_of.values()]
        hidden_TH = self.base_states(collate(prompts, responses, alignment=self.alignment, group_ids=groups))
        states = hidden_TH.split([len(response) for response in responses])
        states_of = dict(zip(row_of, states, strict=True))
        by_row = [states_of[_response_key(row)] for row in rows]
        return FullDistribution(torch.cat(by_row), self.head, self.divergence)


class TopKTeacher:
    """The log-probabilities of the K most likely tokens that were stored with the samples."""

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, rows: Sequence[Row]) -> TopKDistribution:
        """`RowBuilder` has cut each response to the positions that have log-probabilities."""
        ids: list[Any] = [row.sample.top_ids for row in rows]
        logprobs: list[Any] = [row.sample.top_logprobs for row in rows]
        ids_TK = torch.from_numpy(np.concatenate(ids)).view(-1, self.k)
        logprobs_TK = torch.from_numpy(np.concatenate(logprobs)).view(-1, self.k)
        return TopKDistribution(ids_TK, logprobs_TK)


def build_teacher(
    study: Study, base_states: Callable[[ResponseBatch], Tensor], device: torch.device
) -> TeacherSource | None:
    """The teacher that `method.teacher` names; None if the method uses none.

    Args:
        study: model and method.
        base_states: computes the base model's hidden states for a batch; only a resident teacher calls it.
        device: the student's device.
    """
    method = study.method
    if method.teacher == "none":
        return None
    if method.teacher == "topk":
        return TopKTeacher(method.teacher_topk)
    # The states that cached and resident teachers return become logits by the base model's head, never the student's.
    head = FrozenHead.from_checkpoint(study.model, torch_dtype(study.model.dtype)).to(device)
    if method.teacher == "resident":
        return ResidentTeacher(head, base_states, alignment=method.alignment, divergence=method.divergence)
    return CachedTeacher(head, method.divergence)


def _response_key(row: Row) -> tuple[str, bytes]:
    """Identifies a response to an example."""
    return row.sample.example.example_id, row.response_ids.tobytes()


def _stored_states(row: Row) -> Tensor:
    sample = row.sample
    if sample.hidden is None or sample.hidden_dtype is None:
        raise UserError(
            f"the sample of example {sample.example.example_id} has no teacher states; delete the samples and sample "
            f"again with method.teacher=cached"
        )
    return hidden_from_bytes(sample.hidden, sample.hidden_dtype, len(row.response_ids))
