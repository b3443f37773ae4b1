"""The same training step in other ways: with plain transformers, and with TRL's loss functions in the same plain loop.

Shapes: B rows of a micro-batch, L tokens of the longest of them, T response tokens of all rows concatenated,
V vocabulary, H hidden size, N rows of the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.train_step.problem import FRACTION, Questions, Size
from pos2distill.config import Study
from pos2distill.losses.objectives import row_coefficients
from pos2distill.models.architecture import torch_dtype
from pos2distill.models.load import load_model
from pos2distill.training.rows import Row
from pos2distill.training.schedule import learning_rate

RowLosses = Callable[[Any, Any, Sequence[Row], torch.device], Tensor]
"""(student, teacher, rows of a micro-batch, device) -> (B,) KL(teacher || student) in nats, mean over the response."""


@dataclass(frozen=True, slots=True)
class Padded:
    """Prompts and responses, padded on the right. response_BL: the positions whose logits predict the response."""

    input_ids_BL: Tensor
    attention_mask_BL: Tensor
    response_BL: Tensor


def pad(rows: Sequence[Row], device: torch.device, *, of_teacher: bool = False) -> Padded:
    """Pad rows with the student's prompts, or with the teacher's."""
    prompts = [row.prompt_ids for row in rows]
    if of_teacher:
        prompts = [row.sample.teacher_prompt_ids for row in rows]
    longest = max(len(prompt) + len(row.response_ids) for prompt, row in zip(prompts, rows, strict=True))
    ids_BL = torch.zeros(len(rows), longest, dtype=torch.long)
    mask_BL = torch.zeros_like(ids_BL)
    response_BL = torch.zeros_like(ids_BL, dtype=torch.bool)
    for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        length = len(prompt) + len(row.response_ids)
        ids_BL[index, :length] = torch.tensor([*prompt.tolist(), *row.response_ids.tolist()])
        mask_BL[index, :length] = 1
        response_BL[index, len(prompt) - 1 : length - 1] = True
    return Padded(ids_BL.to(device), mask_BL.to(device), response_BL.to(device))


def _by_row(kl_T: Tensor, rows: Sequence[Row]) -> Tensor:
    lengths = [len(row.response_ids) for row in rows]
    return torch.stack([row_kl.mean() for row_kl in kl_T.split(lengths)])


def straightforward(student: Any, teacher: Any, rows: Sequence[Row], device: torch.device) -> Tensor:
    """Computes all logits of both models, (B, L, V) in fp32, and selects those of the response afterwards."""
    own, frozen = pad(rows, device), pad(rows, device, of_teacher=True)
    student_BLV = student(input_ids=own.input_ids_BL, attention_mask=own.attention_mask_BL, use_cache=False).logits
    student_TV = student_BLV.float()[own.response_BL].log_softmax(-1)
    with torch.no_grad():
        teacher_BLV = teacher(
            input_ids=frozen.input_ids_BL, attention_mask=frozen.attention_mask_BL, use_cache=False
        ).logits
        teacher_TV = teacher_BLV.float()[frozen.response_BL].log_softmax(-1)
    return _by_row((teacher_TV.exp() * (teacher_TV - student_TV)).sum(-1).clamp_min(0), rows)


def trl_gkd(student: Any, teacher: Any, rows: Sequence[Row], device: torch.device) -> Tensor:
    """The loss of TRL 1.16's `GKDTrainer.compute_loss` at beta = 0, except that the teacher has its own prompt.

    It computes the divergence at all positions and selects the response's afterwards. It requires the responses of both
    models at the same positions, since the trainer's own teacher reads the student's tokens.
    """
    from trl.experimental.gkd import GKDTrainer

    own, frozen = pad(rows, device), pad(rows, device, of_teacher=True)
    student_BLV = student(input_ids=own.input_ids_BL, attention_mask=own.attention_mask_BL).logits
    with torch.no_grad():
        teacher_BLV = teacher(input_ids=frozen.input_ids_BL, attention_mask=frozen.attention_mask_BL).logits
    if not torch.equal(own.response_BL, frozen.response_BL):
        raise ValueError("expected the responses of student and teacher at the same positions")
    labels_BL = torch.where(own.response_BL, 0, -100)
    kl_TV = GKDTrainer.generalized_jsd_loss(student_BLV, teacher_BLV, labels_BL, beta=0, reduction="none")
    return _by_row(kl_TV.float().sum(-1).clamp_min(0), rows)


def trl_chunked(student: Any, teacher: Any, rows: Sequence[Row], device: torch.device) -> Tensor:
    """The kernel of TRL 1.16's `DistillationTrainer`: logits of the response only, in recomputed tiles."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    own, frozen = pad(rows, device), pad(rows, device, of_teacher=True)
    student_BLH = student.model(
        input_ids=own.input_ids_BL, attention_mask=own.attention_mask_BL, use_cache=False
    ).last_hidden_state
    with torch.no_grad():
        teacher_BLH = teacher.model(
            input_ids=frozen.input_ids_BL, attention_mask=frozen.attention_mask_BL, use_cache=False
        ).last_hidden_state
    kl_T, _ = ChunkedDivergenceFunction.apply(
        student_BLH[own.response_BL],
        student.lm_head.weight,
        None,
        teacher_BLH[frozen.response_BL],
        teacher.lm_head.weight,
        None,
        0.0,
    )
    return _by_row(kl_T.clamp_min(0), rows)


class PlainStep:
    """One step of a plain loop: fp32 weights under autocast, coefficients of the whole batch, clipping, AdamW.

    With several micro-batches, a pass without gradients computes the row losses first, as in the product.
    """

    def __init__(
        self, size: Size, study: Study, questions: Questions, device: torch.device, row_losses: RowLosses
    ) -> None:
        self.study, self.device, self.row_losses = study, device, row_losses
        rows = questions.rows()
        self.micro_batches = []
        for start in range(0, len(rows), size.micro_batch_rows):
            self.micro_batches.append(rows[start : start + size.micro_batch_rows])
        self.slot_id_N = torch.tensor([row.slot_id for row in rows])
        # The dtype under autocast decides the attention kernel: flash-attn where it can be used, as in our step.
        compute_dtype = torch_dtype(size.precision)
        self.student: Any = load_model(study.model, dtype=torch.float32, compute_dtype=compute_dtype, device=device)
        self.student.train()
        if size.gradient_checkpointing:
            self.student.gradient_checkpointing_enable({"use_reentrant": False})
        self.teacher: Any = load_model(study.model, device=device)
        settings = study.training
        self.optimizer = torch.optim.AdamW(
            self.student.parameters(), lr=0, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )
        self.autocast = torch.autocast(
            device.type, torch.bfloat16, enabled=size.precision == "bfloat16", cache_enabled=False
        )

    def __call__(self) -> float:
        """Make the step and return its loss."""
        single_loss_B = None
        if len(self.micro_batches) == 1:
            single_loss_B = self._losses(self.micro_batches[0])
            loss_N = single_loss_B.detach().cpu()
        else:
            with torch.no_grad():
                loss_N = torch.cat([self._losses(rows) for rows in self.micro_batches]).cpu()
        coefficient_N = row_coefficients(self.study.method, loss_N, torch.zeros_like(loss_N), self.slot_id_N)
        start = 0
        for rows in self.micro_batches:
            coefficient_B = coefficient_N[start : start + len(rows)].to(self.device)
            loss_B = single_loss_B
            if loss_B is None:
                loss_B = self._losses(rows)
            (coefficient_B * loss_B).sum().backward()
            start += len(rows)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(FRACTION, self.study.training)
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), self.study.training.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float((coefficient_N * loss_N).sum())

    def _losses(self, rows: Sequence[Row]) -> Tensor:
        with self.autocast:
            return self.row_losses(self.student, self.teacher, rows, self.device)
