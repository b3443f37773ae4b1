"""What the API server refuses: in the objects themselves, and in pods, which KubeRay creates only later."""

import re
from collections.abc import Callable, Iterator

from ..names import RAY_CLUSTER_NAME_LENGTH, RAY_JOB_NAME_LENGTH
from ..types import Violation
from .fields import Fields, containers_of, pods_of, quantity, templates_of

_RAY_KINDS = ("RayJob", "RayCluster", "RayService", "RayCronJob")
# KubeRay derives the names of services and pods from these names.
_RAY_NAME_LENGTHS = {"RayJob": RAY_JOB_NAME_LENGTH, "RayCluster": RAY_CLUSTER_NAME_LENGTH}
_OBJECT_KINDS = ("ServiceAccount", "NetworkPolicy", "PodDisruptionBudget")
_GENERATED_LENGTH = 5  # characters that Kubernetes appends to generateName

_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # services may not begin with a digit
_DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME_PART = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_PULL_POLICIES = ("Always", "IfNotPresent", "Never")
_SHOWN = 60  # characters of a name in a message


def kind_exists(manifest: Fields) -> Iterator[Violation]:
    """Source: the CRDs of KubeRay 1.7.0. Kinds of other groups are not known here."""
    kind = manifest.text("kind")
    if manifest.text("apiVersion").startswith("ray.io/") and kind not in _RAY_KINDS:
        yield manifest.violation("kind", f"'{kind[:_SHOWN]}' is no kind of KubeRay; set one of {', '.join(_RAY_KINDS)}")


def name_is_valid(manifest: Fields) -> Iterator[Violation]:
    """Source: ValidateRayJobMetadata and ValidateRayClusterMetadata of KubeRay; ValidateObjectMeta of Kubernetes."""
    metadata, kind = manifest.mapping("metadata"), manifest.text("kind")
    field = "name" if "name" in metadata else "generateName"
    name = metadata.text(field)
    length = len(name) + (_GENERATED_LENGTH if field == "generateName" else 0)
    # Kubernetes appends letters and digits, so that a generated name may have a dash before them.
    shown, checked = name[:_SHOWN], name.rstrip("-") if field == "generateName" else name
    if not name:
        yield metadata.violation("name", "missing; set it")
    elif kind in _RAY_NAME_LENGTHS and not _DNS_1035.fullmatch(checked):
        message = f"'{shown}' is not a valid DNS label; use a to z, 0 to 9 and -, and start with a letter"
        yield metadata.violation(field, message)
    elif kind in _OBJECT_KINDS and not _DNS_SUBDOMAIN.fullmatch(checked):
        yield metadata.violation(field, f"'{shown}' is not a valid name; use a to z, 0 to 9, - and dots")
    longest = _RAY_NAME_LENGTHS.get(kind, 253)
    if length > longest:
        message = f"has {length} characters; shorten it to {longest}, because longer names are derived from it"
        yield metadata.violation(field, message)


def labels_are_valid(manifest: Fields) -> Iterator[Violation]:
    """Source: ValidateObjectMeta of Kubernetes, for the object and for its pods."""
    for owner in [manifest, *templates_of(manifest)]:
        yield from check_labels(owner.mapping("metadata", "labels"))
    for template in templates_of(manifest):
        yield from check_labels(template.mapping("spec", "nodeSelector"))


def check_labels(labels: Fields) -> Iterator[Violation]:
    """Keys and values in the syntax of labels. Source: IsQualifiedName and IsValidLabelValue of Kubernetes."""
    for key, value in labels.values.items():
        prefix, separator, name = key.rpartition("/")
        is_domain = len(prefix) <= 253 and _DNS_SUBDOMAIN.fullmatch(prefix)
        if not _NAME_PART.fullmatch(name) or (separator and not is_domain):
            message = "is not a valid key; use at most 63 letters, digits, '-', '_' and '.', after an optional domain"
            yield labels.violation(key[:_SHOWN], message)
        elif isinstance(value, str) and not _LABEL_VALUE.fullmatch(value):
            message = f"'{value[:_SHOWN]}' is not a valid label; use at most 63 letters, digits, '-', '_' and '.'"
            yield labels.violation(key, message)


def containers_have_distinct_names(manifest: Fields) -> Iterator[Violation]:
    """Source: validateContainers of Kubernetes."""
    for pod in pods_of(manifest):
        names = set()
        for container in containers_of(pod):
            name = container.text("name")
            if name in names:
                yield container.violation("name", f"'{name[:_SHOWN]}' is used twice in this pod; rename one")
            names.add(name)


def mounts_have_distinct_paths(manifest: Fields) -> Iterator[Violation]:
    """Source: ValidateVolumeMounts of Kubernetes."""
    for pod in pods_of(manifest):
        for container in containers_of(pod):
            paths = set()
            for mount in container.mappings("volumeMounts"):
                path = mount.text("mountPath")
                if path in paths:
                    yield mount.violation("mountPath", "is used twice in this container; remove one of the mounts")
                paths.add(path)


def variables_are_valid(manifest: Fields) -> Iterator[Violation]:
    """Source: ValidateEnv of Kubernetes."""
    for pod in pods_of(manifest):
        for container in containers_of(pod):
            for variable in container.mappings("env"):
                if not _ENV_NAME.fullmatch(variable.text("name")):
                    yield variable.violation("name", "is not a valid name of an environment variable; set one")
                if variable.text("value") and "valueFrom" in variable:
                    yield variable.violation("valueFrom", "is not supported together with value; remove one of them")


def amounts_are_valid(manifest: Fields) -> Iterator[Violation]:
    """Source: ValidateResourceRequirements of Kubernetes."""
    for pod in pods_of(manifest):
        for container in containers_of(pod):
            resources = container.mapping("resources")
            requests, limits = resources.mapping("requests"), resources.mapping("limits")
            for amounts in (requests, limits):
                for name, value in amounts.values.items():
                    amount = quantity(value)
                    if amount is None or amount < 0:
                        message = "is not a valid quantity; expected for example 4, 500m or 16Gi"
                        yield amounts.violation(name, message)
            for name in requests.values:
                request, limit = quantity(requests.get(name)), quantity(limits.get(name))
                if request is not None and limit is not None and request > limit:
                    message = f"{requests.get(name)} is more than the limit, {limits.get(name)}; lower it"
                    yield requests.violation(name, message)


def pull_policy_is_known(manifest: Fields) -> Iterator[Violation]:
    """Source: validatePullPolicy of Kubernetes."""
    for pod in pods_of(manifest):
        for container in containers_of(pod):
            policy = container.get("imagePullPolicy")
            if policy is not None and policy not in _PULL_POLICIES:
                yield container.violation("imagePullPolicy", f"expected one of: {', '.join(_PULL_POLICIES)}; set one")


def budget_has_one_number(manifest: Fields) -> Iterator[Violation]:
    """Source: ValidatePodDisruptionBudgetSpec of Kubernetes."""
    spec = manifest.mapping("spec")
    if manifest.get("kind") == "PodDisruptionBudget" and "minAvailable" in spec and "maxUnavailable" in spec:
        yield spec.violation("maxUnavailable", "is not supported together with minAvailable; remove one of them")


RULES: tuple[Callable[[Fields], Iterator[Violation]], ...] = (
    kind_exists,
    name_is_valid,
    labels_are_valid,
    containers_have_distinct_names,
    mounts_have_distinct_paths,
    variables_are_valid,
    amounts_are_valid,
    pull_policy_is_known,
    budget_has_one_number,
)
