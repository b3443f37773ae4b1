"""Models of the hub are checked on the machine that downloads them, before they are first loaded there."""

import hashlib
from pathlib import Path

from pos2distill.config import ModelSection
from pos2distill.models.check import check_weights_in
from pos2distill.models.files import is_hub_name, local_folder
from pos2distill.scratch import locked, user_folder


def checked_folder(model: ModelSection) -> str:
    """The model's folder on this machine (`local_folder`); `check_weights` checks the files of a hub model first.

    Folders and URLs are checked before a run starts, and not again. One process of a machine checks a
    snapshot, and an empty file in the user's temporary folder records that it is valid.

    Raises:
        UserError: see `local_folder` and `check_weights`.
    """
    folder = local_folder(model)
    if not is_hub_name(model.path):
        return folder
    valid = user_folder("checked-models") / _identity(folder)
    with locked(valid.with_suffix(".lock")):
        if not valid.exists():
            check_weights_in(folder, model)
            valid.touch()
    return folder


def _identity(folder: str) -> str:
    """A digest of the files that are checked, so that changed ones are checked again."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.suffix in (".json", ".safetensors"):
            status = path.stat()  # follows links: a snapshot consists of links
            digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:32]
