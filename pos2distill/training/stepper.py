"""What moves the weights: one interface, two strategies (`torch` here, `zero3` in its own module)."""

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pos2distill.config import Study, TrainersSection
from pos2distill.models.load import load_model, torch_dtype
from pos2distill.models.responses import ResponseBatch, predicting_hidden
from pos2distill.training.state import KINDS, StoredState, start_moments, write_state
from pos2distill.training.student import Student
from pos2distill.training.teachers import TeacherView


class Stepper(Protocol):
    """Forward, backward and update of one worker's share of a global batch.

    Losses given to `backward` add up over micro-batches and ranks: the sum is the global loss, so is its gradient.
    """

    student: Student

    def forward(self, batch: ResponseBatch, teacher: TeacherView | None) -> Tensor:
        """Row losses (B,); with a graph, unless under `torch.no_grad`."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the loss's gradient. `last`: the global batch's last micro-batch on this rank."""

    def step(self, learning_rate: float) -> float:
        """Clip, update, clear. Returns the gradient's norm before clipping."""

    def frozen_states(self, batch: ResponseBatch) -> Tensor:
        """The resident teacher's hidden states (T, H)."""

    def save(self, folder: Path) -> None:
        """Write the weights in Hugging Face format. Called on every rank; rank 0 writes."""

    def save_state(self, folder: Path) -> None:
        """Write weights and optimizer state to go on from. Called on every rank; each writes files of its own."""

    def load_state(self, folder: Path) -> None:
        """Go on from a saved state: of any number of ranks, of either strategy. Called on every rank.

        Raises:
            UserError: naming the file that is missing, damaged or of another model.
        """


class TorchStepper:
    """One process, plain torch: the reference, and the laptop's choice."""

    def __init__(self, study: Study, trainers: TrainersSection, device: torch.device) -> None:
        torch.set_num_threads(trainers.threads)
        self.study = study
        self.device = device
        # fp32 weights under autocast: the same master weights that ZeRO keeps.
        lm = load_model(study.model, dtype=torch.float32, device=device, packed=True)
        prepare_for_training(lm, trainers)
        self.student = Student(lm, study).to(device)
        self.autocast = torch.autocast(
            device.type, torch.bfloat16, enabled=study.training.precision == "bfloat16", cache_enabled=False
        )
        settings = study.training
        self.optimizer = torch.optim.AdamW(
            lm.parameters(), lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
        )
        self.frozen = load_model(study.model, device=device, packed=True) if study.method.has_resident_teacher else None

    def forward(self, batch: ResponseBatch, teacher: TeacherView | None) -> Tensor:
        with self.autocast:
            loss_B: Tensor = self.student(batch.to(self.device), teacher and teacher.to(self.device))
        return loss_B

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def step(self, learning_rate: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = torch.nn.utils.clip_grad_norm_(self.student.lm.parameters(), self.study.training.gradient_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    @torch.no_grad()
    def frozen_states(self, batch: ResponseBatch) -> Tensor:
        assert self.frozen is not None
        return predicting_hidden(self.frozen, batch.to(self.device))

    def save(self, folder: Path) -> None:
        lm: Any = self.student.lm
        lm.to(torch_dtype(self.study.model.dtype)).save_pretrained(folder)

    def save_state(self, folder: Path) -> None:
        parameters = dict(self.student.lm.named_parameters())
        start_moments(self.optimizer, parameters.values())
        step = int(self.optimizer.state[next(iter(parameters.values()))]["step"])
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        write_state(
            folder, shapes, lambda kind, name: self._state_of(parameters[name], kind), step=step, rank=0, world=1
        )

    @torch.no_grad()
    def load_state(self, folder: Path) -> None:
        parameters = dict(self.student.lm.named_parameters())
        stored = StoredState(folder, {name: parameter.shape for name, parameter in parameters.items()})
        stored.verify(rank=0, world=1)
        start_moments(self.optimizer, parameters.values())
        for name, parameter in parameters.items():
            for kind in KINDS:
                self._state_of(parameter, kind).copy_(stored.read(kind, name))
            self.optimizer.state[parameter]["step"].fill_(stored.step)

    def _state_of(self, parameter: Tensor, kind: str) -> Tensor:
        state: Tensor = parameter if kind == "weight" else self.optimizer.state[parameter][kind]
        return state


def prepare_for_training(lm: PreTrainedModel, trainers: TrainersSection) -> None:
    """Training mode, with activations recomputed in the backward pass if asked for."""
    lm.train()
    if trainers.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def build_stepper(study: Study, trainers: TrainersSection, device: torch.device) -> Stepper:
    """The strategy that the runtime names; DeepSpeed is imported only for its own."""
    if trainers.strategy == "zero3":
        from pos2distill.training.zero3 import Zero3Stepper

        return Zero3Stepper(study, trainers, device)
    return TorchStepper(study, trainers, device)
