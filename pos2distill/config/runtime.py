"""Where and how a study runs, which its fingerprint does not cover."""

import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from pos2distill.config.base import Section


class PoolSection(Section):
    """A pool of actors that grows and shrinks with its work."""

    min: int = Field(1, ge=1)
    max: int = Field(1, ge=1)
    batch_size: int = Field(32, ge=1, description="prompts in a batch")
    concurrent_batches: int = Field(2, ge=1, description="batches that an actor processes concurrently")
    cpus: float = Field(1.0, ge=0, description="CPUs of one actor")
    gpus: float = Field(0.0, ge=0, description="GPUs of one actor")
    threads: int = Field(1, ge=1, description="torch threads of one actor, on a CPU")
    max_restarts: int = Field(3, ge=0, description="of one actor, before the run fails")

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

    workers: int = Field(1, ge=1, description="number of workers; with max_workers, the minimum")
    max_workers: int | None = Field(
        None, ge=1, description="elastic: the cluster decides the number, from workers to this maximum"
    )
    strategy: Literal["zero3", "torch"] = Field(
        "zero3", description="zero3: DeepSpeed, any number of workers; torch: one process"
    )
    micro_batch_tokens: int = Field(
        16384,
        ge=1,
        description="at most this many tokens in one forward and backward pass on one worker; a longer row is passed "
        "alone. A row is a prompt and its response, so 16384 tokens are five rows of 3,100, or more where rows share a "
        "prefix, which one pass computes once; halve it if memory runs out. Larger is faster: with several passes per "
        "batch, weights that depend on losses need one more forward pass",
    )
    gradient_checkpointing: bool = True
    cpus: float = Field(1.0, ge=0)
    gpus: float = Field(0.0, ge=0)
    threads: int = Field(1, ge=1)
    max_restarts: int = Field(3, ge=0, description="of all workers after one is lost, before the run fails")

    @model_validator(mode="after")
    def _workers_are_at_most_max_workers(self) -> "TrainersSection":
        if self.max_workers is not None and self.max_workers < self.workers:
            raise ValueError(f"max_workers: {self.max_workers} is less than workers, {self.workers}")
        return self

    @model_validator(mode="after")
    def _torch_is_one_process(self) -> "TrainersSection":
        most = self.max_workers or self.workers
        if self.strategy == "torch" and most != 1:
            raise ValueError(f"workers: strategy 'torch' is one process, got {most}; use zero3")
        return self


class CheckpointsSection(Section):
    """Training state that is saved during training. It is deleted once the checkpoint is published."""

    # A lost worker costs all workers the steps since the last checkpoint, so this limits the repeated work.
    minutes: float = Field(15.0, gt=0, description="maximum time between two")
    steps: int | None = Field(
        None, ge=1, description="also after this many steps, but not before the last one is uploaded"
    )
    keep: int = Field(2, ge=1, description="how many of the newest to keep")


class VllmSection(Section):
    """Settings of the vLLM engine that change its speed and memory, not its answers."""

    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs of one engine, all on one node")
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    max_num_seqs: int = Field(256, ge=1)
    cpu_kv_cache_gib: int = Field(1, ge=1, description="key-value cache of the CPU build")
    stall_minutes: float = Field(
        60.0,
        gt=0,
        description="an engine that has prompts but finishes no answer for so long counts as dead; on Ray it is "
        "started again",
    )


class EndpointSection(Section):
    """The server of engine `openai`: its address, limits and prices."""

    base_url: str | None = Field(None, description="required, for example http://127.0.0.1:8000/v1")
    served_model: str | None = Field(None, description="name of the model there. Default: model.path")
    api_key_env: str | None = Field(
        None,
        description="environment variable that holds the key, which is written nowhere. Default: OPENAI_API_KEY if it "
        "is set, else no key",
    )
    concurrency: int = Field(16, ge=1, description="requests of one sampler at a time")
    requests_per_minute: int | None = Field(
        None, ge=1, description="of one sampler, with retries, evenly spaced. Default: no limit"
    )
    timeout_s: float = Field(300.0, gt=0, description="of one attempt, after which the request is sent again")
    max_retries: int = Field(
        8,
        ge=0,
        description="of one request, after errors of connection, malformed answers, 408, 409, 429 and 5xx: after the "
        "time that the server asks for (Retry-After, up to 2 minutes), else after 0.5 s, doubled up to 8 s, less a "
        "random quarter",
    )
    price_input: float | None = Field(None, ge=0, description="of a million tokens of prompts, in any currency")
    price_output: float | None = Field(None, ge=0, description="of a million tokens of answers")

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

    delay_s: float = Field(0.0, ge=0, description="duration of one batch")
    reply_tokens: int = Field(8, ge=1)
    fail_every: int = Field(
        0, ge=0, description="about one in this many prompts fails, the same ones in every run; 0: none"
    )
    die_at_call: int = Field(0, ge=0, description="the call at which an engine dies with its process; 0: never")


class Runtime(Section):
    """Where and how a study runs. Results change by rounding, and by the first order if `training.order=arrival`."""

    storage: str | None = Field(None, description="folder or fsspec URL; default: runs/NAME")
    executor: Literal["ray", "local"] = Field(
        "ray",
        description="ray: on a cluster or this machine; local: in one process without Ray, for tests and debugging",
    )
    mode: Literal["streamed", "staged"] = Field(
        "streamed",
        description="streamed: training starts with the first samples; staged: sample all, then train, for one GPU",
    )
    samplers: PoolSection = PoolSection()
    teachers: PoolSection = PoolSection(batch_size=8)
    trainers: TrainersSection = TrainersSection()
    checkpoints: CheckpointsSection = CheckpointsSection()
    vllm: VllmSection = VllmSection()
    endpoint: EndpointSection = EndpointSection()
    fake: FakeSection = FakeSection()
    max_failed_fraction: float = Field(
        0.05,
        ge=0,
        le=1,
        description="sampling stops if more than this fraction of the samples failed or is empty, and before that as "
        "soon as chance does not explain their number; an evaluation, once a server refuses prompts of more than this "
        "fraction of the questions for their content",
    )
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = Field(
        (), description="log the training steps (docs/running.md, Experiment trackers)"
    )
