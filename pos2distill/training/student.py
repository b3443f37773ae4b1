"""The student: a language model whose forward returns row losses.

The loss is computed inside forward because ZeRO-3 gathers a module's weights only while the engine's forward runs. For
the same reason, the base model's states of a student with adapters are computed there.

Shapes: B rows, S tokens of the packed sequence, T response tokens of all rows, H hidden size, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from pos2distill.config import Study, TrainersSection
from pos2distill.losses.kl import mean_by_row, reverse_kl
from pos2distill.models.dropout import turn_dropout_off
from pos2distill.models.head import LogitTransform
from pos2distill.models.hidden_states import response_hidden_states
from pos2distill.models.loss_head import LossHead, TokenLosses, compute_dtype
from pos2distill.models.packing import PositionView, ResponseBatch
from pos2distill.randomness import derive_seed
from pos2distill.training.teachers import TeacherDistribution


class Student(nn.Module):
    """The model under training, with its loss."""

    def __init__(self, lm: PreTrainedModel, study: Study) -> None:
        super().__init__()
        self.lm = lm
        self.loss = study.method.loss
        self.view_weight = study.method.view_weight
        self.transform = LogitTransform(lm.config)
        self.head = LossHead(lm.get_output_embeddings())

    def forward(self, batch: ResponseBatch, teacher: TeacherDistribution | None, *, adapters: bool = True) -> Tensor:
        """Each row's loss in nats, mean over its response tokens: the method's KL, or the cross-entropy.

        With a second view of the rows (RPSD, arXiv:2604.14339), plus `method.view_weight` times the mean over the
        tokens from the shift on of KL(student under the view || student under the plain positions, without gradient).

        Logits exist at response positions only, in float32 also if the model is bfloat16, and for a chunk of tokens
        at a time (`LossHead`).

        Args:
            batch: prompts and responses.
            teacher: the base model's distribution at the batch's response tokens, in their order; None for a
                cross-entropy.
            adapters: False: return the hidden states (T, H) without the adapters instead, of a student that has some.
        Returns: (B,) float32.
        """
        if not adapters:
            return self._states_without_adapters(batch)
        hidden_TH = response_hidden_states(self.lm, batch)
        assert teacher is not None or self.loss == "ce"
        # With adaptive weights, a cross-entropy has a teacher too.
        token_losses = response_losses(self.transform, teacher if self.loss == "kl" else None, batch.target_T)
        loss_B = mean_by_row(self.head(hidden_TH, token_losses=token_losses), batch.row_T, batch.row_count)
        if batch.view is not None:
            loss_B = loss_B + self.view_weight * self._position_view_divergence(batch, batch.view, hidden_TH.detach())
        return loss_B

    def _position_view_divergence(self, batch: ResponseBatch, view: PositionView, plain_TH: Tensor) -> Tensor:
        """KL(view || plain) of each row, (B,), mean over the tokens from the shift on; 0 where there are none."""
        view_TH = response_hidden_states(self.lm, replace(batch, position_S=view.position_S))

        # Here, since the backward pass runs outside of autocast.
        plain_TH = plain_TH.to(compute_dtype(plain_TH))

        def token_losses(raw_logits_tV: Tensor, chunk: slice) -> Tensor:
            plain_tV = self.head.raw_logits(plain_TH[chunk])
            return reverse_kl(self.transform(raw_logits_tV), self.transform(plain_tV))

        is_shifted_T = view.is_shifted_T.float()
        divergence_T = self.head(view_TH, token_losses=token_losses)
        total_B = mean_by_row(divergence_T * is_shifted_T, batch.row_T, batch.row_count)
        # Both means are over all tokens of a row, so their quotient is the mean over those from the shift on.
        fraction_B = mean_by_row(is_shifted_T, batch.row_T, batch.row_count)
        return total_B / fraction_B.clamp_min(torch.finfo(fraction_B.dtype).tiny)

    @torch.no_grad()
    def _states_without_adapters(self, batch: ResponseBatch) -> Tensor:
        # Imported here: only students with adapters need peft.
        from pos2distill.models.lora import adapters_off

        with adapters_off(self.lm):
            return response_hidden_states(self.lm, batch)


def response_losses(transform: LogitTransform, teacher: TeacherDistribution | None, target_T: Tensor) -> TokenLosses:
    """The losses of response tokens from raw logits: the KL to the teacher, or without one the cross-entropy.

    Args:
        target_T: (T,) the tokens, for the cross-entropy.
    """

    def token_losses(raw_logits_tV: Tensor, chunk: slice) -> Tensor:
        logits_tV = transform(raw_logits_tV)
        if teacher is not None:
            return teacher[chunk].kl(logits_tV)
        return cross_entropy(logits_tV, target_T[chunk], reduction="none")

    return token_losses


def prepare_for_training(lm: PreTrainedModel, study: Study, trainers: TrainersSection) -> None:
    """Add adapters and gradient checkpointing as configured, and set training mode without dropout.

    Without dropout, because a row passes through the model more than once (for its weight and for its gradient) and
    shares tokens with other rows: randomness would make every pass another function.
    """
    if study.training.lora:
        # Imported here: only students with adapters need peft.
        from pos2distill.models.lora import add_adapters

        add_adapters(lm, study.training.lora, seed=derive_seed(study.seed, "adapters"))
    else:
        _freeze_what_gets_no_gradient(lm)
    # transformers 5.19 uses gradient checkpointing in training mode only (`GradientCheckpointingLayer`).
    lm.train()
    turn_dropout_off(lm)
    if trainers.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _freeze_what_gets_no_gradient(lm: PreTrainedModel) -> None:
    """Freeze weights that several ranks would only decay.

    No token passes through some, such as the encoder of images. Others, the corrections of ERNIE's routers, choose
    experts and are in no sum; transformers 5.19 freezes them itself, but not those that it loads.
    """
    parts: tuple[Any, ...] = (lm.get_decoder(), lm.get_output_embeddings())  # type: ignore[no-untyped-call]
    trained: set[int] = set()
    for part in parts:
        trained |= {id(parameter) for parameter in part.parameters()}
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_(id(parameter) in trained and not name.endswith("e_score_correction_bias"))


def trainable(lm: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The trained parameters by name, in the model's order: all of them, or those of the adapters."""
    return {name: parameter for name, parameter in lm.named_parameters() if parameter.requires_grad}


def plain_weights(
    weights: dict[str, Tensor], study: Study, dtypes: Mapping[str, torch.dtype]
) -> tuple[dict[str, Tensor], float]:
    """The student's weights as those of a plain model, with adapters merged.

    Args:
        weights: the student's weights, as `state_dict` names them. With adapters, it does not keep them (`merge`).
        dtypes: the dtypes of the base model's weights (`weight_dtypes`).
    Returns: the weights, and the relative error of the adapters' update by rounding (`merge`); 0 without adapters.
    """
    error = 0.0
    if study.training.lora:
        from pos2distill.models.lora import merge

        weights, error = merge(weights, study.training.lora, dtypes)
    plain: dict[str, Tensor] = {}
    # Tied weights are one tensor, and must stay one: transformers 5.19 writes two tensors twice.
    converted: dict[tuple[Any, ...], Tensor] = {}
    for name, weight in weights.items():
        key = (weight.data_ptr(), weight.shape, weight.stride(), dtypes[name])
        if key not in converted:
            converted[key] = weight.to(dtypes[name])
        plain[name] = converted[key]
    return plain, error
