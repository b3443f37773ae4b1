"""What makes a manifest wrong though its schema is right.

Rules of KubeRay 1.7's operator (its controllers/ray/utils/validation.go), which tells them only after a manifest is
applied; and rules of this project: where work is placed, what a pod may do, no secrets in clear text. Each fault is a
place and a line that says how to mend it.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from cluster.pod_rules import as_dict, as_int, as_list, check_pod, check_rights, gpus_of, is_spot
from cluster.spec import DRAIN_ENV, NAME_LENGTH
from pos2distill.errors import did_you_mean
from pos2distill.placement import POOLS_LABEL, SAMPLING, SUBCLUSTER_LABEL, TRAINING
from pos2distill.secrets import looks_secret

Fault = tuple[str, str]

AUTOSCALER_V2_ENV = "RAY_enable_autoscaler_v2"
API_VERSIONS = {
    "RayJob": "ray.io/v1",
    "RayCluster": "ray.io/v1",
    "ServiceAccount": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
}

_NAME_LENGTHS = {"RayJob": NAME_LENGTH, "RayCluster": 53}
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_START_RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")
_MODES = ("K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode")
_QUEUE = "kueue.x-k8s.io/queue-name"
_ELASTIC = "kueue.x-k8s.io/elastic-job"  # with a gate of Kueue that is off by default
_GATED = ("networkPolicy", "tlsOptions", "historyServerOptions")


def check_manifest(manifest: dict[str, Any]) -> Iterator[Fault]:
    """All faults of one manifest, as (place, what is wrong; how to mend it)."""
    kind = str(manifest.get("kind"))
    if kind == "RayCronJob":
        yield "kind", "RayCronJob is behind a gate that is off by default; use a RayJob"
    elif kind not in API_VERSIONS:
        yield "kind", f"'{kind}' is not known here{did_you_mean(kind, API_VERSIONS)}"
    elif manifest.get("apiVersion") != API_VERSIONS[kind]:
        yield "apiVersion", f"is '{manifest.get('apiVersion')}', but {kind} is served as {API_VERSIONS[kind]}; set that"
    metadata, spec = as_dict(manifest.get("metadata")), as_dict(manifest.get("spec"))
    yield from _check_metadata(kind, metadata)
    cluster = as_dict(spec.get("rayClusterSpec", spec))
    elastic = _ELASTIC in as_dict(metadata.get("annotations"))
    if _QUEUE in as_dict(metadata.get("labels")) and cluster.get("enableInTreeAutoscaling") and not elastic:
        yield f"metadata.labels.{_QUEUE}", "Kueue refuses clusters that autoscale; leave it or fix the groups' size"
    if kind == "RayJob":
        yield from _check_job(spec, as_dict(metadata.get("labels")))
        if "rayClusterSpec" in spec:
            yield from _check_cluster("spec.rayClusterSpec", as_dict(spec["rayClusterSpec"]), of_job=True)
    elif kind == "RayCluster":
        yield from _check_cluster("spec", spec, of_job=False)
    for place, text in _strings("", manifest):
        if looks_secret(text) and ".env[" not in place:  # told there with a name
            yield place, "holds what looks like a secret in clear text; use a Kubernetes Secret and a secretKeyRef"


def _check_metadata(kind: str, metadata: dict[str, Any]) -> Iterator[Fault]:
    name = str(metadata.get("name", ""))
    if not _DNS_1035.fullmatch(name):
        yield "metadata.name", f"'{name}' is no DNS label; use a to z, 0 to 9 and -, from a letter on"
    if len(name) > (most := _NAME_LENGTHS.get(kind, 63)):
        yield "metadata.name", f"has {len(name)} characters; shorten it to {most}, longer names are made of it"
    yield from _check_labels("metadata.labels", as_dict(metadata.get("labels")))


def _check_labels(place: str, labels: dict[str, Any]) -> Iterator[Fault]:
    for key, value in labels.items():
        if not isinstance(key, str) or not isinstance(value, str):
            yield f"{place}.{key}", "is no text; put it in quotes"
        elif not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            yield f"{place}.{key}", f"'{value}' is no label; use letters, digits, '-', '_', '.', 63 characters at most"


def _check_job(spec: dict[str, Any], labels: dict[str, Any]) -> Iterator[Fault]:
    shutdown = spec.get("shutdownAfterJobFinishes") is True
    ttl, backoff = as_int(spec.get("ttlSecondsAfterFinished")), as_int(spec.get("backoffLimit"))
    if not spec.get("entrypoint") and spec.get("submissionMode") != "InteractiveMode":
        yield "spec.entrypoint", "missing; give the command that the job runs"
    if spec.get("suspend") and not shutdown:
        yield "spec.suspend", "needs its cluster shut down after the job; set shutdownAfterJobFinishes: true"
    if ttl and not shutdown:
        yield "spec.ttlSecondsAfterFinished", "has no effect alone; set shutdownAfterJobFinishes: true"
    if _QUEUE in labels and not shutdown:
        yield "spec.shutdownAfterJobFinishes", "a job in a Kueue queue must give back its quota; set it to true"
    for name, number, least in (
        ("ttlSecondsAfterFinished", ttl, 0),
        ("backoffLimit", backoff, 0),
        ("activeDeadlineSeconds", as_int(spec.get("activeDeadlineSeconds")), 1),
        ("preRunningDeadlineSeconds", as_int(spec.get("preRunningDeadlineSeconds")), 1),
    ):
        if number is not None and number < least:
            yield f"spec.{name}", f"is {number}; set it to {least} or more"
    if "activeDeadlineSeconds" not in spec:
        yield "spec.activeDeadlineSeconds", "missing: a job that hangs would keep its GPUs; set a limit in seconds"
    yield from _check_mode(spec, backoff)
    yield from _check_selector(spec, backoff)
    yield from _check_deletion(spec, shutdown)
    if "submitterPodTemplate" in spec:
        yield from check_pod("spec.submitterPodTemplate", as_dict(spec["submitterPodTemplate"]))
    if spec.get("managedBy") not in (None, "ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"):
        yield "spec.managedBy", "expected ray.io/kuberay-operator or kueue.x-k8s.io/multikueue; remove it or set one"
    try:
        yaml.safe_load(str(spec.get("runtimeEnvYAML", "")))
    except yaml.YAMLError:
        yield "spec.runtimeEnvYAML", "is no YAML; mend it or bake what it says into the image"


def _check_mode(spec: dict[str, Any], backoff: int | None) -> Iterator[Fault]:
    mode = spec.get("submissionMode", "K8sJobMode")
    if mode not in _MODES:
        yield "spec.submissionMode", f"'{mode}' is unknown{did_you_mean(str(mode), _MODES)}"
    if backoff and mode == "InteractiveMode":
        yield "spec.backoffLimit", "does not go with InteractiveMode; set 0"
    if mode == "SidecarMode":
        for name in ("submitterPodTemplate", "submitterConfig", "clusterSelector"):
            if name in spec:
                yield f"spec.{name}", "does not go with SidecarMode; remove it, or use K8sJobMode"


def _check_selector(spec: dict[str, Any], backoff: int | None) -> Iterator[Fault]:
    if not spec.get("clusterSelector"):
        if "rayClusterSpec" not in spec:
            yield "spec.rayClusterSpec", "missing; describe the job's cluster, or name one by clusterSelector"
        return
    if backoff:
        yield "spec.backoffLimit", "a retry makes a new cluster, but clusterSelector names an old one; set 0"
    if spec.get("suspend"):
        yield "spec.suspend", "does not go with clusterSelector; remove one of them"


def _check_deletion(spec: dict[str, Any], shutdown: bool) -> Iterator[Fault]:
    strategy = as_dict(spec.get("deletionStrategy"))
    rules = as_list(strategy.get("deletionRules"))
    autoscaled = as_dict(spec.get("rayClusterSpec")).get("enableInTreeAutoscaling")
    if rules and shutdown:
        yield "spec.deletionStrategy.deletionRules", "does not go with shutdownAfterJobFinishes; remove one of them"
    if rules and ("onSuccess" in strategy or "onFailure" in strategy):
        yield "spec.deletionStrategy", "has rules and onSuccess or onFailure; keep the rules"
    for index, rule in enumerate(rules):
        if autoscaled and as_dict(rule).get("policy") == "DeleteWorkers":
            place = f"spec.deletionStrategy.deletionRules[{index}].policy"
            yield place, "DeleteWorkers does not go with autoscaling; use DeleteCluster"


def _check_cluster(place: str, spec: dict[str, Any], *, of_job: bool) -> Iterator[Fault]:
    head = as_dict(spec.get("headGroupSpec"))
    groups = [as_dict(group) for group in as_list(spec.get("workerGroupSpecs"))]
    yield from _check_versions(place, spec, of_job=of_job)
    yield from _check_autoscaler(place, spec, head, groups)
    for name in _GATED:
        if name in spec:
            yield f"{place}.{name}", "is behind a gate that is off by default, and the operator refuses it; remove it"
    fault_tolerance = as_dict(spec.get("gcsFaultToleranceOptions"))
    if fault_tolerance.get("backend") == "rocksdb":
        yield f"{place}.gcsFaultToleranceOptions.backend", "rocksdb is behind a gate that is off by default; use redis"
    if of_job and fault_tolerance:
        yield f"{place}.gcsFaultToleranceOptions", "does not survive a job's retry; remove it, the study resumes itself"
    if of_job and "upgradeStrategy" in spec:
        yield f"{place}.upgradeStrategy", "is refused on the cluster of a job; remove it"
    if fault_tolerance:
        yield from _check_redis(f"{place}.headGroupSpec.template.spec.containers[0].env", head)
    yield from _check_head(f"{place}.headGroupSpec", head)
    names = [group.get("groupName") for group in groups]
    with_gpus = any(map(gpus_of, groups))  # else all is on CPUs
    for index, group in enumerate(groups):
        at = f"{place}.workerGroupSpecs[{index}]"
        yield from _check_group(at, group, with_gpus=with_gpus)
        if names.index(group.get("groupName")) < index:
            yield f"{at}.groupName", f"'{group.get('groupName')}' is there twice; rename one"


def _check_redis(place: str, head: dict[str, Any]) -> Iterator[Fault]:
    names = {str(variable.get("name")) for variable in _environment(head)}
    for name in ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"):
        if name in names:
            yield place, f"{name} says again what gcsFaultToleranceOptions says; remove the variable"


def _environment(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Variables of the Ray container, the first."""
    containers = as_list(as_dict(as_dict(group.get("template")).get("spec")).get("containers"))
    return [as_dict(variable) for variable in as_list(as_dict(containers[0] if containers else None).get("env"))]


def _check_versions(place: str, spec: dict[str, Any], *, of_job: bool) -> Iterator[Fault]:
    version, auth = spec.get("rayVersion"), as_dict(spec.get("authOptions"))
    if auth.get("mode") != "token":
        yield f"{place}.authOptions.mode", "whoever reaches the head may run code on it; set token"
    elif version is None:
        yield f"{place}.rayVersion", "missing: authOptions needs it; give the image's version, for example 2.60.0"
    elif not (numbers := _version(version)):
        yield f"{place}.rayVersion", f"'{version}' is no version; expected for example 2.60.0"
    elif numbers < (2, 52):
        yield f"{place}.rayVersion", f"authOptions needs Ray 2.52 or newer, got {version}; use a newer image"
    if auth.get("enableK8sTokenAuth") and of_job:
        yield f"{place}.authOptions.enableK8sTokenAuth", "is refused on the cluster of a job; remove it"


def _version(text: Any) -> tuple[int, int] | None:
    found = re.match(r"^(\d+)\.(\d+)", str(text))
    return (int(found[1]), int(found[2])) if found else None


def _check_autoscaler(
    place: str, spec: dict[str, Any], head: dict[str, Any], groups: list[dict[str, Any]]
) -> Iterator[Fault]:
    scaled, version = spec.get("enableInTreeAutoscaling") is True, as_dict(spec.get("autoscalerOptions")).get("version")
    at = f"{place}.headGroupSpec.template.spec.containers[0].env"
    by_env = next((each for each in _environment(head) if each.get("name") == AUTOSCALER_V2_ENV), None)
    if scaled:
        yield from check_rights(f"{place}.autoscalerOptions", as_dict(spec.get("autoscalerOptions")))
    if by_env and not scaled:
        yield at, f"{AUTOSCALER_V2_ENV} without autoscaling; set enableInTreeAutoscaling: true and remove it"
    elif by_env and version:
        yield at, f"{AUTOSCALER_V2_ENV} says again what autoscalerOptions.version says; remove the variable"
    second = version == "v2" or (version is None and (not by_env or str(by_env.get("value")) in ("1", "true")))
    for index, group in enumerate(groups):
        group_at = f"{place}.workerGroupSpecs[{index}]"
        if not scaled and group.get("minReplicas") != group.get("maxReplicas"):
            yield f"{place}.enableInTreeAutoscaling", f"off, so '{group.get('groupName')}' never grows; set it to true"
        if scaled and group.get("suspend"):
            yield f"{group_at}.suspend", "does not go with autoscaling; set maxReplicas: 0 instead"
        if "idleTimeoutSeconds" in group and not (scaled and second):
            yield f"{group_at}.idleTimeoutSeconds", "of a group needs autoscaler v2; set autoscalerOptions.version: v2"
        if as_int(group.get("priority")):
            if not (scaled and second):
                yield f"{group_at}.priority", "needs autoscaler v2; set autoscalerOptions.version: v2"
            if (_version(spec.get("rayVersion")) or (0, 0)) < (2, 56):
                yield f"{group_at}.priority", "needs rayVersion 2.56 or newer; set it or remove the priority"


def _check_head(place: str, head: dict[str, Any]) -> Iterator[Fault]:
    parameters, resources = as_dict(head.get("rayStartParams")), as_dict(head.get("resources"))
    yield from _check_start(place, head)
    if gpus_of(head):
        at = f"{place}.template.spec.containers[0].resources.limits.nvidia.com/gpu"
        yield at, "the head does no work and wants no GPU; remove it"
    if str(parameters.get("num-cpus", resources.get("CPU"))) != "0":
        yield f"{place}.rayStartParams.num-cpus", 'the head is not to get work; set "0"'
    for pool in (SAMPLING, TRAINING):
        if pool.label in as_dict(head.get("labels")) or pool.resource in resources:
            yield f"{place}.labels", f"the head is of no pool; remove {pool.label} and the resource {pool.resource}"
    for key, value in POOLS_LABEL.items():
        if as_dict(head.get("labels")).get(key) != value:
            yield f"{place}.labels.{key}", f"missing: work would be placed on nodes of any pool; set {value}"
    yield from check_pod(f"{place}.template", as_dict(head.get("template")))


def _check_group(place: str, group: dict[str, Any], *, with_gpus: bool) -> Iterator[Fault]:
    least, most, now = (as_int(group.get(name)) for name in ("minReplicas", "maxReplicas", "replicas"))
    if least is not None and most is not None and least > most:
        yield f"{place}.minReplicas", f"{least} is more than maxReplicas, {most}; lower it"
    elif now is not None and not (least or 0) <= now <= (now if most is None else most):
        yield f"{place}.replicas", f"{now} is not between minReplicas and maxReplicas; set {least or 0}"
    if least is not None and least < 0:
        yield f"{place}.minReplicas", f"is {least}; set 0 or more"
    hosts = as_int(group.get("numOfHosts"))
    if hosts is not None and hosts != 1:
        yield f"{place}.numOfHosts", f"is {hosts}, but a replica here is one node; set 1"
    yield from _check_start(place, group)
    yield from _check_drain(f"{place}.template.spec", group)
    yield from _check_routing(place, group, with_gpus=with_gpus)
    yield from check_pod(f"{place}.template", as_dict(group.get("template")))


def _check_drain(place: str, group: dict[str, Any]) -> Iterator[Fault]:
    """Ray, not Kubernetes, says how long work goes on after the warning, and tells trainers of it."""
    grace = as_int(as_dict(as_dict(group.get("template")).get("spec")).get("terminationGracePeriodSeconds"))
    drain = next((each.get("value") for each in _environment(group) if each.get("name") == DRAIN_ENV), None)
    at = f"{place}.containers[0].env"
    if drain is None:
        yield at, f"{DRAIN_ENV} is missing: work ends 30 s after the warning; set it to less than the grace period"
    elif not (str(drain).isdecimal() and int(str(drain)) < (30 if grace is None else grace)):
        yield at, f"{DRAIN_ENV} is no number below terminationGracePeriodSeconds: the pod is killed before; lower it"


def _check_start(place: str, group: dict[str, Any]) -> Iterator[Fault]:
    """What a node says about itself when Ray starts on it."""
    parameters, resources = as_dict(group.get("rayStartParams")), as_dict(group.get("resources"))
    if "labels" in parameters:
        yield f"{place}.rayStartParams.labels", f"KubeRay refuses labels here; move them to {place}.labels"
    twice = [name for name in _START_RESOURCES if name in parameters]
    if twice and resources:
        yield f"{place}.rayStartParams.{twice[0]}", f"does not go with {place}.resources; say it in one of them"
    for name, amount in resources.items():
        if not isinstance(amount, str):
            yield f"{place}.resources.{name}", "is no text; put it in quotes"
    for name, value in parameters.items():
        if not isinstance(value, str):
            yield f"{place}.rayStartParams.{name}", "is no text; put it in quotes"
    yield from _check_labels(f"{place}.labels", as_dict(group.get("labels")))


def _check_routing(place: str, group: dict[str, Any], *, with_gpus: bool) -> Iterator[Fault]:
    """Whether work finds the group: pos2distill/placement.py says why the labels are as they are."""
    labels, resources = as_dict(group.get("labels")), as_dict(group.get("resources"))
    samples = SAMPLING.resource in resources
    trains = TRAINING.resource in resources or labels.get(TRAINING.label) == TRAINING.value
    subcluster = labels.get(SUBCLUSTER_LABEL)
    if samples and trains:
        yield place, "offers sampling and training; make two groups of it, so that they scale apart"
    elif trains:
        if subcluster is not None:
            yield f"{place}.labels.{SUBCLUSTER_LABEL}", "on trainers, training never gets its nodes; remove it"
        if labels.get(TRAINING.label) != TRAINING.value:
            yield f"{place}.labels.{TRAINING.label}", f"missing on trainers; set {TRAINING.value}"
        if TRAINING.resource not in resources:
            yield f"{place}.resources.{TRAINING.resource}", "missing on trainers; set one for each GPU"
        if labels.get("ray.io/market-type") == "spot" or is_spot(group):
            yield (
                f"{place}.template.spec.nodeSelector",
                "trainers on spot machines: losing one stops all; use on demand",
            )
    elif subcluster not in (None, SAMPLING.value):
        yield f"{place}.labels.{SUBCLUSTER_LABEL}", f"'{subcluster}' is no pool; set {SAMPLING.value}"
    elif subcluster is None:
        mend = f"set {SUBCLUSTER_LABEL}: {SAMPLING.value}, or {TRAINING.label}: {TRAINING.value}"
        yield f"{place}.labels", f"no work finds this group; {mend}"
    elif gpus_of(group) and not samples:
        yield f"{place}.resources.{SAMPLING.resource}", "missing on nodes that sample; set one for each GPU"
    if (samples or trains) and with_gpus and not gpus_of(group):
        at = f"{place}.template.spec.containers[0].resources.limits.nvidia.com/gpu"
        yield at, f"missing: {'training' if trains else 'sampling'} wants GPUs; say how many a pod has"


def _strings(place: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _strings(f"{place}.{key}" if place else str(key), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _strings(f"{place}[{index}]", inner)
    elif isinstance(value, str):
        yield place, value
