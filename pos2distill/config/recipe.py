"""A study, its runtime, and what they require of each other."""

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from pos2distill.config.base import Section, matches
from pos2distill.config.runtime import Runtime
from pos2distill.config.study import Study

# It becomes a part of paths (runs/NAME), so it has no slash, no space and no leading dot.
_Name = Annotated[str, matches(r"[a-z0-9][a-z0-9_.-]*", "a name of a to z, 0 to 9, _, . and -, for example my_study")]


class Recipe(Section):
    """A complete, named run."""

    name: _Name = Field(description="Name of the run, which becomes part of paths (runs/NAME).")
    description: str = Field("", description="What the run is for, in one line, for lists of recipes and for reports.")
    study: Study = Field(description="What defines the result.")
    runtime: Runtime = Field(Runtime(), description="Where and how the study runs.")
    sweep: dict[str, tuple[Any, ...]] = Field(
        {},
        description="Settings by dotted name, or whole sections, each with a list of values. The study runs for every "
        "combination of them.",
    )
    # Filled in while a file is loaded. `exclude` keeps these fields out of dumps and out of the names of settings.
    other_tasks: dict[str, Study] = Field(
        {}, exclude=True, description="Studies of the recipes that evaluation.also_evaluate names."
    )
    written: dict[str, Any] = Field(
        {}, exclude=True, repr=False, description="Study of a sweep as the file and the command line wrote it."
    )
    written_paths: dict[str, str] = Field(
        {},
        exclude=True,
        repr=False,
        description="Values of model.path, data.path and runtime.storage as the file and the command line wrote them.",
    )

    auto_precisions: tuple[str, ...] = Field(
        (),
        exclude=True,
        repr=False,
        description="Those of model.dtype and training.precision for which the file or the command line wrote auto.",
    )

    @field_validator("sweep", mode="before")
    @classmethod
    def _sweep_is_flat(cls, sweep: Any) -> Any:
        # Before pydantic's own checks, which would report a nested sweep only as a wrong type.
        if sweep is None:
            return {}
        if not isinstance(sweep, dict):
            return sweep
        for name, values in sweep.items():
            if isinstance(values, dict) and values:
                raise ValueError(f"{name}: write {name}.{_first_leaf(values)}: [...]")
            if not isinstance(values, list | tuple):
                raise ValueError(f"{name}: input should be a list, for example [{values}]")
        return sweep

    @model_validator(mode="after")
    def _engines_have_their_gpus(self) -> "Recipe":
        gpus, parts = self.runtime.samplers.gpus, self.runtime.vllm.tensor_parallel_size
        # vLLM uses one GPU for each tensor-parallel part. With another number, reserved GPUs would be idle, or GPUs
        # of other actors would be used. A sampler with a fraction of a GPU has one part.
        if self.study.model.engine == "vllm" and gpus and parts != max(1, gpus):
            raise ValueError(
                f"runtime.vllm.tensor_parallel_size: {parts}, but one sampler has {gpus:g} GPUs "
                f"(runtime.samplers.gpus); set both to the same"
            )
        return self

    @model_validator(mode="after")
    def _one_process_uses_one_gpu(self) -> "Recipe":
        pools = {"teachers": self.runtime.teachers.gpus}
        if self.study.model.engine == "hf":
            pools["samplers"] = self.runtime.samplers.gpus
        for pool, gpus in pools.items():
            if gpus > 1:
                raise ValueError(f"runtime.{pool}.gpus: {gpus:g}, but each of them uses one GPU; set 1, and raise max")
        return self

    @model_validator(mode="after")
    def _engines_fit_their_part_of_a_gpu(self) -> "Recipe":
        gpus, part = self.runtime.samplers.gpus, self.runtime.vllm.gpu_memory_utilization
        if self.study.model.engine == "vllm" and 0 < gpus < part and gpus < 1:
            raise ValueError(
                f"runtime.vllm.gpu_memory_utilization: {part:g}, but one sampler has {gpus:g} of a GPU "
                f"(runtime.samplers.gpus); set {gpus:g} or less"
            )
        return self

    @model_validator(mode="after")
    def _endpoint_has_an_address(self) -> "Recipe":
        if self.study.model.engine == "openai" and self.runtime.endpoint.base_url is None:
            raise ValueError(
                "runtime.endpoint.base_url: missing; model.engine openai needs it, for example http://127.0.0.1:8000/v1"
            )
        return self

    @model_validator(mode="after")
    def _zero3_keeps_the_models_precision(self) -> "Recipe":
        """ZeRO-3 computes with, and exports, weights of the training's precision; torch keeps those of the model."""
        study = self.study
        is_rounded = study.model.dtype == "float32" and study.training.precision == "bfloat16"
        # A recipe without training examples only evaluates.
        if self.runtime.trainers.strategy == "zero3" and is_rounded and study.data.train_examples:
            raise ValueError(
                "training.precision: zero3 would round the float32 weights of model.dtype to bfloat16; "
                "set both to the same"
            )
        return self

    @model_validator(mode="after")
    def _local_executor_trains_in_one_process(self) -> "Recipe":
        # Workers are processes of Ray Train, and the local executor has only its own process.
        executor, trainers = self.runtime.executor, self.runtime.trainers
        if executor == "local" and trainers.strategy != "torch":
            raise ValueError(
                f"runtime.trainers.strategy: '{trainers.strategy}' requires runtime.executor ray; set strategy to "
                f"torch and workers to 1"
            )
        workers = trainers.max_workers or trainers.workers
        if executor == "local" and workers > 1:
            raise ValueError(f"runtime.trainers.workers: {workers} require runtime.executor ray; set 1")
        return self

    @property
    def storage(self) -> str:
        """Where the run's artifacts are stored: a folder or an fsspec URL."""
        return self.runtime.storage or default_storage(self.name)


def default_storage(name: object) -> str:
    """Where a run of this name is stored if `runtime.storage` is not set."""
    return f"runs/{name}"


def _first_leaf(tree: dict[str, Any]) -> str:
    """The dotted name of the first value in nested mappings."""
    name, inner = next(iter(tree.items()))
    return f"{name}.{_first_leaf(inner)}" if isinstance(inner, dict) and inner else name
