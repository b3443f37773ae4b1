"""A model's files: their folder on this machine and their fingerprint. Imports no torch, so that planning is fast."""

import errno
import functools
import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from pos2distill.config import ModelSection
from pos2distill.config.model import looks_like_hub_name
from pos2distill.config.yaml_reader import parse_value
from pos2distill.errors import TransientError, UserError, no_such_folder
from pos2distill.faults import disk_is_full, error_text, fix_hint, is_permanent
from pos2distill.literal_paths import require_listable
from pos2distill.scratch import locked, user_folder
from pos2distill.urls import open_url, require_answer, storage_errors

_SAMPLE_BYTES = 1 << 16
_SAMPLES = 256
# The files of a model folder other than its weights. `.py` matters with trust_remote_code only; hashing it is harmless.
_MODEL_FILES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
_SAME_AFTER_A_CHANGE = {"name", "size", "type"}  # fields of a listing that do not change with the content
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MISTRAL_COPY = "consolidated"  # Mistral's own copy of the same weights begins with this
_HUB_SECONDS = 8.0  # until the hub counts as unreachable


def local_folder(model: ModelSection, *, weights: bool = True) -> str:
    """The model's folder on this machine: the path itself, or a cached copy of an fsspec URL or hub snapshot.

    Args:
        weights: False if config and tokenizer suffice; then the weights are not downloaded.
    Raises:
        UserError: if there is no such folder, URL or hub model.
    """
    if "://" in model.path:
        return str(_copy_of_url(model, weights=weights))
    if os.path.isdir(model.path):
        return model.path
    if not is_hub_name(model.path):
        raise UserError(_no_such_model(model.path))
    return _hub_snapshot(model, [f"*{ending}" for ending in _endings(weights=weights)])


def with_commit(model: ModelSection, digest: str) -> ModelSection:
    """A hub model with the commit that its `model_digest` names as its revision; any other model as it is.

    What `main` names may change while a study runs, and processes that start later would load another model.
    """
    if model.uses_chat_api or not is_hub_name(model.path):
        return model
    return model.replace(revision=digest.rpartition("@")[2])


def model_digest(model: ModelSection) -> str:
    """A fingerprint of what the model computes.

    Of a hub model: its name and the commit of its revision. Of a folder or URL: a hash of its files, where weights are
    sampled: their size and 256 samples of 64 KiB spread over each file, so that 16 GB do not take a minute. That
    distinguishes any two trained models, but not two files that differ in a few bytes. Of a model that is known by its
    name on a server only (`api: chat`): that name.

    A process reads an unchanged URL once, since every sample is a request.

    Raises:
        UserError: if there is no such folder, URL or hub model.
    """
    if model.uses_chat_api:
        return f"served: {model.path}"
    if is_hub_name(model.path):
        return f"{model.path}@{Path(_hub_snapshot(model, ['config.json'])).name}"
    if "://" in model.path:
        states = _file_states(model.path)
        # A web server lists neither times nor hashes, so that a changed file may look the same.
        if states and all(state.keys() - _SAME_AFTER_A_CHANGE for state in states.values()):
            return _digest_once(model.path, _hash_states(states))
    return _digest_files(model.path)


@functools.lru_cache(maxsize=16)
def _digest_once(path: str, _version: str) -> str:
    """`_version` identifies the files' states, so that a changed model is another cache entry."""
    return _digest_files(path)


def _digest_files(model_path: str) -> str:
    """The digest of a folder or URL."""
    fs, root = open_url(model_path, "model.path")
    with storage_errors(model_path, "model.path"):
        require_listable(fs, root)
    files = sorted(fs.find(root))
    if fs.isfile(root):
        folder, _, name = model_path.rpartition("/")
        hint = f"; did you mean '{folder}'?" if name.endswith((*_MODEL_FILES, ".safetensors")) and folder else ""
        raise UserError(f"{model_path}: is a file, expected a model folder (model.path){hint}")
    if not files and fs.exists(root):
        raise UserError(f"{model_path}: is empty, expected a model folder (model.path)")
    if not files:
        raise UserError(_no_such_model(model_path))
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


def files_version(model: ModelSection) -> str:
    """A value that changes when one of the model's files changes: the sizes, times and similar fields of a listing.

    It is the cache key of what a process makes from the files. No file is read, and no request is sent to the hub: the
    version of a hub model is its snapshot in this machine's cache.
    """
    if is_hub_name(model.path):
        from huggingface_hub import try_to_load_from_cache

        return str(try_to_load_from_cache(model.path, "config.json", revision=model.revision))
    return _hash_states(_file_states(model.path))


# transformers 5.19 refuses to write some of the first that it reads. Servers read the others of a multimodal model.
_COPIED_FILES = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def reject_unindexed_copy(model: ModelSection, folder: Path) -> None:
    """Raise if Mistral's own copy of the weights is beside a model without an index.

    vLLM 0.32 reads the files that the index names; without an index it reads all, so it would mix the two.

    Args:
        folder: with the model's files. Nothing is checked if there is none.
    Raises:
        UserError: naming the copy.
    """
    copies = sorted(path.name for path in folder.glob(f"{_MISTRAL_COPY}*.safetensors"))
    if copies and not (folder / INDEX).exists():
        raise UserError(
            f"{model.path}: holds {copies[0]} and no {INDEX}, so vLLM would read both copies of the weights; move "
            f"{copies[0]} to another folder, or set model.engine to hf"
        )


def copy_other_configs(model: ModelSection, folder: Path) -> None:
    """Copy those configs of the base model that are not written with the weights and the tokenizer.

    Those that it lacks are removed: transformers 5.19 writes a generation_config.json with every model, and with an
    empty one no end token of config.json would count.
    """
    source = Path(local_folder(model, weights=False))
    for name in _COPIED_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
        else:
            (folder / name).unlink(missing_ok=True)


def read_license(model: ModelSection) -> str | None:
    """The license that the card in a model's folder (README.md) names, as the hub spells it.

    None if it names none, or for a hub model, whose card is not downloaded.
    """
    if is_hub_name(model.path):
        return None
    fs, root = open_url(model.path, "model.path")
    try:
        with storage_errors(model.path, "model.path"):
            card = fs.cat_file(f"{root}/README.md").decode(errors="replace")
        # The metadata is YAML between two lines of ---, if the card has any.
        parts = card.split("---\n", 2)
        metadata = parse_value(parts[1]) if len(parts) == 3 and not parts[0] else None
    except (UserError, ValueError):
        return None  # no card, or none that can be read: a report does not need it
    license = metadata.get("license") if isinstance(metadata, dict) else None
    return license if isinstance(license, str) else None


def _endings(*, weights: bool) -> tuple[str, ...]:
    """Endings of the files of a model that are used: many repositories hold the weights in other formats too."""
    return (*_MODEL_FILES, ".safetensors") if weights else _MODEL_FILES


def _file_states(path: str) -> dict[str, dict[str, Any]]:
    """The entry of each of the model's files in a listing of its folder or URL."""
    fs, root = open_url(path, "model.path")
    with storage_errors(path, "model.path"):
        require_listable(fs, root)
        fs.invalidate_cache(root)
        found = fs.find(root, detail=True)
        states = {}
        for file, state in found.items():
            if file.endswith(_endings(weights=True)):
                # fsspec 2026.9 lists the time of a link, not of its file.
                states[file] = fs.info(file) if state.get("islink") else state
    return states


def _hash_states(states: dict[str, dict[str, Any]]) -> str:
    return hashlib.sha256(repr(sorted(states.items())).encode()).hexdigest()


def _copy_of_url(model: ModelSection, *, weights: bool) -> Path:
    """The local copy, named by its digest, so that a changed model is copied again. One process of a machine copies."""
    copies = user_folder("models")
    digest = model_digest(model)
    whole, without_weights = copies / digest, copies / f"{digest}-without-weights"
    copy = whole if weights else without_weights
    with locked(copies / f"{digest}.lock"):
        if whole.exists():
            return whole
        if copy.exists():
            return copy
        # Renamed only when complete, so that a copy is never half a model. The lock shows that nobody writes to one
        # that exists: its process died.
        partial = copies / f"{digest}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        fs, root = open_url(model.path, "model.path")
        for path in fs.find(root):
            name = path[len(root) :].lstrip("/")
            if name.endswith(_endings(weights=weights)) and not name.startswith(_MISTRAL_COPY):
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                fs.get_file(path, str(partial / name))
        partial.rename(copy)
    return copy


def _no_such_model(path: str) -> str:
    otherwise = "" if "/" in path else "; a model of the hub is OWNER/NAME"
    return no_such_folder(path, "model folder (model.path)", otherwise=otherwise)


def _no_hub_name(path: str, error: ValueError) -> str:
    """The message for a path that is no folder and, as the error says, breaks the rules of the hub's names."""
    rule = str(error).removesuffix(f": '{path}'.")
    found = re.fullmatch("([^@:/]+/[^@:/]+)[@:]([^/].*)", path)
    hint = f"; for a revision, set model.path={found[1]} and model.revision={found[2]}" if found else ""
    return f"{path}: neither a folder nor OWNER/NAME of a model on the hub ({rule}) (model.path){hint}"


def _hub_snapshot(model: ModelSection, patterns: list[str]) -> str:
    """The local folder, named after the commit, that holds these files of a hub model."""
    # Imported here: only hub names need it.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    unavailable = f"{model.path}: neither a folder nor a model that the hub provides (model.path)"
    times_out = not constants.HF_HUB_OFFLINE and _times_out(constants.ENDPOINT)
    try:
        return snapshot_download(
            model.path,
            revision=model.revision,
            allow_patterns=patterns,
            ignore_patterns=[f"{_MISTRAL_COPY}*"],
            local_files_only=times_out,
        )
    except HFValidationError as error:
        raise UserError(_no_hub_name(model.path, error)) from None
    except LocalEntryNotFoundError as error:
        # Without a connection, the hub's library reports that nothing is cached.
        if times_out:
            why = f"{constants.ENDPOINT} does not answer, and the model is not in the cache of this machine"
        elif constants.HF_HUB_OFFLINE or isinstance(error.__cause__, HfHubHTTPError):
            why = error_text(error)
        else:
            why = f"{constants.ENDPOINT} cannot be reached ({error.__cause__}); check the path, or the network"
        raise TransientError(f"{unavailable}: {why}") from None
    except (HfHubHTTPError, OSError) as error:
        if _is_disk_error(error):
            raise UserError(
                f"{model.path}: cannot be stored in {constants.HF_HUB_CACHE}: {error_text(error)}{fix_hint(error)}"
            ) from None
        # A server that is overloaded, or a download that broke off, is not the user's fault.
        kind = UserError if is_permanent(error) else TransientError
        raise kind(f"{unavailable}: {error_text(error)}") from None


# A disk that cannot be written, and something else where a folder should be.
_CACHE_ERRORS = (errno.EROFS, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


def _is_disk_error(error: Exception) -> bool:
    """Whether the folder that models are downloaded to cannot be used."""
    is_permission_error = isinstance(error, PermissionError) and error.filename is not None
    return is_permission_error or disk_is_full(error) or getattr(error, "errno", None) in _CACHE_ERRORS


def _times_out(address: str) -> bool:
    """Whether a server does not answer in time, as behind a firewall. huggingface_hub 2.4 itself waits without end."""
    try:
        require_answer(address, _HUB_SECONDS)
    except TimeoutError:
        return True
    except (OSError, ValueError):
        return False  # the hub's library says what is wrong with the address or the connection
    return False


def is_hub_name(path: str) -> bool:
    """Whether a path can be OWNER/NAME on the hub. A folder of this name on this machine takes precedence."""
    return looks_like_hub_name(path) and not os.path.exists(path)
