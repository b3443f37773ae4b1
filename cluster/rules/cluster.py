"""Rules for the spec of a Ray cluster."""

from collections.abc import Callable, Iterator

from ..types import Violation
from .autoscaler import AUTOSCALER_RULES, ray_version
from .fields import Fields, environment
from .groups import check_group, check_head

# Fields that the operator of KubeRay 1.7 rejects in its default configuration.
_GATED_FIELDS = ("networkPolicy", "tlsOptions", "historyServerOptions")
_REDIS_VARIABLES = ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME")


def check_cluster(cluster: Fields, *, of_job: bool) -> Iterator[Violation]:
    """All violations of the spec of a cluster.

    Args:
        of_job: whether a RayJob creates the cluster.
    """
    rules = (*CLUSTER_RULES, *AUTOSCALER_RULES)
    if of_job:
        rules += JOB_CLUSTER_RULES
    for rule in rules:
        yield from rule(cluster)
    yield from check_head(cluster.mapping("headGroupSpec"))
    for group in cluster.mappings("workerGroupSpecs"):
        yield from check_group(group, cluster)


def token_authentication_is_on(cluster: Fields) -> Iterator[Violation]:
    """Rule of this project."""
    authentication = cluster.mapping("authOptions")
    if authentication.get("mode") != "token":
        yield authentication.violation("mode", "anyone who can reach the head may run code on it; set token")


def ray_version_supports_authentication(cluster: Fields) -> Iterator[Violation]:
    """Source: ValidateRayClusterSpec."""
    version = cluster.get("rayVersion")
    if cluster.mapping("authOptions").get("mode") != "token":
        return  # the rule above reports it
    numbers = ray_version(version)
    if version is None:
        message = "missing: authOptions requires it; set the version in the image, for example 2.60.0"
        yield cluster.violation("rayVersion", message)
    elif numbers is None:
        yield cluster.violation("rayVersion", f"'{version}' is not a valid version; expected for example 2.60.0")
    elif numbers < (2, 52):
        yield cluster.violation(
            "rayVersion", f"authOptions requires Ray 2.52 or newer, got {version}; use a newer image"
        )


def gated_fields_are_absent(cluster: Fields) -> Iterator[Violation]:
    """Source: ValidateRayClusterSpec."""
    for name in _GATED_FIELDS:
        if name in cluster:
            yield cluster.violation(name, "requires a feature gate that is off by default; remove it")


def head_state_is_not_in_rocksdb(cluster: Fields) -> Iterator[Violation]:
    """Source: validateGcsFaultToleranceBackend."""
    fault_tolerance = cluster.mapping("gcsFaultToleranceOptions")
    if fault_tolerance.get("backend") == "rocksdb":
        yield fault_tolerance.violation("backend", "rocksdb requires a feature gate that is off by default; use redis")


def redis_is_configured_once(cluster: Fields) -> Iterator[Violation]:
    """Source: ValidateRayClusterSpec."""
    head = cluster.mapping("headGroupSpec")
    if not cluster.mapping("gcsFaultToleranceOptions"):
        return
    names = {str(variable.get("name")) for variable in environment(head)}
    for name in _REDIS_VARIABLES:
        if name in names:
            message = f"{name} repeats gcsFaultToleranceOptions; remove the variable"
            yield head.violation("template.spec.containers[0].env", message)


def group_names_are_unique(cluster: Fields) -> Iterator[Violation]:
    """Rule of this project: disruption budgets and placement refer to groups by name."""
    names = []
    for group in cluster.mappings("workerGroupSpecs"):
        name = group.get("groupName")
        if name in names:
            yield group.violation("groupName", f"'{name}' is used twice; rename one")
        names.append(name)


def job_cluster_has_no_fault_tolerant_head(cluster: Fields) -> Iterator[Violation]:
    """Rule of this project."""
    if cluster.mapping("gcsFaultToleranceOptions"):
        message = "does not survive a retry of the job; remove it, since the study resumes without it"
        yield cluster.violation("gcsFaultToleranceOptions", message)


def job_cluster_has_no_upgrade_strategy(cluster: Fields) -> Iterator[Violation]:
    """Source: ValidateRayClusterUpgradeOptions."""
    if "upgradeStrategy" in cluster:
        yield cluster.violation("upgradeStrategy", "is not supported for the cluster of a job; remove it")


def job_cluster_has_no_kubernetes_tokens(cluster: Fields) -> Iterator[Violation]:
    """Source: ValidateRayJobSpec."""
    authentication = cluster.mapping("authOptions")
    if authentication.get("enableK8sTokenAuth"):
        yield authentication.violation("enableK8sTokenAuth", "is not supported for the cluster of a job; remove it")


CLUSTER_RULES: tuple[Callable[[Fields], Iterator[Violation]], ...] = (
    token_authentication_is_on,
    ray_version_supports_authentication,
    gated_fields_are_absent,
    head_state_is_not_in_rocksdb,
    redis_is_configured_once,
    group_names_are_unique,
)
JOB_CLUSTER_RULES: tuple[Callable[[Fields], Iterator[Violation]], ...] = (
    job_cluster_has_no_fault_tolerant_head,
    job_cluster_has_no_upgrade_strategy,
    job_cluster_has_no_kubernetes_tokens,
)
