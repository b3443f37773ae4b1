"""The model of a study, and what generates with it."""

from typing import Literal

from pydantic import Field

from pos2distill.config.base import HashableMapping, Options, Precision, Section


def checkpoint_of(path: str) -> tuple[str, str] | None:
    """The storage and the fingerprint of a model that `study` made: STORAGE/checkpoint-FINGERPRINT/model; else None."""
    storage, checkpoint, folder = ("", "", *path.rstrip("/").rsplit("/", 2))[-3:]
    name, _, fingerprint = checkpoint.partition("-")
    if (name, folder) != ("checkpoint", "model") or not fingerprint:
        return None
    return storage or ("/" if path.startswith("/") else "."), fingerprint


def looks_like_hub_name(path: str) -> bool:
    """Whether a model's path can be OWNER/NAME on the hub, wherever there is no folder of this name."""
    return not path.startswith((".", "/", "~")) and "://" not in path and path.count("/") == 1


class ModelSection(Section):
    """The model that is measured, sampled from and distilled."""

    path: str = Field(
        description="folder or fsspec URL of a Hugging Face model, or its hub name; of api chat the name on the server"
    )
    revision: str | None = Field(None, description="hub revision, to fix the version of a model named by its hub name")
    dtype: Precision = Field(
        "bfloat16",
        description="auto, for runs on CPUs: bfloat16 if the CPU of the machine that loads the recipe multiplies "
        "matrices faster in it (AMX, AMD's AVX512-BF16, Arm BF16), else float32",
    )
    engine: Literal["vllm", "hf", "openai", "fake"] = Field(
        "vllm",
        description="the generator. vllm; hf: transformers, slower but without start-up time; openai: a server with "
        "OpenAI's API (runtime.endpoint), for evaluation only; fake: for tests",
    )
    api: Literal["chat", "completions"] = Field(
        "chat",
        description="engine openai. chat: the server applies its chat template to the question; completions: it gets "
        "the token ids that other engines get, for which path must hold the tokenizer and the config",
    )
    attention: Literal["auto", "flash_attention_2", "sdpa", "eager"] = Field(
        "auto", description="auto: flash_attention_2 if it is available, else sdpa"
    )
    # Left out of dumps, and so of fingerprints, where there are none.
    chat_template_kwargs: Options = Field(
        HashableMapping(),
        exclude_if=lambda kwargs: not kwargs,
        description="further variables of the chat template, such as {enable_thinking: false}; with api chat, they are "
        "sent to the server, which must know the field (vLLM, SGLang)",
    )
    max_length: int | None = Field(None, gt=0, description="context in tokens; default: from the model's config")
    rope_scales: tuple[float, ...] = Field((), description="filled in from inference.scales")
    trust_remote_code: bool = False

    @property
    def uses_chat_api(self) -> bool:
        """Whether a server applies the chat template: `path` is a name there, and this machine has no file of it."""
        return self.engine == "openai" and self.api == "chat"
