"""What the API server rejects: in the objects themselves, and in pods, which KubeRay creates only later."""

import re
from collections.abc import Iterator

from pos2distill.errors import did_you_mean

from ..names import GPU, RAY_CLUSTER_NAME_LENGTH, RAY_JOB_NAME_LENGTH
from ..syntax import (
    KEY_MESSAGE,
    LABEL_MESSAGE,
    NAME_MESSAGE,
    SHOWN,
    is_config_key,
    is_dns_name,
    is_label_value,
    is_qualified_name,
)
from ..types import Violation
from .fields import Fields, Rule, containers_of, pods_of, quantity, templates_of
from .network import check_port, check_protocol

_RAY_KINDS = ("RayJob", "RayCluster", "RayService", "RayCronJob")
# KubeRay derives the names of services and pods from these names.
_RAY_NAME_LENGTHS = {"RayJob": RAY_JOB_NAME_LENGTH, "RayCluster": RAY_CLUSTER_NAME_LENGTH}
_OBJECT_KINDS = ("ServiceAccount", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget")
_GENERATED_LENGTH = 5  # characters that Kubernetes appends to generateName

_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # services may not begin with a digit
_ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_RESOURCES = ("cpu", "memory", "ephemeral-storage")  # resources without a domain, besides hugepages-SIZE
_OPERATORS = ("Exists", "Equal", "Lt", "Gt")  # the last two since Kubernetes 1.35, behind a feature gate
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_ANNOTATIONS_LENGTH = 256 << 10  # total length of all keys and values of an object
_PULL_POLICIES = ("Always", "IfNotPresent", "Never")


def kind_exists(manifest: Fields) -> Iterator[Violation]:
    """Source: the CRDs of KubeRay 1.7.0. Kinds of other groups are not known here."""
    kind, version = manifest.text("kind"), manifest.text("apiVersion")
    if not version.startswith("ray.io/"):
        return
    if kind not in _RAY_KINDS:
        yield manifest.violation("kind", f"'{kind[:SHOWN]}' is not a KubeRay kind; set one of {', '.join(_RAY_KINDS)}")
    if version not in ("ray.io/v1", "ray.io/v1alpha1"):
        yield manifest.violation("apiVersion", f"'{version[:SHOWN]}' is not a KubeRay version; set ray.io/v1")


def name_is_valid(manifest: Fields) -> Iterator[Violation]:
    """Source: ValidateRayJobMetadata and ValidateRayClusterMetadata of KubeRay; ValidateObjectMeta of Kubernetes."""
    metadata, kind = manifest.mapping("metadata"), manifest.text("kind")
    field = "name" if "name" in metadata else "generateName"
    name = metadata.text(field)
    length = len(name) + (_GENERATED_LENGTH if field == "generateName" else 0)
    # Kubernetes appends letters and digits, so that a generated name may have a dash before them.
    shown, checked = name[:SHOWN], name.rstrip("-") if field == "generateName" else name
    if not name:
        yield metadata.violation("name", "missing; set it")
    elif kind in _RAY_NAME_LENGTHS and not _DNS_1035.fullmatch(checked):
        message = f"'{shown}' is not a valid DNS label; use a to z, 0 to 9 and -, and start with a letter"
        yield metadata.violation(field, message)
    elif kind in _OBJECT_KINDS and not is_dns_name(checked):
        yield metadata.violation(field, f"'{shown}' {NAME_MESSAGE}")
    longest = _RAY_NAME_LENGTHS.get(kind, 253)
    if length > longest:
        message = f"has {length} characters; shorten it to {longest}, because longer names are derived from it"
        yield metadata.violation(field, message)


def labels_are_valid(manifest: Fields) -> Iterator[Violation]:
    """Source: ValidateObjectMeta of Kubernetes, for the object and for its pods."""
    for owner in [manifest, *templates_of(manifest)]:
        yield from label_violations(owner.mapping("metadata", "labels"))
    for template in templates_of(manifest):
        yield from label_violations(template.mapping("spec", "nodeSelector"))


def label_violations(labels: Fields) -> Iterator[Violation]:
    """Keys and values in the syntax of labels. Source: IsQualifiedName and IsValidLabelValue of Kubernetes."""
    for key, value in labels.values.items():
        if not is_qualified_name(key):
            yield labels.violation(key[:SHOWN], KEY_MESSAGE)
        elif isinstance(value, str) and not is_label_value(value):
            yield labels.violation(key, f"'{value[:SHOWN]}' {LABEL_MESSAGE}")


def annotations_are_valid(manifest: Fields) -> Iterator[Violation]:
    """Source: ValidateAnnotations of Kubernetes, for the object and for its pods."""
    for owner in [manifest, *templates_of(manifest)]:
        annotations = owner.mapping("metadata", "annotations")
        for key in annotations.values:
            if not is_qualified_name(key.lower()):
                yield annotations.violation(key[:SHOWN], KEY_MESSAGE)
        length = sum(len(f"{key}{value}".encode()) for key, value in annotations.values.items())
        if length > _ANNOTATIONS_LENGTH:
            yield owner.violation("metadata.annotations", f"have {length} bytes; shorten them to {_ANNOTATIONS_LENGTH}")


def tolerations_are_valid(manifest: Fields) -> Iterator[Violation]:
    """Source: ValidateTolerations of Kubernetes."""
    for pod in pods_of(manifest):
        for toleration in pod.mappings("tolerations"):
            yield from _check_toleration(toleration)


def _check_toleration(toleration: Fields) -> Iterator[Violation]:
    key, value = toleration.text("key"), toleration.text("value")
    operator, effect = toleration.text("operator"), toleration.text("effect")
    if key and not is_qualified_name(key):
        yield toleration.violation("key", KEY_MESSAGE)
    if operator and operator not in _OPERATORS:
        yield toleration.violation("operator", f"'{operator[:SHOWN]}' is unknown{did_you_mean(operator, _OPERATORS)}")
    elif not key and operator != "Exists":
        yield toleration.violation("operator", "a toleration of all taints requires Exists; set it, or a key")
    elif operator == "Exists" and value:
        yield toleration.violation("value", "is not supported with the operator Exists; remove it, or set Equal")
    elif not is_label_value(value):
        yield toleration.violation(
            "value", f"'{value[:SHOWN]}' is not a valid value; use at most 63 letters and digits"
        )
    if effect and effect not in _EFFECTS:
        yield toleration.violation("effect", f"'{effect[:SHOWN]}' is unknown{did_you_mean(effect[:SHOWN], _EFFECTS)}")
    elif "tolerationSeconds" in toleration and effect != "NoExecute":
        yield toleration.violation("tolerationSeconds", "requires the effect NoExecute; set that, or remove it")


def references_are_valid(manifest: Fields) -> Iterator[Violation]:
    """Source: ValidatePodSpec and ValidateEnv of Kubernetes. The names of Secrets are not checked there."""
    for pod in pods_of(manifest):
        for field in ("priorityClassName", "serviceAccountName"):
            name = pod.text(field)
            if name and not is_dns_name(name):
                yield pod.violation(field, f"'{name[:SHOWN]}' {NAME_MESSAGE}")
        for container in containers_of(pod):
            for variable in container.mappings("env"):
                for source in ("secretKeyRef", "configMapKeyRef"):
                    reference = variable.mapping("valueFrom", source)
                    if reference.text("key") and not is_config_key(reference.text("key")):
                        message = "is not a valid key of a Secret; use letters, digits, '-', '_' and '.'"
                        yield reference.violation("key", message)


def container_ports_are_valid(manifest: Fields) -> Iterator[Violation]:
    """Source: validateContainerPorts of Kubernetes."""
    for pod in pods_of(manifest):
        for container in containers_of(pod):
            for port in container.mappings("ports"):
                yield from check_port(port, "containerPort")
                yield from check_protocol(port)


def containers_have_distinct_names(manifest: Fields) -> Iterator[Violation]:
    """Source: validateContainers of Kubernetes."""
    for pod in pods_of(manifest):
        names = set()
        for container in containers_of(pod):
            name = container.text("name")
            if name in names:
                yield container.violation("name", f"'{name[:SHOWN]}' is used twice in this pod; rename one")
            names.add(name)


def volumes_are_distinct(manifest: Fields) -> Iterator[Violation]:
    """Source: ValidateVolumes of Kubernetes."""
    for pod in pods_of(manifest):
        names = set()
        for volume in pod.mappings("volumes"):
            name, sources = volume.text("name"), [key for key in volume.values if key != "name" and key in volume]
            if name in names:
                yield volume.violation("name", f"there are two volumes '{name[:SHOWN]}'; remove one")
            names.add(name)
            if len(sources) > 1:
                yield volume.violation(
                    sources[1][:SHOWN], f"is a second source, beside {sources[0][:SHOWN]}; remove one"
                )


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
            yield from _check_amounts(requests)
            yield from _check_amounts(limits)
            for name in requests.values:
                request, limit = quantity(requests.get(name)), quantity(limits.get(name))
                if request is not None and limit is not None and request > limit:
                    message = f"{requests.get(name)} is more than the limit, {limits.get(name)}; lower it"
                    yield requests.violation(name, message)


def _check_amounts(amounts: Fields) -> Iterator[Violation]:
    for name, value in amounts.values.items():
        amount = quantity(value)
        if not _is_resource(name):
            message = f"is not a resource; set one of {', '.join(_RESOURCES)}, or of a device, such as {GPU}"
            yield amounts.violation(name[:SHOWN], message)
        elif amount is None or amount < 0:
            yield amounts.violation(name, "is not a valid quantity; expected for example 4, 500m or 16Gi")
        elif "/" in name and amount != int(amount):  # a device
            yield amounts.violation(name, f"{value} is not a whole number; set one")


def _is_resource(name: str) -> bool:
    """Whether this names a resource; those of devices have a domain.

    Source: ValidateContainerResourceName of Kubernetes.
    """
    if "/" in name:
        return is_qualified_name(name)
    return name in _RESOURCES or name.startswith("hugepages-")


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


RULES: tuple[Rule, ...] = (
    kind_exists,
    name_is_valid,
    labels_are_valid,
    annotations_are_valid,
    tolerations_are_valid,
    references_are_valid,
    container_ports_are_valid,
    containers_have_distinct_names,
    volumes_are_distinct,
    mounts_have_distinct_paths,
    variables_are_valid,
    amounts_are_valid,
    pull_policy_is_known,
    budget_has_one_number,
)
