"""The student: row losses, and of adapters their initial model's states, computed inside one forward.

Inside, because ZeRO-3 gathers a module's weights only while the engine's forward runs.
Shapes: B rows, S tokens of all rows laid end to end, T response tokens of all rows, H hidden size, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from pos2distill.config import Study, TrainersSection
from pos2distill.losses.kl import mean_by_row
from pos2distill.models.head import LogitTransform
from pos2distill.models.hidden_states import response_hidden_states
from pos2distill.models.load import torch_dtype
from pos2distill.models.packing import ResponseBatch
from pos2distill.randomness import derive_seed
from pos2distill.training.teachers import TeacherView

_LOGITS = 2**22
"""So many logits are looked at together: 16 MiB in float32, of which a divergence and its gradient take several."""


class Student(nn.Module):
    """The model under training, with its loss."""

    def __init__(self, lm: PreTrainedModel, study: Study) -> None:
        super().__init__()
        self.lm = lm
        self.loss = study.method.loss
        self.transform = LogitTransform(lm.config)

    def forward(self, batch: ResponseBatch, teacher: TeacherView | None, *, initial: bool = False) -> Tensor:
        """Each row's loss in nats, mean over its response tokens: KL(teacher || student), or the cross-entropy.

        Logits exist at response positions only: lm_head's product (T, V), never (S, V). What is made of it in float32
        is made for some tokens at a time, and once more in the backward pass instead of being kept.

        Args:
            batch: prompts and responses. teacher: the view at the batch's tokens, in their order.
            initial: of a student with adapters: the initial model's hidden states (T, H) instead.
        Returns: (B,) float32.
        """
        if initial:
            return self._initial_states(batch)
        lm_head: Any = self.lm.get_output_embeddings()
        product_TV = lm_head(response_hidden_states(self.lm, batch))
        wanted = teacher if self.loss == "kl" else batch.target_T
        assert wanted is not None
        size = max(1, _LOGITS // product_TV.shape[1])
        parts = zip(product_TV.split(size), wanted.split(size), strict=True)
        loss_T = torch.cat([checkpoint(self._token_losses, *part, use_reentrant=False) for part in parts])
        return mean_by_row(loss_T, batch.row_T, batch.rows)

    def _token_losses(self, product_TV: Tensor, wanted: TeacherView | Tensor) -> Tensor:
        """Of some tokens: lm_head's product, and the teacher's view or the tokens themselves. (T,) float32."""
        student_TV = self.transform(product_TV)
        if isinstance(wanted, Tensor):
            return cross_entropy(student_TV, wanted, reduction="none")
        return wanted.kl(student_TV)

    @torch.no_grad()
    def _initial_states(self, batch: ResponseBatch) -> Tensor:
        from pos2distill.models.lora import adapters_off  # peft is for adapters only

        with adapters_off(self.lm):
            return response_hidden_states(self.lm, batch)


def prepare_for_training(lm: PreTrainedModel, study: Study, trainers: TrainersSection) -> None:
    """Adapters and activations recomputed in the backward pass, if asked for, and training mode without dropout.

    A row is passed more than once, for its weight and for its gradient, and shares tokens with others: chance would
    make of each pass another function.
    """
    if study.training.lora:
        from pos2distill.models.lora import add_adapters  # peft is for adapters only

        add_adapters(lm, study.training.lora, seed=derive_seed(study.seed, "adapters"))
    lm.train()
    for module in lm.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and (isinstance(module, _DropoutNd) or "drop" in name or "jitter" in name):
                setattr(module, name, 0.0)
    if trainers.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def trainable(lm: PreTrainedModel) -> dict[str, nn.Parameter]:
    """What is trained, by name, in the model's order: all parameters, or those of the adapters."""
    return {name: parameter for name, parameter in lm.named_parameters() if parameter.requires_grad}


def plain_weights(weights: Mapping[str, Tensor], study: Study) -> dict[str, Tensor]:
    """The student's weights as those of a plain model, adapters merged, in the initial model's dtype."""
    if study.training.lora:
        from pos2distill.models.lora import merge

        weights = merge(weights, study.training.lora)
    return {name: weight.to(torch_dtype(study.model.dtype)) for name, weight in weights.items()}
