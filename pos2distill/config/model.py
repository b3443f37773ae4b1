"""The model of a study, and what generates with it."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from pos2distill.config.base import HashableMapping, Options, Precision, Section


def checkpoint_of(path: str) -> tuple[str, str] | None:
    """The storage and the fingerprint of a model that `study` made: STORAGE/checkpoint-FINGERPRINT/model; else None."""
    parts = path.rstrip("/").rsplit("/", 2)
    if len(parts) < 2:
        return None
    checkpoint, folder = parts[-2:]
    storage = parts[0] if len(parts) == 3 else ""
    name, _, fingerprint = checkpoint.partition("-")
    if (name, folder) != ("checkpoint", "model") or not fingerprint:
        return None
    return storage or ("/" if path.startswith("/") else "."), fingerprint


def looks_like_hub_name(path: str) -> bool:
    """Whether a model's path can be OWNER/NAME on the hub, wherever there is no folder of this name."""
    return not path.startswith((".", "/", "~")) and "://" not in path and path.count("/") == 1


# Fields of a request that carry the prompt, cut it, or add to the answer that is judged.
_RESERVED_FIELDS = ("model", "messages", "prompt", "stream", "n", "best_of", "echo", "suffix", "truncate_prompt_tokens")


class ModelSection(Section):
    """The model that is measured, sampled from and distilled."""

    path: str = Field(
        description="Folder, fsspec URL or hub name of a Hugging Face model. With api `chat` of engine `openai`, the "
        "model's name on the server."
    )
    revision: str | None = Field(
        None, description="Revision of a model on the hub: a branch, tag or commit. Default: the main branch."
    )
    dtype: Precision = Field(
        "bfloat16",
        description="Data type of the model's weights. `auto`, for runs on CPUs: bfloat16 if the CPU of the machine "
        "that loads the recipe multiplies matrices faster in it (AMX, AMD's AVX512-BF16, Arm BF16), else "
        "float32.",
    )
    engine: Literal["vllm", "hf", "openai", "fake"] = Field(
        "vllm",
        description="Inference engine. `vllm`: vLLM; `hf`: transformers, slower but without start-up time; `openai`: a "
        "server with OpenAI's API (runtime.endpoint), for evaluation only; `fake`: for tests.",
    )
    api: Literal["chat", "completions"] = Field(
        "chat",
        description="API of engine `openai`. `chat`: the server applies its chat template to the question; "
        "`completions`: it gets the token ids that other engines get, for which path must hold the "
        "tokenizer and the config.",
    )
    attention: Literal["auto", "flash_attention_2", "sdpa", "eager"] = Field(
        "auto",
        description="Attention implementation of transformers. `auto`: flash_attention_2 if it is available, else "
        "sdpa.",
    )
    # Left out of dumps, and so of fingerprints, where there are none.
    chat_template_kwargs: Options = Field(
        HashableMapping(),
        exclude_if=lambda kwargs: not kwargs,
        description="Additional variables of the chat template, for example {enable_thinking: false}. With api `chat` "
        "they are sent to the server, which must support the field (vLLM, SGLang).",
    )
    # Left out likewise.
    extra_body: Options = Field(
        HashableMapping(),
        exclude_if=lambda fields: not fields,
        description="Additional fields of each request of engine `openai`. They replace those of the same name; null "
        "leaves one out, for example {max_tokens: null, temperature: null, max_completion_tokens: 4000} with "
        "evaluation.max_new_tokens 4000.",
    )
    # Left out likewise.
    engine_args: Options = Field(
        HashableMapping(),
        exclude_if=lambda arguments: not arguments,
        description="Additional arguments of vLLM's engine, by their names in vllm.EngineArgs, for example "
        "{quantization: fp8, kv_cache_dtype: fp8}. Many change answers, so they are part of the fingerprint.",
    )
    max_length: int | None = Field(
        None, gt=0, description="Maximum context length in tokens. Default: from the model's config."
    )
    rope_scales: tuple[float, ...] = Field(
        (), description="RoPE scales of the layers. Filled in from inference.scales; do not set them here."
    )
    trust_remote_code: bool = Field(
        False, description="Allow a model or tokenizer to run Python code from its own repository or folder."
    )

    @field_validator("extra_body")
    @classmethod
    def _leaves_prompt_and_answer(cls, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        for name in _RESERVED_FIELDS:
            if name in fields:
                raise ValueError(f"{name}: is set by the evaluation, or would change what is judged; leave it out")
        if fields.get("max_tokens") is not None:
            raise ValueError("max_tokens: is evaluation.max_new_tokens; set that, or null to leave it out")
        return fields

    @property
    def uses_chat_api(self) -> bool:
        """Whether a server applies the chat template: `path` is a name there, and this machine has no file of it."""
        return self.engine == "openai" and self.api == "chat"
