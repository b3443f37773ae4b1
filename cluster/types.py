"""Types that the modules of this package share."""

import enum
from typing import Any, NamedTuple

# A Kubernetes object, or a part of one, as plain Python data. (`Manifest` alone is the artifact store's word.)
KubeManifest = dict[str, Any]


class Level(enum.StrEnum):
    """What a finding means. Errors and policies are refused, warnings are only reported."""

    ERROR = "error"  # Kubernetes or KubeRay refuses the manifest
    POLICY = "policy"  # they accept it, but a study does not run as intended, or is not safe
    WARNING = "warning"  # accepted, but risky


class Violation(NamedTuple):
    """Where a manifest breaks a rule or its schema."""

    path: str  # of the field, for example spec.rayClusterSpec.workerGroupSpecs[0].minReplicas
    message: str  # what is wrong and how to fix it, on one line
