"""What a study needs of its pods: images, resources, volumes and variables."""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from ..machines import gpu_count
from ..names import GPU, GPU_COUNT_LABEL, INSTANCE_TYPE_LABEL, SET_BY_KUBERAY
from ..syntax import SHOWN, is_pinned
from ..types import Violation
from .fields import (
    Fields,
    Rule,
    all_containers,
    cluster_of,
    containers_of,
    gpu_limit,
    nodes_of,
    pods_of,
    quantity,
    ray_container,
    running_containers,
)

_SHM = "/dev/shm"


def images_have_a_version(manifest: Fields) -> Iterator[Violation]:
    """Pods of one cluster must run the same image."""
    containers = [container for pod in pods_of(manifest) for container in containers_of(pod)]
    collector = cluster_of(manifest).mapping("historyServerOptions", "collectorOptions")
    if collector.get("image"):  # KubeRay rejects one without an image
        containers.append(collector)
    for container in containers:
        image = container.text("image")
        # Another rule reports a container without an image.
        if image and not is_pinned(image):
            yield container.violation("image", f"'{image[:200]}' may change between pods; name a version")


# --- Resources


def ray_containers_have_limits(manifest: Fields) -> Iterator[Violation]:
    """KubeRay 1.7 passes the limits of the Ray container to `ray start`, and Ray places work by them."""
    for node in nodes_of(manifest):
        resources = ray_container(node).mapping("resources")
        limits = resources.mapping("limits")
        for name in ("cpu", "memory"):
            if name not in limits:
                yield limits.violation(name, "missing: Ray takes the size of its node from it; set it")
        for name in resources.mapping("requests").values:
            if name not in limits:
                yield limits.violation(name, "missing, although it is requested; set it to the request")
        for name in limits.values:
            limit, request = limits.get(name), resources.mapping("requests").get(name, limits.get(name))
            if quantity(request) != quantity(limit):
                message = f"{request} is not the limit, {limit}, which the machine may not have; make them equal"
                yield resources.violation(f"requests.{name}", message)


def gpus_fit_the_machine(manifest: Fields) -> Iterator[Violation]:
    """The machine that the node selector names must have the GPUs that the pod requests."""
    for node in nodes_of(manifest):
        selector = node.mapping("template", "spec", "nodeSelector")
        count_label = selector.text(GPU_COUNT_LABEL)
        instance_type = selector.text(INSTANCE_TYPE_LABEL)
        available: int | None
        if count_label.isdecimal() and len(count_label) < 4:
            available, machine = int(count_label), "the selected machines have"
        else:
            available, machine = gpu_count(instance_type), f"{instance_type} has"
        if available is None:
            continue
        container = ray_container(node)
        requested = gpu_limit(container)
        if requested > available:
            message = f"{requested} GPUs, but {machine} {available}, so that the pod would wait forever; lower it"
            yield container.violation(f"resources.limits.{GPU}", message)


def gpu_pods_tolerate_gpu_machines(manifest: Fields) -> Iterator[Violation]:
    """GKE and NVIDIA's operator taint machines with GPUs."""
    for node in nodes_of(manifest):
        tolerations = node.mapping("template", "spec").mappings("tolerations")
        # A toleration without a key matches every taint.
        tolerates = any(toleration.get("key") in (None, GPU) for toleration in tolerations)
        if gpu_limit(ray_container(node)) and not tolerates:
            message = f"missing for {GPU}: machines with GPUs are tainted; add it with operator Exists"
            yield node.violation("template.spec.tolerations", message)


# --- Volumes


def mounted_volumes_exist(manifest: Fields) -> Iterator[Violation]:
    """The API server rejects the pod, unless KubeRay adds the volume."""
    for pod in pods_of(manifest):
        volumes = {volume.text("name") for volume in pod.mappings("volumes")}
        for container in containers_of(pod):
            for mount in container.mappings("volumeMounts"):
                name = mount.text("name")
                if name not in volumes:
                    yield mount.violation("name", f"there is no volume '{name[:SHOWN]}'; add it to the pod's volumes")


def written_folders_are_mounted(manifest: Fields) -> Iterator[Violation]:
    """With a read-only root file system, Ray's folder and the home folder with its caches must be volumes."""
    for container in running_containers(manifest):
        if container.mapping("securityContext").get("readOnlyRootFilesystem") is not True:
            continue
        mounts = [mount.text("mountPath") for mount in container.mappings("volumeMounts")]
        if "/tmp" not in mounts:
            yield container.violation("volumeMounts", "Ray writes to /tmp, which is read-only; mount an emptyDir there")
        homes = [item.text("value") for item in container.mappings("env") if item.get("name") == "HOME"]
        home = PurePosixPath(homes[-1] if homes else "/root")
        if not any(mount and home.is_relative_to(mount) for mount in mounts):
            yield container.violation("env", "HOME is not on a mounted volume, so caches cannot be written; set it")


def object_store_fits_shared_memory(manifest: Fields) -> Iterator[Violation]:
    """Ray 2.60 stores objects on disk if /dev/shm is too small; /dev/shm counts towards the pod's memory."""
    for node in nodes_of(manifest):
        container = ray_container(node)
        field = "rayStartParams.object-store-memory"
        store = node.mapping("rayStartParams").text("object-store-memory")
        if store and not store.isdecimal():
            yield node.violation(field, "expected a number of bytes; set it without a unit")
            continue
        size = _shared_memory(node, container)
        if size is None:
            yield container.violation("volumeMounts", f"no volume in memory at {_SHM}; mount an emptyDir there")
            continue
        memory = quantity(container.mapping("resources", "limits").get("memory"))
        if memory is not None and size >= memory:
            yield container.violation("resources.limits.memory", f"must be more than the volume at {_SHM}; raise it")
        if store and (quantity(store) or 0) > size:
            yield node.violation(field, f"is more than the volume at {_SHM}; lower it")


def _shared_memory(node: Fields, container: Fields) -> Any:
    """Bytes of the volume at /dev/shm; None if there is none in memory."""
    volumes = {volume.text("name"): volume for volume in node.mapping("template", "spec").mappings("volumes")}
    for mount in container.mappings("volumeMounts"):
        volume = volumes.get(mount.text("name"))
        if mount.get("mountPath") == _SHM and volume and volume.mapping("emptyDir").get("medium") == "Memory":
            # Without a limit, it may use all memory of the pod.
            return quantity(volume.mapping("emptyDir").get("sizeLimit", 0))
    return None


# --- Variables


def variables_are_set_once(manifest: Fields) -> Iterator[Violation]:
    """No two variables of a container have one name: the last one would count."""
    for container in all_containers(manifest):
        names = set()
        for variable in container.mappings("env"):
            name = variable.text("name")
            if name in names:
                yield variable.violation("name", f"'{name[:SHOWN]}' is set twice; remove one")
            if name in SET_BY_KUBERAY:
                yield variable.violation("name", f"'{name[:SHOWN]}' is set by KubeRay; remove it")
            names.add(name)
            reference = variable.mapping("valueFrom", "secretKeyRef")
            if "secretKeyRef" in variable.mapping("valueFrom") and not (reference.get("name") and reference.get("key")):
                yield reference.violation("name", "name and key of the Secret are required; set both")


RISKS: tuple[Rule, ...] = (images_have_a_version,)
POLICIES: tuple[Rule, ...] = (
    ray_containers_have_limits,
    gpus_fit_the_machine,
    gpu_pods_tolerate_gpu_machines,
    mounted_volumes_exist,
    written_folders_are_mounted,
    object_store_fits_shared_memory,
    variables_are_set_once,
)
