import fcntl
import os
import stat
import tempfile
from pathlib import Path

import pytest

from pos2distill.errors import UserError
from pos2distill.scratch import locked, user_folder


@pytest.fixture(autouse=True)
def own_tempdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_user_folder_is_closed_to_others() -> None:
    folder = user_folder("models")
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert user_folder("models") == folder


def test_user_folder_rejects_a_folder_that_others_may_use(tmp_path: Path) -> None:
    (tmp_path / f"pos2distill-{os.getuid()}").mkdir()
    (tmp_path / f"pos2distill-{os.getuid()}").chmod(0o770)
    with pytest.raises(UserError, match=r"expected a folder that only you can use \(mode 0700\); remove it, or set"):
        user_folder("models")


def test_user_folder_rejects_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"pos2distill-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="expected a folder that only you can use"):
        user_folder("models")


def test_user_folder_rejects_a_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.getuid()
    (tmp_path / f"pos2distill-{user + 1}").mkdir(mode=0o700)  # made by this user, not by the next one
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(UserError, match="expected a folder that only you can use"):
        user_folder("models")


def test_locked_is_released_though_a_forked_process_still_runs(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    reader, writer = os.pipe()
    with locked(path):
        child = os.fork()
        if not child:
            os.close(writer)
            os.read(reader, 1)  # returns once the parent closes its end
            os._exit(0)
    try:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(child, 0)
