import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pos2distill.training.worker import _empty_scratch


def test_empty_scratch_removes_what_dead_workers_left_and_only_of_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine: Any = SimpleNamespace(checkpoint=SimpleNamespace(url="s3://b/mine"))
    other: Any = SimpleNamespace(checkpoint=SimpleNamespace(url="s3://b/other"))
    first: Any = SimpleNamespace(local_rank=0)
    second: Any = SimpleNamespace(local_rank=1)
    kept = _empty_scratch(other, first)
    (kept / "rank-0").mkdir()
    scratch = _empty_scratch(mine, first)
    (scratch / "rank-5" / "40-x").mkdir(parents=True)  # of a rank that now runs on another node
    assert _empty_scratch(mine, second) == scratch
    assert (scratch / "rank-5").exists()  # one worker of a node removes it
    assert not list(_empty_scratch(mine, first).iterdir())
    assert (kept / "rank-0").exists()
