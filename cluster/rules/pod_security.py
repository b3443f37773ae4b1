"""What a study needs of the rights of its pods, and no secrets in clear text.

The rights are those of the Pod Security Standards of Kubernetes, level Restricted, and a read-only root file system.
"""

from collections.abc import Iterator
from typing import Any

from pos2distill.secrets import holds_secret, looks_secret

from ..names import TOKEN_FOLDER
from ..syntax import SHOWN
from ..types import Violation
from .fields import Fields, Rule, all_containers, autoscaler_of, cluster_of, containers_of, pods_of, strings_in

_HOST_NAMESPACES = ("hostNetwork", "hostPID", "hostIPC")
# Required values in the security context of every container, and the reason.
_RIGHTS: tuple[tuple[str, Any, str], ...] = (
    ("allowPrivilegeEscalation", False, "allowed by default; set false"),
    ("readOnlyRootFilesystem", True, "writable by default; set true, and mount an emptyDir where it must write"),
)
_FILTERED = ("RuntimeDefault", "Localhost")  # types of a seccomp or AppArmor profile
# What level Restricted permits. `hostPath` is among the risks above.
_VOLUMES = ("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret")
_SELINUX_TYPES = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")


# --- Risks in any manifest


def host_is_not_shared(manifest: Fields) -> Iterator[Violation]:
    """Source: level Baseline."""
    for pod in pods_of(manifest):
        for name in _HOST_NAMESPACES:
            if pod.get(name):
                yield pod.violation(name, "gives the pod access to the host; remove it")
        for volume in pod.mappings("volumes"):
            if "hostPath" in volume:
                yield volume.violation("hostPath", "gives the pod files of the host; use an emptyDir or a claim")
    for container in all_containers(manifest):
        if container.mapping("securityContext").get("privileged"):
            message = "gives the container all rights on the host; remove it"
            yield container.violation("securityContext.privileged", message)


def no_secret_in_clear_text(manifest: Fields) -> Iterator[Violation]:
    """Everyone who may read the object reads its strings. Secrets themselves are the place for them."""
    if manifest.get("kind") == "Secret":
        return
    named = dict(_variables(manifest.values, ""))
    for path, text in strings_in(manifest.values):
        name = named.get(path)
        if name is not None and holds_secret(name, text):
            yield Violation(path, f"'{name[:SHOWN]}' looks like a secret in clear text; use valueFrom.secretKeyRef")
        elif name is None and looks_secret(text):
            yield Violation(path, "contains what looks like a secret; use a Kubernetes Secret and a secretKeyRef")


def _variables(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """The path of every value in a list of variables, and the variable's name."""
    if isinstance(value, dict):
        if isinstance(value.get("name"), str) and isinstance(value.get("value"), str):
            yield f"{path}.value", value["name"]
        for key, inner in value.items():
            yield from _variables(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _variables(inner, f"{path}[{index}]")


# --- Rights


def pods_do_not_run_as_root(manifest: Fields) -> Iterator[Violation]:
    """A container's setting replaces that of its pod."""
    for pod in pods_of(manifest):
        context = pod.mapping("securityContext")
        every_container_is_set = bool(pod.mappings("containers"))
        for container in containers_of(pod):
            own = container.mapping("securityContext")
            every_container_is_set = every_container_is_set and own.get("runAsNonRoot") is True
            if own.get("runAsNonRoot") is False:
                yield container.violation("securityContext.runAsNonRoot", "the container may run as root; remove it")
        if context.get("runAsNonRoot") is not True and not every_container_is_set:
            yield context.violation("runAsNonRoot", "missing: the pod may run as root; set true")
        for owner in [pod, *containers_of(pod)]:
            if owner.mapping("securityContext").integer("runAsUser") == 0:
                yield owner.violation("securityContext.runAsUser", "0 is root; set for example 1000")


def system_calls_are_filtered(manifest: Fields) -> Iterator[Violation]:
    """A container's profile replaces that of its pod."""
    for pod in pods_of(manifest):
        if pod.mapping("securityContext", "seccompProfile").get("type") not in _FILTERED:
            message = "missing: every system call is allowed; set type: RuntimeDefault"
            yield pod.violation("securityContext.seccompProfile", message)
        for container in containers_of(pod):
            profile = container.mapping("securityContext", "seccompProfile")
            if profile and profile.get("type") not in _FILTERED:
                yield profile.violation("type", "every system call is allowed; remove it")


def rights_are_dropped(manifest: Fields) -> Iterator[Violation]:
    """A container needs no rights beyond those of its user."""
    for container in all_containers(manifest):
        context = container.mapping("securityContext")
        for name, expected, message in _RIGHTS:
            if context.get(name) is not expected:
                yield context.violation(name, message)
        capabilities = context.mapping("capabilities")
        if "ALL" not in capabilities.items_of("drop"):
            yield capabilities.violation("drop", "capabilities are kept by default; set [ALL]")
        if capabilities.items_of("add"):
            yield capabilities.violation("add", "adds a capability again; remove it")


def kernel_is_not_changed(manifest: Fields) -> Iterator[Violation]:
    """Source: level Baseline. A namespace that enforces it rejects the pod."""
    for pod in pods_of(manifest):
        if pod.mapping("securityContext").items_of("sysctls"):
            yield pod.violation("securityContext.sysctls", "changes settings of the kernel; remove it")
        # The containers of a pod have one user, so that one could read the files of the other in /proc.
        if pod.get("shareProcessNamespace"):
            yield pod.violation("shareProcessNamespace", "shows a container's files to the others; remove it")
        for container in containers_of(pod):
            if container.mapping("securityContext").get("procMount") not in (None, "Default"):
                yield container.violation("securityContext.procMount", "shows more of /proc; remove it")
            for port in container.mappings("ports"):
                if port.get("hostPort"):
                    yield port.violation("hostPort", "opens a port of the machine; remove it")


def profiles_are_kept(manifest: Fields) -> Iterator[Violation]:
    """Source: level Baseline."""
    for owner in [*pods_of(manifest), *all_containers(manifest)]:
        context = owner.mapping("securityContext")
        apparmor = context.mapping("appArmorProfile")
        if apparmor and apparmor.get("type") not in _FILTERED:
            yield apparmor.violation("type", "takes the machine's AppArmor profile away; remove it")
        selinux = context.mapping("seLinuxOptions")
        if selinux.get("type", "") not in _SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
            yield context.violation("seLinuxOptions", "takes the pod out of SELinux's domain of containers; remove it")


def volumes_are_of_permitted_kinds(manifest: Fields) -> Iterator[Violation]:
    """Source: level Restricted. Other storage is mounted by a claim."""
    for pod in pods_of(manifest):
        for volume in pod.mappings("volumes"):
            for kind in volume.values:
                if kind not in ("name", "hostPath", *_VOLUMES):
                    yield volume.violation(kind, "is not permitted by Pod Security level Restricted; use a claim")


# --- The token of the Kubernetes API, which only the autoscaler uses: whoever may submit jobs runs code beside it


def token_is_not_mounted_by_default(manifest: Fields) -> Iterator[Violation]:
    """Kubernetes mounts it in every container of a pod, unless the pod says otherwise."""
    for pod in pods_of(manifest):
        if pod.get("automountServiceAccountToken") is not False:
            message = "gives all containers of the pod a token of the API; set false"
            yield pod.violation("automountServiceAccountToken", message)
    if manifest.get("kind") == "ServiceAccount" and manifest.get("automountServiceAccountToken") is not False:
        yield manifest.violation("automountServiceAccountToken", "gives all pods a token of the API; set false")


def token_is_mounted_by_the_autoscaler_only(manifest: Fields) -> Iterator[Violation]:
    """The head has a volume with the token, which the options of the autoscaler mount."""
    head = cluster_of(manifest).mapping("headGroupSpec", "template", "spec")
    for pod in pods_of(manifest):
        tokens = _token_volumes(pod)
        if pod.path != head.path or autoscaler_of(manifest) is None:
            for volume in tokens.values():
                yield volume.violation("projected", "only the autoscaler on the head may have a token; remove it")
        for container in containers_of(pod):
            for mount in container.mappings("volumeMounts"):
                if mount.text("name") in tokens:
                    yield mount.violation("name", "gives the container a token of the API; remove this mount")


def autoscaler_has_its_token(manifest: Fields) -> Iterator[Violation]:
    """Without it, the autoscaler cannot add a node."""
    autoscaler = autoscaler_of(manifest)
    if autoscaler is None:
        return
    tokens = _token_volumes(cluster_of(manifest).mapping("headGroupSpec", "template", "spec"))
    mounts = autoscaler.mappings("volumeMounts")
    if not any(mount.get("mountPath") == TOKEN_FOLDER and mount.text("name") in tokens for mount in mounts):
        message = f"no token of the API, so that no node is ever added; mount a projected volume at {TOKEN_FOLDER}"
        yield autoscaler.violation("volumeMounts", message)


def _token_volumes(pod: Fields) -> dict[str, Fields]:
    """The volumes of a pod that hold a token, by their names."""
    volumes = {}
    for volume in pod.mappings("volumes"):
        if any("serviceAccountToken" in source for source in volume.mapping("projected").mappings("sources")):
            volumes[volume.text("name")] = volume
    return volumes


def head_is_not_public(manifest: Fields) -> Iterator[Violation]:
    """Whoever reaches the dashboard can try to log in to it."""
    head = cluster_of(manifest).mapping("headGroupSpec")
    message = "opens the dashboard to other networks; remove it, use a port-forward"
    if head.get("serviceType") in ("LoadBalancer", "NodePort"):
        yield head.violation("serviceType", message)
    if head.mapping("headService", "spec").get("type") in ("LoadBalancer", "NodePort"):
        yield head.violation("headService.spec.type", message)
    if head.get("enableIngress"):
        yield head.violation("enableIngress", message)


RISKS: tuple[Rule, ...] = (host_is_not_shared, no_secret_in_clear_text)
POLICIES: tuple[Rule, ...] = (
    pods_do_not_run_as_root,
    system_calls_are_filtered,
    rights_are_dropped,
    kernel_is_not_changed,
    profiles_are_kept,
    volumes_are_of_permitted_kinds,
    token_is_not_mounted_by_default,
    token_is_mounted_by_the_autoscaler_only,
    autoscaler_has_its_token,
    head_is_not_public,
)
