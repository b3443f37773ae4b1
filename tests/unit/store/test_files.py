import os
from pathlib import Path
from typing import Any

import fsspec
import pytest

from pos2distill.store.files import write_bytes
from tests.support.stores import make_samples, open_store


def test_write_bytes_leaves_nothing_after_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path))
    store.append(make_samples("a"))

    def crash(*paths: Any) -> None:
        raise OSError("the machine went down")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="went down"):
        store.append(make_samples("b"))
    assert store.index(["a", "b"]).stored.tolist() == [True, False]
    assert len(list(Path(store.folder).iterdir())) == 1


def test_write_bytes_replaces_the_whole_file(storage: str) -> None:
    fs, path = fsspec.url_to_fs(f"{storage}/file")
    fs.makedirs(fs._parent(path), exist_ok=True)
    write_bytes(fs, path, b"a long first content")
    write_bytes(fs, path, b"short")
    assert fs.cat_file(path) == b"short"
    assert [entry.rsplit("/", 1)[-1] for entry in fs.ls(fs._parent(path), detail=False)] == ["file"]
