"""Rules for the head and for the node groups of a Ray cluster."""

from collections.abc import Callable, Iterator

from pos2distill.placement import DRAIN_VARIABLE, POOLS_LABEL, SAMPLING, SUBCLUSTER_LABEL, TRAINING

from ..names import GPU, MARKET_LABEL, SPOT_SELECTORS
from ..types import Violation
from .autoscaler import GROUP_AUTOSCALER_RULES
from .fields import Fields, environment, gpu_limit, ray_container
from .labels import check_labels
from .pods import check_pod

_RESOURCE_PARAMETERS = ("num-cpus", "num-gpus", "memory", "resources")  # of `ray start`
_DEFAULT_GRACE_S = 30  # terminationGracePeriodSeconds of Kubernetes


def check_head(head: Fields) -> Iterator[Violation]:
    """All violations of the head."""
    for rule in (*NODE_RULES, *HEAD_RULES):
        yield from rule(head)
    yield from check_pod(head.mapping("template"))


def check_group(group: Fields, cluster: Fields) -> Iterator[Violation]:
    """All violations of one node group of a cluster."""
    for rule in (*GROUP_RULES, *NODE_RULES):
        yield from rule(group)
    for cluster_rule in (*GROUP_AUTOSCALER_RULES, group_has_gpus_if_another_has):
        yield from cluster_rule(group, cluster)
    yield from check_pod(group.mapping("template"))


# --- Rules for the head and for every group


def labels_are_no_start_parameters(node: Fields) -> Iterator[Violation]:
    """Source: validateRayGroupLabels."""
    if "labels" in node.mapping("rayStartParams"):
        message = f"KubeRay does not support labels here; move them to {node.join('labels')}"
        yield node.violation("rayStartParams.labels", message)


def resources_are_set_in_one_place(node: Fields) -> Iterator[Violation]:
    """Source: validateRayGroupResources."""
    # One line is enough, even if several parameters are repeated.
    repeated = [name for name in _RESOURCE_PARAMETERS if name in node.mapping("rayStartParams")]
    if repeated and node.mapping("resources"):
        message = f"is not supported together with {node.join('resources')}; set one of them"
        yield node.violation(f"rayStartParams.{repeated[0]}", message)


def resources_and_parameters_are_strings(node: Fields) -> Iterator[Violation]:
    """Source: the types of both fields in `apis/ray/v1/raycluster_types.go`."""
    for section in ("resources", "rayStartParams"):
        fields = node.mapping(section)
        for name, value in fields.values.items():
            if not isinstance(value, str):
                yield fields.violation(str(name), "is not a string; put it in quotes")


def node_labels_are_valid(node: Fields) -> Iterator[Violation]:
    """Source: validateRayGroupLabels."""
    yield from check_labels(node.mapping("labels"))


NODE_RULES: tuple[Callable[[Fields], Iterator[Violation]], ...] = (
    labels_are_no_start_parameters,
    resources_are_set_in_one_place,
    resources_and_parameters_are_strings,
    node_labels_are_valid,
)

# --- Rules for the head. All are rules of this project: no work runs on the head.


def head_has_no_gpu(head: Fields) -> Iterator[Violation]:
    """The head runs no work, so a GPU would stay unused."""
    if gpu_limit(ray_container(head)):
        yield _gpu_violation(head, "the head runs no work and needs no GPU; remove it")


def head_has_no_cpus_for_work(head: Fields) -> Iterator[Violation]:
    """Ray places no work on a node with 0 CPUs. KubeRay accepts them as a start parameter or as a resource."""
    parameters, resources = head.mapping("rayStartParams"), head.mapping("resources")
    if str(parameters.get("num-cpus", resources.get("CPU"))) != "0":
        yield head.violation("rayStartParams.num-cpus", 'the head must not run work; set "0"')


def head_is_in_no_pool(head: Fields) -> Iterator[Violation]:
    """pos2distill/placement.py explains the labels."""
    for pool in (SAMPLING, TRAINING):
        if pool.label in head.mapping("labels") or pool.resource in head.mapping("resources"):
            message = f"the head must not be in a pool; remove {pool.label} and the resource {pool.resource}"
            yield head.violation("labels", message)


def head_says_that_there_are_pools(head: Fields) -> Iterator[Violation]:
    """pos2distill/placement.py explains the labels."""
    labels = head.mapping("labels")
    for key, value in POOLS_LABEL.items():
        if labels.get(key) != value:
            yield labels.violation(key, f"missing: work would be placed on nodes of any pool; set {value}")


HEAD_RULES: tuple[Callable[[Fields], Iterator[Violation]], ...] = (
    head_has_no_gpu,
    head_has_no_cpus_for_work,
    head_is_in_no_pool,
    head_says_that_there_are_pools,
)

# --- Rules for a group


def replicas_are_in_range(group: Fields) -> Iterator[Violation]:
    """Source: ValidateRayClusterSpec."""
    minimum, maximum = group.integer("minReplicas"), group.integer("maxReplicas")
    replicas = group.integer("replicas")
    # With an empty range, no number of replicas could be right.
    if minimum is not None and maximum is not None and minimum > maximum:
        yield group.violation("minReplicas", f"{minimum} is more than maxReplicas, {maximum}; lower it")
    elif replicas is not None:
        is_too_small = replicas < (minimum or 0)
        is_too_large = maximum is not None and replicas > maximum
        if is_too_small or is_too_large:
            yield group.violation(
                "replicas", f"{replicas} is not between minReplicas and maxReplicas; set {minimum or 0}"
            )
    if minimum is not None and minimum < 0:
        yield group.violation("minReplicas", f"is {minimum}; set 0 or more")


def replica_is_one_node(group: Fields) -> Iterator[Violation]:
    """Rule of this project."""
    hosts = group.integer("numOfHosts")
    if hosts is not None and hosts != 1:
        yield group.violation("numOfHosts", f"is {hosts}, but a replica must be one node; set 1")


def work_may_use_the_grace_period(group: Fields) -> Iterator[Violation]:
    """After a termination notice, Ray 2.60 stops work when its own drain timeout ends, not when Kubernetes' does.

    Rule of this project: training uses this time to save a checkpoint.
    """
    env_path = "template.spec.containers[0].env"
    values = [variable.get("value") for variable in environment(group) if variable.get("name") == DRAIN_VARIABLE]
    if not values or values[0] is None:
        message = f"{DRAIN_VARIABLE} is missing: work stops after 30 s; set it to less than the grace period"
        yield group.violation(env_path, message)
        return
    drain = str(values[0])
    grace_s = group.mapping("template", "spec").integer("terminationGracePeriodSeconds")
    if grace_s is None:
        grace_s = _DEFAULT_GRACE_S
    # Ray must have stopped the work before Kubernetes kills the pod.
    if not drain.isdecimal() or int(drain) >= grace_s:
        message = f"{DRAIN_VARIABLE} must be a number below terminationGracePeriodSeconds, {grace_s}; lower it"
        yield group.violation(env_path, message)


def group_is_in_one_pool(group: Fields) -> Iterator[Violation]:
    """Work must find the group by its labels and resources. pos2distill/placement.py explains them."""
    samples, trains = _samples(group), _trains(group)
    if samples and trains:
        message = "provides both sampling and training; make two groups of it, so that they scale independently"
        yield Violation(group.path, message)
    elif trains:
        yield from _check_training_group(group)
    else:
        yield from _check_sampling_group(group)


def _check_training_group(group: Fields) -> Iterator[Violation]:
    labels = group.mapping("labels")
    if labels.get(SUBCLUSTER_LABEL) is not None:
        yield labels.violation(SUBCLUSTER_LABEL, "with this label, training never gets its nodes; remove it")
    if labels.get(TRAINING.label) != TRAINING.value:
        yield labels.violation(TRAINING.label, f"missing on nodes for training; set {TRAINING.value}")
    if TRAINING.resource not in group.mapping("resources"):
        yield group.violation(f"resources.{TRAINING.resource}", "missing on nodes for training; set one for each GPU")
    if labels.get(MARKET_LABEL) == "spot" or _selects_spot(group):
        message = "training must not use spot machines, since the loss of one stops all workers; use on-demand machines"
        yield group.violation("template.spec.nodeSelector", message)


def _check_sampling_group(group: Fields) -> Iterator[Violation]:
    labels = group.mapping("labels")
    subcluster = labels.get(SUBCLUSTER_LABEL)
    if subcluster is None:
        choices = f"{SUBCLUSTER_LABEL}: {SAMPLING.value}, or {TRAINING.label}: {TRAINING.value}"
        yield group.violation("labels", f"no work is placed on this group; set {choices}")
    elif subcluster != SAMPLING.value:
        yield labels.violation(SUBCLUSTER_LABEL, f"'{subcluster}' is not a pool; set {SAMPLING.value}")
    # Nodes without GPUs need no resource: they may be for data tasks.
    elif gpu_limit(ray_container(group)) and not _samples(group):
        yield group.violation(f"resources.{SAMPLING.resource}", "missing on nodes for sampling; set one for each GPU")


def group_has_gpus_if_another_has(group: Fields, cluster: Fields) -> Iterator[Violation]:
    """Without GPUs in any group, the whole cluster runs on CPUs. Rule of this project."""
    is_gpu_cluster = any(gpu_limit(ray_container(other)) for other in cluster.mappings("workerGroupSpecs"))
    is_worker = _samples(group) or _trains(group)
    if is_gpu_cluster and is_worker and not gpu_limit(ray_container(group)):
        work = "training" if _trains(group) else "sampling"
        yield _gpu_violation(group, f"missing: {work} needs GPUs; set the number of a pod")


def _samples(group: Fields) -> bool:
    return SAMPLING.resource in group.mapping("resources")


def _trains(group: Fields) -> bool:
    # Either of the two shows what the group is for; the rules report the one that is missing.
    has_label = group.mapping("labels").get(TRAINING.label) == TRAINING.value
    return has_label or TRAINING.resource in group.mapping("resources")


def _selects_spot(group: Fields) -> bool:
    """Whether the node selector requests spot machines of some platform."""
    selector = group.mapping("template", "spec", "nodeSelector")
    for labels in SPOT_SELECTORS.values():
        for key, value in labels.items():
            if selector.get(key) == value:
                return True
    return False


def _gpu_violation(node: Fields, message: str) -> Violation:
    return node.violation(f"template.spec.containers[0].resources.limits.{GPU}", message)


GROUP_RULES: tuple[Callable[[Fields], Iterator[Violation]], ...] = (
    replicas_are_in_range,
    replica_is_one_node,
    work_may_use_the_grace_period,
    group_is_in_one_pool,
)
