"""Folders of a storage that hold the newest results for people: `report`, `evaluation`, `analysis`.

Each has one JSON file that names the fingerprints of what it shows. A folder that shows results of other settings is
not overwritten: it is kept as `NAME-FINGERPRINT`.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from pos2distill.literal_paths import make_folder, move, remove
from pos2distill.store.files import write_bytes, write_json
from pos2distill.urls import open_url, storage_errors

REPORT_FOLDER, EVALUATION_FOLDER, ANALYSIS_FOLDER = "report", "evaluation", "analysis"
SUMMARY = "summary.json"  # of the first two
MODELS = ("base", "distilled")


def page_url(storage: str, name: str) -> str:
    """The page in a folder."""
    return f"{storage}/{name}/index.html"


def has_page(storage: str, name: str) -> bool:
    """Whether the page in a folder is there."""
    fs, path = open_url(page_url(storage, name), "runtime.storage")
    with storage_errors(storage, "runtime.storage"):
        return bool(fs.exists(path))


def write_folder(storage: str, name: str, files: Mapping[str, bytes], index: str, content: Mapping[str, Any]) -> None:
    """Write a folder of a storage, and first keep the one that shows other results.

    Args:
        files: content by file name, which may contain a folder.
        index: the name of the JSON file.
        content: its content.
    """
    fs, root = open_url(storage, "runtime.storage")
    with storage_errors(storage, "runtime.storage"):
        _keep_other(storage, name, index, content)
        make_folder(fs, f"{root}/{name}")
        for file, data in files.items():
            path = f"{root}/{name}/{file}"
            make_folder(fs, path.rpartition("/")[0])
            write_bytes(fs, path, data)
        # Last, since its fingerprints say that the folder is complete.
        write_json(fs, f"{root}/{name}/{index}", content)


def read_index(storage: str, name: str, index: str) -> dict[str, Any] | None:
    """The content of a folder's JSON file; None if there is none, or it is corrupt and so will be written again."""
    fs, path = open_url(f"{storage}/{name}/{index}", "runtime.storage")
    if not fs.exists(path):
        return None
    with storage_errors(storage, "runtime.storage"):
        try:
            content = json.loads(fs.cat_file(path))
        except (ValueError, RecursionError):
            return None
    return content if isinstance(content, dict) else None


def _keep_other(storage: str, name: str, index: str, content: Mapping[str, Any]) -> None:
    """Move the folder that shows other results out of the way. One that shows a part of the new results is replaced."""
    shown = _fingerprints(read_index(storage, name, index) or {})
    new = _fingerprints(content)
    fs, root = open_url(storage, "runtime.storage")
    if not shown.items() <= new.items():
        _move(fs, f"{root}/{name}", f"{root}/{name}-{_last(shown)}")
    # The new results are written to NAME, so that a copy of them from before would be there twice.
    if new and fs.exists(f"{root}/{name}-{_last(new)}"):
        remove(fs, f"{root}/{name}-{_last(new)}")


def _move(fs: Any, source: str, target: str) -> None:
    if fs.exists(target):
        remove(fs, target)  # moved into it, the folder would be one level too deep
    move(fs, source, target)


def _fingerprints(content: Mapping[str, Any]) -> dict[str, str]:
    """The fingerprint of the report, or those of each model's results; none if one is not a hexadecimal number."""
    found = {}
    if isinstance(content.get("fingerprint"), str):
        found["all"] = content["fingerprint"]
    for model in MODELS:
        results = content.get(model)
        if "all" not in found and isinstance(results, Mapping) and isinstance(results.get("fingerprint"), str):
            found[model] = results["fingerprint"]
    # They become names of folders. A file with other ones is corrupt.
    if all(re.fullmatch("[0-9a-f]+", fingerprint) for fingerprint in found.values()):
        return found
    return {}


def _last(fingerprints: Mapping[str, str]) -> str:
    return list(fingerprints.values())[-1]
