"""Rules for the autoscaler of a Ray cluster and for the fields of groups that depend on it."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from ..names import AUTOSCALER_V2_VARIABLE
from ..types import Violation
from .fields import Fields, environment
from .pods import check_rights

_HEAD_ENV = "headGroupSpec.template.spec.containers[0].env"


def ray_version(value: Any) -> tuple[int, int] | None:
    """Major and minor number of a version of Ray, or None if the value is not a version."""
    match = re.match(r"^(\d+)\.(\d+)", str(value))
    return (int(match[1]), int(match[2])) if match else None


def autoscales(cluster: Fields) -> bool:
    """Whether the autoscaler is on."""
    return cluster.get("enableInTreeAutoscaling") is True


def _uses_autoscaler_v2(cluster: Fields) -> bool:
    """Version 2 is the default. A field, or for older versions of KubeRay a variable, may select version 1."""
    if not autoscales(cluster):
        return False
    version = cluster.mapping("autoscalerOptions").get("version")
    if version is not None:
        return bool(version == "v2")
    # KubeRay compares the variable with these two values.
    variable = _version_variable(cluster)
    return variable is None or str(variable.get("value")) in ("1", "true")


def _version_variable(cluster: Fields) -> Fields | None:
    for variable in environment(cluster.mapping("headGroupSpec")):
        if variable.get("name") == AUTOSCALER_V2_VARIABLE:
            return variable
    return None


def autoscaler_container_is_restricted(cluster: Fields) -> Iterator[Violation]:
    """The autoscaler's container has the same rules as those of pods. Rule of this project."""
    if autoscales(cluster):
        yield from check_rights(cluster.mapping("autoscalerOptions"))


def autoscaler_version_is_set_once(cluster: Fields) -> Iterator[Violation]:
    """Source: ValidateRayClusterSpec."""
    if _version_variable(cluster) is None:
        return
    if not autoscales(cluster):
        message = f"{AUTOSCALER_V2_VARIABLE} without autoscaling; set enableInTreeAutoscaling: true and remove it"
        yield cluster.violation(_HEAD_ENV, message)
    elif cluster.mapping("autoscalerOptions").get("version"):
        message = f"{AUTOSCALER_V2_VARIABLE} repeats autoscalerOptions.version; remove the variable"
        yield cluster.violation(_HEAD_ENV, message)


def fixed_cluster_has_fixed_groups(group: Fields, cluster: Fields) -> Iterator[Violation]:
    """Rule of this project."""
    if not autoscales(cluster) and group.get("minReplicas") != group.get("maxReplicas"):
        message = f"is off, so that '{group.get('groupName')}' never grows; set it to true"
        yield cluster.violation("enableInTreeAutoscaling", message)


def autoscaled_group_is_not_suspended(group: Fields, cluster: Fields) -> Iterator[Violation]:
    """Source: ValidateRayClusterSpec."""
    if autoscales(cluster) and group.get("suspend"):
        yield group.violation("suspend", "is not supported with autoscaling; set maxReplicas: 0 instead")


def idle_timeout_requires_autoscaler_v2(group: Fields, cluster: Fields) -> Iterator[Violation]:
    """Source: validateWorkerGroupIdleTimeout."""
    if "idleTimeoutSeconds" in group and not _uses_autoscaler_v2(cluster):
        yield group.violation("idleTimeoutSeconds", "requires autoscaler v2; set autoscalerOptions.version: v2")


def priority_requires_autoscaler_v2(group: Fields, cluster: Fields) -> Iterator[Violation]:
    """Source: validateWorkerGroupPriority."""
    if not group.integer("priority"):
        return
    if not _uses_autoscaler_v2(cluster):
        yield group.violation("priority", "requires autoscaler v2; set autoscalerOptions.version: v2")
    version = ray_version(cluster.get("rayVersion"))
    if version is None or version < (2, 56):
        yield group.violation("priority", "requires rayVersion 2.56 or newer; set it or remove the priority")


AUTOSCALER_RULES: tuple[Callable[[Fields], Iterator[Violation]], ...] = (
    autoscaler_container_is_restricted,
    autoscaler_version_is_set_once,
)
GROUP_AUTOSCALER_RULES: tuple[Callable[[Fields, Fields], Iterator[Violation]], ...] = (
    fixed_cluster_has_fixed_groups,
    autoscaled_group_is_not_suspended,
    idle_timeout_requires_autoscaler_v2,
    priority_requires_autoscaler_v2,
)
