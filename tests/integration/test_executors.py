"""The two executors give the same results: one study under both, byte for byte."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.commands import run_study
from pos2distill.config import Recipe


def results(storage: Path) -> dict[str, bytes]:
    """Every file but manifests, which hold times, and the report, which shows them."""
    files = {}
    for path in sorted(storage.rglob("*")):
        name = str(path.relative_to(storage))
        if path.is_file() and path.name not in ("manifest.json", "run.json") and not name.startswith("report/"):
            files[name] = path.read_bytes()
    return files


@pytest.mark.xdist_group("compute")
def test_executors_give_equal_bytes(finished: Recipe, small_toy: Callable[..., Recipe], tmp_path: Path) -> None:
    run_study(small_toy(tmp_path, "runtime.executor=local"))
    expected = results(Path(finished.storage))
    kinds = {name.partition("/")[0].rpartition("-")[0] for name in expected}
    assert {"examples", "base-scores", "samples", "checkpoint", "distilled-scores"} <= kinds
    assert results(tmp_path) == expected
