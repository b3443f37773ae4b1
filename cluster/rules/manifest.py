"""Rules for a whole manifest and its metadata, and the order in which all rules are applied."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from pos2distill.errors import did_you_mean
from pos2distill.secrets import looks_secret

from ..names import ELASTIC_ANNOTATION, QUEUE_LABEL, RAY_CLUSTER_NAME_LENGTH, RAY_JOB_NAME_LENGTH
from ..types import KubeManifest, Violation
from .cluster import check_cluster
from .fields import Fields
from .job import check_job
from .labels import check_labels

API_VERSIONS = {
    "RayJob": "ray.io/v1",
    "RayCluster": "ray.io/v1",
    "ServiceAccount": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
}

_NAME_LENGTHS = {"RayJob": RAY_JOB_NAME_LENGTH, "RayCluster": RAY_CLUSTER_NAME_LENGTH}
_MAX_NAME_LENGTH = 63  # of a DNS label
# KubeRay derives the names of services from these names, and services may not begin with a digit.
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def check_manifest(manifest: KubeManifest) -> Iterator[Violation]:
    """All violations of one manifest."""
    fields = Fields("", manifest)
    for rule in MANIFEST_RULES:
        yield from rule(fields)
    # The other kinds have no rules beyond these: only this project's own code renders them.
    kind, spec = fields.get("kind"), fields.mapping("spec")
    if kind == "RayJob":
        yield from check_job(spec)
        if "rayClusterSpec" in spec:
            yield from check_cluster(spec.mapping("rayClusterSpec"), of_job=True)
    elif kind == "RayCluster":
        yield from check_cluster(spec, of_job=False)
    yield from no_secret_in_clear_text(fields)


def kind_is_served(manifest: Fields) -> Iterator[Violation]:
    """The kind must be one that this project renders, in the API version that Kubernetes or KubeRay 1.7 serves."""
    kind = str(manifest.get("kind"))
    api_version = manifest.get("apiVersion")
    if kind == "RayCronJob":
        yield manifest.violation("kind", "RayCronJob requires a feature gate that is off by default; use a RayJob")
    elif kind not in API_VERSIONS:
        yield manifest.violation("kind", f"'{kind}' is not supported{did_you_mean(kind, API_VERSIONS)}")
    elif api_version != API_VERSIONS[kind]:
        message = f"is '{api_version}', but {kind} is served as {API_VERSIONS[kind]}; set that"
        yield manifest.violation("apiVersion", message)


def name_is_valid(manifest: Fields) -> Iterator[Violation]:
    """Names must be DNS labels, and short enough for the suffixes that KubeRay appends.

    Source: ValidateRayJobMetadata and ValidateRayClusterMetadata.
    """
    metadata = manifest.mapping("metadata")
    name = str(metadata.get("name", ""))
    if not _DNS_1035.fullmatch(name):
        message = f"'{name}' is not a valid DNS label; use a to z, 0 to 9 and -, and start with a letter"
        yield metadata.violation("name", message)
    max_length = _NAME_LENGTHS.get(str(manifest.get("kind")), _MAX_NAME_LENGTH)
    if len(name) > max_length:
        message = f"has {len(name)} characters; shorten it to {max_length}, because longer names are derived from it"
        yield metadata.violation("name", message)


def labels_are_valid(manifest: Fields) -> Iterator[Violation]:
    """Labels of the object must follow the syntax of Kubernetes."""
    yield from check_labels(manifest.mapping("metadata", "labels"))


def queued_cluster_has_fixed_size(manifest: Fields) -> Iterator[Violation]:
    """Kueue rejects a cluster that autoscales, unless its feature gate for elastic jobs is on."""
    metadata, spec = manifest.mapping("metadata"), manifest.mapping("spec")
    # A RayJob contains the spec of its cluster; a RayCluster is that spec.
    cluster = spec.mapping("rayClusterSpec") if "rayClusterSpec" in spec else spec
    is_queued = QUEUE_LABEL in metadata.mapping("labels")
    is_elastic = ELASTIC_ANNOTATION in metadata.mapping("annotations")
    if is_queued and cluster.get("enableInTreeAutoscaling") and not is_elastic:
        message = "Kueue rejects clusters that autoscale; remove this label, or turn off autoscaling and fix the size"
        yield metadata.violation(f"labels.{QUEUE_LABEL}", message)


def queued_job_releases_its_quota(manifest: Fields) -> Iterator[Violation]:
    """Kueue rejects a job whose cluster keeps its quota after the job."""
    is_queued = QUEUE_LABEL in manifest.mapping("metadata", "labels")
    spec = manifest.mapping("spec")
    if manifest.get("kind") == "RayJob" and is_queued and spec.get("shutdownAfterJobFinishes") is not True:
        yield spec.violation(
            "shutdownAfterJobFinishes", "a job in a Kueue queue must release its quota; set it to true"
        )


def no_secret_in_clear_text(manifest: Fields) -> Iterator[Violation]:
    """No string may look like a secret. Rule of this project."""
    for path, text in _strings(manifest.path, manifest.values):
        # Environment variables have a rule of their own, which also knows their names.
        if looks_secret(text) and ".env[" not in path:
            yield Violation(path, "contains what looks like a secret; use a Kubernetes Secret and a secretKeyRef")


def _strings(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """All strings in a value, with their paths."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _strings(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _strings(f"{path}[{index}]", inner)
    elif isinstance(value, str):
        yield path, value


MANIFEST_RULES: tuple[Callable[[Fields], Iterator[Violation]], ...] = (
    kind_is_served,
    name_is_valid,
    labels_are_valid,
    queued_cluster_has_fixed_size,
    queued_job_releases_its_quota,
)
