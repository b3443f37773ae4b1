"""What a job takes along to a cluster: this project and one recipe. Nothing else leaves the machine.

Secrets, data sets, environments, results and git's own files stay here: only some folders are searched, only files of
some kinds are taken, none whose name is that of a secret, and a file that holds a key is refused.
"""

import fnmatch
import shutil
from collections.abc import Iterator
from pathlib import Path

from pos2distill.errors import UserError
from pos2distill.secrets import holds_key, looks_secret

PROJECT = Path(__file__).parents[2]
TAKEN = ("run.py", "pyproject.toml", "pos2distill", "pipelines", "examples")
MAX_BYTES = 100 * 2**20

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
# Of files that are no code. `*token*` would leave tokenizers behind.
_SECRET_NAMES = (
    *("*secret*", "*credential*", "*passw*", "kubeconfig*", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
    *("token.*", "*_token.*", "*-token.*", "tokens.*", "*service?account*", "*serviceaccount*"),
    *("*key.*", "*keys.*", "*private?key*", "*api?key*", "kaggle.*", "*netrc*"),
)
_READ_BYTES = 2**20  # of a file, that are searched for a key: what is longer is data
_LEFT_FOLDERS = ("__pycache__", "runs", "wandb", "mlruns", "venv", "env", "node_modules")


def packed_files(project: Path = PROJECT) -> list[Path]:
    """The files that go, relative to the project, sorted. Links are not followed."""
    return sorted(path.relative_to(project) for name in TAKEN for path in _walk(project / name))


def pack(into: Path, files: list[Path], recipe: Path | None, project: Path = PROJECT) -> None:
    """Copy the files into a folder, and a recipe of the user's own beside `run.py`.

    Raises:
        UserError: if they are too many bytes, or a secret stands in one.
    """
    sizes = {path: (project / path).stat().st_size for path in files}
    if sum(sizes.values()) > MAX_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        raise UserError(
            f"{largest}: {sizes[largest] / 2**20:.0f} MiB; a job takes {MAX_BYTES / 2**20:.0f} MiB at most with it; "
            f"put data and models where the cluster reads them, and give a URL"
        )
    for path in files:
        if path.suffix not in (".gz", ".safetensors") and holds_key(_read(project / path)):
            raise UserError(f"{path}: holds what looks like a secret; take it out, since this file goes with the job")
        (into / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(project / path, into / path)
    if recipe:
        for number, line in enumerate(recipe.read_text().splitlines(), 1):
            if looks_secret(line):
                raise UserError(
                    f"{recipe}: line {number} holds what looks like a secret; give it to the cluster's nodes"
                )
        shutil.copyfile(recipe, into / recipe.name)


def is_packed(path: str, files: list[Path]) -> bool:
    """Whether a path of a setting, relative to the project, is that of a packed file or folder."""
    wanted = Path(path)
    return any(file == wanted or wanted in file.parents for file in files) and wanted != Path()


def _walk(path: Path) -> Iterator[Path]:
    if path.is_symlink():
        return
    if path.is_dir():
        for inner in path.iterdir():
            if not inner.name.startswith(".") and inner.name.lower() not in _LEFT_FOLDERS:
                yield from _walk(inner)
    elif path.is_file() and path.suffix in _KINDS and not _is_secret(path):
        yield path


def _read(path: Path) -> str:
    with open(path, "rb") as file:
        return file.read(_READ_BYTES).decode(errors="replace")


def _is_secret(path: Path) -> bool:
    name = path.name.lower()
    return path.suffix != ".py" and any(fnmatch.fnmatchcase(name, pattern) for pattern in _SECRET_NAMES)
