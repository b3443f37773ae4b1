"""The sample store: append-only Parquet parts in one artifact, each example in it once.

A part is named after the examples it holds, so that a batch written twice (its actor died after the write) is one
file. Readers keep the first row of an example in the order of part names, whatever two racing writers left.
"""

import hashlib

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pos2distill.errors import UserError
from pos2distill.records import SAMPLE_SCHEMA
from pos2distill.store.artifacts import Artifact, write_table

_PARTS = "parts"


class SampleStore:
    """Samples under an artifact of their own."""

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self.folder = f"{artifact.path}/{_PARTS}"

    def open(self) -> None:
        """Make ready to append; parts of an interrupted run stay and count."""
        self.artifact.fs.makedirs(self.folder, exist_ok=True)

    def append(self, samples: pa.Table) -> str:
        """Write one part, whole or not at all.

        Args:
            samples: rows of `SAMPLE_SCHEMA`, at least one.
        Returns: the part's name.
        """
        ids = "\n".join(sorted(samples["example_id"].to_pylist()))
        name = f"part-{hashlib.sha256(ids.encode()).hexdigest()[:16]}.parquet"
        write_table(self.artifact.fs, f"{self.folder}/{name}", samples.cast(SAMPLE_SCHEMA))
        return name

    def part_paths(self) -> list[str]:
        """Paths of all parts, sorted by name."""
        self.artifact.fs.invalidate_cache(self.folder)  # other processes write parts too
        return sorted(self.artifact.fs.glob(f"{self.folder}/part-*.parquet"))

    def example_ids(self) -> set[str]:
        """Ids of the examples that need no sampling any more."""
        return set(self.read(["example_id"])["example_id"].to_pylist())

    def read(self, columns: list[str] | None = None) -> pa.Table:
        """All samples, each example once, sorted by example id.

        Args:
            columns: which to read; `example_id` must be among them.
        """
        fields = columns or SAMPLE_SCHEMA.names
        schema = pa.schema([SAMPLE_SCHEMA.field(name) for name in fields])
        parts = [self._read_part(path, fields) for path in self.part_paths()]
        if not parts:
            return schema.empty_table()
        table = pa.concat_tables(part.cast(schema) for part in parts)
        table = table.append_column("_row", pa.array(range(len(table))))
        first = table.group_by("example_id").aggregate([("_row", "min")])["_row_min"]
        table = table.take(first).drop_columns("_row")
        return table.take(pc.sort_indices(table["example_id"]))

    def _read_part(self, path: str, columns: list[str]) -> pa.Table:
        try:
            return pq.read_table(path, filesystem=self.artifact.fs, columns=columns)
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{path}: damaged ({reason}); delete it, and its examples are sampled again") from None
