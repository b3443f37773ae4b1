"""The status of a job, or of a cluster without a job, and of its pods."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pos2distill.errors import ExitCode, UserError, status_name

from .job_state import ENDED, EXIT_CODES, deployment_status, describe, end_of, object_identity, short_message
from .kubectl import get_object, get_pods
from .names import GROUP_LABEL
from .spec import ClusterSpec
from .types import Outcome

PodCounts = dict[str, dict[str, Counter[str]]]
"""For each group of pods, `phases` and `waiting`: the number of pods by phase, and by reason for waiting."""


def status(spec: ClusterSpec) -> Outcome:
    """Print the status of the job, or of the cluster without a job, and of its pods, with the reasons for waiting."""
    found = get_object("rayjob", spec.name, spec.namespace)
    if found:
        kind, state = "RayJob", _job_state(spec, found)
    else:
        found = get_object("raycluster", spec.name, spec.namespace)
        if not found:
            raise UserError(f"{spec.name}: no RayJob or RayCluster of this name in namespace {spec.namespace}")
        kind, state = "RayCluster", _cluster_state(found)
    print(f"{spec.name}: {state.details}")
    summary = {**object_identity(spec, {**found, "kind": kind}), **asdict(state)}
    for field in ("rayClusterName", "startTime", "endTime", "message"):
        value = found.get("status", {}).get(field)
        summary[field] = short_message(value) if value else None
        if value:
            print(f"  {field}: {short_message(value)}")
    counts = count_pods(get_pods(spec.namespace, spec.labels))
    print_pods(counts)
    summary["pods"] = counts
    return Outcome(ExitCode.SUCCESS, summary)


@dataclass(frozen=True, slots=True)
class _State:
    """What `status` says of a job, or of a cluster without one. The fields are those that `--json` prints."""

    status: str
    exit_code: ExitCode | None  # None until the job has ended
    details: str


def _job_state(spec: ClusterSpec, job: dict[str, Any]) -> _State:
    if deployment_status(job) in ENDED:
        exit_code = EXIT_CODES[end_of(spec, job)]
        return _State(status_name(exit_code), exit_code, describe(job))
    word = "running" if deployment_status(job) == "Running" else "pending"
    return _State(word, None, describe(job))


def _cluster_state(cluster: dict[str, Any]) -> _State:
    word = cluster.get("status", {}).get("state") or "new"
    return _State(word, None, f"cluster without a job, {word}")


def count_pods(pods: Sequence[dict[str, Any]]) -> PodCounts:
    """How many pods of each group are in which phase, and how many wait for which reason."""
    counts: PodCounts = {}
    for pod in pods:
        # KubeRay labels the pods of the cluster with their group. The submitter's pod is not part of the cluster.
        group = pod["metadata"].get("labels", {}).get(GROUP_LABEL, "submitter")
        of_group = counts.setdefault(group, {"phases": Counter(), "waiting": Counter()})
        pod_status = pod.get("status", {})
        of_group["phases"][pod_status.get("phase", "?")] += 1
        # Several containers of one pod may wait for the same reason; the pod counts once.
        of_group["waiting"].update(set(_waiting_reasons(pod_status)))
    return dict(sorted(counts.items()))


def print_pods(counts: PodCounts) -> None:
    """Print what `count_pods` returns: first the phases of all groups, then the reasons for waiting."""
    for group, of_group in counts.items():
        for phase, count in sorted(of_group["phases"].items()):
            print(f"  pods of {group}: {count} {phase}")
    for group, of_group in counts.items():
        for reason, count in sorted(of_group["waiting"].items()):
            print(f"  {count} of {group}: {reason}")


def _waiting_reasons(pod_status: dict[str, Any]) -> Iterator[str]:
    """Why a pod has no node, or why its containers do not start, in the words of Kubernetes."""
    waiting = []
    for field in ("initContainerStatuses", "containerStatuses"):
        for container in pod_status.get(field, ()):
            waiting.append(container.get("state", {}).get("waiting", {}))
    for condition in pod_status.get("conditions", ()):
        if condition.get("reason") == "Unschedulable":
            waiting.append(condition)
    for entry in waiting:
        # A container that is just starting has a reason, but no message.
        if entry.get("message"):
            yield short_message(f"{entry.get('reason')}: {entry['message']}")
