"""The student: a language model whose forward returns row losses.

The loss is computed inside forward because ZeRO-3 gathers a module's weights only while the engine's forward runs. For
the same reason, the initial model's states of a student with adapters are computed there.

Shapes: B rows, S tokens of the packed sequence, T response tokens of all rows, H hidden size, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from pos2distill.config import Study, TrainersSection
from pos2distill.losses.kl import mean_by_row, reverse_kl
from pos2distill.models.head import LogitTransform
from pos2distill.models.hidden_states import response_hidden_states
from pos2distill.models.load import torch_dtype
from pos2distill.models.packing import PositionView, ResponseBatch
from pos2distill.randomness import derive_seed
from pos2distill.training.teachers import TeacherView

_CHUNK_LOGITS = 2**22
"""Logits whose loss is computed at once: 16 MiB in float32. A divergence and its gradient need several times that."""


class Student(nn.Module):
    """The model under training, with its loss."""

    def __init__(self, lm: PreTrainedModel, study: Study) -> None:
        super().__init__()
        self.lm = lm
        self.loss = study.method.loss
        self.view_weight = study.method.view_weight
        self.transform = LogitTransform(lm.config)

    def forward(self, batch: ResponseBatch, teacher: TeacherView | None, *, initial: bool = False) -> Tensor:
        """Each row's loss in nats, mean over its response tokens: KL(teacher || student), or the cross-entropy.

        With a second view of the rows (RPSD, arXiv:2604.14339), plus `method.view_weight` times the mean over the
        tokens from the shift on of KL(student under the view || student under the plain positions, without gradient).

        Logits exist at response positions only: lm_head's product is (T, V), never (S, V). The float32 values derived
        from it are computed for a chunk of tokens at a time, and again in the backward pass instead of being stored.

        Args:
            batch: prompts and responses.
            teacher: the view at the batch's response tokens, in their order; None for a cross-entropy.
            initial: return the initial model's hidden states (T, H) instead; for students with adapters.
        Returns: (B,) float32.
        """
        if initial:
            return self._initial_states(batch)
        # The module and not its weight, because ZeRO-3 gathers the weight when the module is called.
        lm_head: Any = self.lm.get_output_embeddings()
        product_TV = lm_head(response_hidden_states(self.lm, batch))
        target: TeacherView | Tensor = batch.target_T
        if self.loss == "kl":
            assert teacher is not None
            target = teacher
        chunk = max(1, _CHUNK_LOGITS // product_TV.shape[1])
        losses = []
        for chunk_product, chunk_target in zip(product_TV.split(chunk), target.split(chunk), strict=True):
            losses.append(checkpoint(self._token_losses, chunk_product, chunk_target, use_reentrant=False))
        loss_B = mean_by_row(torch.cat(losses), batch.row_T, batch.rows)
        if batch.view is not None:
            loss_B = loss_B + self.view_weight * self._view_divergence(batch, batch.view, product_TV.detach())
        return loss_B

    def _view_divergence(self, batch: ResponseBatch, view: PositionView, plain_TV: Tensor) -> Tensor:
        """KL(view || plain) of each row, (B,), mean over the tokens that count; 0 where none does."""
        lm_head: Any = self.lm.get_output_embeddings()
        states_TH = response_hidden_states(self.lm, replace(batch, position_S=view.position_S))
        view_TV = lm_head(states_TH)
        chunk = max(1, _CHUNK_LOGITS // view_TV.shape[1])
        divergences = []
        for chunk_view, chunk_plain in zip(view_TV.split(chunk), plain_TV.split(chunk), strict=True):
            divergences.append(checkpoint(self._token_divergence, chunk_view, chunk_plain, use_reentrant=False))
        counts_T = view.counts_T.float()
        total_B = mean_by_row(torch.cat(divergences) * counts_T, batch.row_T, batch.rows)
        # Both means are over all tokens of a row, so their quotient is the mean over those that count.
        fraction_B = mean_by_row(counts_T, batch.row_T, batch.rows)
        return total_B / fraction_B.clamp_min(torch.finfo(fraction_B.dtype).tiny)

    def _token_divergence(self, view_TV: Tensor, plain_TV: Tensor) -> Tensor:
        return reverse_kl(self.transform(view_TV), self.transform(plain_TV))

    def _token_losses(self, product_TV: Tensor, target: TeacherView | Tensor) -> Tensor:
        """The losses (T,) of a chunk of tokens, float32: KL to a teacher's view, or cross-entropy on token ids."""
        student_TV = self.transform(product_TV)
        if isinstance(target, Tensor):
            return cross_entropy(student_TV, target, reduction="none")
        return target.kl(student_TV)

    @torch.no_grad()
    def _initial_states(self, batch: ResponseBatch) -> Tensor:
        # Imported here: only students with adapters need peft.
        from pos2distill.models.lora import adapters_off

        with adapters_off(self.lm):
            return response_hidden_states(self.lm, batch)


def prepare_for_training(lm: PreTrainedModel, study: Study, trainers: TrainersSection) -> None:
    """Add adapters and gradient checkpointing as configured, and set training mode without dropout.

    Without dropout, because a row passes through the model more than once (for its weight and for its gradient) and
    shares tokens with other rows: randomness would make every pass another function.
    """
    if study.training.lora:
        # Imported here: only students with adapters need peft.
        from pos2distill.models.lora import add_adapters

        add_adapters(lm, study.training.lora, seed=derive_seed(study.seed, "adapters"))
    # transformers 5.19 uses gradient checkpointing in training mode only (`GradientCheckpointingLayer`).
    lm.train()
    _turn_dropout_off(lm)
    if trainers.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _turn_dropout_off(lm: PreTrainedModel) -> None:
    """Set every dropout probability to 0, and routers' jitter, which is random too.

    transformers 5.19: attention layers and routers hold their probabilities as float attributes, such as
    `attention_dropout` or `jitter_noise`, instead of in torch's dropout modules.
    """
    for module in lm.modules():
        for name, value in vars(module).items():
            is_probability = isinstance(module, _DropoutNd) or "drop" in name or "jitter" in name
            if isinstance(value, float) and is_probability:
                setattr(module, name, 0.0)


def trainable(lm: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The trained parameters by name, in the model's order: all of them, or those of the adapters."""
    return {name: parameter for name, parameter in lm.named_parameters() if parameter.requires_grad}


def plain_weights(weights: Mapping[str, Tensor], study: Study) -> dict[str, Tensor]:
    """The student's weights as those of a plain model, with adapters merged, in the initial model's dtype."""
    if study.training.lora:
        from pos2distill.models.lora import merge

        weights = merge(weights, study.training.lora)
    return {name: weight.to(torch_dtype(study.model.dtype)) for name, weight in weights.items()}
