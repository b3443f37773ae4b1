"""The `zero3` strategy: DeepSpeed ZeRO stage 3. The only module that imports deepspeed.

DeepSpeed has no public interface for some of what is needed here. Whatever is used of its internals was read in
DeepSpeed 0.19.8 (`runtime/zero/stage3.py`, `runtime/engine.py`) and is named where it is used.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, modeling_utils
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from pos2distill.config import ModelSection, Study, TrainersSection
from pos2distill.environment import set_deepspeed_variables
from pos2distill.models.architecture import non_persistent_buffers, torch_dtype, weight_dtypes
from pos2distill.models.downloaded import checked_folder
from pos2distill.models.hidden_states import response_hidden_states
from pos2distill.models.load import load_model
from pos2distill.models.packing import ResponseBatch
from pos2distill.training.state import KINDS, Shapes, StoredState, init_optimizer_state, write_state
from pos2distill.training.student import Student, plain_weights, prepare_for_training, trainable
from pos2distill.training.teachers import TeacherDistribution


class Zero3Strategy:
    """Weights, gradients and optimizer state sharded over the ranks of the default process group."""

    def __init__(
        self, study: Study, trainers: TrainersSection, device: torch.device, student_start: ModelSection
    ) -> None:
        deepspeed = _import_deepspeed(device)
        torch.set_num_threads(trainers.threads)
        self.study = study
        self.device = device
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()
        config = _deepspeed_config(study, device)
        # Before HfDeepSpeedConfig, as both loaders: they build models without weights, which DeepSpeed would change.
        self.dtypes = weight_dtypes(study.model)
        load = _ShardedLoader(student_start, torch_dtype(study.training.precision))
        load_base = None
        if study.holds_base_copy(starts_from_base=student_start == study.model):
            load_base = _ShardedLoader(study.model, torch_dtype(study.model.dtype))
        # While this object exists, transformers shards weights as it loads them (transformers 5.19).
        self._hf_config = HfDeepSpeedConfig(config)
        lm = load(device)
        prepare_for_training(lm, study, trainers)
        self.student = Student(lm, study)
        trained = list(trainable(lm).values())
        self.engine: Any
        self.engine, *_ = deepspeed.initialize(model=self.student, model_parameters=trained, config=config)
        self.base: Any = None
        if load_base is not None:
            base_lm = load_base(device).requires_grad_(False)
            # Without an optimizer, DeepSpeed only shards the weights and gathers them for each forward.
            without_optimizer = {key: value for key, value in config.items() if key != "optimizer"}
            self.base, *_ = deepspeed.initialize(model=_HiddenStatesModule(base_lm), config=without_optimizer)

    def forward(self, batch: ResponseBatch, teacher: TeacherDistribution | None) -> Tensor:
        if teacher is not None:
            teacher = teacher.to(self.device)
        loss_B: Tensor = self.engine(batch.to(self.device), teacher)
        return loss_B

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages gradients over ranks, but the losses of ranks must add up.
        self.engine.backward(loss * self.world_size)

    def step(self, learning_rate: float) -> float:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    @torch.no_grad()
    def base_states(self, batch: ResponseBatch) -> Tensor:
        batch = batch.to(self.device)
        if self.base is not None:
            base_TH: Tensor = self.base(batch)
            return base_TH
        own_TH: Tensor = self.engine(batch, None, adapters=False)
        return own_TH

    def save(self, folder: Path) -> float:
        # DeepSpeed 0.19.8, `DeepSpeedEngine`: gathers layer by layer with every rank's help; None except on rank 0.
        weights = self.engine._zero3_consolidated_16bit_state_dict()
        if weights is None:
            return 0.0
        # Moved, so that `plain_weights` can release what it merges.
        own = {name.removeprefix("lm."): weights.pop(name) for name in list(weights) if name.startswith("lm.")}
        plain, error = plain_weights(own, self.study, self.dtypes)
        lm = self.student.lm
        lm.save_pretrained(folder, state_dict=plain)
        # transformers 5.19 writes the dtype of the model's first weight, in which it was trained, to config.json.
        lm.config.dtype = torch_dtype(self.study.model.dtype)
        lm.config.save_pretrained(folder)
        return error

    def save_adapter(self, folder: Path) -> None:
        from deepspeed.utils import safe_get_full_fp32_param

        from pos2distill.models.lora import save_adapter

        weights = {}
        for name, parameter in self._parameters().items():
            # A collective; copied to the CPU, so that the GPU holds one full tensor at a time.
            weight = safe_get_full_fp32_param(parameter)
            if self.rank == 0:
                weights[name] = weight.cpu()
        if self.rank == 0:
            save_adapter(self.student.lm, weights, self.study.model, folder)

    def save_state(self, folder: Path) -> None:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        parameters = self._parameters()
        adam, shards = self._adam()

        def gather(kind: str, name: str) -> Tensor:
            full: Tensor
            if kind == "weight":
                full = safe_get_full_fp32_param(parameters[name])
            else:
                full = safe_get_full_optimizer_state(parameters[name], kind)
            return full

        # All shards are updated together, so any of them has the step count.
        step = int(adam.state[shards[0]]["step"])
        write_state(folder, self.state_shapes(), gather, step=step, rank=self.rank, world_size=self.world_size)

    def state_shapes(self) -> Shapes:
        return {name: parameter.ds_shape for name, parameter in self._parameters().items()}

    def load_state(self, stored: StoredState) -> None:
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        parameters = self._parameters()
        adam, shards = self._adam()
        optimizer = self.engine.optimizer
        # Frees weights that are still gathered from the last pass: they are the old ones.
        optimizer.checkpoint_event_prologue()
        for name, parameter in parameters.items():
            # Every rank's shard has this size; the last rank's is padded.
            shard_size = parameter.ds_tensor.ds_numel
            start = min(self.rank * shard_size, parameter.ds_numel)
            stop = min(start + shard_size, parameter.ds_numel)
            for kind in KINDS:
                shard = torch.zeros(shard_size)
                shard[: stop - start] = stored.read_flat(kind, name, start, stop)
                if kind == "weight":
                    safe_set_local_fp32_param(parameter, shard)
                else:
                    safe_set_local_optimizer_state(parameter, shard, kind)
        for shard in shards:
            adam.state[shard]["step"].fill_(stored.step)
        # Copies the fp32 master weights to the weights that are computed with.
        for group in range(len(shards)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        # Gathers again the small weights that stay gathered between steps.
        optimizer.checkpoint_event_epilogue()

    def _parameters(self) -> dict[str, Any]:
        """The trained parameters by name, with what DeepSpeed adds to each.

        DeepSpeed 0.19.8: `ds_shape` and `ds_numel` of the full tensor, `ds_tensor` this rank's shard.
        """
        return trainable(self.student.lm)

    def _adam(self) -> tuple[torch.optim.Optimizer, list[Tensor]]:
        """The torch optimizer inside DeepSpeed's, and this rank's flat fp32 shards of the weights, which it steps.

        DeepSpeed 0.19.8, `DeepSpeedZeroOptimizer_Stage3`: `optimizer` and `fp32_partitioned_groups_flat`.
        """
        adam: torch.optim.Optimizer = self.engine.optimizer.optimizer
        shards: list[Tensor] = self.engine.optimizer.fp32_partitioned_groups_flat
        init_optimizer_state(adam, shards)
        return adam, shards


class _ShardedLoader:
    """Loads a model with its weights sharded over the ranks and everything else as without DeepSpeed.

    While weights are being sharded, DeepSpeed 0.19.8 casts every new floating-point tensor to the weights' dtype, also
    RoPE's frequencies (DeepSpeed issue 4932). So these are computed in the constructor, before HfDeepSpeedConfig
    exists, and put back after loading.
    """

    def __init__(self, model: ModelSection, dtype: torch.dtype) -> None:
        # The check of a hub model that this machine has not loaded before builds a model without weights too.
        checked_folder(model)
        self.model = model
        self.dtype = dtype
        self.buffers = non_persistent_buffers(model, dtype)

    def __call__(self, device: torch.device) -> PreTrainedModel:
        with _experts_on_one_rank():
            lm = load_model(self.model, dtype=self.dtype, device=device, packed=True)
        for name, buffer in self.buffers.items():
            module_name, _, buffer_name = name.rpartition(".")
            setattr(lm.get_submodule(module_name), buffer_name, buffer.to(device))
        return lm


@contextmanager
def _experts_on_one_rank() -> Iterator[None]:
    """While models are loaded, ranks other than 0 read no weights of experts.

    transformers 5.19 merges the experts of a layer into one tensor, on every rank for the whole model before anything
    is sharded, but takes the values of rank 0 alone. Other weights are views of the file, which need no memory.
    """
    read: Callable[..., dict[str, Tensor]] = modeling_utils.load_state_dict

    def read_without_experts(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
        tensors = read(*args, **kwargs)
        return {name: tensor.to("meta") if ".experts." in name else tensor for name, tensor in tensors.items()}

    if torch.distributed.get_rank() > 0:
        modeling_utils.load_state_dict = read_without_experts
    try:
        yield
    finally:
        modeling_utils.load_state_dict = read


class _HiddenStatesModule(torch.nn.Module):
    """The base model as a module whose forward returns hidden states: DeepSpeed gathers weights only in a forward."""

    def __init__(self, lm: torch.nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, batch: ResponseBatch) -> Tensor:
        return response_hidden_states(self.lm, batch)


def _import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for a kind of device."""
    set_deepspeed_variables(device=device.type)
    import deepspeed

    # Otherwise DeepSpeed 0.19.8 compiles this operation on the first start, for a minute. Only inference uses it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _deepspeed_config(study: Study, device: torch.device) -> dict[str, Any]:
    settings = study.training
    optimizer: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": list(settings.betas),
        "eps": 1e-8,
        "weight_decay": settings.weight_decay,
        # DeepSpeed's own Adam is compiled on the first start, with a CUDA toolkit that container images may lack.
        "torch_adam": True,
    }
    return {
        # The training loop cuts the global batch itself and marks the accumulation boundary in `backward`.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.max_grad_norm,
        "bf16": {"enabled": settings.precision == "bfloat16"},
        # Otherwise gradients of micro-batches are added up in bfloat16.
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "AdamW", "params": optimizer},
        "zero_optimization": {"stage": 3, "overlap_comm": device.type != "cpu"},
        "zero_force_ds_cpu_optimizer": False,
        # Never: the step log reports the steps.
        "steps_per_print": 2**31,
    }
