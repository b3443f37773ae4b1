"""The student: row losses computed inside one forward.

Inside, because ZeRO-3 gathers a module's weights only while the engine's forward runs.
Shapes: B rows, T response tokens laid end to end, H hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from pos2distill.config import Study
from pos2distill.losses.kl import forward_kl, mean_by_row
from pos2distill.models.head import FrozenHead, LogitTransform
from pos2distill.models.load import torch_dtype
from pos2distill.models.responses import ResponseBatch, predicting_hidden


class Student(nn.Module):
    """The model under training beside the initial model's output head, where the method looks at that model."""

    def __init__(self, lm: PreTrainedModel, study: Study) -> None:
        super().__init__()
        self.lm = lm
        self.loss = study.method.loss
        self.transform = LogitTransform(lm.config)
        self.teacher_head: FrozenHead | None = None
        if study.method.needs_teacher:
            self.teacher_head = FrozenHead.from_checkpoint(study.model, torch_dtype(study.model.dtype))

    def forward(self, batch: ResponseBatch, teacher_TH: Tensor | None) -> Tensor:
        """Each row's loss in nats, mean over its response tokens: KL(teacher || student), or the cross-entropy.

        Logits exist at response positions only: (T, V) of each model, never (B, L, V).

        Args:
            batch: prompts and responses. teacher_TH: hidden states of the frozen model, in the batch's token order.
        Returns: (B,) float32.
        """
        lm_head: Any = self.lm.get_output_embeddings()
        student_TV = self.transform(lm_head(predicting_hidden(self.lm, batch)))
        if self.loss == "kl":
            assert self.teacher_head is not None
            assert teacher_TH is not None
            loss_T = forward_kl(self.teacher_head(teacher_TH), student_TV)
        else:
            loss_T = cross_entropy(student_TV, batch.target_T, reduction="none")
        return mean_by_row(loss_T, batch.row_T, len(batch.input_ids_BL))

    @torch.no_grad()
    def teacher_loss(self, batch: ResponseBatch, teacher_TH: Tensor) -> Tensor:
        """The frozen model's own cross-entropy on each row's response, at the advantageous slots. (B,) float32."""
        assert self.teacher_head is not None
        device = self.teacher_head.weight_VH.device
        batch = batch.to(device)
        loss_T = cross_entropy(self.teacher_head(teacher_TH.to(device)), batch.target_T, reduction="none")
        return mean_by_row(loss_T, batch.row_T, len(batch.input_ids_BL))
