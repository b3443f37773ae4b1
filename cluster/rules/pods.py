"""Rules for pod templates: rights, resources, images, volumes, and no secrets in clear text."""

from collections.abc import Callable, Iterator

from pos2distill.secrets import holds_secret

from ..names import GPU, GPU_COUNT_LABEL, INSTANCE_TYPE_LABEL
from ..types import Violation
from .fields import Fields, gpu_limit


def _instance_gpus() -> dict[str, int]:
    """GPUs of common instance types, from these lists:

    https://cloud.google.com/compute/docs/gpus, https://aws.amazon.com/ec2/instance-types
    """
    gpus: dict[str, int] = {}
    for count in (1, 2, 4, 8):
        gpus[f"a2-highgpu-{count}g"] = count
        gpus[f"a2-ultragpu-{count}g"] = count
    for cpus, count in ((4, 1), (8, 1), (12, 1), (16, 1), (32, 1), (24, 2), (48, 4), (96, 8)):
        gpus[f"g2-standard-{cpus}"] = count
    for family in ("g5", "g6", "g6e"):
        for size in ("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge"):
            gpus[f"{family}.{size}"] = 1
        for size in ("12xlarge", "24xlarge"):
            gpus[f"{family}.{size}"] = 4
        gpus[f"{family}.48xlarge"] = 8
    for name in ("a3-megagpu-8g", "a3-ultragpu-8g"):
        gpus[name] = 8
    for name in ("p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "p5e.48xlarge", "p5en.48xlarge"):
        gpus[name] = 8
    return gpus


INSTANCE_GPUS = _instance_gpus()


def check_pod(template: Fields) -> Iterator[Violation]:
    """All violations of a pod template."""
    pod = template.mapping("spec")
    for pod_rule in POD_RULES:
        yield from pod_rule(pod)
    for container in pod.mappings("initContainers") + pod.mappings("containers"):
        for container_rule in CONTAINER_RULES:
            yield from container_rule(container)
        yield from check_rights(container)
        yield from mounted_volumes_exist(container, pod)


def check_rights(container: Fields) -> Iterator[Violation]:
    """Violations in the rights of one container. The autoscaler has options of this form, too."""
    for rule in RIGHTS_RULES:
        yield from rule(container)


def pod_has_a_container(pod: Fields) -> Iterator[Violation]:
    """Source: ValidateRayClusterSpec."""
    if not pod.items_of("containers"):
        yield pod.violation("containers", "missing; a pod requires the Ray container")


def pod_is_not_restarted(pod: Fields) -> Iterator[Violation]:
    """Source: ValidateRayClusterSpec."""
    # KubeRay accepts a missing policy.
    policy = pod.get("restartPolicy")
    if policy not in (None, "Never"):
        yield pod.violation("restartPolicy", f"is {policy}, but autoscaler v2 replaces pods itself; set Never")


def host_namespaces_are_not_shared(pod: Fields) -> Iterator[Violation]:
    """Source: Pod Security Standards of Kubernetes, level Baseline."""
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield pod.violation(name, "gives the pod access to the host; remove it")


def pod_does_not_run_as_root(pod: Fields) -> Iterator[Violation]:
    """Source: Pod Security Standards of Kubernetes, level Restricted."""
    # A container's setting overrides that of the pod, so either may forbid root.
    contexts = [container.mapping("securityContext") for container in pod.mappings("containers")]
    every_container_is_set = bool(contexts) and all(context.get("runAsNonRoot") for context in contexts)
    if not pod.mapping("securityContext").get("runAsNonRoot") and not every_container_is_set:
        yield pod.violation("securityContext.runAsNonRoot", "missing: the pod may run as root; set true")


def user_is_not_root(pod: Fields) -> Iterator[Violation]:
    """Source: Pod Security Standards of Kubernetes, level Restricted."""
    for owner in [pod, *pod.mappings("containers")]:
        if owner.mapping("securityContext").get("runAsUser") == 0:
            yield owner.violation("securityContext.runAsUser", "0 is root; set for example 1000")


def system_calls_are_filtered(pod: Fields) -> Iterator[Violation]:
    """Source: Pod Security Standards of Kubernetes, level Restricted."""
    profile = pod.mapping("securityContext", "seccompProfile")
    if profile.get("type") not in ("RuntimeDefault", "Localhost"):
        message = "missing: every system call is allowed; set type: RuntimeDefault"
        yield pod.violation("securityContext.seccompProfile", message)


def gpus_fit_the_machine(pod: Fields) -> Iterator[Violation]:
    """The machine that the node selector names must have the GPUs that the pod requests. Rule of this project."""
    selector = pod.mapping("nodeSelector")
    instance_type = str(selector.get(INSTANCE_TYPE_LABEL))
    count_label = str(selector.get(GPU_COUNT_LABEL, ""))
    available: int | None
    if count_label.isdecimal():
        available, machine = int(count_label), "the selected machines have"
    else:
        available, machine = INSTANCE_GPUS.get(instance_type), f"{instance_type} has"
    # The Ray container is the first one, and the only one that may request GPUs.
    containers = pod.mappings("containers")
    requested = gpu_limit(containers[0]) if containers else 0
    if available is not None and requested > available:
        message = f"{requested} GPUs, but {machine} {available}, so that the pod would wait forever; lower it"
        yield pod.violation(f"containers[0].resources.limits.{GPU}", message)


def limits_are_set(container: Fields) -> Iterator[Violation]:
    """KubeRay 1.7 passes the limits of the Ray container to `ray start`."""
    limits = container.mapping("resources", "limits")
    for name in ("cpu", "memory"):
        if name not in limits:
            yield limits.violation(name, "missing: Ray takes the size of its node from it; set it")


def requests_equal_limits(container: Fields) -> Iterator[Violation]:
    """Otherwise Ray would place work for resources that the machine may not have. Rule of this project."""
    resources = container.mapping("resources")
    requests, limits = resources.mapping("requests"), resources.mapping("limits")
    for name, limit in limits.values.items():
        request = requests.get(name, limit)
        if request != limit:
            yield requests.violation(name, f"{request} is not the limit, {limit}; make them equal")


def image_has_a_version(container: Fields) -> Iterator[Violation]:
    """Pods of one cluster must run the same image. Rule of this project."""
    image = str(container.get("image", ""))
    name = image.rpartition("/")[2]  # a registry's port also follows a colon
    if ":" not in name or name.endswith(":latest"):
        yield container.violation("image", f"'{image}' may change between pods; name a version")


def environment_holds_no_secret(container: Fields) -> Iterator[Violation]:
    """Rule of this project."""
    for variable in container.mappings("env"):
        name, value = str(variable.get("name", "")), variable.get("value")
        if isinstance(value, str) and holds_secret(name, value):
            yield variable.violation("value", f"'{name}' looks like a secret in clear text; use valueFrom.secretKeyRef")


def mounted_volumes_exist(container: Fields, pod: Fields) -> Iterator[Violation]:
    """Source: validation of pods by the API server, which happens only when KubeRay creates the pod."""
    volumes = {str(volume.get("name")) for volume in pod.mappings("volumes")}
    for mount in container.mappings("volumeMounts"):
        name = str(mount.get("name"))
        if name not in volumes:
            yield mount.violation("name", f"there is no volume '{name}'; add it to the pod's volumes")


def container_is_not_privileged(container: Fields) -> Iterator[Violation]:
    """Source: Pod Security Standards of Kubernetes, level Baseline."""
    if container.mapping("securityContext").get("privileged"):
        yield container.violation("securityContext.privileged", "gives the container all rights on the host; remove it")


def privileges_cannot_be_gained(container: Fields) -> Iterator[Violation]:
    """Source: Pod Security Standards of Kubernetes, level Restricted."""
    if container.mapping("securityContext").get("allowPrivilegeEscalation") is not False:
        yield container.violation("securityContext.allowPrivilegeEscalation", "allowed by default; set false")


def capabilities_are_dropped(container: Fields) -> Iterator[Violation]:
    """Source: Pod Security Standards of Kubernetes, level Restricted."""
    if "ALL" not in container.mapping("securityContext", "capabilities").items_of("drop"):
        yield container.violation("securityContext.capabilities.drop", "capabilities are kept by default; set [ALL]")


def root_file_system_is_read_only(container: Fields) -> Iterator[Violation]:
    """The root file system must be read-only, and /tmp writable for Ray. Rule of this project."""
    if container.mapping("securityContext").get("readOnlyRootFilesystem") is not True:
        message = "writable by default; set true, and mount an emptyDir where the container must write"
        yield container.violation("securityContext.readOnlyRootFilesystem", message)
        return
    # Only a read-only root file system needs a mount for /tmp.
    mount_paths = [mount.get("mountPath") for mount in container.mappings("volumeMounts")]
    if "/tmp" not in mount_paths:
        yield container.violation("volumeMounts", "Ray writes to /tmp, which is read-only; mount an emptyDir there")


Rule = Callable[[Fields], Iterator[Violation]]

POD_RULES: tuple[Rule, ...] = (
    pod_has_a_container,
    pod_is_not_restarted,
    host_namespaces_are_not_shared,
    pod_does_not_run_as_root,
    user_is_not_root,
    system_calls_are_filtered,
    gpus_fit_the_machine,
)
CONTAINER_RULES: tuple[Rule, ...] = (
    limits_are_set,
    requests_equal_limits,
    image_has_a_version,
    environment_holds_no_secret,
)
RIGHTS_RULES: tuple[Rule, ...] = (
    container_is_not_privileged,
    privileges_cannot_be_gained,
    capabilities_are_dropped,
    root_file_system_is_read_only,
)
