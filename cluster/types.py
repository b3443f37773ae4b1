"""Types that the modules of this package share."""

from typing import Any, NamedTuple

# A Kubernetes object, or a part of one, as plain Python data. (`Manifest` alone is the artifact store's word.)
KubeManifest = dict[str, Any]


class Violation(NamedTuple):
    """Where a manifest breaks a rule or its schema."""

    path: str  # of the field, for example spec.rayClusterSpec.workerGroupSpecs[0].minReplicas
    message: str  # what is wrong and how to fix it, on one line
