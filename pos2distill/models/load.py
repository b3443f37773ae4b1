"""Load models and tokenizers in Hugging Face format, and say plainly what one lacks."""

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pos2distill.config import ModelSection
from pos2distill.errors import UserError
from pos2distill.urls import open_url

_PROBE = "pos2distill-probe"
_SAMPLE_BYTES = 1 << 16
# What a model's folder holds beside its weights. `.py` counts with trust_remote_code only, but counting it is harmless.
_MODEL_FILES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")


def local_folder(model: ModelSection) -> str:
    """The model's folder on this machine: the path as it is, or a cached copy of an fsspec URL or hub snapshot."""
    if "://" in model.path:
        copy = Path(tempfile.gettempdir()) / "pos2distill-models" / model_digest(model)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            fs, path = open_url(model.path, "model.path")
            with tempfile.TemporaryDirectory(dir=copy.parent) as partial:
                fs.get(path.rstrip("/") + "/", f"{partial}/model/", recursive=True)
                _rename_unless_there(Path(partial) / "model", copy)
        return str(copy)
    if os.path.isdir(model.path):
        return model.path
    if not _is_hub_name(model.path):
        raise UserError(f"{model.path}: no such model folder (model.path)")
    return _hub_snapshot(model, [f"*{ending}" for ending in (*_MODEL_FILES, ".safetensors")])


def _hub_snapshot(model: ModelSection, patterns: list[str]) -> str:
    """The local folder, named after the commit, that holds these files of a hub model."""
    from huggingface_hub import snapshot_download  # only a hub name needs it
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return snapshot_download(
            model.path,
            revision=model.revision,
            allow_patterns=patterns,
            ignore_patterns=["consolidated*"],  # Mistral's own copy of the same weights
        )
    except (RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{model.path}: neither a folder nor a model the hub gives us (model.path): {reason}") from None


def model_digest(model: ModelSection) -> str:
    """A fingerprint of what the model computes.

    A hub name stands for itself and the commit its revision is at. A folder or URL is read: everything but weights
    whole; weights by size and 256 samples of 64 KiB spread over each file, so that 16 GB need no minute of hashing.
    That tells any two trained models apart, but not two files that differ in a few bytes.
    """
    if _is_hub_name(model.path):
        return f"{model.path}@{Path(_hub_snapshot(model, ['config.json'])).name}"
    fs, root = open_url(model.path, "model.path")
    files = sorted(fs.find(root))
    if not files:
        raise UserError(f"{model.path}: no such model folder (model.path)")
    digest = hashlib.sha256()
    for path in files:
        name = path[len(root) :].lstrip("/")
        if name.endswith(".safetensors"):
            digest.update(f"{name}\0{fs.size(path)}\0".encode())
            for offset in np.unique(np.linspace(0, max(0, fs.size(path) - _SAMPLE_BYTES), 256).astype(int)):
                digest.update(fs.cat_file(path, start=int(offset), end=int(offset) + _SAMPLE_BYTES))
        elif name.endswith(_MODEL_FILES):
            digest.update(f"{name}\0".encode())
            digest.update(fs.cat_file(path))
    return digest.hexdigest()[:16]


def load_config(model: ModelSection) -> Any:
    """The model's configuration.

    Raises:
        UserError: if the folder holds no readable config.json.
    """
    folder = local_folder(model)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise UserError(f"{model.path}: no usable config.json: {str(error).strip().splitlines()[0]}") from None


def load_tokenizer(model: ModelSection) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a chat template.

    Raises:
        UserError: if the folder has no tokenizer, or its tokenizer no chat template.
    """
    folder = local_folder(model)
    if not any((Path(folder) / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(f"{model.path}: holds no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    if not tokenizer.chat_template:
        raise UserError(f"{model.path}: its tokenizer has no chat template; use the model's chat or instruct version")
    return tokenizer


def load_model(
    model: ModelSection, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """The causal language model in evaluation mode, from safetensors only.

    Args:
        dtype: of the weights; default: `model.dtype`.
    """
    folder = local_folder(model)
    weights = dtype or torch_dtype(model.dtype)
    if not list(Path(folder).glob("*.safetensors")):
        raise UserError(f"{model.path}: holds no weights in safetensors format")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=weights,
        attn_implementation=pick_attention(model.attention, weights, torch.device(device)),
        trust_remote_code=model.trust_remote_code,
        use_safetensors=True,
    )
    lm: PreTrainedModel = loaded.to(device).eval()
    # Sampling settings come from the study; defaults from the model's folder would add penalties that nobody asked for.
    lm.generation_config = GenerationConfig()
    return lm


def torch_dtype(name: str) -> torch.dtype:
    """`"bfloat16"` or `"float32"` as torch's dtype."""
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def pick_attention(wanted: str, dtype: torch.dtype, device: torch.device) -> str:
    """`auto` resolved: flash_attention_2 for bfloat16 weights on a GPU where its package is installed, else sdpa."""
    if wanted != "auto":
        return wanted
    possible = device.type == "cuda" and dtype == torch.bfloat16
    return "flash_attention_2" if possible and importlib.util.find_spec("flash_attn") else "sdpa"


def context_length(model: ModelSection) -> int:
    """The longest prompt and response the model takes, in tokens."""
    if model.max_length:
        return model.max_length
    config = load_config(model)
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not length:
        raise UserError(f"{model.path}: its config states no max_position_embeddings; set model.max_length")
    return int(length)


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that closes an assistant's turn, read off the chat template (it often is not `eos_token`)."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
    rendered = str(tokenizer.apply_chat_template(turns, tokenize=False))
    tail = tokenizer(rendered.rpartition(_PROBE)[2], add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    closing = next((int(token) for token in tail if token in special), tokenizer.eos_token_id)
    if closing is None:
        raise UserError("the chat template closes no assistant turn and the tokenizer has no eos_token")
    return closing


def stop_token_ids(model: ModelSection, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends generation: end of turn, end of sequence, and what the generation config adds."""
    stops = {end_of_turn_id(tokenizer), tokenizer.eos_token_id}
    path = Path(local_folder(model)) / "generation_config.json"
    if path.exists():
        listed = json.loads(path.read_text()).get("eos_token_id")
        stops.update(listed if isinstance(listed, list) else [listed])
    return sorted(stop for stop in stops if stop is not None)


def keep_generation_config(model: ModelSection, folder: Path) -> None:
    """Copy the base's generation_config.json as it is: transformers refuses to write some that it reads."""
    own = Path(local_folder(model)) / "generation_config.json"
    if own.exists():
        shutil.copyfile(own, folder / own.name)


def _is_hub_name(path: str) -> bool:
    """Whether a path that is no folder here can be OWNER/NAME on the hub."""
    return not os.path.isdir(path) and not path.startswith((".", "/")) and "://" not in path and path.count("/") == 1


def _rename_unless_there(partial: Path, final: Path) -> None:
    try:
        partial.rename(final)
    except OSError:  # another process finished the same copy first; both hold the same files
        if not final.exists():
            raise
