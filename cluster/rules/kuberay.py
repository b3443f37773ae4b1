"""What KubeRay's operator rejects, of the fields that `cluster render` writes.

The operator reports these only in the status of an applied object. Each docstring names the function it follows, in
`ray-operator/controllers/ray/utils/validation.go` of KubeRay 1.7.0. Its rules on other fields are not repeated here,
since nothing would show that a copy of them is out of date.
"""

import re
from collections.abc import Iterator

from ..names import AUTOSCALER_V2_VARIABLE, COLLECTOR_VARIABLES
from ..types import Violation
from .fields import Fields, Rule, autoscaler_of, cluster_of, containers_of, groups_of, job_of, nodes_of, ray_container
from .kubernetes import label_violations

_RESOURCE_PARAMETERS = ("num-cpus", "num-gpus", "memory", "resources")  # parameters of `ray start`
_MINIMA = (
    ("ttlSecondsAfterFinished", 0),
    ("backoffLimit", 0),
    ("activeDeadlineSeconds", 1),
    ("preRunningDeadlineSeconds", 1),
)
_AUTH_VERSION, _PRIORITY_VERSION = (2, 52), (2, 56)
_REQUIRED_BY_BACKEND = {"gcs": "GCS_BUCKET", "s3": "S3_REGION"}  # only for backends that `render` writes
_ENABLED = ("1", "true")  # values of a variable that switch a feature on


def limits_are_in_range(manifest: Fields) -> Iterator[Violation]:
    """Source: ValidateRayJobSpec; for preRunningDeadlineSeconds, the CRD."""
    job = job_of(manifest)
    for name, minimum in _MINIMA:
        value = job.integer(name)
        if value is not None and value < minimum:
            yield job.violation(name, f"is {value}; set it to {minimum} or more")


def ttl_requires_shutdown(manifest: Fields) -> Iterator[Violation]:
    """Source: validateDeletionConfiguration."""
    job = job_of(manifest)
    if (job.integer("ttlSecondsAfterFinished") or 0) > 0 and job.get("shutdownAfterJobFinishes") is not True:
        yield job.violation("ttlSecondsAfterFinished", "requires shutdownAfterJobFinishes: true; set that")


def cluster_is_described(manifest: Fields) -> Iterator[Violation]:
    """Source: ValidateRayJobSpec."""
    job = job_of(manifest)
    if manifest.get("kind") == "RayJob" and not job.get("clusterSelector") and "rayClusterSpec" not in job:
        yield job.violation("rayClusterSpec", "missing; describe the job's cluster, or name one with clusterSelector")


def pods_have_a_container(manifest: Fields) -> Iterator[Violation]:
    """Source: ValidateRayClusterSpec; of the image, ValidatePodSpec of Kubernetes."""
    for node in nodes_of(manifest):
        pod = node.mapping("template", "spec")
        if not pod.items_of("containers"):
            yield pod.violation("containers", "missing; a pod requires the Ray container")
        for container in containers_of(pod):
            if not container.get("image"):
                yield container.violation("image", "missing; KubeRay sets none, and Kubernetes rejects the pod")


def replicas_are_in_range(manifest: Fields) -> Iterator[Violation]:
    """Source: ValidateRayClusterSpec."""
    for group in groups_of(manifest):
        minimum, maximum = group.integer("minReplicas"), group.integer("maxReplicas")
        for name, value in (("minReplicas", minimum), ("maxReplicas", maximum)):
            if value is not None and value < 0:
                yield group.violation(name, f"is {value}; set 0 or more")
        if minimum is not None and maximum is not None and minimum > maximum:
            yield group.violation("minReplicas", f"{minimum} is more than maxReplicas, {maximum}; lower it")


def resources_are_set_in_one_place(manifest: Fields) -> Iterator[Violation]:
    """Source: validateRayGroupResources."""
    for node in nodes_of(manifest):
        # One line is enough, even if several parameters are repeated.
        repeated = [name for name in _RESOURCE_PARAMETERS if node.mapping("rayStartParams").get(name)]
        if repeated and node.mapping("resources"):
            message = f"is not supported together with {node.join('resources')}; set one of them"
            yield node.violation(f"rayStartParams.{repeated[0]}", message)


def labels_are_no_parameter(manifest: Fields) -> Iterator[Violation]:
    """Source: validateRayGroupLabels."""
    for node in nodes_of(manifest):
        if "labels" in node.mapping("rayStartParams"):
            yield node.violation("rayStartParams.labels", f"is not supported; set {node.join('labels')} instead")


def node_labels_are_valid(manifest: Fields) -> Iterator[Violation]:
    """Source: validateRayGroupLabels."""
    for node in nodes_of(manifest):
        yield from label_violations(node.mapping("labels"))


def group_settings_require_autoscaler_v2(manifest: Fields) -> Iterator[Violation]:
    """Source: validateWorkerGroupIdleTimeout, validateWorkerGroupPriority."""
    cluster = cluster_of(manifest)
    is_new = _ray_version(cluster) >= _PRIORITY_VERSION
    is_v2 = cluster.mapping("autoscalerOptions").get("version") == "v2"
    is_v2 = is_v2 or _head_variables(cluster).get(AUTOSCALER_V2_VARIABLE) in _ENABLED
    for group in groups_of(manifest):
        if (group.integer("idleTimeoutSeconds") or 0) < 0:
            yield group.violation("idleTimeoutSeconds", "is negative; set 0 or more")
        for name in ("idleTimeoutSeconds", "priority"):
            # A priority of 0 counts as none.
            is_set = name in group and (name != "priority" or group.integer(name))
            if is_set and not is_v2:
                yield group.violation(name, "requires autoscaler v2; set autoscalerOptions.version: v2")
        if group.integer("priority") and not is_new:
            yield group.violation("priority", "requires rayVersion 2.56 or newer; set it or remove the priority")


def restarts_are_left_to_the_autoscaler(manifest: Fields) -> Iterator[Violation]:
    """Source: ValidateRayClusterSpec."""
    autoscaler = autoscaler_of(manifest)
    if autoscaler is None or autoscaler.get("version") != "v2":
        return
    for node in nodes_of(manifest):
        pod = node.mapping("template", "spec")
        policy = pod.get("restartPolicy")
        if policy not in (None, "", "Never"):
            yield pod.violation("restartPolicy", f"is {policy}, but autoscaler v2 replaces pods itself; set Never")


def ray_version_supports_authentication(manifest: Fields) -> Iterator[Violation]:
    """Source: ValidateRayClusterSpec."""
    cluster = cluster_of(manifest)
    if cluster.mapping("authOptions").get("mode") != "token":
        return
    version = cluster.text("rayVersion")
    if not version:
        message = "missing: authOptions requires it; set the version in the image, for example 2.60.0"
        yield cluster.violation("rayVersion", message)
    elif _ray_version(cluster) == (0, 0):
        yield cluster.violation("rayVersion", f"'{version[:20]}' is not a valid version; expected for example 2.60.0")
    elif _ray_version(cluster) < _AUTH_VERSION:
        message = f"authOptions requires Ray 2.52 or newer, got {version[:20]}; use a newer image"
        yield cluster.violation("rayVersion", message)


def collector_is_complete(manifest: Fields) -> Iterator[Violation]:
    """Source: ValidateRayClusterSpec, validateCollectorOptions."""
    options = cluster_of(manifest).mapping("historyServerOptions")
    if not options:
        return
    collector = options.mapping("collectorOptions")
    if not collector:
        yield options.violation("collectorOptions", "missing; set the image and the bucket")
        return
    if not collector.get("image"):
        yield collector.violation("image", "missing; set it")
    variables = {variable.text("name"): variable for variable in collector.mappings("env")}
    for name in COLLECTOR_VARIABLES:
        if name in variables:
            yield variables[name].violation("name", f"{name} is set by KubeRay itself; remove it")
    backend = variables["STORAGE_BACKEND"].text("value") if "STORAGE_BACKEND" in variables else ""
    if not backend:
        yield collector.violation("env", "STORAGE_BACKEND is missing; set for example gcs, and GCS_BUCKET")
    required = _REQUIRED_BY_BACKEND.get(backend.lower())
    if required is not None and not _has_value(variables.get(required)):
        yield collector.violation("env", f"{required} is missing, which {backend} requires; set it")


def _has_value(variable: Fields | None) -> bool:
    return variable is not None and (bool(variable.get("value")) or "valueFrom" in variable)


def _ray_version(cluster: Fields) -> tuple[int, int]:
    """Major and minor number of the version of Ray; (0, 0) if the value is not a version."""
    match = re.match(r"v?(\d{1,4})\.(\d{1,4})", cluster.text("rayVersion"))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _head_variables(cluster: Fields) -> dict[str, str]:
    variables = {}
    for variable in ray_container(cluster.mapping("headGroupSpec")).mappings("env"):
        variables[variable.text("name")] = variable.text("value")
    return variables


RULES: tuple[Rule, ...] = (
    limits_are_in_range,
    ttl_requires_shutdown,
    cluster_is_described,
    pods_have_a_container,
    replicas_are_in_range,
    resources_are_set_in_one_place,
    labels_are_no_parameter,
    node_labels_are_valid,
    group_settings_require_autoscaler_v2,
    restarts_are_left_to_the_autoscaler,
    ray_version_supports_authentication,
    collector_is_complete,
)
