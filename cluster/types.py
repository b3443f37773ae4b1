"""Types that the modules of this package share."""

import enum
from dataclasses import dataclass
from typing import Any

from pos2distill.errors import ExitCode

# A Kubernetes object, or a part of one, as plain Python data. (`Manifest` alone is a class of the artifact store.)
KubeManifest = dict[str, Any]


class Level(enum.StrEnum):
    """What a finding means. Errors and policies are rejected, warnings are only reported."""

    ERROR = "error"  # Kubernetes or KubeRay rejects the manifest
    POLICY = "policy"  # they accept it, but a study does not run as intended, or is not safe
    WARNING = "warning"  # accepted, but risky


@dataclass(frozen=True, slots=True)
class Violation:
    """Where a manifest breaks a rule or its schema."""

    path: str  # path of the field, for example spec.rayClusterSpec.workerGroupSpecs[0].minReplicas
    message: str  # what is wrong and how to fix it, on one line


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an action of `run.py cluster` ended. summary: what `--json` prints, of the actions that have it."""

    exit_code: ExitCode
    summary: dict[str, Any] | None = None
