"""The GPU memory that the processes of a study need. Units: bytes, unless a name says otherwise."""

import math
from collections.abc import Iterator

from pos2distill.config import Recipe, Study, TrainersSection
from pos2distill.config.base import WEIGHT_BYTES
from pos2distill.errors import UserError

from .job_command import JobCommand
from .known_models import known_model
from .machines import gpu_memory_gb
from .model_size import ADAPTER_PERCENT, parameter_count
from .nodes import NodeSection
from .spec import ClusterSpec

# Bytes of GPU memory per trained parameter, by training.precision: fp32 weight 4, gradient 4 and two moments 8, and in
# bfloat16 a copy of the weight that the model computes with.
GPU_BYTES = {"bfloat16": 18, "float32": 16}
ENGINE_RESERVE = 1.6e9  # GPU memory that vLLM needs besides weights and cache; an estimate
# Further memory on each GPU: gathered weights, recomputed activations, buffers of NCCL and CUDA; an estimate.
GPU_RESERVE = 6e9

# Arguments of vLLM that make the weights smaller, or keep a part of them elsewhere.
_SIZE_ARGUMENTS = ("quantization", "quantization_config", "cpu_offload_gb", "offload_group_size")


def check_gpu_memory(spec: ClusterSpec, job: JobCommand) -> None:
    """Reject what does not fit the GPUs of the machines, where these are known.

    Raises:
        UserError: naming how many workers, or GPUs of an engine, suffice.
    """
    for cell in job.cells:
        pools = job.pools(cell.study)
        if "trainers" in pools:
            _check_trainers(spec, cell)
        if "samplers" in pools:
            _check_samplers(spec, cell)
        if "teachers" in pools:
            _check_teachers(spec, cell)


def _check_trainers(spec: ClusterSpec, recipe: Recipe) -> None:
    study, trainers = recipe.study, recipe.runtime.trainers
    memory = _gpu_memory(spec.training.node)
    if memory is None or not trainers.gpus:
        return
    parameters = parameter_count(spec, study.model.path)
    needed = worker_bytes(study, trainers, parameters) + GPU_RESERVE
    if needed <= memory:
        return
    gpu = f"a GPU of {spec.training.node.instance_type} has {memory / 1e9:.0f} GB"
    if trainers.strategy == "torch":
        raise UserError(
            f"{recipe.name}: runtime.trainers.strategy: with torch each worker has the whole model, and needs "
            f"{needed / 1e9:.0f} GB of GPU memory and activations, but {gpu}; "
            f"{_remedy_of_torch(study, trainers, parameters, memory)}"
        )
    raise UserError(
        f"{recipe.name}: runtime.trainers.workers: {trainers.workers} workers need {needed / 1e9:.0f} GB of GPU memory "
        f"each and activations, but {gpu}; set {_zero3_workers(study, parameters, memory)} or more"
    )


def _remedy_of_torch(study: Study, trainers: TrainersSection, parameters: float, memory: float) -> str:
    """What to set so that the workers fit: of the changes that are enough, the one that changes least."""
    recomputing = trainers.replace(gradient_checkpointing=True)
    if worker_bytes(study, recomputing, parameters) + GPU_RESERVE <= memory:
        return "set runtime.trainers.gradient_checkpointing to true"
    in_bfloat16 = study.replace(model=study.model.replace(dtype="bfloat16"))
    if study.training.lora is not None and study.training.precision == "bfloat16":
        for each, also in ((trainers, ""), (recomputing, " and runtime.trainers.gradient_checkpointing to true")):
            if worker_bytes(in_bfloat16, each, parameters) + GPU_RESERVE <= memory:
                return f"set model.dtype to bfloat16{also}"
    workers = _zero3_workers(in_bfloat16 if _zero3_rounds(study) else study, parameters, memory)
    more = f" and runtime.trainers.workers to {workers} or more" if trainers.workers < workers else ""
    return f"set zero3{_for_zero3(study)}{more}"


def _zero3_workers(study: Study, parameters: float, memory: float) -> int:
    """How many workers suffice."""
    return math.ceil(zero3_bytes(study, parameters) / (memory - GPU_RESERVE))


def _zero3_rounds(study: Study) -> bool:
    """Whether zero3 refuses this study, since it would round its float32 weights to bfloat16."""
    return study.model.dtype == "float32" and study.training.precision == "bfloat16"


def _for_zero3(study: Study) -> str:
    """What else to set for zero3."""
    return " and model.dtype to bfloat16" if _zero3_rounds(study) else ""


def tight_memory(spec: ClusterSpec, job: JobCommand) -> Iterator[str]:
    """A line if the activations of training may not fit beside what `check_gpu_memory` requires."""
    trainers, memory = job.recipe.runtime.trainers, _gpu_memory(spec.training.node)
    if memory is None or not trainers.gpus:
        return
    for cell in job.cells:
        study = cell.study
        activations = _boundary_bytes(spec, study, trainers.micro_batch_tokens)
        needed = worker_bytes(study, trainers, parameter_count(spec, study.model.path)) + activations + GPU_RESERVE
        if activations and needed > memory:
            remedy = "use more workers"
            if trainers.strategy == "torch":
                remedy = f"set runtime.trainers.strategy to zero3{_for_zero3(study)} with several workers"
            yield (
                f"runtime.trainers.workers: {trainers.workers} workers need about {needed / 1e9:.0f} GB of GPU memory "
                f"each, {activations / 1e9:.1f} GB of it for activations, but a GPU of "
                f"{spec.training.node.instance_type} has {memory / 1e9:.0f} GB; {remedy}, or lower "
                f"runtime.trainers.micro_batch_tokens"
            )
            return


def _check_samplers(spec: ClusterSpec, recipe: Recipe) -> None:
    """The weights in vLLM's part of the memory; samplers may run on every sampling group."""
    study, vllm = recipe.study, recipe.runtime.vllm
    if study.model.engine != "vllm" or not recipe.runtime.samplers.gpus:
        return
    if any(name in study.model.engine_args for name in _SIZE_ARGUMENTS):
        return  # how much of the weights a GPU holds is not known here
    weights = WEIGHT_BYTES[study.model.dtype] * parameter_count(spec, study.model.path)
    for name, group in spec.sampling_groups.items():
        memory = _gpu_memory(group.node)
        if memory is None:
            continue
        available = vllm.gpu_memory_utilization * memory - ENGINE_RESERVE
        if weights / vllm.tensor_parallel_size <= available:
            continue
        remedy = "raise runtime.vllm.gpu_memory_utilization"
        if available > 0:
            # A power of two, since vLLM divides the attention heads among the GPUs.
            gpus = 2 ** math.ceil(math.log2(weights / available))
            remedy = f"set {gpus} or more, and runtime.samplers.gpus to the same"
        raise UserError(
            f"{recipe.name}: runtime.vllm.tensor_parallel_size: the weights take "
            f"{weights / vllm.tensor_parallel_size / 1e9:.0f} GB of a GPU, but vLLM has {max(available, 0) / 1e9:.0f} "
            f"GB of a GPU of {name}, {group.node.instance_type}; {remedy}"
        )


def _check_teachers(spec: ClusterSpec, recipe: Recipe) -> None:
    """The weights in the memory of one GPU, which is all that a teacher uses; it may run on every sampling group."""
    study = recipe.study
    if not recipe.runtime.teachers.gpus:
        return
    weights = WEIGHT_BYTES[study.model.dtype] * parameter_count(spec, study.model.path)
    for name, group in spec.sampling_groups.items():
        memory = _gpu_memory(group.node)
        if memory is not None and weights + ENGINE_RESERVE > memory:
            # An analysis reads hidden states whatever the teacher is.
            remedy = "use machines with larger GPUs"
            if study.method.teacher == "cached" and study.analysis is None:
                remedy = f"set method.teacher to topk or resident, or {remedy}"
            raise UserError(
                f"{recipe.name}: runtime.teachers.gpus: the teacher's weights take {weights / 1e9:.0f} GB of one GPU, "
                f"but a GPU of {name}, {group.node.instance_type}, has {memory / 1e9:.0f} GB; {remedy}"
            )


def _gpu_memory(node: NodeSection) -> float | None:
    """The memory of one GPU; None for a machine that is not named or not known."""
    gigabytes = gpu_memory_gb(node.instance_type or "")
    return None if gigabytes is None else gigabytes * 1e9


def _boundary_bytes(spec: ClusterSpec, study: Study, tokens: int) -> float:
    """Activations at the boundaries of layers, which gradient checkpointing keeps; 0 for a model of unknown shape.

    Without checkpointing, all activations are kept; they are larger by a factor that depends on the model's kernels.
    """
    model = known_model(study.model.path)
    if model is None or spec.model_billions is not None:
        return 0
    return float(WEIGHT_BYTES[study.training.precision]) * tokens * model.layers * model.width


def worker_bytes(study: Study, trainers: TrainersSection, parameters: float) -> float:
    """What a training worker holds of the model and its training state, at most in any round."""
    if trainers.strategy == "zero3":
        return zero3_bytes(study, parameters) / trainers.workers
    return _model_bytes(study, parameters, GPU_BYTES["float32"]) + _cast_bytes(study, trainers, parameters)


def _cast_bytes(study: Study, trainers: TrainersSection, parameters: float) -> float:
    """The bfloat16 copies of float32 weights, which autocast makes where they are used.

    Those of all layers stay until the backward pass, those of a layer that is computed again do not. A second view
    (`method.view`) is a second pass with copies of its own.
    """
    if trainers.gradient_checkpointing or study.training.precision != "bfloat16":
        return 0
    passes = 2 if study.method.view in ("skip", "cyclic") else 1
    if study.training.lora is None:
        cast = parameters
    else:
        cast = parameters * ADAPTER_PERCENT / 100 + (parameters if study.model.dtype == "float32" else 0)
    return passes * WEIGHT_BYTES["bfloat16"] * cast


def zero3_bytes(study: Study, parameters: float) -> float:
    """What ZeRO-3 divides between the GPUs of all training workers, at most in any round."""
    return _model_bytes(study, parameters, GPU_BYTES[study.training.precision])


def _model_bytes(study: Study, parameters: float, bytes_per_trained: int) -> float:
    holds_base_copy = study.holds_base_copy(starts_from_base=study.method.rounds == 1)
    base_copy = WEIGHT_BYTES[study.model.dtype] * parameters if holds_base_copy else 0
    trained = bytes_per_trained * parameters
    if study.training.lora is None:
        return trained + base_copy
    # As `torch` loads them, and zero3, which takes no study where the two differ (`_zero3_rounds`).
    dtype = study.model.dtype if study.training.precision == "bfloat16" else "float32"
    frozen = WEIGHT_BYTES[dtype] * parameters
    return frozen + trained * ADAPTER_PERCENT / 100 + base_copy
