"""Partial results of an unfinished artifact, in parts, so that a stopped run can resume."""

import logging
import re
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from pos2distill.faults import error_text
from pos2distill.literal_paths import last_part, list_matching, make_folder
from pos2distill.store.artifacts import Artifact
from pos2distill.store.files import is_corrupt, read_table, write_table
from pos2distill.store.parallel_map import parallel_map
from pos2distill.urls import storage_errors

_logger = logging.getLogger(__name__)


class _UnusablePartError(Exception):
    """Why a part cannot be used."""


class TableParts:
    """The parts of one table. The driver alone writes and reads them.

    Args:
        key: columns that identify a row.
        folder: in the artifact, of these parts alone.
    """

    def __init__(self, artifact: Artifact, schema: pa.Schema, key: Sequence[str], folder: str = "parts") -> None:
        self.artifact, self.schema, self.key = artifact, schema, list(key)
        self.folder, self.url = f"{artifact.path}/{folder}", f"{artifact.url}/{folder}"
        self._name = folder
        self._next = self._first_free()

    def append(self, part: pa.Table) -> None:
        """Write one part atomically."""
        make_folder(self.artifact.fs, self.folder)
        write_table(self.artifact.fs, f"{self.folder}/part-{self._next:06d}.parquet", part)
        self._next += 1

    def read(self) -> pa.Table:
        """The rows of all parts, sorted by their key. Keeps the first of rows with equal keys.

        A corrupt part is named in the log and left out; its rows count as not computed.

        Raises:
            UserError: if the storage cannot be read.
        """
        parts = parallel_map(self._read_or_warn, self._paths().values())
        return self._each_row_once(pa.concat_tables([self.schema.empty_table(), *parts]))

    def _read_or_warn(self, path: str) -> pa.Table:
        """A part; without rows if it is corrupt."""
        try:
            with storage_errors(path, "runtime.storage"):
                return self._read_part(path)
        except _UnusablePartError as error:
            _logger.warning("%s: corrupt (%s); its rows will be computed again", path, error)
            return self.schema.empty_table()

    def _read_part(self, path: str) -> pa.Table:
        try:
            part = read_table(self.artifact.fs, path)
        except (pa.ArrowException, OSError, ValueError) as error:
            if not is_corrupt(error):
                raise
            raise _UnusablePartError(error_text(error)) from None
        if not part.schema.equals(self.schema):
            raise _UnusablePartError("its columns are not those of the table")
        return part

    def remove(self) -> None:
        """Remove all parts, once the artifact is published."""
        self.artifact.remove(self._name)

    def _first_free(self) -> int:
        # Not the number of parts, since a corrupt one may have been removed by hand.
        return max(self._paths(), default=-1) + 1

    def _paths(self) -> dict[int, str]:
        """The path of each part by its number, in order. Other files in the folder are not parts."""
        paths = {}
        for path in list_matching(self.artifact.fs, self.folder, "part-*.parquet"):
            match = re.fullmatch(r"part-([0-9]+)\.parquet", last_part(path))
            if match:
                paths[int(match[1])] = path
        return dict(sorted(paths.items()))

    def _each_row_once(self, table: pa.Table) -> pa.Table:
        # If some prompts of an example were answered, all of them are answered again; the first answers count.
        ordered = table.sort_by([(name, "ascending") for name in self.key])
        numbered = ordered.select(self.key).append_column("row", pa.array(range(len(ordered)), pa.int64()))
        firsts = numbered.group_by(self.key).aggregate([("row", "min")])
        # pyarrow 26 returns groups in an order of its own.
        return ordered.take(firsts["row_min"].take(pc.sort_indices(firsts["row_min"])))
