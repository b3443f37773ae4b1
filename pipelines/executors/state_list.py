"""The list of training states that an executor keeps beside them, and which of these states are there."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from pos2distill.errors import UserError, warn
from pos2distill.literal_paths import list_matching, remove
from pos2distill.store.artifacts import Artifact
from pos2distill.store.checkpoint_layout import train_again
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
        content = read_if_any(checkpoint.fs, f"{checkpoint.path}/{self.folder}/{self.file}")
        return {} if content is None else self._parse(checkpoint, content)

    def present(self, checkpoint: Artifact) -> dict[str, int]:
        """As `read`, without states that are missing."""
        listed = self.read(checkpoint)
        paths = self._paths(checkpoint) if listed else {}
        return {name: step for name, step in listed.items() if name in paths}

    def repair(self, checkpoint: Artifact) -> None:
        """Make the list and the states agree.

        States that are not listed, since their upload was cut off, are removed: they would fill the disk. Listed states
        that are missing are taken off the list, with a warning: they would count among those that are kept.

        Raises:
            UserError: if the list is corrupt, or all listed states are missing; with what to do.
        """
        with storage_errors(checkpoint.url, "runtime.storage"):
            listed, paths = self.read(checkpoint), self._paths(checkpoint)
            missing = [name for name in listed if name not in paths]
            if missing:
                self._take_off(checkpoint, listed, missing)
            for name, path in paths.items():
                if name not in listed:
                    remove(checkpoint.fs, path)

    def _take_off(self, checkpoint: Artifact, listed: dict[str, int], missing: list[str]) -> None:
        """Write the list without the missing states, unless none is left."""
        url, path = f"{checkpoint.url}/{self.folder}", f"{checkpoint.path}/{self.folder}/{self.file}"
        steps = [step for name, step in listed.items() if name not in missing]
        if not steps:
            raise UserError(f"{url}/{missing[0]}: missing, but listed in {self.file}; {train_again(checkpoint)}")
        write_bytes(checkpoint.fs, path, self.without(checkpoint.fs.cat_file(path), missing))
        for name in missing:
            warn(
                f"{url}/{name}: missing, but listed in {self.file}; training continues from the state at step "
                f"{steps[-1]}"
            )

    def _parse(self, checkpoint: Artifact, content: bytes) -> dict[str, int]:
        try:
            return self.parse(content)
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{checkpoint.url}/{self.folder}/{self.file}: corrupt; {train_again(checkpoint)}") from None

    def _paths(self, checkpoint: Artifact) -> dict[str, str]:
        """The paths of the states that are there, listed or not, by name."""
        found = list_matching(checkpoint.fs, f"{checkpoint.path}/{self.folder}", self.pattern, with_folders=True)
        paths = {path.rstrip("/").rpartition("/")[2]: path for path in found}
        paths.pop(self.file, None)
        return paths
