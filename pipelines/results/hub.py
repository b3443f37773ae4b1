"""A run's checkpoint on the Hugging Face hub, with its model card."""

import glob
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pos2distill.errors import UserError
from pos2distill.literal_paths import download, require_listable
from pos2distill.store.artifacts import Artifact
from pos2distill.store.checkpoint_layout import ADAPTER_FOLDER, MODEL_CARD, MODEL_FOLDER
from pos2distill.urls import storage_errors

from ..artifact_names import CHECKPOINT
from ..stages.distill import has_adapter
from .artifact_lookup import open_artifact

_TOKEN = "set HF_TOKEN, or log in with `hf auth login`"
# Files of an earlier model that would be loaded instead: vLLM 0.32 loads the weights that an index names, transformers
# 5.19 the base model that a config of adapters names.
_EARLIER = re.compile(
    r"(model|consolidated|pytorch_model|adapter_model)[^/]*\.(safetensors|bin)(\.index\.json)?|adapter_config\.json"
)


def push_checkpoint(run: str, repository: str, *, private: bool = False) -> str:
    """Upload a run's model as a commit to OWNER/NAME, which is made if it does not exist. Returns its URL.

    Weights, their indexes and adapters that are in the repository, and not in this checkpoint, are deleted there: they
    would be loaded in its place. Adapters that the checkpoint has by themselves go into the folder `adapter` there, in
    a commit of their own.

    The hub's library knows the token (HF_TOKEN or `hf auth login`) and the hub's address (HF_ENDPOINT). It uploads no
    file twice, so the same call continues after an interruption.

    Args:
        run: a storage, whose checkpoint is meant, or the path of a checkpoint's artifact.
        private: whether a repository that this call makes is private.
    Raises:
        UserError: if there is no checkpoint or several, it has no model card yet, or the hub refuses it.
    """
    # Imported here: it takes part of a second, and only this command needs it.
    from huggingface_hub import HfApi

    artifact = _pushed_checkpoint(run, repository)
    hub = HfApi()
    with _hub_errors(hub.endpoint):
        # huggingface_hub 2.4 ignores `private` for a repository that exists.
        hub.create_repo(repository, private=private or None, exist_ok=True)
        if private and not hub.repo_info(repository).private:
            raise UserError(f"{repository}: is public already; make it private on the hub, or choose another name")
    message = f"Pos2Distill, study of {artifact.fingerprint}"
    with _local_folder(artifact, MODEL_FOLDER) as folder, _hub_errors(hub.endpoint):
        # By name, since a pattern would match in folders too. What is uploaded is not deleted.
        earlier = [glob.escape(file) for file in hub.list_repo_files(repository) if _EARLIER.fullmatch(file)]
        if not has_adapter(artifact):
            earlier.append(f"{ADAPTER_FOLDER}/*")  # must not stay beside a model that has none
        commit = hub.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=message, delete_patterns=earlier
        )
    if has_adapter(artifact):
        with _local_folder(artifact, ADAPTER_FOLDER) as folder, _hub_errors(hub.endpoint):
            hub.upload_folder(
                repo_id=repository,
                folder_path=folder,
                path_in_repo=ADAPTER_FOLDER,
                commit_message=message,
                delete_patterns="*",
            )
    return str(commit.repo_url)


def files_to_push(run: str, repository: str) -> dict[str, int]:
    """The files that `push_checkpoint` would upload: their names in the repository and bytes. Asks no hub.

    Raises:
        UserError: as `push_checkpoint`, before it asks the hub.
    """
    artifact = _pushed_checkpoint(run, repository)
    # The model at the top of the repository, the adapter in its folder.
    folders = {MODEL_FOLDER: ""} | ({ADAPTER_FOLDER: f"{ADAPTER_FOLDER}/"} if has_adapter(artifact) else {})
    files: dict[str, int] = {}
    with storage_errors(artifact.url, "RUN"):
        for folder, target in folders.items():
            root = f"{artifact.path}/{folder}"
            require_listable(artifact.fs, root)
            for path, entry in sorted(artifact.fs.find(root, detail=True).items()):
                files[f"{target}{path[len(root) + 1 :]}"] = entry["size"]
    return files


def _pushed_checkpoint(run: str, repository: str) -> Artifact:
    """The checkpoint that is uploaded.

    Raises:
        UserError: if the repository's name is not OWNER/NAME, or there is no checkpoint with a model card.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, but not in its __all__

    if repository.count("/") != 1:
        raise UserError(f"{repository}: expected OWNER/NAME on the hub (it has no '/', or several)")
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(f"{repository}: expected OWNER/NAME on the hub ({str(error).rstrip('.')})") from None
    artifact = open_artifact(run, [[CHECKPOINT]], newest=False)
    if not artifact.fs.exists(f"{artifact.path}/{MODEL_FOLDER}/{MODEL_CARD}"):
        raise UserError(f"{artifact.url}: has no model card yet; run `report` with its recipe first")
    return artifact


@contextmanager
def _hub_errors(endpoint: str) -> Iterator[None]:
    """Turns what the hub refuses into one line with the likely fix."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    with storage_errors(endpoint, "HF_ENDPOINT"):
        try:
            yield
        except LocalTokenNotFoundError:
            raise UserError(f"{endpoint}: wants a token; {_TOKEN}") from None
        except HfHubHTTPError as error:
            code = error.response.status_code
            if code not in (401, 403):
                raise
            raise UserError(f"{endpoint}: refuses this token, or it may not write there ({code}); {_TOKEN}") from None


@contextmanager
def _local_folder(artifact: Artifact, name: str) -> Iterator[Path]:
    """A folder of the artifact on this machine; of another storage a copy that lasts as long as the context."""
    if artifact.is_local:
        yield Path(artifact.path) / name
        return
    with tempfile.TemporaryDirectory(prefix="pos2distill-") as temporary:
        with storage_errors(artifact.url, "RUN"):
            download(artifact.fs, f"{artifact.path}/{name}", Path(temporary))
        yield Path(temporary)
