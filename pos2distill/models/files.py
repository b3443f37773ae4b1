"""A model's files: where they are on this machine, and what they are. Without torch, so that a plan is made at once."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from pos2distill.config import ModelSection
from pos2distill.errors import UserError
from pos2distill.urls import open_url

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


def copy_generation_config(model: ModelSection, folder: Path) -> None:
    """Copy the base's generation_config.json as it is: transformers refuses to write some that it reads."""
    own = Path(local_folder(model)) / "generation_config.json"
    if own.exists():
        shutil.copyfile(own, folder / own.name)


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


def _is_hub_name(path: str) -> bool:
    """Whether a path that is no folder here can be OWNER/NAME on the hub."""
    return not os.path.isdir(path) and not path.startswith((".", "/")) and "://" not in path and path.count("/") == 1


def _rename_unless_there(partial: Path, final: Path) -> None:
    try:
        partial.rename(final)
    except OSError:  # another process finished the same copy first; both hold the same files
        if not final.exists():
            raise
