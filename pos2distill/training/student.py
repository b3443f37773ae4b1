"""The student: row losses computed inside one forward.

Inside, because ZeRO-3 gathers a module's weights only while the engine's forward runs.
Shapes: B rows, T response tokens laid end to end, H hidden size, V vocabulary.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from pos2distill.config import Study
from pos2distill.losses.kl import mean_by_row
from pos2distill.models.head import LogitTransform
from pos2distill.models.responses import ResponseBatch, predicting_hidden
from pos2distill.training.teachers import TeacherView


class Student(nn.Module):
    """The model under training, with its loss."""

    def __init__(self, lm: PreTrainedModel, study: Study) -> None:
        super().__init__()
        self.lm = lm
        self.loss = study.method.loss
        self.transform = LogitTransform(lm.config)

    def forward(self, batch: ResponseBatch, teacher: TeacherView | None) -> Tensor:
        """Each row's loss in nats, mean over its response tokens: KL(teacher || student), or the cross-entropy.

        Logits exist at response positions only: (T, V) of each model, never (B, L, V).

        Args:
            batch: prompts and responses. teacher: the view at the batch's tokens, in their order.
        Returns: (B,) float32.
        """
        lm_head: Any = self.lm.get_output_embeddings()
        student_TV = self.transform(lm_head(predicting_hidden(self.lm, batch)))
        if self.loss == "kl":
            assert teacher is not None
            loss_T = teacher.kl(student_TV)
        else:
            loss_T = cross_entropy(student_TV, batch.target_T, reduction="none")
        return mean_by_row(loss_T, batch.row_T, batch.rows)
