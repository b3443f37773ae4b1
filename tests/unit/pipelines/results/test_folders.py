"""The folders `report`, `evaluation` and `analysis`: results of other settings are kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.results.folders import read_index, write_folder


def write(storage: Path, text: str, **content: Any) -> None:
    write_folder(str(storage), "evaluation", {"index.html": text.encode()}, "summary.json", content)


def pages(storage: Path) -> dict[str, str]:
    return {path.parent.name: path.read_text() for path in storage.glob("*/index.html")}


def test_write_folder_keeps_results_of_other_settings(tmp_path: Path) -> None:
    write(tmp_path, "a", base={"fingerprint": "a"})
    write(tmp_path, "a again", base={"fingerprint": "a"})
    assert pages(tmp_path) == {"evaluation": "a again"}
    # The same base model, and now its checkpoint too.
    write(tmp_path, "a and b", base={"fingerprint": "a"}, distilled={"fingerprint": "b"})
    assert pages(tmp_path) == {"evaluation": "a and b"}
    write(tmp_path, "c", base={"fingerprint": "c"})
    assert pages(tmp_path) == {"evaluation": "c", "evaluation-b": "a and b"}
    assert json.loads((tmp_path / "evaluation-b" / "summary.json").read_text())["distilled"] == {"fingerprint": "b"}
    # Back to the first settings: each result is there once.
    write(tmp_path, "a and b again", base={"fingerprint": "a"}, distilled={"fingerprint": "b"})
    assert pages(tmp_path) == {"evaluation": "a and b again", "evaluation-c": "c"}


def test_write_folder_leaves_no_kept_copy_of_what_it_shows(tmp_path: Path) -> None:
    """Also where the folder shows a part of it, such as the base model without its checkpoint."""
    write(tmp_path, "a and b", base={"fingerprint": "a"}, distilled={"fingerprint": "b"})
    write(tmp_path, "a", base={"fingerprint": "a"})
    assert pages(tmp_path) == {"evaluation": "a", "evaluation-b": "a and b"}
    write(tmp_path, "a and b again", base={"fingerprint": "a"}, distilled={"fingerprint": "b"})
    assert pages(tmp_path) == {"evaluation": "a and b again"}


def test_write_folder_of_a_report_compares_its_own_fingerprint(tmp_path: Path) -> None:
    write(tmp_path, "1", fingerprint="1e", base={"mean": 0.5})
    write(tmp_path, "2", fingerprint="2f", base={"mean": 0.5})
    assert pages(tmp_path) == {"evaluation": "2", "evaluation-1e": "1"}


@pytest.mark.parametrize(
    "content",
    [
        '{"fingerprint": "../../x"}',
        '{"fingerprint": "a/../../x"}',
        '{"fingerprint": ""}',
        '{"base": {"fingerprint": "a"}, "distilled": {"fingerprint": "/../../x"}}',
    ],
)
def test_write_folder_names_no_folder_by_what_is_no_fingerprint(tmp_path: Path, content: str) -> None:
    storage = tmp_path / "storage"
    (storage / "evaluation").mkdir(parents=True)
    (storage / "evaluation" / "summary.json").write_text(content)
    write(storage, "new", base={"fingerprint": "a"})
    assert pages(storage) == {"evaluation": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["storage"]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"base": 3}'])
def test_write_folder_overwrites_a_damaged_one(tmp_path: Path, content: str) -> None:
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "summary.json").write_text(content)
    write(tmp_path, "new", base={"fingerprint": "a"})
    assert pages(tmp_path) == {"evaluation": "new"}
    assert read_index(str(tmp_path), "evaluation", "summary.json") == {"base": {"fingerprint": "a"}}
