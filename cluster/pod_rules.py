"""Faults of one pod template: what it may do, what it asks for, what it says in clear text."""

from collections.abc import Iterator
from typing import Any

from cluster.pods import GPU, SPOT_SELECTORS
from pos2distill.secrets import holds_secret

Fault = tuple[str, str]

# GPUs of common machines: https://cloud.google.com/compute/docs/gpus, https://aws.amazon.com/ec2/instance-types
INSTANCE_GPUS = {
    **{f"a2-highgpu-{n}g": n for n in (1, 2, 4, 8)},
    **{f"a2-ultragpu-{n}g": n for n in (1, 2, 4, 8)},
    **{f"a3-highgpu-{n}g": n for n in (1, 2, 4, 8)},
    **{f"g2-standard-{cpus}": n for cpus, n in ((4, 1), (8, 1), (12, 1), (16, 1), (32, 1), (24, 2), (48, 4), (96, 8))},
    **{f"{kind}.{size}": 1 for kind in ("g5", "g6", "g6e") for size in ("xlarge", "2xlarge", "4xlarge", "8xlarge")},
    **{f"{kind}.16xlarge": 1 for kind in ("g5", "g6", "g6e")},
    **{f"{kind}.{size}": 4 for kind in ("g5", "g6", "g6e") for size in ("12xlarge", "24xlarge")},
    **{f"{kind}.48xlarge": 8 for kind in ("g5", "g6", "g6e", "p5", "p5en")},
    **dict.fromkeys(("a3-megagpu-8g", "a3-ultragpu-8g", "p4d.24xlarge", "p4de.24xlarge", "p5e.48xlarge"), 8),
}
_GPU_COUNT_LABEL = "nvidia.com/gpu.count"  # set by NVIDIA's feature discovery
_INSTANCE_LABEL = "node.kubernetes.io/instance-type"


def as_dict(value: Any) -> dict[str, Any]:
    """The mapping, or an empty one: what is of the wrong kind is the schema's business."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """The list, or an empty one."""
    return value if isinstance(value, list) else []


def as_int(value: Any) -> int | None:
    """The whole number, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def gpus_of(group: dict[str, Any]) -> int:
    """GPUs of the Ray container, the first, of a group's pod."""
    containers = as_list(as_dict(as_dict(group.get("template")).get("spec")).get("containers"))
    limits = as_dict(as_dict(as_dict(containers[0] if containers else None).get("resources")).get("limits"))
    amount = str(limits.get(GPU, "0"))
    return int(amount) if amount.isdecimal() else 0


def is_spot(group: dict[str, Any]) -> bool:
    """Whether a group asks for machines that may be taken away."""
    selector = as_dict(as_dict(as_dict(group.get("template")).get("spec")).get("nodeSelector"))
    return any(selector.get(key) == value for each in SPOT_SELECTORS.values() for key, value in each.items())


def check_pod(place: str, template: dict[str, Any]) -> Iterator[Fault]:
    """All faults of a pod template."""
    pod, place = as_dict(template.get("spec")), f"{place}.spec"
    containers = [as_dict(container) for container in as_list(pod.get("containers"))]
    if not containers:
        yield f"{place}.containers", "missing; a pod needs the Ray container"
    if pod.get("restartPolicy") not in (None, "Never"):
        yield f"{place}.restartPolicy", f"is {pod['restartPolicy']}; autoscaler v2 replaces pods itself, set Never"
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield f"{place}.{name}", "opens the machine to the pod; remove it"
    yield from _check_identity(place, pod, containers)
    yield from _check_node_type(place, pod, containers)
    volumes = {str(as_dict(volume).get("name")) for volume in as_list(pod.get("volumes"))}
    for kind in ("initContainers", "containers"):
        for index, container in enumerate(as_list(pod.get(kind))):
            yield from _check_container(f"{place}.{kind}[{index}]", as_dict(container), volumes)


def _check_identity(place: str, pod: dict[str, Any], containers: list[dict[str, Any]]) -> Iterator[Fault]:
    security = as_dict(pod.get("securityContext"))
    owns = [as_dict(container.get("securityContext")) for container in containers]
    if not (security.get("runAsNonRoot") or (owns and all(own.get("runAsNonRoot") for own in owns))):
        yield f"{place}.securityContext.runAsNonRoot", "missing: the pod may run as root; set true"
    for at, context in [(place, security), *((f"{place}.containers[{i}]", own) for i, own in enumerate(owns))]:
        if context.get("runAsUser") == 0:
            yield f"{at}.securityContext.runAsUser", "0 is root; set for example 1000"
    if as_dict(security.get("seccompProfile")).get("type") not in ("RuntimeDefault", "Localhost"):
        yield f"{place}.securityContext.seccompProfile", "missing: every system call is open; set type: RuntimeDefault"


def _check_node_type(place: str, pod: dict[str, Any], containers: list[dict[str, Any]]) -> Iterator[Fault]:
    selector = as_dict(pod.get("nodeSelector"))
    machine = str(selector.get(_INSTANCE_LABEL))
    count = str(selector.get(_GPU_COUNT_LABEL, ""))
    there = int(count) if count.isdecimal() else INSTANCE_GPUS.get(machine)
    wanted = gpus_of({"template": {"spec": {"containers": containers}}})
    if there is not None and wanted > there:
        named = f"machines with {count} GPUs" if count.isdecimal() else f"{machine} has {there}"
        at = f"{place}.containers[0].resources.limits.{GPU}"
        yield at, f"{wanted} GPUs, but {named}: the pod would wait for ever; lower it or choose another machine"


def _check_container(place: str, container: dict[str, Any], volumes: set[str]) -> Iterator[Fault]:
    yield from _check_resources(place, as_dict(container.get("resources")))
    yield from check_rights(place, container)
    image = str(container.get("image", "")).rpartition("/")[2]
    if ":" not in image or image.endswith(":latest"):
        yield f"{place}.image", f"'{container.get('image', '')}' may change between pods; name a version"
    for index, mount in enumerate(as_list(container.get("volumeMounts"))):
        if (name := str(as_dict(mount).get("name"))) not in volumes:
            yield f"{place}.volumeMounts[{index}].name", f"there is no volume '{name}'; add it to the pod's volumes"
    for index, variable in enumerate(as_list(container.get("env"))):
        name, value = as_dict(variable).get("name", ""), as_dict(variable).get("value")
        if isinstance(value, str) and holds_secret(str(name), value):
            at = f"{place}.env[{index}].value"
            yield at, f"'{name}' looks like a secret in clear text; use valueFrom.secretKeyRef"


def _check_resources(place: str, resources: dict[str, Any]) -> Iterator[Fault]:
    requests, limits = as_dict(resources.get("requests")), as_dict(resources.get("limits"))
    for name in ("cpu", "memory"):
        if name not in limits:
            yield f"{place}.resources.limits.{name}", "missing: Ray takes the size of its node from it; set it"
    for name, limit in limits.items():
        if (requested := requests.get(name, limit)) != limit:
            yield f"{place}.resources.requests.{name}", f"{requested} is not the limit, {limit}; make them equal"


def check_rights(place: str, container: dict[str, Any]) -> Iterator[Fault]:
    """What a container may do that it should not, or needs and may not."""
    security, at = as_dict(container.get("securityContext")), f"{place}.securityContext"
    if security.get("privileged"):
        yield f"{at}.privileged", "gives the pod the machine; remove it"
    if security.get("allowPrivilegeEscalation") is not False:
        yield f"{at}.allowPrivilegeEscalation", "open by default; set false"
    if "ALL" not in as_list(as_dict(security.get("capabilities")).get("drop")):
        yield f"{at}.capabilities.drop", "capabilities are kept; set [ALL]"
    if security.get("readOnlyRootFilesystem") is not True:
        yield f"{at}.readOnlyRootFilesystem", "open by default; set true and mount an emptyDir where it must write"
    elif not any(as_dict(mount).get("mountPath") == "/tmp" for mount in as_list(container.get("volumeMounts"))):
        yield f"{place}.volumeMounts", "Ray writes to /tmp, which is read-only; mount an emptyDir there"
