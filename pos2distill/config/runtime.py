"""Where and how a study runs, which its fingerprint does not cover."""

import re
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from pos2distill.config.base import Section


class PoolSection(Section):
    """A pool of actors that grows and shrinks with its work."""

    min: int = Field(1, ge=1, description="Minimum number of actors.")
    max: int = Field(1, ge=1, description="Maximum number of actors.")
    batch_size: int = Field(32, ge=1, description="Prompts per batch.")
    concurrent_batches: int = Field(2, ge=1, description="Batches that one actor processes concurrently.")
    cpus: float = Field(1.0, ge=0, description="CPUs of one actor.")
    gpus: float = Field(0.0, ge=0, description="GPUs of one actor.")
    threads: int = Field(1, ge=1, description="PyTorch threads of one actor on a CPU.")
    max_restarts: int = Field(3, ge=0, description="Restarts of one actor before the run fails.")

    @model_validator(mode="after")
    def _min_is_at_most_max(self) -> "PoolSection":
        if self.min > self.max:
            raise ValueError(f"min: {self.min} is more than max, {self.max}")
        return self

    @property
    def device(self) -> str:
        """The torch device of one actor."""
        return "cuda" if self.gpus else "cpu"


class TrainersSection(Section):
    """The training workers."""

    workers: int = Field(1, ge=1, description="Number of workers. With max_workers, the minimum.")
    max_workers: int | None = Field(
        None,
        ge=1,
        description="Maximum number of workers for elastic training, where the cluster decides how many run. Default: "
        "always `workers`.",
    )
    strategy: Literal["zero3", "torch"] = Field(
        "zero3",
        description="Training strategy. `zero3`: DeepSpeed ZeRO-3, which divides the model among the workers; `torch`: "
        "plain PyTorch, where each worker has all of it: for one worker, and for adapters. Default: `zero3`; `torch` "
        "with executor `local`.",
    )
    micro_batch_tokens: int = Field(
        16384,
        ge=1,
        description="Maximum number of tokens in one forward and backward pass on one worker, by default five rows of "
        "3,100; a longer row (a prompt and its response) is passed alone. Larger is faster, since "
        "loss-dependent weights need one more forward pass if a batch takes several; halve it if memory "
        "runs out.",
    )
    gradient_checkpointing: bool = Field(
        True, description="Recompute activations in the backward pass, which saves memory and takes time."
    )
    cpus: float = Field(1.0, ge=0, description="CPUs of one worker.")
    gpus: float = Field(0.0, ge=0, le=1, description="GPUs of one worker: 0 or 1; a part of one for a single worker.")
    threads: int = Field(1, ge=1, description="PyTorch threads of one worker.")
    max_restarts: int = Field(
        3, ge=0, description="Restarts of all workers after the loss of one, before the run fails."
    )

    @model_validator(mode="after")
    def _workers_are_at_most_max_workers(self) -> "TrainersSection":
        if self.max_workers is not None and self.max_workers < self.workers:
            raise ValueError(f"max_workers: {self.max_workers} is less than workers, {self.workers}")
        return self

    @model_validator(mode="after")
    def _several_workers_share_no_gpu(self) -> "TrainersSection":
        # NCCL refuses two ranks on one GPU.
        if 0 < self.gpus < 1 and (self.max_workers or self.workers) > 1:
            raise ValueError(f"gpus: {self.gpus:g}, but several workers cannot share a GPU; set 1")
        return self


class CheckpointsSection(Section):
    """Training state that is saved during training. It is deleted once the checkpoint is published."""

    # A lost worker costs all workers the steps since the last checkpoint, so this limits the repeated work.
    minutes: float = Field(15.0, gt=0, description="Save a checkpoint at least every this many minutes.")
    steps: int | None = Field(
        None,
        ge=1,
        description="Also save a checkpoint every this many steps, but not before the last one is uploaded. Default: "
        "by minutes only.",
    )
    keep: int = Field(2, ge=1, description="Number of newest checkpoints to keep.")


class VllmSection(Section):
    """Settings of the vLLM engine that change its speed and memory, not its answers."""

    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Fraction of a GPU's memory that an engine may use."
    )
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs of one engine (tensor parallelism), all on one node.")
    enforce_eager: bool = Field(False, description="Run PyTorch in eager mode, without compilation and CUDA graphs.")
    enable_prefix_caching: bool = Field(
        True, description="Reuse the key-value cache of prompts with the same beginning."
    )
    max_num_seqs: int = Field(256, ge=1, description="Maximum number of sequences that one engine processes at a time.")
    cpu_kv_cache_gib: int = Field(1, ge=1, description="Size of the key-value cache of vLLM's CPU build, in GiB.")
    stall_minutes: float = Field(
        60.0,
        gt=0,
        description="Minutes without a finished answer after which an engine that has prompts counts as dead. On Ray "
        "it is then restarted.",
    )


class EndpointSection(Section):
    """The server of engine `openai`: its address, limits and prices."""

    base_url: str | None = Field(
        None, description="URL of the server, for example http://127.0.0.1:8000/v1. Engine `openai` requires it."
    )
    served_model: str | None = Field(None, description="Name of the model on the server. Default: model.path.")
    api_key_env: str | None = Field(
        None,
        description="Environment variable with the API key, which is written nowhere. Default: OPENAI_API_KEY if it is "
        "set, else no key.",
    )
    concurrency: int = Field(16, ge=1, description="Concurrent requests of one sampler.")
    requests_per_minute: int | None = Field(
        None,
        ge=1,
        description="Maximum number of requests of one sampler per minute, including retries and evenly spaced. "
        "Default: no limit.",
    )
    timeout_s: float = Field(
        300.0,
        gt=0,
        description="Seconds that one attempt of a request may take, after which the request is sent again.",
    )
    max_retries: int = Field(
        8,
        ge=0,
        description="Retries of one request after connection errors, malformed answers, answers that the server itself "
        "gave up, and the statuses 408, 409, 429 and 5xx. Each waits for the time that the server asks for "
        "(Retry-After, up to 2 minutes), else for 0.5 s, doubled up to 8 s, less a random quarter at most.",
    )
    price_input: float | None = Field(None, ge=0, description="Price per million prompt tokens, in any currency.")
    price_output: float | None = Field(None, ge=0, description="Price per million answer tokens, in the same currency.")

    @field_validator("api_key_env")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
            raise ValueError("expected the name of an environment variable, not a key")
        return name

    @field_validator("base_url")
    @classmethod
    def _is_a_url_without_password(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("expected a URL, for example http://127.0.0.1:8000/v1")
        if parts.password or parts.query:
            raise ValueError("expected a URL without a password or key; name the key's variable in api_key_env")
        return url

    @model_validator(mode="after")
    def _prices_are_together(self) -> "EndpointSection":
        if (self.price_input is None) != (self.price_output is None):
            raise ValueError("price_input: needs price_output, and the reverse")
        return self


class FakeSection(Section):
    """Faults and delays of the fake engine, which answers with the end of its prompt. For tests."""

    delay_s: float = Field(0.0, ge=0, description="Duration of one batch in seconds.")
    reply_tokens: int = Field(8, ge=1, description="Length of an answer in tokens.")
    fail_every: int = Field(
        0, ge=0, description="About one in this many prompts fails, the same ones in every run. 0: none."
    )
    die_at_call: int = Field(0, ge=0, description="Call at which an engine dies with its process. 0: never.")


class Runtime(Section):
    """Where and how a study runs. Results change by rounding, and by the first order if `training.order=arrival`."""

    storage: str | None = Field(
        None, description="Folder or fsspec URL for everything that the run writes. Default: runs/NAME."
    )
    executor: Literal["ray", "local"] = Field(
        "ray",
        description="What runs the stages. `ray`: Ray, on a cluster or this machine; `local`: one process without Ray, "
        "for tests and debugging.",
    )
    mode: Literal["streamed", "staged"] = Field(
        "streamed",
        description="How sampling and training overlap. `streamed`: training starts with the first samples; `staged`: "
        "sample all, then train, for one GPU.",
    )
    samplers: PoolSection = Field(PoolSection(), description="Actors that sample responses and answer evaluations.")
    teachers: PoolSection = Field(
        PoolSection(batch_size=8), description="Actors that compute the teacher's hidden states, and the analysis."
    )
    trainers: TrainersSection = Field(TrainersSection(), description="Workers that train the student.")
    checkpoints: CheckpointsSection = Field(CheckpointsSection(), description="Checkpoints during training.")
    vllm: VllmSection = Field(VllmSection(), description="Settings of engine `vllm`.")
    endpoint: EndpointSection = Field(EndpointSection(), description="Server of engine `openai`.")
    fake: FakeSection = Field(FakeSection(), description="Settings of engine `fake`.")
    max_failed_fraction: float = Field(
        0.05,
        ge=0,
        le=1,
        description="Maximum fraction of failed or empty samples, above which sampling stops, or earlier once chance "
        "does not explain their number. An evaluation stops if a server refuses the prompts of more than "
        "this fraction of its questions for their content.",
    )
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = Field(
        (), description="Experiment trackers that log the training steps (docs/running.md, Experiment trackers)."
    )

    @property
    def sampling_pools(self) -> dict[str, PoolSection]:
        """The sections of the actors that run while samples are made, by name."""
        return {"samplers": self.samplers, "teachers": self.teachers}

    @property
    def pools(self) -> dict[str, PoolSection | TrainersSection]:
        """The sections of all processes that run a model, by name."""
        return {**self.sampling_pools, "trainers": self.trainers}

    @model_validator(mode="before")
    @classmethod
    def _default_training_strategy(cls, settings: Any) -> Any:
        """One process trains with `torch`, unless another strategy is asked for."""
        if not isinstance(settings, Mapping):
            return settings
        trainers = settings.get("trainers", {})
        if isinstance(trainers, TrainersSection):
            trainers = trainers.model_dump(exclude_unset=True)
        if not isinstance(trainers, Mapping) or trainers.get("strategy") is not None:
            return settings
        strategy = "torch" if settings.get("executor") == "local" else "zero3"
        return {**settings, "trainers": {**trainers, "strategy": strategy}}
