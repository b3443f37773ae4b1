"""The `zero3` strategy: DeepSpeed ZeRO stage 3. The only importer of deepspeed."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from pos2distill.config import Study, TrainersSection
from pos2distill.models.load import load_model, torch_dtype
from pos2distill.models.responses import ResponseBatch, predicting_hidden
from pos2distill.training.stepper import has_resident_teacher, prepare_for_training
from pos2distill.training.student import Student


class Zero3Stepper:
    """Weights, gradients and optimizer state parted over the ranks of the default process group."""

    def __init__(self, study: Study, trainers: TrainersSection, device: torch.device) -> None:
        if device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"  # read at import
        import deepspeed

        torch.set_num_threads(trainers.threads)
        self.study = study
        self.device = device
        self.world = torch.distributed.get_world_size()
        config = _deepspeed_config(study, device)
        # transformers parts the weights while it loads them as long as this object lives.
        self._hf_config = HfDeepSpeedConfig(config)
        dtype = torch.bfloat16 if study.training.precision == "bfloat16" else torch.float32
        lm = load_model(study.model, dtype=dtype, device=device)
        prepare_for_training(lm, trainers)
        self.student = Student(lm, study)
        if self.student.teacher_head is not None:
            self.student.teacher_head.to(device)
        self.engine: Any
        self.engine, *_ = deepspeed.initialize(model=self.student, model_parameters=lm.parameters(), config=config)
        self.frozen: Any = None
        if has_resident_teacher(study):
            frozen = load_model(study.model, device=device).requires_grad_(False)
            inference = {key: value for key, value in config.items() if key != "optimizer"}
            self.frozen, *_ = deepspeed.initialize(model=_StatesOf(frozen), config=inference)

    def forward(self, batch: ResponseBatch, teacher_TH: Tensor | None) -> Tensor:
        loss_B: Tensor = self.engine(batch.to(self.device), None if teacher_TH is None else teacher_TH.to(self.device))
        return loss_B

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks; our losses add up.
        self.engine.backward(loss * self.world)

    def step(self, learning_rate: float) -> float:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    @torch.no_grad()
    def frozen_states(self, batch: ResponseBatch) -> Tensor:
        hidden_TH: Tensor = self.frozen(batch.to(self.device))
        return hidden_TH

    def save(self, folder: Path) -> None:
        weights = self.engine._zero3_consolidated_16bit_state_dict()  # gathers layer by layer; every rank takes part
        if weights is None:
            return
        dtype = torch_dtype(self.study.model.dtype)
        own = {name.removeprefix("lm."): weight.to(dtype) for name, weight in weights.items() if name.startswith("lm.")}
        self.student.lm.config.dtype = dtype
        self.student.lm.save_pretrained(folder, state_dict=own)


class _StatesOf(torch.nn.Module):
    """The frozen model as a module whose forward gives hidden states, as DeepSpeed wants one."""

    def __init__(self, lm: torch.nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, batch: ResponseBatch) -> Tensor:
        return predicting_hidden(self.lm, batch)


def _deepspeed_config(study: Study, device: torch.device) -> dict[str, Any]:
    settings = study.training
    optimizer: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": list(settings.betas),
        "eps": 1e-8,
        "weight_decay": settings.weight_decay,
        "torch_adam": True,  # DeepSpeed's own is compiled at the first start, with a CUDA toolkit that images may lack
    }
    return {
        # We cut the global batch and state the accumulation boundary ourselves.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.gradient_clip,
        "bf16": {"enabled": settings.precision == "bfloat16"},
        "optimizer": {"type": "AdamW", "params": optimizer},
        "zero_optimization": {"stage": 3, "overlap_comm": device.type != "cpu"},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }
