import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem

from pos2distill.literal_paths import download, list_matching, move, remove
from tests.support.paths import ODD_NAME

NEIGHBOR = "a1-b"  # which ODD_NAME matches, taken for a pattern


class Opened:
    """A folder of an odd name, and beside it a folder that the name would match as a pattern."""

    def __init__(self, storage: str) -> None:
        self.fs, self.path = fsspec.url_to_fs(storage)
        self.neighbor = f"{self.path.rpartition('/')[0]}/{NEIGHBOR}"
        self.write(self.path, "part-2", "part-1", "part", "x-1/part-1", "x-1/part-2", "x-2/part-1", "x-1/y/part-1")
        self.write(self.neighbor, "part-9", "x-9/part-9")

    def write(self, folder: str, *names: str) -> None:
        for name in names:
            self.fs.makedirs(f"{folder}/{name}".rpartition("/")[0], exist_ok=True)
            self.fs.pipe_file(f"{folder}/{name}", name.encode())

    def matching(self, pattern: str, **options: Any) -> list[str]:
        found = list_matching(self.fs, self.path, pattern, **options)
        assert all(path.startswith(f"{self.path}/") for path in found)
        return [path.removeprefix(f"{self.path}/") for path in found]


@pytest.fixture
def opened(storage: str) -> Opened:
    assert storage.endswith(ODD_NAME)
    return Opened(storage)


def test_list_matching_reads_the_folder_literally_and_the_names_as_a_pattern(opened: Opened) -> None:
    assert opened.matching("part-*") == ["part-1", "part-2"]
    assert opened.matching("*/part-1") == ["x-1/part-1", "x-2/part-1"]
    assert opened.matching("x-1/part-*") == ["x-1/part-1", "x-1/part-2"]
    assert opened.matching("x-[2-9]/*") == ["x-2/part-1"]
    assert opened.matching("y*") == []
    assert list_matching(opened.fs, f"{opened.path}/nothing", "*") == []
    assert list_matching(opened.fs, f"{opened.path}/part", "*") == []  # a file


def test_list_matching_with_folders(opened: Opened) -> None:
    assert opened.matching("x-*") == []
    assert opened.matching("x-*", with_folders=True) == ["x-1", "x-2"]
    assert opened.matching("*", with_folders=True) == ["part", "part-1", "part-2", "x-1", "x-2"]
    assert opened.matching("*/*", with_folders=True) == ["x-1/part-1", "x-1/part-2", "x-1/y", "x-2/part-1"]


def test_list_matching_sees_what_was_written_since(opened: Opened) -> None:
    opened.matching("part-*")
    opened.write(opened.path, "part-3")
    assert opened.matching("part-*") == ["part-1", "part-2", "part-3"]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """`refuse(folder, error)`: from now on, listing this folder fails with this `errno`."""
    scandir = os.scandir

    def apply(folder: Path, error: int) -> None:
        def fail(path: str) -> Any:
            if Path(path) == folder:
                raise OSError(error, os.strerror(error), path)
            return scandir(path)

        monkeypatch.setattr(os, "scandir", fail)

    return apply


@pytest.mark.parametrize("pattern", ["part-*", "*/part-*"])
@pytest.mark.parametrize("error", [errno.ESTALE, errno.EACCES])
def test_list_matching_raises_for_a_folder_that_cannot_be_listed(
    tmp_path: Path, refuse: Callable[[Path, int], None], pattern: str, error: int
) -> None:
    """Otherwise it would be as if nothing had been stored, for as long as a mount is stale."""
    (tmp_path / "part-1").touch()
    fs = fsspec.filesystem("file")
    refuse(tmp_path, error)
    with pytest.raises(OSError, match=re.escape(os.strerror(error))):
        list_matching(fs, str(tmp_path), pattern)


def test_list_matching_follows_links_to_folders_and_leaves_out_those_to_themselves(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").touch()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    found = list_matching(fsspec.filesystem("file"), str(tmp_path), "*/manifest.json")
    assert found == [str(tmp_path / name / "manifest.json") for name in ("link", "run")]


def test_list_matching_leaves_out_inner_folders_that_may_not_be_read_or_are_gone(
    tmp_path: Path, refuse: Callable[[Path, int], None]
) -> None:
    fs = fsspec.filesystem("file")
    for name in ("run", "lost+found"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    found = str(tmp_path / "run" / "manifest.json")
    for error in (errno.EACCES, errno.ENOENT):
        refuse(tmp_path / "lost+found", error)
        assert list_matching(fs, str(tmp_path), "*/manifest.json") == [found]
    refuse(tmp_path / "lost+found", errno.ESTALE)
    with pytest.raises(OSError, match="Stale"):
        list_matching(fs, str(tmp_path), "*/manifest.json")


def test_remove_leaves_what_a_pattern_would_match(opened: Opened) -> None:
    remove(opened.fs, f"{opened.path}/part")
    remove(opened.fs, f"{opened.path}/x-1")
    assert opened.matching("*", with_folders=True) == ["part-1", "part-2", "x-2"]
    remove(opened.fs, opened.path)
    assert not opened.fs.exists(opened.path)
    assert list_matching(opened.fs, opened.neighbor, "*", with_folders=True) != []
    with pytest.raises(FileNotFoundError):
        remove(opened.fs, opened.path)


def test_move_of_a_folder_and_of_a_file(opened: Opened) -> None:
    move(opened.fs, f"{opened.path}/x-1", f"{opened.path}/z")
    assert opened.matching("*/*") == ["x-2/part-1", "z/part-1", "z/part-2"]
    assert opened.fs.cat_file(f"{opened.path}/z/y/part-1") == b"x-1/y/part-1"
    move(opened.fs, f"{opened.path}/part-1", f"{opened.path}/z/part-7")
    assert opened.matching("z/*") == ["z/part-1", "z/part-2", "z/part-7"]
    assert opened.matching("part-*") == ["part-2"]
    with pytest.raises(FileNotFoundError):
        move(opened.fs, f"{opened.path}/part-1", f"{opened.path}/part-8")


def test_download_copies_the_whole_folder(opened: Opened, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    download(opened.fs, opened.path, copy)
    files = {str(path.relative_to(copy)): path.read_text() for path in copy.rglob("*") if path.is_file()}
    assert set(files) == {"part", "part-1", "part-2", "x-1/part-1", "x-1/part-2", "x-2/part-1", "x-1/y/part-1"}
    assert all(name == text for name, text in files.items())
    with pytest.raises(FileNotFoundError):
        download(opened.fs, f"{opened.path}/nothing", tmp_path / "none")


class Bucket(AsyncFileSystem):  # type: ignore[misc]  # untyped
    """An object store that lists what begins with a prefix in one request, as S3 does, and may be busy."""

    protocol = "bucket"
    cachable = False

    def __init__(self, *keys: str) -> None:
        super().__init__()
        self.keys = set(keys)
        self.requests: list[str] = []
        self.busy_folders: set[str] = set()

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        if path in self.busy_folders:
            raise OSError(errno.EBUSY, "Please reduce your request rate.")
        self.requests.append(f"list {path}/")
        inside = {key.removeprefix(f"{path}/") for key in self.keys if key.startswith(f"{path}/")}
        if not inside:
            raise FileNotFoundError(path)
        kinds = {rest.split("/")[0]: "directory" if "/" in rest else "file" for rest in sorted(inside)}
        return [{"name": f"{path}/{name}", "type": kind, "size": 0} for name, kind in kinds.items()]

    async def _find(self, path: str, **_: Any) -> list[str]:
        self.requests.append(f"list {path}")
        return sorted(key for key in self.keys if key == path or key.startswith(f"{path}/"))

    async def _rm_file(self, path: str, **_: Any) -> None:
        self.requests.append(f"delete {path}")
        self.keys.remove(path)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.requests.append(f"forget {path}")


def test_list_matching_asks_an_object_store_for_the_folders_that_can_match() -> None:
    bucket = Bucket("b/[1]/x-1/part-1", "b/[1]/x-1/y/part-2", "b/[1]/z/part-3", "b/[1]/x-file", "b/1/x-1/part-4")
    assert list_matching(bucket, "b/[1]", "x-*/part-*") == ["b/[1]/x-1/part-1"]
    assert bucket.requests == ["forget b/[1]", "list b/[1]/", "forget b/[1]/x-1", "list b/[1]/x-1/"]


@pytest.mark.parametrize("busy", ["b", "b/x"])
@pytest.mark.parametrize("pattern", ["*/part-*", "x/*"])
def test_list_matching_raises_if_an_object_store_is_busy(busy: str, pattern: str) -> None:
    bucket = Bucket("b/x/part-1")
    assert list_matching(bucket, "b", pattern) == ["b/x/part-1"]
    bucket.busy_folders = {busy}
    with pytest.raises(OSError, match="reduce your request rate"):
        list_matching(bucket, "b", pattern)


def test_remove_asks_an_object_store_for_the_folder_alone() -> None:
    bucket = Bucket("b/[1]/x/1", "b/[1]/x/2", "b/1/x/3")
    remove(bucket, "b/[1]/x")
    assert bucket.keys == {"b/1/x/3"}
    assert bucket.requests == ["list b/[1]/x", "delete b/[1]/x/1", "delete b/[1]/x/2"]
