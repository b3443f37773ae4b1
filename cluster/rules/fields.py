"""Reading manifests that may be written by hand: any field may be missing or have the wrong type."""

import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

from ..names import GPU, PART_OF_LABEL, PROJECT
from ..types import Violation

RAY_API = "ray.io/v1"
# https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
_QUANTITY = re.compile(r"([+-]?[0-9]+(?:\.[0-9]*)?|[+-]?\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,3})?")
_DECIMAL_SUFFIXES = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_LARGEST = Decimal(2**63 - 1)  # ParseQuantity of Kubernetes takes this for anything larger
_BINARY_SUFFIXES = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


class Fields:
    """The fields of one mapping in a manifest, and the path to it.

    A field of the wrong type reads as missing. The schema reports wrong types, so the rules need no checks for them.
    """

    def __init__(self, path: str, value: Any) -> None:
        self.path = path
        self.values: dict[str, Any] = value if isinstance(value, dict) else {}

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def __bool__(self) -> bool:
        return bool(self.values)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, of any type. A field without a value (null) is a missing one."""
        value = self.values.get(name)
        return default if value is None else value

    def text(self, name: str) -> str:
        """The value of a field that must be a string."""
        value = self.values.get(name)
        return value if isinstance(value, str) else ""

    def integer(self, name: str) -> int | None:
        """The value of a field that must be an integer."""
        value = self.values.get(name)
        # bool is a subclass of int.
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        return value if is_integer else None

    def items_of(self, name: str) -> list[Any]:
        """The items of a list."""
        value = self.values.get(name)
        return value if isinstance(value, list) else []

    def mapping(self, *names: str) -> "Fields":
        """The mapping in a field, or in a field of a field, and so on."""
        fields = self
        for name in names:
            fields = Fields(fields.join(name), fields.values.get(name))
        return fields

    def mappings(self, name: str) -> list["Fields"]:
        """The mappings in a list."""
        return [Fields(f"{self.join(name)}[{index}]", item) for index, item in enumerate(self.items_of(name))]

    def join(self, name: str) -> str:
        """The path to a field."""
        return f"{self.path}.{name}" if self.path else name

    def violation(self, name: str, message: str) -> Violation:
        """A violation of the field `name`, which may be a dotted path."""
        return Violation(self.join(name), message)


# --- The parts of a manifest. All are empty in manifests of other kinds.


def is_own(manifest: Fields) -> bool:
    """Whether a manifest carries the label of this project."""
    return bool(manifest.mapping("metadata", "labels").get(PART_OF_LABEL) == PROJECT)


def job_of(manifest: Fields) -> Fields:
    """The spec of a RayJob."""
    return manifest.mapping("spec") if manifest.get("kind") == "RayJob" else Fields("spec", None)


def cluster_of(manifest: Fields) -> Fields:
    """The spec of a RayCluster, or that of the cluster in a RayJob."""
    if manifest.get("kind") == "RayCluster":
        return manifest.mapping("spec")
    return job_of(manifest).mapping("rayClusterSpec")


def groups_of(manifest: Fields) -> list[Fields]:
    """The groups of worker nodes."""
    return cluster_of(manifest).mappings("workerGroupSpecs")


def nodes_of(manifest: Fields) -> list[Fields]:
    """The head and the groups of worker nodes."""
    cluster = cluster_of(manifest)
    return [cluster.mapping("headGroupSpec"), *groups_of(manifest)] if cluster else []


def templates_of(manifest: Fields) -> list[Fields]:
    """The pod templates of the head, of the groups and of the submitter."""
    templates = [node.mapping("template") for node in nodes_of(manifest)]
    if "submitterPodTemplate" in job_of(manifest):
        templates.append(job_of(manifest).mapping("submitterPodTemplate"))
    return templates


def pods_of(manifest: Fields) -> list[Fields]:
    """The specs of those templates."""
    return [template.mapping("spec") for template in templates_of(manifest)]


def containers_of(pod: Fields) -> list[Fields]:
    """All containers of a pod; those that run before the others come first."""
    return pod.mappings("initContainers") + pod.mappings("containers")


def ray_container(node: Fields) -> Fields:
    """The Ray container of the head or of a node group. KubeRay takes the first container of the pod."""
    containers = node.mapping("template", "spec").mappings("containers")
    if not containers:
        # An empty container, so that rules can read it; another rule reports that it is missing.
        return Fields(node.join("template.spec.containers[0]"), None)
    return containers[0]


def autoscaler_of(manifest: Fields) -> Fields | None:
    """The options of the autoscaler's container, which KubeRay adds to the head; None without autoscaling."""
    cluster = cluster_of(manifest)
    return cluster.mapping("autoscalerOptions") if cluster.get("enableInTreeAutoscaling") is True else None


def running_containers(manifest: Fields) -> list[Fields]:
    """The containers of all pods that stay, and the autoscaler's, whose options have the same form."""
    containers = [container for pod in pods_of(manifest) for container in pod.mappings("containers")]
    autoscaler = autoscaler_of(manifest)
    return containers if autoscaler is None else [*containers, autoscaler]


def all_containers(manifest: Fields) -> list[Fields]:
    """The running containers, and those that run before them."""
    prepared = [container for pod in pods_of(manifest) for container in pod.mappings("initContainers")]
    return prepared + running_containers(manifest)


# --- Values


def quantity(value: Any) -> Decimal | None:
    """An amount of a resource, such as 4, 500m or 16Gi; None for a value that is not an amount."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    match = _QUANTITY.fullmatch(str(value))
    if not match:
        return None
    number, suffix = Decimal(match[1]), match[2] or ""
    if suffix in _BINARY_SUFFIXES:
        amount = number * Decimal(2) ** _BINARY_SUFFIXES[suffix]
    else:
        exponent = _DECIMAL_SUFFIXES.get(suffix)
        if exponent is None:
            exponent = int(suffix[1:]) if suffix else 0
        amount = number.scaleb(exponent)
    return max(-_LARGEST, min(amount, _LARGEST))


def gpu_limit(container: Fields) -> int:
    """GPUs of a container. A value that is not a number counts as 0."""
    return int(quantity(container.mapping("resources", "limits").get(GPU)) or 0)


def strings_in(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """All strings in a value, with their paths."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from strings_in(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from strings_in(inner, f"{path}[{index}]")
    elif isinstance(value, str):
        yield path, value


Rule = Callable[[Fields], Iterator[Violation]]
"""Finds what is wrong with one manifest."""
