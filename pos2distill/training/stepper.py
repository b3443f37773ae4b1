"""What moves the weights: one interface, two strategies (`torch` here, `zero3` in its own module)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from pos2distill.config import Study, TrainersSection
from pos2distill.models.load import load_model, torch_dtype
from pos2distill.models.responses import ResponseBatch, predicting_hidden
from pos2distill.randomness import derive_seed
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
        """The resident teacher's hidden states (T, H): of a frozen model, or of the student without its adapters."""

    def save(self, folder: Path) -> None:
        """Write the weights of a plain model in Hugging Face format. Called on every rank; rank 0 writes."""

    def save_state(self, folder: Path) -> None:
        """Write trained weights and optimizer state to go on from. Called on every rank; each writes its own files."""

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
        norm = torch.nn.utils.clip_grad_norm_(self.student.lm.parameters(), self.study.training.gradient_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    @torch.no_grad()
    def frozen_states(self, batch: ResponseBatch) -> Tensor:
        batch = batch.to(self.device)
        if self.frozen is not None:
            return predicting_hidden(self.frozen, batch)
        states_TH: Tensor = self.student(batch, None, initial=True)
        return states_TH

    def save(self, folder: Path) -> None:
        lm: Any = self.student.lm
        weights = plain_weights(lm.state_dict(), self.study)
        lm.to(torch_dtype(self.study.model.dtype)).save_pretrained(folder, state_dict=weights)

    def save_state(self, folder: Path) -> None:
        parameters = trainable(self.student.lm)
        start_moments(self.optimizer, parameters.values())
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
        start_moments(self.optimizer, parameters.values())
        for name, parameter in parameters.items():
            for kind in KINDS:
                self._state_of(parameter, kind).copy_(stored.read(kind, name))
            self.optimizer.state[parameter]["step"].fill_(stored.step)

    def _state_of(self, parameter: Tensor, kind: str) -> Tensor:
        state: Tensor = parameter if kind == "weight" else self.optimizer.state[parameter][kind]
        return state


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


def build_stepper(study: Study, trainers: TrainersSection, device: torch.device) -> Stepper:
    """The strategy that the runtime names; DeepSpeed is imported only for its own."""
    if trainers.strategy == "zero3":
        from pos2distill.training.zero3 import Zero3Stepper

        return Zero3Stepper(study, trainers, device)
    return TorchStepper(study, trainers, device)
