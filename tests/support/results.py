"""What a recipe's commands have stored, read through the recipe's plan."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.plan import make_plan
from pos2distill.config import Recipe
from pos2distill.literal_paths import list_matching
from pos2distill.store.artifacts import Artifact
from pos2distill.store.samples import SampleStore
from tests.support.tables import missing_in


def artifact_of(recipe: Recipe, stage: str) -> Artifact:
    """The artifact that a stage makes."""
    return next(each.artifact for each in make_plan(recipe).stages if each.name == stage)


def counts_of(recipe: Recipe, stage: str) -> dict[str, int]:
    """The counts in the manifest of a finished artifact."""
    manifest = artifact_of(recipe, stage).manifest()
    assert manifest is not None, f"{stage} is not finished"
    return manifest.counts


def training_ids(recipe: Recipe) -> pa.Array:
    """Ids of the training examples, in their order."""
    table = artifact_of(recipe, "prepare").read_table("train.parquet", ["example_id"])
    return table["example_id"].combine_chunks()


def sample_store(recipe: Recipe) -> SampleStore:
    """The store of the samples."""
    return SampleStore(artifact_of(recipe, "sample"))


def stored_samples(recipe: Recipe) -> int:
    """How many samples are stored on disk, finished or not."""
    parts = Path(artifact_of(recipe, "sample").path) / "parts"
    return sum(pq.read_metadata(part).num_rows for part in parts.glob("part-*.parquet"))


def saved_states(recipe: Recipe) -> list[Path]:
    """The training states that are stored on disk now. A file that is being written is empty at first."""
    paths = (Path(artifact_of(recipe, "distill").path) / "training").rglob("progress.json")
    return [path for path in paths if _size(path)]


def step_of_state(progress: Path) -> int:
    """The step at which a run resumes from a training state."""
    step: int = json.loads(progress.read_text())["step"]
    return step


def flip_bit(part: Path, column: str) -> None:
    """Corrupt one column of a Parquet file, so that only those who read it notice."""
    metadata = pq.read_metadata(part)
    names = [metadata.schema.column(index).path.partition(".")[0] for index in range(metadata.num_columns)]
    chunk = metadata.row_group(0).column(names.index(column))
    data = bytearray(part.read_bytes())
    # A dictionary, if the column has one, is in front of the data, and in its size.
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    data[start + chunk.total_compressed_size // 2] ^= 4
    part.write_bytes(data)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # a newer state has replaced it
        return 0


def read_steps(recipe: Recipe) -> list[dict[str, Any]]:
    """The records of the training steps, in order."""
    checkpoint = artifact_of(recipe, "distill")
    paths = list_matching(checkpoint.fs, f"{checkpoint.path}/steps", "*.jsonl")
    return [json.loads(line) for path in paths for line in checkpoint.fs.cat_file(path).splitlines()]


def assert_exactly_once(recipe: Recipe) -> None:
    """Every training example is in the store once, as readers see it, and every row was trained on once an epoch."""
    ids = training_ids(recipe)
    store = sample_store(recipe)
    index = store.index(ids)
    assert not missing_in(index)
    assert store.tally(index).outcomes.total() == len(ids)
    counts = counts_of(recipe, "sample")
    assert counts["sampled"] == counts["kept"] == len(ids)
    steps = read_steps(recipe)
    assert [step["step"] for step in steps] == list(range(len(steps)))
    for epoch in range(recipe.study.training.epochs):
        trained = Counter(example for step in steps if step["epoch"] == epoch for example in step["examples"])
        assert trained == Counter(ids.to_pylist())
        rows = sum(step["rows"] for step in steps if step["epoch"] == epoch)
        assert rows == (recipe.study.method.k + 1) * len(ids)
