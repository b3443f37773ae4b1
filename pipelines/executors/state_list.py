"""The list of training states that an executor keeps beside them, and which of these states are there."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from pos2distill.errors import UserError, warn
from pos2distill.literal_paths import list_matching, remove
from pos2distill.store.artifacts import Artifact
from pos2distill.store.checkpoint_layout import train_again_hint
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

    def read(self, checkpoint: Artifact) -> dict[str, int]:
        """The states that are listed, the oldest first: their names and steps. Empty without a list.

        Raises:
            UserError: if the list is corrupt, with what to do.
        """
        content = self._content(checkpoint)
        return {} if content is None else self._checked(checkpoint, content)

    def present(self, checkpoint: Artifact) -> dict[str, int]:
        """As `read`, without states that are missing.

        Raises:
            UserError: also if all listed states are missing.
        """
        listed = self.read(checkpoint)
        return self._left(checkpoint, listed, self._paths(checkpoint)) if listed else {}

    def repair(self, checkpoint: Artifact) -> None:
        """Make the list and the states agree.

        States that are not listed, since their upload was cut off, are removed: they would fill the disk. Listed states
        that are missing are taken off the list, with a warning: they would count among those that are kept.

        Raises:
            UserError: as `present`.
        """
        with storage_errors(checkpoint.url, "runtime.storage"):
            content, paths = self._content(checkpoint), self._paths(checkpoint)
            listed: dict[str, int] = {}
            if content is not None:
                listed = self._checked(checkpoint, content)
                left = self._left(checkpoint, listed, paths)
                missing = [name for name in listed if name not in left]
                if missing:
                    write_bytes(checkpoint.fs, self._path(checkpoint), self.without(content, missing))
                    self._warn(checkpoint, missing, list(left.values())[-1])
            for name, path in paths.items():
                if name not in listed:
                    remove(checkpoint.fs, path)

    def _content(self, checkpoint: Artifact) -> bytes | None:
        return read_if_any(checkpoint.fs, self._path(checkpoint))

    def _path(self, checkpoint: Artifact) -> str:
        return f"{checkpoint.path}/{self.folder}/{self.file}"

    def _checked(self, checkpoint: Artifact, content: bytes) -> dict[str, int]:
        try:
            return self.parse(content)
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{checkpoint.url}/{self.folder}/{self.file}: corrupt; {train_again_hint(checkpoint)}"
            ) from None

    def _left(self, checkpoint: Artifact, listed: dict[str, int], paths: Collection[str]) -> dict[str, int]:
        """The listed states that are not missing.

        Raises:
            UserError: if all of them are.
        """
        left = {name: step for name, step in listed.items() if name in paths}
        if listed and not left:
            raise UserError(
                f"{checkpoint.url}/{self.folder}/{list(listed)[-1]}: missing, but listed in {self.file}; "
                f"{train_again_hint(checkpoint)}"
            )
        return left

    def _warn(self, checkpoint: Artifact, missing: list[str], step: int) -> None:
        for name in missing:
            warn(
                f"{checkpoint.url}/{self.folder}/{name}: missing, but listed in {self.file}; training continues from "
                f"the state at step {step}"
            )

    def _paths(self, checkpoint: Artifact) -> dict[str, str]:
        """The paths of the states that are there, listed or not, by name."""
        found = list_matching(checkpoint.fs, f"{checkpoint.path}/{self.folder}", self.pattern, with_folders=True)
        paths = {path.rstrip("/").rpartition("/")[2]: path for path in found}
        paths.pop(self.file, None)
        return paths
