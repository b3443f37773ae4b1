import errno
import os
import stat
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from pos2distill.store.files import allow_usual_access, sync, sync_folder, write_bytes
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


def test_sync_folder_syncs_every_file_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the operating system is asked to do: no test can cut the power."""
    (tmp_path / "inside").mkdir()
    paths = [tmp_path, tmp_path / "inside", tmp_path / "a.json", tmp_path / "inside" / "b.safetensors"]
    for path in paths[2:]:
        path.write_bytes(b"x")
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    sync_folder(tmp_path)
    assert sorted(synced) == sorted(path.stat().st_ino for path in paths)


def test_sync_raises_unless_a_file_system_does_not_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may be found to be full only now; a mounted bucket syncs nothing."""
    number = 0

    def fail(descriptor: int) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(os, "fsync", fail)
    fs = fsspec.filesystem("file")
    for number in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):  # noqa: B007  # read by `fail`
        sync([tmp_path])
        write_bytes(fs, str(tmp_path / "file"), b"content")
    number = errno.ENOSPC
    with pytest.raises(OSError, match="refused"):
        sync([tmp_path])
    with pytest.raises(OSError, match="refused"):
        write_bytes(fs, str(tmp_path / "file"), b"another")
    assert (tmp_path / "file").read_bytes() == b"content"


def test_allow_usual_access_leaves_what_the_umask_leaves(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "inside" / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    before = os.umask(0o027)
    try:
        allow_usual_access(tmp_path)
    finally:
        os.umask(before)
    rights = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_file()}
    assert rights == {"model.safetensors": 0o640, "config.json": 0o640}
