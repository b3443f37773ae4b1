"""Rules for the spec of a RayJob, apart from its cluster."""

from collections.abc import Callable, Iterator

import yaml

from pos2distill.errors import did_you_mean

from ..types import Violation
from .fields import Fields
from .pods import check_pod

_SUBMISSION_MODES = ("K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode")
_MANAGERS = ("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue")
# Fields of a RayJob and their smallest values. All are optional.
_MINIMA = (
    ("ttlSecondsAfterFinished", 0),
    ("backoffLimit", 0),
    ("activeDeadlineSeconds", 1),
    ("preRunningDeadlineSeconds", 1),
)


def check_job(job: Fields) -> Iterator[Violation]:
    """All violations of the spec of a RayJob, except those of its cluster."""
    for rule in JOB_RULES:
        yield from rule(job)
    if "submitterPodTemplate" in job:
        yield from check_pod(job.mapping("submitterPodTemplate"))


def _shuts_down(job: Fields) -> bool:
    return job.get("shutdownAfterJobFinishes") is True


def entrypoint_is_given(job: Fields) -> Iterator[Violation]:
    """A job requires a command, unless the user submits it (InteractiveMode)."""
    if not job.get("entrypoint") and job.get("submissionMode") != "InteractiveMode":
        yield job.violation("entrypoint", "missing; set the command that the job runs")


def suspended_job_shuts_down(job: Fields) -> Iterator[Violation]:
    """Source: ValidateRayJobSpec."""
    if job.get("suspend") and not _shuts_down(job):
        message = "requires that the cluster is deleted after the job; set shutdownAfterJobFinishes: true"
        yield job.violation("suspend", message)


def ttl_requires_shutdown(job: Fields) -> Iterator[Violation]:
    """Source: validateDeletionConfiguration."""
    if job.integer("ttlSecondsAfterFinished") and not _shuts_down(job):
        yield job.violation("ttlSecondsAfterFinished", "requires shutdownAfterJobFinishes: true; set that")


def limits_are_in_range(job: Fields) -> Iterator[Violation]:
    """Source: ValidateRayJobSpec."""
    for name, minimum in _MINIMA:
        value = job.integer(name)
        if value is not None and value < minimum:
            yield job.violation(name, f"is {value}; set it to {minimum} or more")


def deadline_is_set(job: Fields) -> Iterator[Violation]:
    """Rule of this project."""
    if "activeDeadlineSeconds" not in job:
        message = "missing: a job that hangs would keep its GPUs; set a limit in seconds"
        yield job.violation("activeDeadlineSeconds", message)


def submission_mode_is_known(job: Fields) -> Iterator[Violation]:
    """Source: JobSubmissionMode in `apis/ray/v1/rayjob_types.go`."""
    mode = job.get("submissionMode", "K8sJobMode")
    if mode not in _SUBMISSION_MODES:
        yield job.violation("submissionMode", f"'{mode}' is unknown{did_you_mean(str(mode), _SUBMISSION_MODES)}")


def interactive_job_has_no_retries(job: Fields) -> Iterator[Violation]:
    """Source: ValidateRayJobSpec."""
    # A retry keeps the id of the failed job, and so would be taken for running: ray-project/kuberay#3525.
    if job.integer("backoffLimit") and job.get("submissionMode") == "InteractiveMode":
        yield job.violation("backoffLimit", "is not supported in InteractiveMode; set 0")


def sidecar_job_has_no_submitter(job: Fields) -> Iterator[Violation]:
    """In SidecarMode, a container of the head submits the job to its own cluster. Source: ValidateRayJobSpec."""
    if job.get("submissionMode") != "SidecarMode":
        return
    for name in ("submitterPodTemplate", "submitterConfig", "clusterSelector"):
        if name in job:
            yield job.violation(name, "is not supported in SidecarMode; remove it, or use K8sJobMode")


def cluster_is_described_or_selected(job: Fields) -> Iterator[Violation]:
    """Source: ValidateRayJobSpec."""
    if not job.get("clusterSelector") and "rayClusterSpec" not in job:
        yield job.violation("rayClusterSpec", "missing; describe the job's cluster, or name one with clusterSelector")


def selected_cluster_has_no_retries(job: Fields) -> Iterator[Violation]:
    """Source: ValidateRayJobSpec."""
    if job.get("clusterSelector") and job.integer("backoffLimit"):
        message = "a retry creates a new cluster, but clusterSelector names an existing one; set 0"
        yield job.violation("backoffLimit", message)


def selected_cluster_is_not_suspended(job: Fields) -> Iterator[Violation]:
    """Source: ValidateRayJobSpec."""
    if job.get("clusterSelector") and job.get("suspend"):
        yield job.violation("suspend", "is not supported with clusterSelector; remove one of them")


def deletion_rules_exclude_other_settings(job: Fields) -> Iterator[Violation]:
    """Source: validateDeletionConfiguration."""
    strategy = job.mapping("deletionStrategy")
    if not strategy.items_of("deletionRules"):
        return
    if _shuts_down(job):
        message = "are not supported with shutdownAfterJobFinishes; remove one of them"
        yield strategy.violation("deletionRules", message)
    if "onSuccess" in strategy or "onFailure" in strategy:
        message = "has deletionRules and also onSuccess or onFailure; keep the rules only"
        yield job.violation("deletionStrategy", message)


def autoscaled_workers_are_not_deleted(job: Fields) -> Iterator[Violation]:
    """Source: validateDeletionRules."""
    # KubeRay 1.7 supports only one of the two, since both decide on the number of workers.
    if not job.mapping("rayClusterSpec").get("enableInTreeAutoscaling"):
        return
    for rule in job.mapping("deletionStrategy").mappings("deletionRules"):
        if rule.get("policy") == "DeleteWorkers":
            yield rule.violation("policy", "DeleteWorkers is not supported with autoscaling; use DeleteCluster")


def manager_is_known(job: Fields) -> Iterator[Violation]:
    """Source: the field's validation in `apis/ray/v1/rayjob_types.go`."""
    manager = job.get("managedBy")
    if manager is not None and manager not in _MANAGERS:
        yield job.violation("managedBy", f"expected {' or '.join(_MANAGERS)}; set one of them or remove it")


def runtime_environment_is_yaml(job: Fields) -> Iterator[Violation]:
    """Source: ValidateRayJobSpec."""
    try:
        yaml.safe_load(str(job.get("runtimeEnvYAML", "")))
    except yaml.YAMLError:
        yield job.violation("runtimeEnvYAML", "is not valid YAML; fix it, or put its contents into the image")


JOB_RULES: tuple[Callable[[Fields], Iterator[Violation]], ...] = (
    entrypoint_is_given,
    suspended_job_shuts_down,
    ttl_requires_shutdown,
    limits_are_in_range,
    deadline_is_set,
    submission_mode_is_known,
    interactive_job_has_no_retries,
    sidecar_job_has_no_submitter,
    cluster_is_described_or_selected,
    selected_cluster_has_no_retries,
    selected_cluster_is_not_suspended,
    deletion_rules_exclude_other_settings,
    autoscaled_workers_are_not_deleted,
    manager_is_known,
    runtime_environment_is_yaml,
)
