"""What a study needs of the rights of its pods, and no secrets in clear text.

The rights are those of the Pod Security Standards of Kubernetes, level Restricted, and a read-only root file system.
"""

from collections.abc import Callable, Iterator
from typing import Any

from pos2distill.secrets import holds_secret, looks_secret

from ..types import Violation
from .fields import Fields, all_containers, cluster_of, containers_of, groups_of, pods_of, strings_in

_HOST_NAMESPACES = ("hostNetwork", "hostPID", "hostIPC")
# Required values in the security context of every container, and the reason.
_RIGHTS: tuple[tuple[str, Any, str], ...] = (
    ("allowPrivilegeEscalation", False, "allowed by default; set false"),
    ("readOnlyRootFilesystem", True, "writable by default; set true, and mount an emptyDir where it must write"),
)
_FILTERED = ("RuntimeDefault", "Localhost")  # types of a seccomp profile


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
            yield Violation(path, f"'{name[:60]}' looks like a secret in clear text; use valueFrom.secretKeyRef")
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
            yield capabilities.violation("add", "gives back a right; remove it")


def workers_have_no_api_token(manifest: Fields) -> Iterator[Violation]:
    """Only the autoscaler talks to the Kubernetes API, and it runs on the head."""
    for group in groups_of(manifest):
        pod = group.mapping("template", "spec")
        if pod.get("automountServiceAccountToken") is not False:
            yield pod.violation("automountServiceAccountToken", "gives workers a token of the API; set false")


def head_is_not_public(manifest: Fields) -> Iterator[Violation]:
    """Whoever reaches the dashboard can try to log in to it."""
    head = cluster_of(manifest).mapping("headGroupSpec")
    if head.get("serviceType") in ("LoadBalancer", "NodePort"):
        yield head.violation("serviceType", "opens the dashboard to other networks; remove it, use a port-forward")


Rule = Callable[[Fields], Iterator[Violation]]

RISKS: tuple[Rule, ...] = (host_is_not_shared, no_secret_in_clear_text)
POLICIES: tuple[Rule, ...] = (
    pods_do_not_run_as_root,
    system_calls_are_filtered,
    rights_are_dropped,
    workers_have_no_api_token,
    head_is_not_public,
)
