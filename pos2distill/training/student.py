"""The student: row KLs against the frozen teacher, computed inside one forward.

Inside, because ZeRO-3 gathers a module's weights only while the engine's forward runs.
Shapes: B rows, T response tokens laid end to end, H hidden size, V vocabulary.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from pos2distill.losses.kl import forward_kl, mean_by_row
from pos2distill.models.head import FrozenHead
from pos2distill.models.responses import ResponseBatch, predicting_hidden


class Student(nn.Module):
    """The model under training beside the initial model's output head."""

    def __init__(self, lm: PreTrainedModel, teacher_head: FrozenHead) -> None:
        super().__init__()
        self.lm = lm
        self.teacher_head = teacher_head

    def forward(self, batch: ResponseBatch, teacher_TH: Tensor) -> Tensor:
        """KL(teacher || student) of each row in nats, mean over its response tokens.

        Logits exist at response positions only: 2 x (T, V), never (B, L, V).

        Args:
            batch: prompts and responses. teacher_TH: hidden states of the frozen model, in the batch's token order.
        Returns: (B,) float32.
        """
        lm_head: Any = self.lm.get_output_embeddings()
        student_TV = self.teacher_head.transform(lm_head(predicting_hidden(self.lm, batch)))
        kl_T = forward_kl(self.teacher_head(teacher_TH), student_TV)
        return mean_by_row(kl_T, batch.row_T, len(batch.input_ids_BL))
