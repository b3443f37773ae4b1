"""A RayJob on a Kubernetes cluster, through kubectl: submit and follow it, show its status and log, delete it.

Results are in the storage, not in the cluster. A job that has ended is submitted again by deleting and applying it: the
new job finds the finished stages and stored samples.
"""

import copy
import enum
import hashlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pos2distill.errors import ExitCode, UserError, collapse_whitespace, status_name, warn_once
from pos2distill.node_pools import DEADLINE_PASSED, GATE_FAILED, JOB_DEADLINE_VARIABLE, NOT_RETRIED, RAY_VARIABLES

from .job_log import LogFollower
from .kubectl import UnreachableError, as_selector, get_existing, get_object, get_pods, kubectl
from .names import GROUP_LABEL, MADE_BY_KUBERAY_LABEL, PROJECT, STORAGE_ANNOTATION
from .nodes import INT32
from .render import to_yaml
from .spec import ClusterSpec
from .types import KubeManifest, Outcome

POLL_SECONDS = 5.0
OUTAGE_SECONDS = 300.0  # following stops with an error if the cluster does not answer for this time
_MESSAGE_LENGTH = 300
_STOP_MARGIN_SECONDS = 120  # time between the end of a job that is stopped and KubeRay's deadline
_DIGEST_ANNOTATION = f"{PROJECT}/digest"  # digest of the submitted spec of the job
_SUBMISSION_LABEL = f"{PROJECT}/submission"  # random: tells a job from a later one of the same name

# What `render` makes, but for the monitor of pods.
_RENDERED_KINDS = ("rayjob", "raycluster", "configmap", "serviceaccount", "networkpolicy", "poddisruptionbudget")
# Values of jobDeploymentStatus, KubeRay 1.7.0:
# https://github.com/ray-project/kuberay/blob/v1.7.0/ray-operator/apis/ray/v1/rayjob_types.go
_ENDED = ("Complete", "Failed", "ValidationFailed")
_DEADLINE_EXCEEDED = "DeadlineExceeded"  # reason of a job that has passed activeDeadlineSeconds; it is not retried


def submit(spec: ClusterSpec, manifests: Sequence[KubeManifest]) -> Outcome:
    """Create a RayJob and follow it to its end.

    A job that is already running is only followed. A job that has ended is deleted and created again.

    Args:
        manifests: the result of `render`; the RayJob is the last one.
    Returns: with the exit code SUCCESS, FAILED, USER_ERROR or STOPPED; INTERRUPTED by Ctrl-C, TERMINATED by SIGTERM.
    Raises:
        UserError: kubectl or the cluster rejects the job, or a job with another command runs under this name.
    """
    ray_job = manifests[-1]
    # Sorted keys, so that equal specs have equal digests.
    digest = hashlib.sha256(json.dumps(ray_job["spec"], sort_keys=True).encode()).hexdigest()[:16]
    while True:
        job = get_object("rayjob", spec.name, spec.namespace)
        if job and _deployment_status(job) not in _ENDED:
            _check_same_command(spec, job, ray_job)
            # A job that was applied by other means has no digest, and counts as unchanged.
            applied_digest = _annotation(job, _DIGEST_ANNOTATION) or digest
            change = "" if applied_digest == digest else ", with a different image or spec"
            print(f"{spec.name} is already running{change}; following it", flush=True)
            break
        companions = to_yaml(manifests[:-1])
        for existing in [*([job] if job else []), *get_existing(companions)]:
            _check_is_ours(spec, existing)
        if job:
            status_text = _deployment_status(job)
            print(f"{spec.name} has ended ({status_text}); submitting it again to resume from its storage", flush=True)
            _delete_ended(spec, job)
        print(kubectl("apply", "--filename", "-", text=companions), end="", flush=True)
        if _create(_submitted(spec, ray_job, digest)):
            break
    try:
        exit_code = _follow(spec)
    except KeyboardInterrupt as interrupt:
        print(
            f"\ndetached; {spec.name} continues. Run the same command to follow it again; `run.py cluster delete` "
            f"stops it, and may lose the steps since its last checkpoint (to save one first: docs/cluster.md, "
            f"Submitting)",
            flush=True,
        )
        exit_code = ExitCode.of_interrupt(interrupt)
    summary = {**_identity(spec, ray_job), "status": status_name(exit_code), "exit_code": exit_code}
    return Outcome(exit_code, summary)


def _identity(spec: ClusterSpec, manifest: KubeManifest) -> dict[str, Any]:
    """Which object an action is about, and where the results of its study are; None for a cluster without a job."""
    storage = _annotation(manifest, STORAGE_ANNOTATION)
    return {"name": spec.name, "namespace": spec.namespace, "kind": manifest["kind"], "storage": storage}


def _check_is_ours(spec: ClusterSpec, existing: dict[str, Any]) -> None:
    """Reject an existing object that lacks the labels of this spec, since it must not be replaced."""
    labels = existing["metadata"].get("labels") or {}
    missing = [f"{key}={value}" for key, value in spec.labels.items() if labels.get(key) != value]
    if missing:
        raise UserError(
            f"{existing['kind']}/{existing['metadata']['name']}: exists in namespace {spec.namespace} without the "
            f"label {missing[0]}, so it may have another owner; set another spec.name, or delete it with kubectl"
        )


def _delete_ended(spec: ClusterSpec, job: dict[str, Any]) -> None:
    """Delete this job, and not one of the same name that another command has created by now.

    Waits for the end of the deletion; otherwise the old object would still be found.
    """
    submission = job.get("metadata", {}).get("labels", {}).get(_SUBMISSION_LABEL)
    # A job that was applied by other means has no such label.
    which = [f"--selector={_SUBMISSION_LABEL}={submission}"] if submission else [spec.name]
    _delete_and_wait("rayjob", *which, "--namespace", spec.namespace)


def _delete_and_wait(*arguments: str) -> str:
    # A finalizer that nobody removes would block a deletion for ever. The first limit begins once the server answers.
    return kubectl("delete", *arguments, "--wait=true", "--timeout=180s", time_limit="200s")


def _create(ray_job: KubeManifest) -> bool:
    """Create the job, unless another command has just done so. Unlike `apply`, this never changes one that runs."""
    try:
        print(kubectl("create", "--filename", "-", text=to_yaml([ray_job])), end="", flush=True)
    except UserError as error:
        if "(AlreadyExists)" in str(error):
            return False
        raise
    return True


def _submitted(spec: ClusterSpec, ray_job: KubeManifest, digest: str) -> KubeManifest:
    """A copy of the job that is created now: with its digest, and the time at which all its attempts end.

    KubeRay's own deadline begins anew with every attempt, and ends one without a checkpoint. In a queue it is the only
    limit, since a job may wait there for longer than its deadline before its first attempt.
    """
    submitted = copy.deepcopy(ray_job)  # the manifest belongs to the caller
    submitted["metadata"].setdefault("annotations", {})[_DIGEST_ANNOTATION] = digest
    submitted["metadata"].setdefault("labels", {})[_SUBMISSION_LABEL] = secrets.token_hex(8)
    if spec.job.queue is None:
        (container,) = submitted["spec"]["submitterPodTemplate"]["spec"]["containers"]
        container["env"].append({"name": JOB_DEADLINE_VARIABLE, "value": str(int(time.time()) + spec.job.deadline_s)})
        # Later than the submitter's by the time in which a stopped job saves a checkpoint.
        deadline_s = spec.job.deadline_s + _stop_wait_s(spec) + _STOP_MARGIN_SECONDS
        submitted["spec"]["activeDeadlineSeconds"] = min(deadline_s, INT32)
    return submitted


def _stop_wait_s(spec: ClusterSpec) -> int:
    """How long a job may run after a request to stop."""
    seconds = {**RAY_VARIABLES, **spec.pods.env}["RAY_JOB_STOP_WAIT_TIME_S"]
    return int(seconds) if seconds.isdecimal() else 0


def _check_same_command(spec: ClusterSpec, job: dict[str, Any], ray_job: KubeManifest) -> None:
    running = job["spec"].get("entrypoint")
    if running != ray_job["spec"]["entrypoint"]:
        raise UserError(
            f"{spec.name}: runs another command ({running}); wait until it ends, delete it, or set another spec.name"
        )


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
    summary = {**_identity(spec, {**found, "kind": kind}), **state._asdict()}
    for field in ("rayClusterName", "startTime", "endTime", "message"):
        value = found.get("status", {}).get(field)
        summary[field] = _one_line(value) if value else None
        if value:
            print(f"  {field}: {_one_line(value)}")
    summary["pods"] = _print_pods(get_pods(spec.namespace, spec.labels))
    return Outcome(ExitCode.SUCCESS, summary)


class _State(NamedTuple):
    """What `status` says of a job, or of a cluster without one. The fields are those that `--json` prints."""

    status: str
    exit_code: ExitCode | None  # None until the job has ended
    details: str


def _job_state(spec: ClusterSpec, job: dict[str, Any]) -> _State:
    if _deployment_status(job) in _ENDED:
        exit_code = _end_of(spec, job).exit_code
        return _State(status_name(exit_code), exit_code, _describe(job))
    word = "running" if _deployment_status(job) == "Running" else "pending"
    return _State(word, None, _describe(job))


def _cluster_state(cluster: dict[str, Any]) -> _State:
    word = cluster.get("status", {}).get("state") or "new"
    return _State(word, None, f"cluster without a job, {word}")


def _print_pods(pods: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Print how many pods of each group are in which phase, and what they wait for. Returns the same by group."""
    phases: dict[str, Counter[str]] = {}
    reasons: dict[str, Counter[str]] = {}
    for pod in pods:
        # KubeRay labels the pods of the cluster with their group. The submitter's pod is not part of the cluster.
        group = pod["metadata"].get("labels", {}).get(GROUP_LABEL, "submitter")
        pod_status = pod.get("status", {})
        phases.setdefault(group, Counter())[pod_status.get("phase", "?")] += 1
        # Several containers of one pod may wait for the same reason; the pod counts once.
        reasons.setdefault(group, Counter()).update(set(_waiting_reasons(pod_status)))
    for group in sorted(phases):
        for phase, count in sorted(phases[group].items()):
            print(f"  pods of {group}: {count} {phase}")
    for group in sorted(reasons):
        for reason, count in sorted(reasons[group].items()):
            print(f"  {count} of {group}: {reason}")
    return {group: {"phases": phases[group], "waiting": reasons[group]} for group in sorted(phases)}


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
            yield _one_line(f"{entry.get('reason')}: {entry['message']}")


def logs(spec: ClusterSpec) -> ExitCode:
    """Print the job's log so far."""
    if not get_object("rayjob", spec.name, spec.namespace):
        raise UserError(f"{spec.name}: no RayJob of this name in namespace {spec.namespace}, so there is no log")
    # Without a limit, since a long log takes long. That the server answers has just been seen.
    print(kubectl("logs", f"job/{spec.name}", "--namespace", spec.namespace, time_limit="0"), end="")
    return ExitCode.SUCCESS


def delete(spec: ClusterSpec) -> ExitCode:
    """Delete the job, or the cluster without a job, and all other objects of the spec. Results are kept."""
    kinds = list(_RENDERED_KINDS)
    if spec.network.pod_monitor is not None:  # a cluster without a Prometheus operator does not know the kind
        kinds.append("podmonitor")
    # By label, since objects of other owners may have the same names. The job's cluster carries the job's labels too,
    # but KubeRay deletes it with the job, after a request to the job to stop.
    selector = f"--selector={as_selector(spec.labels)},!{MADE_BY_KUBERAY_LABEL}"
    output = _delete_and_wait(",".join(kinds), selector, "--namespace", spec.namespace, "--ignore-not-found")
    # kubectl 1.32 prints "No resources found" if there are none.
    print(output if " deleted" in output else f"{spec.name}: not found\n", end="")
    return ExitCode.SUCCESS


def _follow(spec: ClusterSpec) -> ExitCode:
    """Print changes of the status and the log until the job ends."""
    log, printed = LogFollower(spec.name, spec.namespace), ""
    last_answer = time.monotonic()
    try:
        while True:
            try:
                job = get_object("rayjob", spec.name, spec.namespace)
            except UserError as error:
                # The job continues while the cluster does not answer, so a short outage does not end the following.
                outage_s = time.monotonic() - last_answer
                if not isinstance(error, UnreachableError) or outage_s > OUTAGE_SECONDS:
                    raise UserError(f"{error}; the job may still run; run the same command to follow it") from None
                time.sleep(POLL_SECONDS)
                continue
            last_answer = time.monotonic()
            if job is None:
                print(f"{spec.name} was deleted; run the same command to resume from its storage")
                return ExitCode.STOPPED
            description = _describe(job)
            if description != printed:
                print(f"{time.strftime('%H:%M:%S')} {spec.name}: {description}", flush=True)
                printed = description
            if _deployment_status(job) in _ENDED:
                log.finish(_last_attempt(job))
                return _report_end(spec, job)
            log.update(_running_attempt(job))
            time.sleep(POLL_SECONDS)
    finally:
        log.stop()


class _End(enum.Enum):
    """How a job has ended, and the exit code of `cluster submit` for it."""

    SUCCEEDED = enum.auto(), ExitCode.SUCCESS
    REJECTED = enum.auto(), ExitCode.USER_ERROR  # KubeRay found the RayJob invalid
    USER_ERROR = enum.auto(), ExitCode.USER_ERROR
    GATE_FAILED = enum.auto(), ExitCode.FAILED
    FAILED = enum.auto(), ExitCode.FAILED
    AT_DEADLINE = enum.auto(), ExitCode.STOPPED
    STOPPED = enum.auto(), ExitCode.STOPPED

    @property
    def exit_code(self) -> ExitCode:
        return self.value[1]


def _end_of(spec: ClusterSpec, job: dict[str, Any]) -> _End:
    """How a job has ended. Where only its log says so, the end of it is read."""
    stage, status = _deployment_status(job), job.get("status", {})
    if stage == "ValidationFailed":
        return _End.REJECTED
    if status.get("reason") == _DEADLINE_EXCEEDED:
        return _End.AT_DEADLINE
    if status.get("jobStatus") != "STOPPED":
        succeeded = stage == "Complete" and status.get("jobStatus") == "SUCCEEDED"
        return _End.SUCCEEDED if succeeded else _End.FAILED
    # A job stops itself, so that it is not tried again, after a user error and where its gate failed.
    tail = _log_tail(spec)
    for sentence, end in ((GATE_FAILED, _End.GATE_FAILED), (NOT_RETRIED, _End.USER_ERROR)):
        if sentence in tail:
            return end
    return _End.AT_DEADLINE if DEADLINE_PASSED in tail else _End.STOPPED


def _report_end(spec: ClusterSpec, job: dict[str, Any]) -> ExitCode:
    """Print how a job has ended."""
    end, status = _end_of(spec, job), job["status"]
    if end is _End.REJECTED:
        raise UserError(f"{spec.name}: KubeRay rejected it: {_one_line(status.get('message', ''))}")
    causes = [str(status[field]) for field in ("reason", "message") if status.get(field)]
    resume = "run the same command to resume from its storage"
    lines = {
        _End.SUCCEEDED: "succeeded",
        _End.USER_ERROR: "has ended with a user error; see the line `error: …` near the end of its log",
        _End.GATE_FAILED: "has ended, and its gate failed, as the end of its log says",
        _End.FAILED: f"failed: {_one_line(': '.join(causes))}",
        _End.AT_DEADLINE: f"was stopped at its deadline (job.deadline_s: {spec.job.deadline_s}); {resume}",
        _End.STOPPED: f"was stopped; {resume}",
    }
    print(f"{spec.name} {lines[end]}")
    return end.exit_code


def _log_tail(spec: ClusterSpec) -> str:
    """The end of a job's log; empty if its Kubernetes Job is gone, or with a warning if it cannot be read.

    More lines than say how it ended: a job that stops at its deadline logs until it has saved its checkpoint.
    """
    try:
        return kubectl("logs", f"job/{spec.name}", "--namespace", spec.namespace, "--tail=500")
    except UserError as error:
        if "(NotFound)" not in str(error):
            warn_once(f"{spec.name}: why it stopped is not known, since the end of its log cannot be read: {error}")
        return ""


def _deployment_status(job: dict[str, Any]) -> str:
    """KubeRay's status of a job, or New if KubeRay has not processed it yet."""
    return str(job.get("status", {}).get("jobDeploymentStatus") or "New")


def _running_attempt(job: dict[str, Any]) -> int | None:
    """The number of the attempt that runs, from 0; None if none does."""
    return int(job.get("status", {}).get("failed") or 0) if _deployment_status(job) == "Running" else None


def _last_attempt(job: dict[str, Any]) -> int | None:
    """The number of the last attempt of a job that has ended, from 0; None if none has run.

    KubeRay 1.7.0 counts a last attempt that fails as failed, but not one that passes a deadline: then this is too low,
    and never too high.
    """
    status = job.get("status", {})
    if not status.get("jobStatus"):
        return None
    failed = int(status.get("failed") or 0)
    return failed if _deployment_status(job) == "Complete" else max(0, failed - 1)


def _describe(job: dict[str, Any]) -> str:
    job_status = job.get("status", {})
    parts = [_deployment_status(job)]
    if job_status.get("jobStatus"):
        parts.append(f"job {job_status['jobStatus']}")
    if job_status.get("failed"):
        parts.append(f"{job_status['failed']} attempts failed")
    return ", ".join(parts)


def _annotation(found: KubeManifest, name: str) -> str | None:
    """An annotation of this project; None on an object that was not made by `render`."""
    value = (found.get("metadata", {}).get("annotations") or {}).get(name)
    return None if value is None else str(value)


def _one_line(text: Any) -> str:
    return collapse_whitespace(text, _MESSAGE_LENGTH)
