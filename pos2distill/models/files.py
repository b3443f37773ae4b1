"""A model's files: their folder on this machine and their fingerprint. Imports no torch, so that planning is fast."""

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
_SAMPLES = 256
# The files of a model folder other than its weights. `.py` matters with trust_remote_code only; hashing it is harmless.
_MODEL_FILES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")


def local_folder(model: ModelSection) -> str:
    """The model's folder on this machine: the path itself, or a cached copy of an fsspec URL or hub snapshot.

    Raises:
        UserError: if there is no such folder, URL or hub model.
    """
    if "://" in model.path:
        return str(_copy_of_url(model))
    if os.path.isdir(model.path):
        return model.path
    if not is_hub_name(model.path):
        raise UserError(f"{model.path}: no such model folder (model.path)")
    # Only safetensors of the weights, since many repositories hold them a second time in other formats.
    return _hub_snapshot(model, [f"*{ending}" for ending in (*_MODEL_FILES, ".safetensors")])


def model_digest(model: ModelSection) -> str:
    """A fingerprint of what the model computes.

    Of a hub model: its name and the commit of its revision. Of a folder or URL: a hash of its files, where weights are
    sampled: their size and 256 samples of 64 KiB spread over each file, so that 16 GB do not take a minute. That
    distinguishes any two trained models, but not two files that differ in a few bytes.

    Raises:
        UserError: if there is no such folder, URL or hub model.
    """
    if is_hub_name(model.path):
        return f"{model.path}@{Path(_hub_snapshot(model, ['config.json'])).name}"
    fs, root = open_url(model.path, "model.path")
    files = sorted(fs.find(root))
    if not files:
        raise UserError(f"{model.path}: no such model folder (model.path)")
    digest = hashlib.sha256()
    for path in files:
        name = path[len(root) :].lstrip("/")
        if name.endswith(".safetensors"):
            size = fs.size(path)
            # Zero bytes separate the parts; otherwise different folders could give the same input.
            digest.update(f"{name}\0{size}\0".encode())
            offsets = np.linspace(0, max(0, size - _SAMPLE_BYTES), _SAMPLES).astype(int)
            # In a small file, several samples start at the same offset.
            for offset in np.unique(offsets).tolist():
                digest.update(fs.cat_file(path, start=offset, end=offset + _SAMPLE_BYTES))
        elif name.endswith(_MODEL_FILES):
            digest.update(f"{name}\0".encode())
            digest.update(fs.cat_file(path))
    return digest.hexdigest()[:16]


def copy_generation_config(model: ModelSection, folder: Path) -> None:
    """Copy the initial model's generation_config.json unchanged: transformers 5.19 refuses to write some it reads."""
    source = Path(local_folder(model)) / "generation_config.json"
    if source.exists():
        shutil.copyfile(source, folder / source.name)


def _copy_of_url(model: ModelSection) -> Path:
    """The local copy, named by its digest, so that a changed model is copied again."""
    copy = Path(tempfile.gettempdir()) / "pos2distill-models" / model_digest(model)
    if copy.exists():
        return copy
    copy.parent.mkdir(parents=True, exist_ok=True)
    fs, path = open_url(model.path, "model.path")
    # Renamed only when complete, so that no other process loads half a copy.
    with tempfile.TemporaryDirectory(dir=copy.parent) as partial:
        fs.get(path.rstrip("/") + "/", f"{partial}/model/", recursive=True)
        _rename_unless_exists(Path(partial) / "model", copy)
    return copy


def _hub_snapshot(model: ModelSection, patterns: list[str]) -> str:
    """The local folder, named after the commit, that holds these files of a hub model."""
    # Imported here: only hub names need it.
    from huggingface_hub import snapshot_download
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
        raise UserError(
            f"{model.path}: neither a folder nor a model that the hub provides (model.path): {reason}"
        ) from None


def is_hub_name(path: str) -> bool:
    """Whether a path can be OWNER/NAME on the hub. A folder of that name on this machine takes precedence."""
    if os.path.isdir(path) or path.startswith((".", "/")) or "://" in path:
        return False
    return path.count("/") == 1


def _rename_unless_exists(partial: Path, final: Path) -> None:
    try:
        partial.rename(final)
    except OSError:
        # Another process may have finished the same copy first; both hold the same files.
        if not final.exists():
            raise
