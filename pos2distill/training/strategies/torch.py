"""The `torch` strategy: one process, plain torch."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pos2distill.config import Study, TrainersSection
from pos2distill.models.hidden_states import response_hidden_states
from pos2distill.models.load import load_model, torch_dtype
from pos2distill.models.packing import ResponseBatch
from pos2distill.training.state import KINDS, StoredState, init_optimizer_state, write_state
from pos2distill.training.student import Student, plain_weights, prepare_for_training, trainable
from pos2distill.training.teachers import TeacherView


class TorchStrategy:
    """One process, plain torch: the reference, and the laptop's choice."""

    def __init__(self, study: Study, trainers: TrainersSection, device: torch.device) -> None:
        torch.set_num_threads(trainers.threads)
        self.study = study
        self.device = device
        # Trained weights are fp32 under autocast: the same master weights that ZeRO keeps. Frozen ones need no masters.
        rounded = study.training.lora and study.training.precision == "bfloat16"
        dtype = torch_dtype(study.model.dtype) if rounded else torch.float32
        computing = dtype if study.training.lora else torch_dtype(study.training.precision)
        lm = load_model(study.model, dtype=dtype, computing=computing, device=device, packed=True)
        prepare_for_training(lm, study, trainers)
        for parameter in trainable(lm).values():
            parameter.data = parameter.data.float()
        self.student = Student(lm, study).to(device)
        self.autocast = torch.autocast(
            device.type, torch.bfloat16, enabled=study.training.precision == "bfloat16", cache_enabled=False
        )
        settings = study.training
        self.optimizer = torch.optim.AdamW(
            trainable(lm).values(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.frozen = load_model(study.model, device=device, packed=True) if study.has_frozen_copy else None

    def forward(self, batch: ResponseBatch, teacher: TeacherView | None) -> Tensor:
        with self.autocast:
            loss_B: Tensor = self.student(batch.to(self.device), teacher and teacher.to(self.device))
        return loss_B

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def step(self, learning_rate: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = torch.nn.utils.clip_grad_norm_(self.student.lm.parameters(), self.study.training.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    @torch.no_grad()
    def frozen_states(self, batch: ResponseBatch) -> Tensor:
        batch = batch.to(self.device)
        if self.frozen is not None:
            return response_hidden_states(self.frozen, batch)
        states_TH: Tensor = self.student(batch, None, initial=True)
        return states_TH

    def save(self, folder: Path) -> None:
        lm: Any = self.student.lm
        weights = plain_weights(lm.state_dict(), self.study)
        lm.to(torch_dtype(self.study.model.dtype)).save_pretrained(folder, state_dict=weights)

    def save_state(self, folder: Path) -> None:
        parameters = trainable(self.student.lm)
        init_optimizer_state(self.optimizer, parameters.values())
        step = int(self.optimizer.state[next(iter(parameters.values()))]["step"])
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        write_state(
            folder, shapes, lambda kind, name: self._state_of(parameters[name], kind), step=step, rank=0, world=1
        )

    @torch.no_grad()
    def load_state(self, folder: Path) -> None:
        parameters = trainable(self.student.lm)
        stored = StoredState(folder, {name: parameter.shape for name, parameter in parameters.items()})
        stored.verify(rank=0, world=1)
        init_optimizer_state(self.optimizer, parameters.values())
        for name, parameter in parameters.items():
            for kind in KINDS:
                self._state_of(parameter, kind).copy_(stored.read(kind, name))
            self.optimizer.state[parameter]["step"].fill_(stored.step)

    def _state_of(self, parameter: Tensor, kind: str) -> Tensor:
        state: Tensor = parameter if kind == "weight" else self.optimizer.state[parameter][kind]
        return state
