"""The other ways to make the same step: plain transformers, and TRL's loss functions in the same plain loop.

Shapes: B rows of a micro-batch, L tokens of the longest, T response tokens of all rows laid end to end, R of the
longest response, V vocabulary, H hidden size, N rows of the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.train_step.problem import FRACTION, Questions, Size
from pos2distill.config import Study
from pos2distill.losses.objectives import row_coefficients
from pos2distill.models.load import load_model, torch_dtype
from pos2distill.training.rows import Row
from pos2distill.training.schedule import learning_rate

RowLosses = Callable[[Any, Any, Sequence[Row], torch.device], Tensor]
"""(student, teacher, rows of a micro-batch, device) -> (B,) KL(teacher || student), mean over the response."""


@dataclass(frozen=True, slots=True)
class Padded:
    """Prompts and responses padded on the right. response_BL: the positions whose logits predict the response."""

    input_ids_BL: Tensor
    attention_mask_BL: Tensor
    response_BL: Tensor


def pad(rows: Sequence[Row], device: torch.device, *, of_teacher: bool = False) -> Padded:
    """The rows with the student's own prompts, or with those that the teacher sees."""
    prompts = [row.sample.prompt_ids if of_teacher else row.prompt_ids for row in rows]
    lengths = [len(prompt) + len(row.response_ids) for prompt, row in zip(prompts, rows, strict=True)]
    ids_BL = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    mask_BL, response_BL = torch.zeros_like(ids_BL), torch.zeros_like(ids_BL, dtype=torch.bool)
    for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        ids_BL[index, : lengths[index]] = torch.tensor([*prompt.tolist(), *row.response_ids.tolist()])
        mask_BL[index, : lengths[index]] = 1
        response_BL[index, len(prompt) - 1 : lengths[index] - 1] = True
    return Padded(ids_BL.to(device), mask_BL.to(device), response_BL.to(device))


def _by_row(kl_T: Tensor, rows: Sequence[Row]) -> Tensor:
    return torch.stack([part.mean() for part in kl_T.split([len(row.response_ids) for row in rows])])


def straightforward(student: Any, teacher: Any, rows: Sequence[Row], device: torch.device) -> Tensor:
    """All logits of both models in fp32, [B, L, V]; the response's are picked out afterwards."""
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
    """What `GKDTrainer.compute_loss` does at beta = 0, with the teacher's prompt as the only difference.

    TRL 1.16 makes the divergence of all tokens and picks the response's afterwards. The trainer gives its teacher the
    student's own tokens, so both models' logits are brought to the same places here.
    """
    from trl.experimental.gkd import GKDTrainer

    own, frozen = pad(rows, device), pad(rows, device, of_teacher=True)
    student_BLV = student(input_ids=own.input_ids_BL, attention_mask=own.attention_mask_BL).logits
    with torch.no_grad():
        teacher_BLV = teacher(input_ids=frozen.input_ids_BL, attention_mask=frozen.attention_mask_BL).logits
    if not torch.equal(own.response_BL, frozen.response_BL):
        raise ValueError("the rows' responses stand at other places than the teacher's")
    labels_BL = torch.where(own.response_BL, 0, -100)
    kl_TV = GKDTrainer.generalized_jsd_loss(student_BLV, teacher_BLV, labels_BL, beta=0, reduction="none")
    return _by_row(kl_TV.float().sum(-1).clamp_min(0), rows)


def trl_chunked(student: Any, teacher: Any, rows: Sequence[Row], device: torch.device) -> Tensor:
    """The kernel of TRL's `DistillationTrainer`: hidden states at the response, logits in tiles that are made twice."""
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
    """One step of a plain loop: fp32 weights under autocast, AdamW, coefficients of the whole batch, clipping.

    Where there are several micro-batches, a pass without gradients gives the row losses first, as in the product.
    """

    def __init__(
        self, size: Size, study: Study, questions: Questions, device: torch.device, row_losses: RowLosses
    ) -> None:
        self.study, self.device, self.row_losses = study, device, row_losses
        rows = questions.rows()
        self.micros = [
            rows[start : start + size.micro_batch_rows] for start in range(0, len(rows), size.micro_batch_rows)
        ]
        self.slot_N = torch.tensor([row.slot_id for row in rows])
        computing = torch_dtype(size.precision)  # under autocast: as ours, by flash-attn where it can be
        self.student: Any = load_model(study.model, dtype=torch.float32, computing=computing, device=device)
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
        """Returns the step's loss."""
        losses = [self._losses(rows) for rows in self.micros] if len(self.micros) == 1 else None
        if losses is None:
            with torch.no_grad():
                measured_N = torch.cat([self._losses(rows) for rows in self.micros])
        else:
            measured_N = losses[0].detach()
        measured_N = measured_N.cpu()
        coefficient_N = row_coefficients(self.study.method, measured_N, torch.zeros_like(measured_N), self.slot_N)
        for index, coefficient_B in enumerate(coefficient_N.split([len(rows) for rows in self.micros])):
            loss_B = losses[index] if losses else self._losses(self.micros[index])
            (coefficient_B.to(self.device) * loss_B).sum().backward()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(FRACTION, self.study.training)
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), self.study.training.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float((coefficient_N * measured_N).sum())

    def _losses(self, rows: Sequence[Row]) -> Tensor:
        with self.autocast:
            return self.row_losses(self.student, self.teacher, rows, self.device)
