"""The arguments of vLLM's engine: those that settings determine, and `model.engine_args`."""

import ast
import copy
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pos2distill.config import ModelSection, VllmSection
from pos2distill.errors import UserError, did_you_mean_one
from pos2distill.models.architecture import context_length
from pos2distill.models.downloaded import checked_folder
from pos2distill.models.files import reject_unindexed_copy
from pos2distill.models.rope.curves import CONFIG_KEY

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

# Arguments whose setting has another name, or is in another section.
_SETTINGS = {"model": "model.path", "max_model_len": "model.max_length", "revision": "model.revision"}
# Arguments that would replace the weights or the config of `model.path`, which are checked and part of the fingerprint.
_OF_OTHER_MODELS = (
    "code_revision",
    "config_format",
    "convert",
    "hf_config_path",
    "load_format",
    "model_class_overrides",
    "model_impl",
    "model_loader_extra_config",
    "model_weights",
    "override_generation_config",
    "runner",
    "spec_method",
    "spec_model",
    "spec_tokens",
    "speculative_config",
    "tokenizer",
    "tokenizer_mode",
    "tokenizer_revision",
    "weight_transfer_config",
)
_OF_OTHER_CODE = ("io_processor_plugin", "logits_processors", "reasoning_parser_plugin", "scheduler_cls", "worker_cls")
_OF_SERVERS = ("max_num_queued_reqs", "max_num_queued_tokens")
_OF_SEVERAL_NODES = ("nnodes", "node_rank", "master_addr", "master_port")
# Why other arguments are rejected, with what to do.
_REASONS = {
    **dict.fromkeys(
        _OF_OTHER_MODELS,
        "would generate with something else than the model of model.path that was checked; leave it out",
    ),
    **dict.fromkeys(_OF_OTHER_CODE, "would run other code than vLLM's in the engine; leave it out"),
    "device_ids": "an engine gets its GPUs from runtime.samplers.gpus; set that",
    "hf_token": "settings hold no secrets; set HF_TOKEN in the environment",
    **dict.fromkeys(_OF_SERVERS, "limits the requests to a server, and prompts beyond it would fail; leave it out"),
}


def engine_arguments(
    model: ModelSection, settings: VllmSection, scales: Sequence[float], *, device: str
) -> "AsyncEngineArgs":
    """The arguments with which the engine is built.

    Raises:
        UserError: if vLLM would read other weights than those of the model.
        ValueError: if vLLM rejects one of `model.engine_args`.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    folder = checked_folder(model)
    reject_unindexed_copy(model, Path(folder))
    return AsyncEngineArgs(
        model=folder,
        **_determined_arguments(model, settings, scales, device=device),
        # A copy, since vLLM changes nested arguments in place.
        **copy.deepcopy(dict(model.engine_args)),
    )


def check_engine_args(model: ModelSection, settings: VllmSection, *, device: str) -> None:
    """Check the names of `model.engine_args`. vLLM checks the values when it starts.

    Raises:
        UserError: for a name that vLLM does not have, whose value follows from other settings, or that would replace
            the model.
    """
    known = argument_names()
    determined = _determined_arguments(model, settings, (), device=device).keys()
    for name in model.engine_args:
        field = f"model.engine_args: {name}"
        if name not in known:
            raise UserError(f"{field}: vLLM has no such argument{did_you_mean_one(name, known)}")
        if name in _SETTINGS:
            raise UserError(f"{field}: is {_SETTINGS[name]}; set that")
        for section, fields in (("model", ModelSection.model_fields), ("runtime.vllm", VllmSection.model_fields)):
            if name in fields:
                raise UserError(f"{field}: is {section}.{name}; set that")
        if name in _REASONS:
            raise UserError(f"{field}: {_REASONS[name]}")
        if name in determined:
            raise UserError(f"{field}: sampling depends on our value of it; leave it out")
        if name.endswith("_parallel_size") or name.startswith("data_parallel") or name in _OF_SEVERAL_NODES:
            raise UserError(
                f"{field}: an engine is divided by runtime.vllm.tensor_parallel_size alone; for more engines set "
                f"runtime.samplers.max"
            )


def argument_names() -> set[str]:
    """The names of all arguments of vLLM's engine, read from its source (vLLM 0.32).

    Importing vLLM takes ten seconds and initializes its platform, which the head of a cluster may not have.

    Raises:
        UserError: if vLLM is not installed.
    """
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        raise UserError("model.engine_args: vLLM is not installed here, so they cannot be checked (`make install`)")
    source = Path(package.origin).parent / "engine" / "arg_utils.py"
    return {
        statement.target.id
        for section in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(section, ast.ClassDef) and section.name in ("EngineArgs", "AsyncEngineArgs")
        for statement in section.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if not statement.target.id.startswith("_")  # vLLM's own
    }


def _determined_arguments(
    model: ModelSection, settings: VllmSection, scales: Sequence[float], *, device: str
) -> dict[str, Any]:
    """All arguments that settings determine, but for the model's folder."""
    arguments: dict[str, Any] = {
        "hf_overrides": {CONFIG_KEY: list(scales)} if scales else {},
        "worker_extension_cls": "pos2distill.sampling.engines.vllm_worker.RopeScales",
        # By default vLLM 0.32 prefers Mistral's own copy of the weights and the config (consolidated.safetensors,
        # params.json), which is not checked, and keeps its values where the model was trained in its folder.
        "config_format": "hf",
        "load_format": "hf",
        "dtype": model.dtype,
        "max_model_len": context_length(model),
        "trust_remote_code": model.trust_remote_code,
        "skip_tokenizer_init": True,
        # Of a multimodal model too: vLLM 0.32 would make its processor of images, which needs a tokenizer.
        "language_model_only": True,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "tensor_parallel_size": settings.tensor_parallel_size,
        # Processes, never Ray's executor: it would look for GPUs on other nodes, and the actor has its own.
        "distributed_executor_backend": "mp" if settings.tensor_parallel_size > 1 else None,
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "max_num_seqs": settings.max_num_seqs,
        "logprobs_mode": "raw_logprobs",  # before temperature and top-p
        "max_logprobs": -1,  # no upper limit
        "generation_config": "vllm",  # sampling settings come from us, not from the model's generation_config.json
        "disable_log_stats": True,
    }
    if device == "cpu":
        # The CPU build of vLLM 0.32 dies when it prefills a seeded prompt in two steps, because torch's CPU
        # generators cannot be reset.
        arguments["enable_chunked_prefill"] = False
    return arguments
