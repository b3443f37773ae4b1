"""Predictions of an evaluation that is not finished, so that a run which was stopped continues where it was."""

import logging

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pos2distill.records import PREDICTION_SCHEMA
from pos2distill.store.artifacts import Artifact, write_table

_FOLDER = "parts"
_KEY = ["documents", "example_id", "placement"]

_logger = logging.getLogger(__name__)


class PartialPredictions:
    """The parts of one artifact, tables of `PREDICTION_SCHEMA`. The driver alone writes and reads them."""

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self.folder = f"{artifact.path}/{_FOLDER}"
        self._written = len(self._paths())

    def append(self, predictions: pa.Table) -> None:
        """Write one part atomically."""
        self.artifact.fs.makedirs(self.folder, exist_ok=True)
        write_table(self.artifact.fs, f"{self.folder}/part-{self._written:06d}.parquet", predictions)
        self._written += 1

    def read(self) -> pa.Table:
        """The predictions of all parts, each prompt once, sorted by prompt length, example and placement.

        A corrupt part is named in the log and left out; its prompts count as not answered.
        """
        tables = [PREDICTION_SCHEMA.empty_table()]
        for path in self._paths():
            try:
                tables.append(pq.read_table(path, filesystem=self.artifact.fs, page_checksum_verification=True))
            except (pa.ArrowException, OSError, ValueError) as error:
                reason = str(error).partition("\n")[0]
                _logger.warning("%s: corrupt (%s); its prompts will be answered again", path, reason)
        return _each_prompt_once(pa.concat_tables(tables))

    def remove(self) -> None:
        """Remove all parts, once the artifact is published."""
        self.artifact.remove(_FOLDER)

    def _paths(self) -> list[str]:
        self.artifact.fs.invalidate_cache(self.folder)  # listings of object stores are cached
        return sorted(str(path) for path in self.artifact.fs.glob(f"{self.folder}/part-*.parquet"))


def finished_examples(predictions: pa.Table, prompts_per_example: int) -> pa.Array:
    """The ids of the examples of which every prompt is answered."""
    counts = predictions.group_by("example_id").aggregate([("placement", "count")])
    return counts.filter(pc.equal(counts["placement_count"], prompts_per_example))["example_id"].combine_chunks()


def _each_prompt_once(predictions: pa.Table) -> pa.Table:
    # Of an example whose prompts were in part answered, all are answered again; the first answers count.
    ordered = predictions.sort_by([(name, "ascending") for name in _KEY])
    numbered = ordered.select(_KEY).append_column("row", pa.array(range(len(ordered)), pa.int64()))
    # One thread keeps the order of the groups.
    firsts = numbered.group_by(_KEY, use_threads=False).aggregate([("row", "min")])
    return ordered.take(firsts["row_min"])
