"""The `torch` strategy: plain torch, with the whole model on every rank."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pos2distill.config import ModelSection, Study, TrainersSection
from pos2distill.environment import set_deepspeed_variables
from pos2distill.models.architecture import torch_dtype, weight_dtypes
from pos2distill.models.hidden_states import response_hidden_states
from pos2distill.models.load import load_model
from pos2distill.models.packing import ResponseBatch
from pos2distill.training.state import KINDS, Shapes, StoredState, init_optimizer_state, write_state
from pos2distill.training.student import Student, plain_weights, prepare_for_training, trainable
from pos2distill.training.teachers import TeacherDistribution


class TorchStrategy:
    """Plain torch: the reference for `zero3`, and the strategy for one GPU or a laptop.

    With several ranks, each has the whole model, and gradients are summed over the ranks before each update (data
    parallelism). For adapters, that is much less than the weights that ZeRO-3 gathers in every pass.
    """

    def __init__(
        self, study: Study, trainers: TrainersSection, device: torch.device, student_start: ModelSection
    ) -> None:
        torch.set_num_threads(trainers.threads)
        self.study = study
        self.device = device
        self.rank, self.world_size = 0, 1
        # Not with one worker: the process may be one of a group of its own, as a script under `torchrun` is.
        if (trainers.max_workers or trainers.workers) > 1:
            self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        precision = torch_dtype(study.training.precision)
        # Trained weights are fp32 under autocast, the same master weights that ZeRO keeps. With adapters, the model's
        # own weights are frozen, need no master weights, and are loaded in the model's dtype.
        lora = study.training.lora is not None
        weight_dtype = torch_dtype(study.model.dtype) if lora and precision == torch.bfloat16 else torch.float32
        compute_dtype = weight_dtype if lora else precision
        lm = load_model(student_start, dtype=weight_dtype, compute_dtype=compute_dtype, device=device, packed=True)
        prepare_for_training(lm, study, trainers)
        # Trained weights are fp32, adapters too: in bfloat16, Adam's small updates would be rounded away.
        for parameter in trainable(lm).values():
            parameter.data = parameter.data.float()
        self.student = Student(lm, study).to(device)
        # Without the cache of cast weights, which would hold a bfloat16 copy of all of them during a pass.
        self.autocast = torch.autocast(
            device.type, torch.bfloat16, enabled=precision == torch.bfloat16, cache_enabled=False
        )
        settings = study.training
        self.optimizer = torch.optim.AdamW(
            trainable(lm).values(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.base = None
        if study.holds_base_copy(starts_from_base=student_start == study.model):
            self.base = load_model(study.model, device=device, packed=True)

    def forward(self, batch: ResponseBatch, teacher: TeacherDistribution | None) -> Tensor:
        if teacher is not None:
            teacher = teacher.to(self.device)
        with self.autocast:
            loss_B: Tensor = self.student(batch.to(self.device), teacher)
        return loss_B

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def step(self, learning_rate: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if self.world_size > 1:
            self._sum_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self.student.lm.parameters(), self.study.training.max_grad_norm)
        self.optimizer.step()
        # Frees the memory of the gradients until the next backward pass.
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def _sum_gradients(self) -> None:
        """Add up the gradients of all ranks, on each: their losses add up too."""
        requests = []
        for parameter in trainable(self.student.lm).values():
            if parameter.grad is None:  # an expert that no token of this rank reached
                parameter.grad = torch.zeros_like(parameter)
            requests.append(torch.distributed.all_reduce(parameter.grad, async_op=True))
        for request in requests:
            request.wait()

    @torch.no_grad()
    def base_states(self, batch: ResponseBatch) -> Tensor:
        batch = batch.to(self.device)
        if self.base is not None:
            return response_hidden_states(self.base, batch)
        states_TH: Tensor = self.student(batch, None, adapters=False)
        return states_TH

    def save(self, folder: Path) -> float:
        if self.rank > 0:
            return 0.0
        lm: Any = self.student.lm
        weights, error = plain_weights(lm.state_dict(), self.study, weight_dtypes(self.study.model))
        # transformers 5.19 imports DeepSpeed here, which warns that it found no GPU.
        set_deepspeed_variables(device=self.device.type)
        # transformers 5.19 writes the dtype of the model's first weight to config.json.
        lm.to(torch_dtype(self.study.model.dtype)).save_pretrained(folder, state_dict=weights)
        return error

    def save_adapter(self, folder: Path) -> None:
        if self.rank > 0:
            return
        # Imported here: only students with adapters need peft.
        from pos2distill.models.lora import save_adapter

        save_adapter(self.student.lm, trainable(self.student.lm), self.study.model, folder)

    def save_state(self, folder: Path) -> None:
        parameters = trainable(self.student.lm)
        # A run that is stopped before its first step has no moments yet.
        init_optimizer_state(self.optimizer, parameters.values())
        any_parameter = next(iter(parameters.values()))
        step = int(self.optimizer.state[any_parameter]["step"])

        def gather(kind: str, name: str) -> Tensor:
            return self._state_of(parameters[name], kind)

        write_state(folder, self.state_shapes(), gather, step=step, rank=self.rank, world_size=self.world_size)

    def state_shapes(self) -> Shapes:
        return {name: parameter.shape for name, parameter in trainable(self.student.lm).items()}

    @torch.no_grad()
    def load_state(self, stored: StoredState) -> None:
        parameters = trainable(self.student.lm)
        # A new optimizer has no moments that the stored ones could be copied into.
        init_optimizer_state(self.optimizer, parameters.values())
        for name, parameter in parameters.items():
            for kind in KINDS:
                self._state_of(parameter, kind).copy_(stored.read(kind, name))
            self.optimizer.state[parameter]["step"].fill_(stored.step)

    def _state_of(self, parameter: Tensor, kind: str) -> Tensor:
        """The weight itself or one of Adam's moments; a tensor that can be written to."""
        if kind == "weight":
            return parameter
        moment: Tensor = self.optimizer.state[parameter][kind]
        return moment
