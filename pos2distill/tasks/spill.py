"""Examples in a temporary file, so that memory does not grow with their number."""

import pickle
import tempfile
from collections.abc import Sequence
from typing import BinaryIO, overload

from pos2distill.records import Example


class ExampleFile:
    """A temporary file of examples. The operating system deletes it when the process ends, however it ends."""

    def __init__(self) -> None:
        self._file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as this object lives

    def append(self, example: Example) -> int:
        """Store an example. Returns its offset in the file."""
        offset = self._file.seek(0, 2)
        # Only this process writes and reads the file, so pickle, the fastest way, is safe here.
        pickle.dump(example, self._file, pickle.HIGHEST_PROTOCOL)
        return offset

    def read(self, offset: int) -> Example:
        """The example stored at an offset."""
        self._file.seek(offset)
        example: Example = pickle.load(self._file)
        return example


class StoredExamples(Sequence[Example]):
    """Examples of a file in a given order, each read when it is accessed.

    Args:
        file: the file that holds them.
        offsets: offset of each example in it.
    """

    def __init__(self, file: ExampleFile, offsets: Sequence[int]) -> None:
        self._file = file
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self._file.read(offset) for offset in self._offsets[index]]
        return self._file.read(self._offsets[index])
