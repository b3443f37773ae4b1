from pathlib import Path

import fsspec
import pytest

from pos2distill.errors import UserError
from pos2distill.store.artifacts import Artifact
from pos2distill.store.storage import check_storage, claim_storage, probe_storage, release_storage


def test_claim_storage_rejects_another_recipe(storage: str) -> None:
    claim_storage(storage, "mine")
    claim_storage(storage, "mine")
    with pytest.raises(UserError) as caught:
        claim_storage(storage, "yours")
    assert str(caught.value) == (
        f"{storage}: holds the run of recipe 'mine', not 'yours'; choose another runtime.storage"
    )


def test_release_storage_frees_a_folder_without_artifacts_only(storage: str) -> None:
    fs, path = fsspec.url_to_fs(storage)
    claim_storage(storage, "mine")
    fs.pipe_file(f"{path}/driver.json", b"{}")  # the lease of the driver that releases the storage
    release_storage(storage)
    claim_storage(storage, "yours")
    artifact = Artifact(storage, "samples", "aaaa")
    with artifact.writing():
        artifact.publish(counts={}, seconds={})
    release_storage(storage)
    assert check_storage(storage, "yours")


def test_check_storage_does_not_claim(storage: str) -> None:
    assert not check_storage(storage, "mine")
    claim_storage(storage, "yours")
    with pytest.raises(UserError, match="holds the run of recipe 'yours', not 'mine'"):
        check_storage(storage, "mine")


def test_claim_storage_rejects_a_folder_with_foreign_files(storage: str) -> None:
    fs, path = fsspec.url_to_fs(storage)
    fs.makedirs(path)
    claim_storage(storage, "mine")  # empty, so it can be claimed
    fs.rm_file(f"{path}/run.json")
    fs.pipe_file(f"{path}/thesis.tex", b"years of work")
    with pytest.raises(UserError, match=r"is not empty and holds no run \(no run.json\); choose another"):
        claim_storage(storage, "mine")
    assert fs.cat_file(f"{path}/thesis.tex") == b"years of work"
    with pytest.raises(UserError, match=r"thesis.tex: is a file, expected a folder \(runtime.storage\)$"):
        claim_storage(f"{storage}/thesis.tex", "mine")


def test_claim_storage_takes_what_is_left_of_a_probe_for_nothing(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a first try with rights to write and none to delete."""
    fs, path = fsspec.url_to_fs(storage)
    fs.makedirs(path)

    def refuse(*_args: object) -> None:
        raise PermissionError(13, "Access Denied")

    with monkeypatch.context() as rights:
        rights.setattr(type(fs), "rm_file", refuse)
        with pytest.raises(PermissionError):
            probe_storage(fs, path)
    assert not check_storage(storage, "mine")
    claim_storage(storage, "mine")


def test_claim_storage_reports_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"/file/run: cannot be used \(Not a directory\) \(runtime.storage\); a part of"
    ):
        claim_storage(f"{tmp_path}/file/run", "mine")


def test_claim_storage_reports_a_corrupt_run_file(storage: str) -> None:
    claim_storage(storage, "mine")
    fs, path = fsspec.url_to_fs(storage)
    fs.pipe_file(f"{path}/run.json", b"")
    with pytest.raises(UserError, match=r"corrupt run.json \(.+\); choose another runtime.storage"):
        claim_storage(storage, "mine")


@pytest.mark.parametrize("name", ["run.json.0123abcd.partial", "driver.json.0123abcd.partial", "driver.json"])
def test_claim_storage_of_a_folder_in_which_a_run_is_about_to_start(tmp_path: Path, name: str) -> None:
    """Or in which one was killed then."""
    (tmp_path / name).write_text("{")
    assert claim_storage(str(tmp_path), "mine") is False
    assert check_storage(str(tmp_path), "mine")


def test_claim_storage_rejects_a_folder_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "run.json.bak").write_text("{}")
    with pytest.raises(UserError, match="is not empty and holds no run"):
        claim_storage(str(tmp_path), "mine")
