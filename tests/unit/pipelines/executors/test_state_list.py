"""The lists of training states of both executors: what they name, and what is there."""

import errno
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipelines.executors import saved_steps, state_list
from pipelines.executors.local import LOCAL_STATES
from pipelines.executors.ray.states import RAY_STATES
from pipelines.executors.state_list import StateList
from pos2distill.errors import UserError
from pos2distill.literal_paths import list_matching, remove
from pos2distill.store.artifacts import Artifact


def local_content(steps: list[int]) -> bytes:
    return json.dumps([f"{step:08d}-a" for step in steps]).encode()


def ray_content(steps: list[int]) -> bytes:
    states = [{"checkpoint_dir_name": f"checkpoint_{step}", "metrics": {"step": step}} for step in steps]
    return json.dumps({"checkpoint_results": states, "checkpoint_report_indices": list(range(len(steps)))}).encode()


@dataclass
class Kept:
    """The states of one executor in a checkpoint."""

    states: StateList
    content: Callable[[list[int]], bytes]
    name: Callable[[int], str]
    artifact: Artifact

    @property
    def folder(self) -> str:
        return f"{self.artifact.path}/{self.states.folder}"

    @property
    def url(self) -> str:
        return f"{self.artifact.url}/{self.states.folder}"

    def save(self, *steps: int, is_whole: bool = True) -> None:
        for step in steps:
            folder = f"{self.folder}/{self.name(step)}"
            self.artifact.fs.makedirs(folder, exist_ok=True)
            self.artifact.fs.pipe_file(f"{folder}/state.json", b'{"files": {"weights.safetensors": []}}')
            if is_whole:
                self.artifact.fs.pipe_file(f"{folder}/weights.safetensors", b"x")

    def write_list(self, *steps: int) -> None:
        self.artifact.fs.makedirs(self.folder, exist_ok=True)
        self.artifact.fs.pipe_file(f"{self.folder}/{self.states.file}", self.content(list(steps)))

    def write_steps(self, *starts: int) -> None:
        """The log of steps, a file for each state that was saved."""
        folder = f"{self.artifact.path}/steps"
        self.artifact.fs.makedirs(folder, exist_ok=True)
        for start in starts:
            self.artifact.fs.pipe_file(f"{folder}/{start:08d}.jsonl", b"{}\n")

    def remove(self, *steps: int) -> None:
        for step in steps:
            remove(self.artifact.fs, f"{self.folder}/{self.name(step)}")

    def names(self) -> list[str]:
        """What is in the folder, without the list."""
        found = [path.rstrip("/").rpartition("/")[2] for path in self.artifact.fs.ls(self.folder, detail=False)]
        return sorted(name for name in found if name != self.states.file)


@pytest.fixture(params=["local", "ray"])
def kept(request: pytest.FixtureRequest, storage: str) -> Kept:
    artifact = Artifact(storage, "checkpoint", "0123")
    if request.param == "local":
        return Kept(LOCAL_STATES, local_content, lambda step: f"{step:08d}-a", artifact)
    return Kept(RAY_STATES, ray_content, lambda step: f"checkpoint_{step}", artifact)


def test_repair_and_present_without_any_state(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    kept.states.repair(kept.artifact)
    assert kept.states.present(kept.artifact) == {}
    assert capsys.readouterr().err == ""


def test_repair_removes_states_that_are_not_listed(kept: Kept) -> None:
    """Their upload was cut off, or they are older than those that are kept."""
    kept.save(3, 6, 9)
    kept.write_list(6)
    kept.states.repair(kept.artifact)
    assert kept.names() == [kept.name(6)]
    assert kept.states.present(kept.artifact) == {kept.name(6): 6}


def test_repair_removes_cut_off_states_without_a_list(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    """The first ones, whose upload was cut off before the list was written, as on a full disk."""
    kept.save(3, 6, is_whole=False)
    kept.artifact.fs.makedirs(f"{kept.folder}/{kept.name(9)}", exist_ok=True)
    kept.artifact.fs.pipe_file(f"{kept.folder}/{kept.name(9)}/state.json", b"{")
    kept.states.repair(kept.artifact)
    assert kept.names() == []
    assert capsys.readouterr().err == (
        f"warning: {kept.url}/{kept.states.file}: missing, the list of the training states beside it; training begins "
        f"again\n"
    )


def test_repair_removes_a_single_state_without_a_list(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    """The first one, saved just before the run was killed: no backup has a list of it."""
    kept.save(3)
    kept.write_steps(0)
    kept.states.repair(kept.artifact)
    assert kept.names() == []
    assert capsys.readouterr().err.endswith("; training begins again\n")


@pytest.mark.parametrize("steps", [(3, 6), (6,)], ids=["several states", "one of several"])
def test_repair_rejects_whole_states_whose_list_was_lost(kept: Kept, steps: tuple[int, ...]) -> None:
    """With `runtime.checkpoints.keep` of 1 there is a single one, but each that was saved has a file of steps."""
    kept.save(*steps)
    kept.save(9, is_whole=False)
    kept.write_steps(0, 3)
    assert kept.states.present(kept.artifact) == {}
    for _ in range(2):
        with pytest.raises(UserError) as caught:
            kept.states.repair(kept.artifact)
        assert str(caught.value) == (
            f"{kept.url}/{kept.states.file}: missing, the list of the training states beside it "
            f"({', '.join(map(kept.name, steps))}); copy it back from a backup, or remove {kept.url} to train again "
            f"from the samples"
        )
    assert kept.names() == sorted(map(kept.name, (*steps, 9)))
    kept.write_list(*steps)
    kept.states.repair(kept.artifact)
    assert kept.states.present(kept.artifact) == {kept.name(step): step for step in steps}


def test_repair_does_not_take_a_whole_state_for_a_part_of_one_while_a_mount_is_stale(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.save(3, 6)
    listed = list_matching

    def stale(fs: Any, folder: str, pattern: str, **options: Any) -> list[str]:
        if folder.endswith(kept.name(3)):
            raise OSError(errno.ESTALE, "Stale file handle")
        return listed(fs, folder, pattern, **options)

    with monkeypatch.context() as patched:
        patched.setattr(state_list, "list_matching", stale)
        with pytest.raises((OSError, UserError), match="Stale file handle"):
            kept.states.repair(kept.artifact)
    assert kept.names() == sorted([kept.name(3), kept.name(6)])


@pytest.mark.parametrize(
    ("missing", "continues"),
    [([9], "; training continues from the state at step 6"), ([6], ""), ([6, 9], "; training continues from the st")],
)
def test_repair_takes_missing_states_off_the_list(
    kept: Kept, capsys: pytest.CaptureFixture[str], missing: list[int], continues: str
) -> None:
    """Otherwise the next state that is saved would replace the only one that is left."""
    kept.save(3, 6, 9)
    kept.write_list(3, 6, 9)
    kept.remove(*missing)
    left = [step for step in (3, 6, 9) if step not in missing]
    assert list(kept.states.present(kept.artifact).values()) == left
    kept.states.repair(kept.artifact)
    names = ", ".join(kept.name(step) for step in missing)
    line = capsys.readouterr().err
    assert line.startswith(f"warning: {kept.url}/{names}: missing, but listed in {kept.states.file}{continues}")
    assert line.count("\n") == 1
    assert list(kept.states.read(kept.artifact).values()) == left
    assert kept.names() == [kept.name(step) for step in left]


def test_repair_and_present_reject_states_that_are_all_missing(kept: Kept) -> None:
    kept.save(3, 6)
    kept.write_list(3, 6)
    kept.remove(3, 6)
    for look in (kept.states.present, kept.states.repair, saved_steps):
        with pytest.raises(UserError) as caught:
            look(kept.artifact)
        assert str(caught.value) == (
            f"{kept.url}/{kept.name(6)}: missing, but listed in {kept.states.file}; remove {kept.url} to train again "
            f"from the samples"
        )
    assert list(kept.states.read(kept.artifact).values()) == [3, 6]


def test_present_looks_again_after_another_process_has_saved_a_state(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.save(3)
    kept.write_list(3)
    paths = StateList._paths

    def paths_after_a_save(states: StateList, artifact: Artifact) -> Any:
        if kept.names() == [kept.name(3)]:
            kept.save(6)
            kept.write_list(6)
            kept.remove(3)
        return paths(states, artifact)

    monkeypatch.setattr(StateList, "_paths", paths_after_a_save)
    assert kept.states.present(kept.artifact) == {kept.name(6): 6}


def test_present_is_empty_while_the_states_of_a_published_checkpoint_are_removed(kept: Kept) -> None:
    kept.save(3)
    kept.write_list(3)
    kept.artifact.publish(counts={}, seconds={})
    kept.remove(3)
    assert kept.states.present(kept.artifact) == {}


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b'["x"]', b'{"checkpoint_results": []}'])
def test_repair_and_present_name_a_corrupt_list(kept: Kept, content: bytes) -> None:
    kept.save(3)
    kept.artifact.fs.pipe_file(f"{kept.folder}/{kept.states.file}", content)
    for look in (kept.states.present, kept.states.repair):
        with pytest.raises(UserError) as caught:
            look(kept.artifact)
        assert str(caught.value) == (
            f"{kept.url}/{kept.states.file}: corrupt; remove {kept.url} to train again from the samples"
        )
    assert kept.names() == [kept.name(3)]


def test_repair_and_present_do_not_take_a_folder_that_cannot_be_listed_for_an_empty_one(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a mount or a store that is busy. Otherwise the message would say that the training must begin again."""
    kept.save(3)
    kept.write_list(3)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EBUSY, "Please reduce your request rate.")

    with monkeypatch.context() as patched:
        patched.setattr(type(kept.artifact.fs), "ls", fail)
        for look in (kept.states.present, kept.states.repair):
            with pytest.raises((OSError, UserError), match="reduce your request rate"):
                look(kept.artifact)
    assert kept.names() == [kept.name(3)]


@pytest.mark.parametrize(
    "content",
    [
        '{"checkpoint_results": [{}], "checkpoint_report_indices": [0]}',
        '{"checkpoint_results": [], "checkpoint_report_indices": [0]}',
    ],
)
def test_read_rejects_a_list_that_ray_train_could_not_read(tmp_path: Path, content: str) -> None:
    artifact = Artifact(str(tmp_path), "checkpoint", "0123")
    folder = Path(artifact.path) / "training"
    folder.mkdir(parents=True)
    (folder / "checkpoint_manager_snapshot.json").write_text(content)
    with pytest.raises(UserError, match=r"checkpoint_manager_snapshot.json: corrupt; remove .*/training to train"):
        RAY_STATES.read(artifact)
