"""The list of training states that an executor keeps beside them, and which of these states are there."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import fsspec

from pos2distill.errors import UserError, warn
from pos2distill.literal_paths import last_part, list_matching, remove
from pos2distill.store.artifacts import Artifact
from pos2distill.store.checkpoint_layout import STATE_FILE, STEPS_FOLDER, train_again_hint
from pos2distill.store.files import read_if_any, write_bytes
from pos2distill.urls import storage_errors


@dataclass(frozen=True, slots=True)
class StateList:
    """How an executor lists the training states that it has saved.

    Attributes:
        folder: the folder of the list and of the states, in the checkpoint.
        file: the name of the list.
        pattern: what the names of states match.
        parse: returns the names and steps of the states in the content of a list, the oldest first. Raises ValueError,
            KeyError or TypeError if it is corrupt.
        without: returns the content of a list without some of its states.
    """

    folder: str
    file: str
    pattern: str
    parse: Callable[[bytes], dict[str, int]]
    without: Callable[[bytes, Collection[str]], bytes]

    def is_written(self, checkpoint: Artifact) -> bool:
        """Whether there is a list."""
        return self._content(checkpoint) is not None

    def read(self, checkpoint: Artifact) -> dict[str, int]:
        """The states that are listed, the oldest first: their names and steps. Empty without a list.

        Raises:
            UserError: if the list is corrupt, with what to do.
        """
        content = self._content(checkpoint)
        return {} if content is None else self._parsed(checkpoint, content)

    def present(self, checkpoint: Artifact) -> dict[str, int]:
        """The listed states that exist, oldest first. Another process may be training.

        Raises:
            UserError: also if all listed states are missing.
        """
        listed: dict[str, int] = {}
        # Twice, since the other process may save or remove states after the list was read.
        for _ in range(2):
            listed = self.read(checkpoint)
            present = _present_among(listed, self._paths(checkpoint))
            if present or not listed:
                return present
        # Once an artifact is published, its states are removed, and the list last.
        if checkpoint.is_finished:
            return {}
        raise self._all_missing(checkpoint, listed)

    def repair(self, checkpoint: Artifact) -> None:
        """Make the list and the states agree, before a run that alone has the lease of the storage.

        States that are not listed, since their upload was cut off, are removed: they would fill the disk. Listed states
        that are missing are taken off the list, with a warning: they would count among those that are kept. Without a
        list, a run that was killed before it wrote the first one left states that were cut off and at most one whole
        one, which are removed, with a warning.

        Raises:
            UserError: if the list is corrupt or was lost, or all listed states are missing.
        """
        with storage_errors(checkpoint.url, "runtime.storage"):
            content, paths = self._content(checkpoint), self._paths(checkpoint)
            if content is None and paths:
                self._reject_lost_list(checkpoint, paths)
                warn(f"{self._missing_list(checkpoint)}; training begins again")
            listed = {} if content is None else self._parsed(checkpoint, content)
            present = _present_among(listed, paths)
            if listed and not present:
                raise self._all_missing(checkpoint, listed)
            missing = [name for name in listed if name not in present]
            if content is not None and missing:
                write_bytes(
                    checkpoint.fs, f"{checkpoint.path}/{self.folder}/{self.file}", self.without(content, missing)
                )
                self._warn_of_missing(checkpoint, missing, listed)
            for name, path in paths.items():
                if name not in listed:
                    remove(checkpoint.fs, path)

    def remove_unlisted(self, checkpoint: Artifact, warn: Callable[[str], None]) -> None:
        """Remove the states of workers that were lost before the first one was listed; new workers continue the run.

        Nothing if there is a list: it is that of a run which has taken this storage over.

        Args:
            warn: called with a line if there were any.
        """
        if self.is_written(checkpoint):
            return
        paths = self._paths(checkpoint)
        for path in paths.values():
            remove(checkpoint.fs, path)
        if paths:
            warn("the workers were lost before their first training state was listed; training begins again")

    def _reject_lost_list(self, checkpoint: Artifact, paths: Mapping[str, str]) -> None:
        """Reject whole states that a list must have named: nothing else says from which one training continues.

        Raises:
            UserError: with what to do.
        """
        fs = checkpoint.fs
        whole = sorted(name for name, path in paths.items() if _is_whole(fs, path))
        # Every state adds a file to the log of the steps, and the list is there before the second state is begun.
        saved = len(list_matching(fs, f"{checkpoint.path}/{STEPS_FOLDER}", "*.jsonl"))
        if whole and max(len(whole), saved) > 1:
            raise UserError(
                f"{self._missing_list(checkpoint)} ({', '.join(whole)}); copy it back from a backup, or "
                f"{train_again_hint(checkpoint, self.folder)}"
            )

    def _missing_list(self, checkpoint: Artifact) -> str:
        return f"{self._url(checkpoint)}/{self.file}: missing, the list of the training states beside it"

    def _url(self, checkpoint: Artifact) -> str:
        return f"{checkpoint.url}/{self.folder}"

    def _content(self, checkpoint: Artifact) -> bytes | None:
        return read_if_any(checkpoint.fs, f"{checkpoint.path}/{self.folder}/{self.file}")

    def _parsed(self, checkpoint: Artifact, content: bytes) -> dict[str, int]:
        try:
            return self.parse(content)
        except (ValueError, KeyError, TypeError):
            url = self._url(checkpoint)
            raise UserError(f"{url}/{self.file}: corrupt; {train_again_hint(checkpoint, self.folder)}") from None

    def _paths(self, checkpoint: Artifact) -> dict[str, str]:
        """The paths of the states that are there, listed or not, by name."""
        found = list_matching(checkpoint.fs, f"{checkpoint.path}/{self.folder}", self.pattern, with_folders=True)
        paths = {last_part(path): path.rstrip("/") for path in found}
        paths.pop(self.file, None)
        return paths

    def _all_missing(self, checkpoint: Artifact, listed: dict[str, int]) -> UserError:
        return UserError(
            f"{self._url(checkpoint)}/{list(listed)[-1]}: missing, but listed in {self.file}; "
            f"{train_again_hint(checkpoint, self.folder)}"
        )

    def _warn_of_missing(self, checkpoint: Artifact, missing: list[str], listed: dict[str, int]) -> None:
        line = f"{self._url(checkpoint)}/{', '.join(missing)}: missing, but listed in {self.file}"
        if list(listed)[-1] in missing:
            newest = next(step for name, step in reversed(listed.items()) if name not in missing)
            line = f"{line}; training continues from the state at step {newest}"
        warn(line)


def _is_whole(fs: fsspec.AbstractFileSystem, path: str) -> bool:
    """Whether a state has all files that it names.

    Raises:
        OSError: if the storage cannot say. A state that is taken for a part of one is removed.
    """
    content = read_if_any(fs, f"{path}/{STATE_FILE}")
    if content is None:
        return False
    try:
        files = set(json.loads(content)["files"])
    except (ValueError, KeyError, TypeError):
        return False
    return files <= {last_part(file) for file in list_matching(fs, path, "*")}


def _present_among(listed: dict[str, int], paths: Collection[str]) -> dict[str, int]:
    return {name: step for name, step in listed.items() if name in paths}
