"""Why attempts of a job failed is kept in its storage."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines import commands
from pipelines.attempts import record_failure
from pipelines.cli import command_line
from pos2distill.config import Recipe
from pos2distill.errors import TransientError
from pos2distill.placement import JOB_DASHBOARD_VARIABLE
from pos2distill.store.storage import claim_storage


@pytest.fixture
def recipe(make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Of a run that has begun, in a job of a cluster."""
    monkeypatch.setenv(JOB_DASHBOARD_VARIABLE, "http://127.0.0.1:8265")
    made = make_recipe()
    claim_storage(made.storage, made.name)
    return made


def records(recipe: Recipe) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in Path(recipe.storage).glob("failed-attempts/*.json")]


def test_command_in_a_job_records_why_it_failed(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise TransientError("s3://b: cannot be used\n(timeout)")

    monkeypatch.setattr(commands, "run_study", fail)
    monkeypatch.setattr("time.sleep", lambda _: None)
    assert command_line.main(["study", str(tmp_path / "recipe.yaml")]) == 2
    (record,) = records(recipe)
    assert (record["command"], record["error"]) == ("study", "s3://b: cannot be used (timeout)")
    assert "error: s3://b: cannot be used (timeout)" in capsys.readouterr().err


def test_record_failure_keeps_the_traceback_of_a_bug(recipe: Recipe) -> None:
    try:
        raise ValueError("no such thing")
    except ValueError as error:
        record_failure(recipe, "distill", error)
    (record,) = records(recipe)
    assert record["error"] == "ValueError('no such thing')"
    assert "test_attempts.py" in record["traceback"]


def test_record_failure_leaves_a_storage_alone_that_no_run_has_claimed(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(JOB_DASHBOARD_VARIABLE, "http://127.0.0.1:8265")
    recipe = make_recipe()
    record_failure(recipe, "study", TransientError("timeout"))
    assert not Path(recipe.storage).exists()


def test_record_failure_writes_nothing_outside_of_a_job(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB_DASHBOARD_VARIABLE)
    record_failure(recipe, "study", TransientError("timeout"))
    assert records(recipe) == []


def test_record_failure_raises_nothing_where_the_storage_cannot_be_written(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ConnectionResetError("reset")

    monkeypatch.setattr("pipelines.attempts.write_bytes", fail)
    record_failure(recipe, "study", TransientError("timeout"))
    assert records(recipe) == []
