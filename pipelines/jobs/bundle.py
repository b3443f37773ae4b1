"""What a job uploads to a cluster: this project and one recipe. Nothing else leaves the machine.

Secrets, data sets, environments, results and git's own files stay here: only some folders are searched, only files of
some kinds are taken, none whose name is that of a secret, and a file that contains a secret is rejected.
"""

import fnmatch
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

from pos2distill.config.paths import project_root
from pos2distill.errors import UserError
from pos2distill.secrets import file_holds_secret, first_secret_line
from pos2distill.tasks.data_files import data_files

PROJECT = project_root()
TAKEN = ("run.py", "pyproject.toml", "pos2distill", "pipelines", "examples")
MAX_BYTES = 100 * 2**20

# Included kinds instead of excluded ones, so that an unknown kind of file stays on this machine.
_KINDS = (
    ".py",
    ".yaml",
    ".yml",
    ".json",
    ".jinja",
    ".j2",
    ".toml",
    ".md",
    ".txt",
    ".gz",
    ".jsonl",
    ".safetensors",
    ".typed",
)
# Names of files, other than code. `*token*` would also exclude tokenizers.
_SECRET_NAMES = (
    "*secret*",
    "*credential*",
    "*passw*",
    "kubeconfig*",
    "id_rsa*",
    "id_dsa*",
    "id_ecdsa*",
    "id_ed25519*",
    "token.*",
    "*_token.*",
    "*-token.*",
    "tokens.*",
    "*service?account*",
    "*serviceaccount*",
    "*key.*",
    "*keys.*",
    "*private?key*",
    "*api?key*",
    "kaggle.*",
    "*netrc*",
)
_EXCLUDED_FOLDERS = ("__pycache__", "runs", "wandb", "mlruns", "venv", "env", "node_modules")


def packed_files(project: Path = PROJECT) -> list[Path]:
    """The files to send, relative to the project, sorted. Links are not followed."""
    return sorted(path.relative_to(project) for name in TAKEN for path in _walk(project / name))


def pack(into: Path, files: list[Path], recipe: Path | None, project: Path = PROJECT) -> None:
    """Copy the files into a folder, and the user's own recipe next to `run.py`.

    Raises:
        UserError: if they are too large, or one contains a secret.
    """
    sizes = {path: (project / path).stat().st_size for path in files}
    if sum(sizes.values()) > MAX_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        raise UserError(
            f"{largest}: {sizes[largest] / 2**20:.0f} MiB; a job can send {MAX_BYTES / 2**20:.0f} MiB; "
            f"store data and models where the cluster can read them, and set a URL"
        )
    for path in files:
        try:
            is_rejected = file_holds_secret(project / path)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path}: cannot be read ({error}); repair or remove it, since this file is sent") from None
        if is_rejected:
            raise UserError(
                f"{path}: contains what looks like a secret; remove it, since this file is sent with the job"
            )
        (into / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(project / path, into / path)
    if recipe:
        number = first_secret_line(recipe.read_text(encoding="utf-8"))
        if number is not None:
            raise UserError(
                f"{recipe}: line {number} contains what looks like a secret; set it on the cluster's nodes instead"
            )
        shutil.copyfile(recipe, into / recipe.name)


def is_packed(path: str, files: list[Path], project: Path = PROJECT) -> bool:
    """Whether a path of a setting, relative to the project, is that of a file or folder that is sent.

    A pattern of data files is sent if all that it matches are.

    Raises:
        UserError: if a pattern matches nothing.
    """
    target = Path(path)
    if "*" in path:
        return all(Path(found).relative_to(project) in files for found in data_files(str(project / path)))
    # `.` is the whole project, of which only a part is sent.
    if target == Path():
        return False
    return any(file == target or target in file.parents for file in files)


def _walk(path: Path) -> Iterator[Path]:
    # A link may lead out of the project, to files that must not be sent.
    if path.is_symlink():
        return
    if path.is_dir():
        for inner in path.iterdir():
            if not inner.name.startswith(".") and inner.name.lower() not in _EXCLUDED_FOLDERS:
                yield from _walk(inner)
    elif path.is_file() and path.suffix in _KINDS and not _is_secret(path):
        yield path


def _is_secret(path: Path) -> bool:
    name = path.name.lower()
    return path.suffix != ".py" and any(fnmatch.fnmatchcase(name, pattern) for pattern in _SECRET_NAMES)
