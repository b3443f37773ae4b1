"""Why attempts of a job failed is kept in its storage."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines import attempts
from pipelines.attempts import record_failure
from pipelines.cli import command_line
from pos2distill.config import Recipe
from pos2distill.errors import Stopped, TransientError
from pos2distill.node_pools import JOB_DASHBOARD_VARIABLE
from pos2distill.store.storage import claim_storage
from tests.support.commands import replace_command


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

    replace_command(monkeypatch, "study", fail)
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

    monkeypatch.setattr("pipelines.attempts.write_json", fail)
    record_failure(recipe, "study", TransientError("timeout"))
    assert records(recipe) == []


def test_record_failure_does_not_wait_for_a_storage_that_says_nothing(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(attempts, "_WRITE_SECONDS", 0.1)
    monkeypatch.setattr(attempts, "check_storage", lambda *_: answers.wait(60))
    start = time.monotonic()
    record_failure(recipe, "study", TransientError("timeout"))
    assert time.monotonic() - start < 10
    answers.set()


def test_record_failure_leaves_out_a_run_that_was_stopped(recipe: Recipe) -> None:
    """As by `ray job stop`: nothing has failed."""
    record_failure(recipe, "study", Stopped("stopped after step 3; its checkpoint is kept", 143))
    assert records(recipe) == []
