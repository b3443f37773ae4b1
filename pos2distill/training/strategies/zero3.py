"""The `zero3` strategy: DeepSpeed ZeRO stage 3. The only importer of deepspeed."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from pos2distill.config import ModelSection, Study, TrainersSection
from pos2distill.models.hidden_states import response_hidden_states
from pos2distill.models.load import load_model, non_persistent_buffers, torch_dtype
from pos2distill.models.packing import ResponseBatch
from pos2distill.training.state import KINDS, StoredState, init_optimizer_state, write_state
from pos2distill.training.student import Student, plain_weights, prepare_for_training, trainable
from pos2distill.training.teachers import TeacherView


class Zero3Strategy:
    """Weights, gradients and optimizer state parted over the ranks of the default process group."""

    def __init__(self, study: Study, trainers: TrainersSection, device: torch.device) -> None:
        if device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"  # read at import
        import deepspeed

        # Inference's all-reduce, which nothing here calls; DeepSpeed would compile it for a minute at the first start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        torch.set_num_threads(trainers.threads)
        self.study = study
        self.device = device
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        config = _deepspeed_config(study, device)
        dtype = torch.bfloat16 if study.training.precision == "bfloat16" else torch.float32
        load = _PartitionedLoad(study.model, dtype)
        load_frozen = _PartitionedLoad(study.model, torch_dtype(study.model.dtype)) if study.has_frozen_copy else None
        # transformers parts the weights while it loads them as long as this object lives.
        self._hf_config = HfDeepSpeedConfig(config)
        lm = load(device)
        prepare_for_training(lm, study, trainers)
        self.student = Student(lm, study)
        trained = list(trainable(lm).values())
        self.engine: Any
        self.engine, *_ = deepspeed.initialize(model=self.student, model_parameters=trained, config=config)
        self.frozen: Any = None
        if load_frozen:
            frozen = load_frozen(device).requires_grad_(False)
            inference = {key: value for key, value in config.items() if key != "optimizer"}
            self.frozen, *_ = deepspeed.initialize(model=_HiddenStatesModule(frozen), config=inference)

    def forward(self, batch: ResponseBatch, teacher: TeacherView | None) -> Tensor:
        loss_B: Tensor = self.engine(batch.to(self.device), teacher and teacher.to(self.device))
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
        batch = batch.to(self.device)
        hidden_TH: Tensor = self.frozen(batch) if self.frozen else self.engine(batch, None, initial=True)
        return hidden_TH

    def save(self, folder: Path) -> None:
        weights = self.engine._zero3_consolidated_16bit_state_dict()  # gathers layer by layer; every rank takes part
        if weights is None:
            return
        own = {name.removeprefix("lm."): weight for name, weight in weights.items() if name.startswith("lm.")}
        self.student.lm.config.dtype = torch_dtype(self.study.model.dtype)
        self.student.lm.save_pretrained(folder, state_dict=plain_weights(own, self.study))

    def save_state(self, folder: Path) -> None:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        parameters = self._parameters()
        adam, parts = self._adam()
        shapes = {name: parameter.ds_shape for name, parameter in parameters.items()}

        def gather(kind: str, name: str) -> Tensor:
            if kind == "weight":
                full: Tensor = safe_get_full_fp32_param(parameters[name])
            else:
                full = safe_get_full_optimizer_state(parameters[name], kind)
            return full

        step = int(adam.state[parts[0]]["step"])
        write_state(folder, shapes, gather, step=step, rank=self.rank, world=self.world)

    def load_state(self, folder: Path) -> None:
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        parameters = self._parameters()
        stored = StoredState(folder, {name: parameter.ds_shape for name, parameter in parameters.items()})
        stored.verify(rank=self.rank, world=self.world)
        adam, parts = self._adam()
        optimizer = self.engine.optimizer
        optimizer.checkpoint_event_prologue()  # lets go of weights that are gathered: they are the old ones
        for name, parameter in parameters.items():
            size = parameter.ds_tensor.ds_numel  # of every rank's part; the last one is padded
            start, stop = (min(edge * size, parameter.ds_numel) for edge in (self.rank, self.rank + 1))
            for kind in KINDS:
                own = torch.zeros(size)
                own[: stop - start] = stored.read_flat(kind, name, start, stop)
                if kind == "weight":
                    safe_set_local_fp32_param(parameter, own)
                else:
                    safe_set_local_optimizer_state(parameter, own, kind)
        for part in parts:
            adam.state[part]["step"].fill_(stored.step)
        for number in range(len(parts)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)  # master weights to those computed with
        optimizer.checkpoint_event_epilogue()  # gathers again what stays gathered between steps

    def _parameters(self) -> dict[str, Any]:
        """By name, with what DeepSpeed adds to them: `ds_shape`, `ds_numel`, `ds_tensor`."""
        return trainable(self.student.lm)

    def _adam(self) -> tuple[torch.optim.Optimizer, list[Tensor]]:
        """The optimizer inside DeepSpeed's, and the flat fp32 parts of this rank's weights that it steps."""
        adam: torch.optim.Optimizer = self.engine.optimizer.optimizer
        parts: list[Tensor] = self.engine.optimizer.fp32_partitioned_groups_flat
        init_optimizer_state(adam, parts)
        return adam, parts


class _PartitionedLoad:
    """Loads a model with its weights parted over the ranks, and all else as it is without DeepSpeed.

    While weights are parted, DeepSpeed makes every new floating-point tensor one of the weights' dtype, RoPE's
    frequencies too (DeepSpeed issue 4932). So those are made here, before any weights are parted.
    """

    def __init__(self, model: ModelSection, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        self.buffers = non_persistent_buffers(model, dtype)

    def __call__(self, device: torch.device) -> PreTrainedModel:
        lm = load_model(self.model, dtype=self.dtype, device=device, packed=True)
        for name, buffer in self.buffers.items():
            owner, _, own = name.rpartition(".")
            setattr(lm.get_submodule(owner), own, buffer.to(device))
        return lm


class _HiddenStatesModule(torch.nn.Module):
    """The frozen model as a module whose forward gives hidden states, as DeepSpeed wants one."""

    def __init__(self, lm: torch.nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, batch: ResponseBatch) -> Tensor:
        return response_hidden_states(self.lm, batch)


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
        "gradient_clipping": settings.max_grad_norm,
        "bf16": {"enabled": settings.precision == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},  # else bf16 gradients of micro-batches are added up in bf16
        "optimizer": {"type": "AdamW", "params": optimizer},
        "zero_optimization": {"stage": 3, "overlap_comm": device.type != "cpu"},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }
