"""Data sets in published formats: stand-ins inside the project, and the published files where they are present."""

import gzip
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import BENCHMARK_DATA, DATA


@dataclass(frozen=True)
class DataSet:
    """A data file.

    data: settings of the section `data`. records: how many the file holds. name: what reports call it.
    pairs: how many placements `evaluation.slots=pairs` evaluates; fewer where many hops share few documents.
    """

    path: Path
    data: dict[str, Any]
    records: int
    name: str
    pairs: int = 12

    @property
    def hops(self) -> tuple[int, ...]:
        return tuple(self.data.get("hops", (1,)))


_NQ: dict[str, Any] = {"format": "nq", "prompt": "qa"}
_ORACLE: dict[str, Any] = {"format": "nq_oracle", "prompt": "qa"}
_KV: dict[str, Any] = {"format": "kv", "prompt": "kv"}
_DPR: dict[str, Any] = {"format": "dpr", "prompt": "qa"}
_REASONING: dict[str, Any] = {"prompt": "reasoning", "metric": "em"}
_MUSIQUE = _REASONING | {"format": "musique", "hops": [2, 3, 4]}
_HOTPOTQA = _REASONING | {"format": "hotpotqa", "hops": [2]}
_2WIKI = _REASONING | {"format": "2wiki", "hops": [2, 4]}

STAND_INS = {
    "nq": DataSet(DATA / "nq-open-20_total_documents_gold_at_0.jsonl", _NQ | {"documents": 20}, 8, "nq"),
    "nq_oracle": DataSet(DATA / "nq-open-oracle.jsonl", _ORACLE | {"documents": 3}, 12, "nq-oracle-random-distractors"),
    "kv": DataSet(DATA / "kv-retrieval-12_keys.jsonl", _KV | {"documents": 12}, 8, "kv"),
    "dpr": DataSet(DATA / "dpr-train.json", _DPR | {"documents": 8}, 8, "dpr"),
    "musique": DataSet(DATA / "musique_ans_train.jsonl", _MUSIQUE | {"documents": 10}, 8, "musique", pairs=4),
    "hotpotqa": DataSet(DATA / "hotpotqa_train.json", _HOTPOTQA | {"documents": 10}, 8, "hotpotqa"),
    "2wiki": DataSet(DATA / "2wiki_train.json", _2WIKI | {"documents": 10}, 8, "2wiki", pairs=4),
}

PUBLISHED = {
    "nq_oracle": DataSet(
        BENCHMARK_DATA / "nq-open-oracle.jsonl.gz", _ORACLE | {"documents": 20}, 1500, "nq-oracle-random-distractors"
    ),
    "kv": DataSet(BENCHMARK_DATA / "kv-retrieval-140_keys.jsonl.gz", _KV | {"documents": 140}, 150, "kv"),
    "musique": DataSet(BENCHMARK_DATA / "musique_train.jsonl.gz", _MUSIQUE | {"documents": 20}, 60, "musique"),
    "hotpotqa": DataSet(BENCHMARK_DATA / "hotpotqa_train.json", _HOTPOTQA | {"documents": 10}, 60, "hotpotqa"),
}

needs_published = pytest.mark.skipif(
    not BENCHMARK_DATA.is_dir(),
    reason=f"no benchmark samples in {BENCHMARK_DATA}; set POS2DISTILL_BENCHMARK_DATA to a folder that holds them",
)


def read_lines(data_sets: Iterable[DataSet]) -> list[list[str]]:
    """The lines of every file that holds one record a line."""
    files = [each.path for each in data_sets if each.path.suffix != ".json"]
    texts = [gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes() for path in files]
    return [text.decode().splitlines() for text in texts]
