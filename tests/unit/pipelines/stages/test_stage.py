"""What a stage records when it is stopped."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.stages.stage import record_stopped
from pos2distill.store.artifacts import Artifact
from pos2distill.store.lease import Lease


@pytest.fixture
def stage(tmp_path: Path) -> Any:
    artifact = Artifact(str(tmp_path), "samples", "abcd")
    artifact.fs.makedirs(artifact.path)
    return SimpleNamespace(artifact=artifact)


@pytest.fixture
def context() -> Any:
    return SimpleNamespace(lease=Lease())


def test_record_stopped_adds_to_the_seconds_of_the_manifest(stage: Any, context: Any) -> None:
    record_stopped(stage, context, lambda: {"sample": 2.0})
    assert stage.artifact.publish(counts={}, seconds={"sample": 3.0}).seconds == {"sample": 5.0}


def test_record_stopped_writes_nothing_after_the_lease_is_lost(stage: Any, context: Any) -> None:
    context.lease.mark_lost("another driver has it")
    record_stopped(stage, context, lambda: {"sample": 2.0})
    assert stage.artifact.fs.ls(stage.artifact.path) == []


def test_record_stopped_hides_no_other_error(stage: Any, context: Any) -> None:
    def fail() -> dict[str, float]:
        raise OSError("the coordinator is gone")

    record_stopped(stage, context, fail)
    assert stage.artifact.fs.ls(stage.artifact.path) == []
