"""What a stage is: a value that names its inputs and settings, and the function that makes its artifact."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from pos2distill.config import Runtime, Study, fingerprint
from pos2distill.config.restrict import RestrictedStudy, restrict
from pos2distill.errors import UserError
from pos2distill.records import SCHEMA_VERSION
from pos2distill.store.artifacts import MANIFEST, Artifact, Manifest
from pos2distill.store.lease import Lease

from ..executors.protocol import Executor


@dataclass(frozen=True, slots=True)
class Input:
    """A result of an earlier stage that a stage reads.

    Attributes:
        artifact: where it is stored.
        fingerprint: covers everything that the part which is read depends on; of an artifact with several parts
            (training and evaluation examples) a part depends on less than the whole.
    """

    artifact: Artifact
    fingerprint: str

    def manifest(self) -> Manifest:
        """The manifest of the finished artifact."""
        manifest = self.artifact.manifest()
        if manifest is None:
            raise RuntimeError(f"{self.artifact.url} is read before it is finished")
        return manifest

    def details(self, *names: str) -> dict[str, Any]:
        """What the stage recorded in the manifest, with at least these names.

        Raises:
            UserError: if one of them is missing.
        """
        details = self.manifest().details
        missing = [name for name in names if name not in details]
        if missing:
            url = self.artifact.url
            raise UserError(
                f"{url}/{MANIFEST}: corrupt, or of an earlier version; expected {missing[0]!r} in details; "
                f"delete {url} and run again to make it again"
            )
        return details


@dataclass(frozen=True, slots=True)
class RunContext:
    """Where and how a stage runs. Nothing here changes its result.

    Attributes:
        logged_settings: all settings of the study as plain values, for the experiment trackers alone. What a stage
            computes with is its own `study`.
        lease: the right to write to the storage.
    """

    name: str
    logged_settings: dict[str, Any]
    runtime: Runtime
    executor: Executor
    lease: Lease


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a run, as a value.

    The fingerprint covers what `run` computes with: the inputs, the study (in which every setting that the stage does
    not declare is reset to its default, see `restrict`), and the derived settings. Besides this value, `run` receives
    only the `RunContext`; what its plan binds to it (a task's name, a digest) is only checked or shown. So no other
    setting of the study can influence the artifact.

    Attributes:
        name: as people see it.
        study: restricted to the declared settings.
        inputs: results of earlier stages, by name.
        derived: values computed from settings, by name.
        run: makes and publishes the artifact.
        streams: earlier stages, by the name of the input, that `run` finishes itself if they are not finished. They are
            not in the fingerprint, since the input's fingerprint covers what is read of their results.
    """

    name: str
    artifact: Artifact
    study: RestrictedStudy
    run: Callable[[Stage, RunContext], Manifest] = field(repr=False)
    inputs: Mapping[str, Input] = field(default_factory=dict)
    derived: Mapping[str, Any] = field(default_factory=dict)
    streams: Mapping[str, Stage] = field(default_factory=dict)

    @classmethod
    def declare(
        cls,
        study: Study,
        storage: str,
        digests: Digests,
        *,
        name: str,
        folder: str,
        fields: Collection[str],
        run: Callable[[Stage, RunContext], Manifest],
        inputs: Mapping[str, Input] | None = None,
        derived: Mapping[str, Any] | None = None,
        streams: Mapping[str, Stage] | None = None,
    ) -> Stage:
        """A stage whose artifact is named by the fingerprint of all that it declares.

        Args:
            folder: the artifact's name (`artifact_names`).
            fields: the settings that `run` computes with (`restrict`).
            name, run, inputs, derived, streams: see the attributes.
        """
        restricted = restrict(study, fields)
        artifact = Artifact(storage, folder, digests.fingerprint(restricted, inputs, derived))
        return cls(name, artifact, restricted, run, inputs or {}, derived or {}, streams or {})

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the artifact."""
        return self.artifact.fingerprint

    def output(self) -> Input:
        """The whole artifact as an input of a later stage."""
        return Input(self.artifact, self.fingerprint)


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of the bytes of the model and of the data file: they stand for the paths in fingerprints."""

    model: str
    data: str

    def fingerprint(
        self, study: Study, inputs: Mapping[str, Input] | None = None, derived: Mapping[str, Any] | None = None
    ) -> str:
        """The fingerprint of what a stage declares.

        A path that was reset because the stage does not declare it stays reset.
        """
        settings = study.model_dump(mode="json")
        # The bytes count, not the path: a model that was moved keeps its fingerprint, a replaced one does not.
        if study.model.path:
            settings["model"]["path"] = self.model
            if study.model.revision and self.model.endswith(f"@{study.model.revision}"):
                settings["model"]["revision"] = None  # the digest names this commit of a hub model
        if study.data.path:
            settings["data"]["path"] = self.data
        input_fingerprints = {name: each.fingerprint for name, each in (inputs or {}).items()}
        # With the schema version, so that a new version makes new artifacts instead of misreading old ones.
        return fingerprint(SCHEMA_VERSION, settings, input_fingerprints, dict(derived or {}))


@contextmanager
def recorded_seconds(stage: Stage, context: RunContext, name: str) -> Iterator[dict[str, float]]:
    """Measure the body's seconds; if it is stopped, add them to those that the stage's manifest will count."""
    start = time.monotonic()
    seconds: dict[str, float] = {}
    try:
        yield seconds
        seconds[name] = time.monotonic() - start
    except (UserError, KeyboardInterrupt):
        record_stopped(stage, context, lambda: {name: time.monotonic() - start})
        raise


def record_stopped(stage: Stage, context: RunContext, seconds: Callable[[], Mapping[str, float]]) -> None:
    """Add the seconds of a run that was stopped to those that the stage's manifest will count.

    Nothing is raised, and nothing is written without the lease: what ended the run is what the user must see.
    """
    with suppress(Exception):
        context.lease.check()
        stage.artifact.add_seconds(seconds())
