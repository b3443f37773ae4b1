"""What a study needs of its job, its cluster and its groups of nodes, so that work is placed and ends."""

import re
from collections.abc import Iterator

from pos2distill.node_pools import DRAIN_VARIABLE, POOLS_LABEL, SAMPLING, SUBCLUSTER_LABEL, TRAINING, Pool

from ..names import ELASTIC_ANNOTATION, GPU, MARKET_LABEL, QUEUE_LABEL
from ..syntax import DNS_LABEL, SHOWN
from ..types import Violation
from .fields import Fields, Rule, cluster_of, gpu_limit, groups_of, job_of, pods_of, ray_container
from .interruptions import selects_spot

_DEFAULT_GRACE_SECONDS = 30  # terminationGracePeriodSeconds of Kubernetes
_ENTRYPOINT_RESOURCES = ("entrypointNumCpus", "entrypointNumGpus", "entrypointResources")

# --- The job


def job_has_a_command(manifest: Fields) -> Iterator[Violation]:
    """Without a command, KubeRay starts a cluster and runs nothing on it."""
    if manifest.get("kind") == "RayJob" and not job_of(manifest).get("entrypoint"):
        yield job_of(manifest).violation("entrypoint", "missing; set the command that the job runs")


def job_has_deadlines(manifest: Fields) -> Iterator[Violation]:
    """A job that hangs would keep its GPUs."""
    job = job_of(manifest)
    if manifest.get("kind") != "RayJob":
        return
    end, start = job.integer("activeDeadlineSeconds"), job.integer("preRunningDeadlineSeconds")
    if "activeDeadlineSeconds" not in job:
        message = "missing: a job that hangs would keep its GPUs; set a limit in seconds"
        yield job.violation("activeDeadlineSeconds", message)
    if end is not None and start is not None and start >= end:
        yield job.violation(
            "preRunningDeadlineSeconds", f"{start} is not before activeDeadlineSeconds, {end}; lower it"
        )


def job_releases_its_cluster(manifest: Fields) -> Iterator[Violation]:
    """A cluster that stays after its job keeps its machines, and its quota in a queue."""
    job = job_of(manifest)
    if manifest.get("kind") == "RayJob" and job.get("shutdownAfterJobFinishes") is not True:
        yield job.violation("shutdownAfterJobFinishes", "missing: the cluster would stay after the job; set true")


def job_starts(manifest: Fields) -> Iterator[Violation]:
    """Kueue resumes the jobs in its queues; nothing else resumes a suspended one."""
    job = job_of(manifest)
    if job.get("suspend") is True and QUEUE_LABEL not in manifest.mapping("metadata", "labels"):
        yield job.violation("suspend", "without a queue, the job would never start; remove it")


def driver_runs_on_the_head(manifest: Fields) -> Iterator[Violation]:
    """The head offers no resources, so that a driver that requests some would wait forever."""
    job = job_of(manifest)
    for name in _ENTRYPOINT_RESOURCES:
        if job.get(name):
            yield job.violation(name, "the driver runs on the head, which offers no resources; remove it")


def queued_cluster_has_fixed_size(manifest: Fields) -> Iterator[Violation]:
    """Kueue rejects a cluster that autoscales, unless its feature gate for elastic jobs is on."""
    metadata = manifest.mapping("metadata")
    is_queued = QUEUE_LABEL in metadata.mapping("labels")
    is_elastic = ELASTIC_ANNOTATION in metadata.mapping("annotations")
    if is_queued and cluster_of(manifest).get("enableInTreeAutoscaling") and not is_elastic:
        message = "Kueue rejects clusters that autoscale; remove this label, or turn off autoscaling and fix the size"
        yield metadata.violation(f"labels.{QUEUE_LABEL}", message)


# --- The cluster


def token_authentication_is_on(manifest: Fields) -> Iterator[Violation]:
    """Whoever reaches the dashboard's port may submit jobs."""
    cluster = cluster_of(manifest)
    # Before KubeRay had the field, the variable was set by hand.
    variables = ray_container(cluster.mapping("headGroupSpec")).mappings("env")
    if any(item.get("name") == "RAY_AUTH_MODE" and item.get("value") == "token" for item in variables):
        return
    if cluster and cluster.mapping("authOptions").get("mode") != "token":
        yield cluster.violation("authOptions.mode", "anyone who can reach the head may run code on it; set token")


def cluster_has_both_pools(manifest: Fields) -> Iterator[Violation]:
    """A study samples and trains; without nodes for one of them it would wait forever."""
    cluster = cluster_of(manifest)
    for pool, work in ((SAMPLING, "sampling"), (TRAINING, "training")):
        if cluster and not any(_serves(group, pool) for group in groups_of(manifest)):
            message = f"no group for {work}; add one with the resource {pool.resource}"
            yield cluster.violation("workerGroupSpecs", message)


def groups_can_grow(manifest: Fields) -> Iterator[Violation]:
    """A group that never has a node serves nobody."""
    for group in groups_of(manifest):
        if group.integer("maxReplicas") == 0:
            yield group.violation("maxReplicas", "is 0, so that work for this group waits forever; set 1 or more")


def fixed_cluster_has_fixed_groups(manifest: Fields) -> Iterator[Violation]:
    """Without the autoscaler, nobody adds nodes."""
    cluster = cluster_of(manifest)
    for group in groups_of(manifest):
        is_fixed = group.get("minReplicas") == group.get("maxReplicas")
        if cluster.get("enableInTreeAutoscaling") is not True and not is_fixed:
            message = f"is off, so that '{group.text('groupName')}' never grows; set it to true"
            yield cluster.violation("enableInTreeAutoscaling", message)


def pods_run_the_same_image(manifest: Fields) -> Iterator[Violation]:
    """Ray requires the same version everywhere, and the submitter needs Ray's client."""
    images = []
    for pod in pods_of(manifest):
        for container in pod.mappings("containers")[:1]:
            images.append(container)
    for container in images:
        if container.text("image") != images[0].text("image"):
            yield container.violation("image", f"is not that of the head; set {images[0].path}.image")


# --- The head


def head_runs_no_work(manifest: Fields) -> Iterator[Violation]:
    """Ray places no work on a node with 0 CPUs. KubeRay accepts them as a start parameter or as a resource."""
    cluster = cluster_of(manifest)
    if not cluster:
        return
    head = cluster.mapping("headGroupSpec")
    parameters, resources = head.mapping("rayStartParams"), head.mapping("resources")
    if str(parameters.get("num-cpus", resources.get("CPU"))) != "0":
        yield head.violation("rayStartParams.num-cpus", 'the head must not run work; set "0"')
    if gpu_limit(ray_container(head)):
        yield _gpu_violation(head, "the head runs no work and needs no GPU; remove it")


def head_shows_its_dashboard(manifest: Fields) -> Iterator[Violation]:
    """The operator and the submitter reach the dashboard from other pods."""
    cluster = cluster_of(manifest)
    parameters = cluster.mapping("headGroupSpec", "rayStartParams")
    # KubeRay sets it to 0.0.0.0 if it is missing.
    if cluster and parameters.get("dashboard-host", "0.0.0.0") != "0.0.0.0":
        yield parameters.violation("dashboard-host", "other pods cannot reach the dashboard; set 0.0.0.0")


def head_labels_are_those_of_pools(manifest: Fields) -> Iterator[Violation]:
    """pos2distill/node_pools.py explains the labels."""
    cluster = cluster_of(manifest)
    if not cluster:
        return
    head = cluster.mapping("headGroupSpec")
    labels = head.mapping("labels")
    for key, value in POOLS_LABEL.items():
        if labels.get(key) != value:
            yield labels.violation(key, f"missing: work would be placed on nodes of any pool; set {value}")
    for pool in (SAMPLING, TRAINING):
        if pool.label in labels or pool.resource in head.mapping("resources"):
            message = f"the head must not be in a pool; remove {pool.label} and the resource {pool.resource}"
            yield head.violation("labels", message)


# --- The groups


def group_names_are_valid(manifest: Fields) -> Iterator[Violation]:
    """Disruption budgets refer to groups by name, and the names of pods contain it."""
    names = set()
    for group in groups_of(manifest):
        name = group.text("groupName")
        if name in names:
            yield group.violation("groupName", f"'{name[:SHOWN]}' is used twice; rename one")
        elif not re.fullmatch(DNS_LABEL, name):
            yield group.violation("groupName", "is not a valid part of a pod's name; use a to z, 0 to 9 and -")
        names.add(name)


def replicas_are_a_node_each(manifest: Fields) -> Iterator[Violation]:
    """The number of nodes is counted in replicas; the initial one lies between the smallest and the largest."""
    for group in groups_of(manifest):
        hosts = group.integer("numOfHosts")
        if hosts is not None and hosts != 1:
            yield group.violation("numOfHosts", f"is {hosts}, but a replica must be one node; set 1")
        minimum, maximum = group.integer("minReplicas") or 0, group.integer("maxReplicas")
        replicas = group.integer("replicas")
        if replicas is None or minimum > (maximum or minimum):
            continue
        if replicas < minimum or (maximum is not None and replicas > maximum):
            message = f"{replicas} is not between minReplicas and maxReplicas; set {minimum}"
            yield group.violation("replicas", message)


def groups_are_not_suspended(manifest: Fields) -> Iterator[Violation]:
    """KubeRay rejects a suspended group with autoscaling; without autoscaling, the group has no nodes."""
    for group in groups_of(manifest):
        if group.get("suspend") is True:
            yield group.violation("suspend", "the group would have no nodes; remove it")


def work_may_use_the_grace_period(manifest: Fields) -> Iterator[Violation]:
    """After a termination notice, Ray 2.60 stops work when its own drain timeout ends, not when Kubernetes' does.

    Training uses this time to save a checkpoint.
    """
    for group in groups_of(manifest):
        env_path = "template.spec.containers[0].env"
        drain = None
        for variable in ray_container(group).mappings("env"):
            if variable.get("name") == DRAIN_VARIABLE:
                drain = variable.text("value")
        grace_s = group.mapping("template", "spec").integer("terminationGracePeriodSeconds")
        if grace_s is None:
            grace_s = _DEFAULT_GRACE_SECONDS
        if drain is None:
            message = f"{DRAIN_VARIABLE} is missing: work stops after 30 s; set it to less than the grace period"
            yield group.violation(env_path, message)
        # Ray must have stopped the work before Kubernetes kills the pod.
        elif not re.fullmatch(r"[0-9]{1,9}", drain) or int(drain) >= grace_s:
            message = f"{DRAIN_VARIABLE} must be a number below terminationGracePeriodSeconds, {grace_s}; lower it"
            yield group.violation(env_path, message)


def groups_are_in_one_pool(manifest: Fields) -> Iterator[Violation]:
    """Work must find a group by its labels and resources. pos2distill/node_pools.py explains them."""
    for group in groups_of(manifest):
        if _serves(group, SAMPLING) and _serves(group, TRAINING):
            message = "provides both sampling and training; make two groups of it, so that they scale independently"
            yield Violation(group.path, message)
        elif _serves(group, TRAINING):
            yield from _check_training_group(group)
        else:
            yield from _check_sampling_group(group)


def _check_training_group(group: Fields) -> Iterator[Violation]:
    labels = group.mapping("labels")
    if SUBCLUSTER_LABEL in labels:
        yield labels.violation(SUBCLUSTER_LABEL, "with this label, training never gets its nodes; remove it")
    if labels.get(TRAINING.label) != TRAINING.value:
        yield labels.violation(TRAINING.label, f"missing on nodes for training; set {TRAINING.value}")
    yield from _check_units(group, TRAINING, "training")
    if labels.get(MARKET_LABEL) == "spot" or selects_spot(group.mapping("template", "spec")):
        message = "training must not use spot machines, since the loss of one stops all workers; use on-demand machines"
        yield group.violation("template.spec.nodeSelector", message)


def _check_sampling_group(group: Fields) -> Iterator[Violation]:
    labels = group.mapping("labels")
    subcluster = labels.text(SUBCLUSTER_LABEL)
    if not subcluster:
        choices = f"{SUBCLUSTER_LABEL}: {SAMPLING.value}, or {TRAINING.label}: {TRAINING.value}"
        yield group.violation("labels", f"no work is placed on this group; set {choices}")
    elif subcluster != SAMPLING.value:
        yield labels.violation(SUBCLUSTER_LABEL, f"'{subcluster[:SHOWN]}' is not a pool; set {SAMPLING.value}")
    # Nodes without GPUs need no resource: they may be for data tasks.
    elif gpu_limit(ray_container(group)) or _serves(group, SAMPLING):
        yield from _check_units(group, SAMPLING, "sampling")


def _check_units(group: Fields, pool: Pool, work: str) -> Iterator[Violation]:
    """One unit of the pool's resource for each GPU: a worker or sampler takes one, or a fraction of one."""
    units = pool.units(gpu_limit(ray_container(group)))
    given = group.mapping("resources").get(pool.resource)
    field = f"resources.{pool.resource}"
    if given is None:
        yield group.violation(field, f"missing on nodes for {work}; set one for each GPU")
    elif str(given) != str(units):
        yield group.violation(field, f'expected one for each GPU; set "{units}"')


def workers_have_gpus_if_others_have(manifest: Fields) -> Iterator[Violation]:
    """Without GPUs in any group, the whole cluster runs on CPUs."""
    groups = groups_of(manifest)
    if not any(gpu_limit(ray_container(group)) for group in groups):
        return
    for group in groups:
        if not gpu_limit(ray_container(group)):
            for pool, work in ((SAMPLING, "sampling"), (TRAINING, "training")):
                if _serves(group, pool):
                    yield _gpu_violation(group, f"missing: {work} needs GPUs; set the number of a pod")


def idle_nodes_stay_a_while(manifest: Fields) -> Iterator[Violation]:
    """A node that is removed at once is started again for the next task."""
    for group in groups_of(manifest):
        if group.integer("idleTimeoutSeconds") == 0:
            yield group.violation(
                "idleTimeoutSeconds", "is 0: nodes are removed between two tasks; set for example 120"
            )


def _serves(group: Fields, pool: Pool) -> bool:
    """Whether a group is meant for a pool: it has the pool's resource, or the label that only training has."""
    is_labeled = pool is TRAINING and group.mapping("labels").get(pool.label) == pool.value
    return is_labeled or pool.resource in group.mapping("resources")


def _gpu_violation(node: Fields, message: str) -> Violation:
    return node.violation(f"template.spec.containers[0].resources.limits.{GPU}", message)


POLICIES: tuple[Rule, ...] = (
    job_has_a_command,
    job_has_deadlines,
    job_releases_its_cluster,
    job_starts,
    driver_runs_on_the_head,
    queued_cluster_has_fixed_size,
    cluster_has_both_pools,
    groups_can_grow,
    fixed_cluster_has_fixed_groups,
    pods_run_the_same_image,
    head_runs_no_work,
    head_shows_its_dashboard,
    head_labels_are_those_of_pools,
    group_names_are_valid,
    replicas_are_a_node_each,
    groups_are_not_suspended,
    work_may_use_the_grace_period,
    groups_are_in_one_pool,
    workers_have_gpus_if_others_have,
)
RISKS: tuple[Rule, ...] = (token_authentication_is_on,)
WARNINGS: tuple[Rule, ...] = (idle_nodes_stay_a_while,)
