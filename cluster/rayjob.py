"""A RayJob on a Kubernetes cluster, through kubectl: submit and follow it, show its log, delete it.

Results are in the storage, not in the cluster. A job that has ended is submitted again by deleting and applying it: the
new job finds the finished stages and stored samples.
"""

import copy
import hashlib
import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from pos2distill.errors import ExitCode, UserError, status_name
from pos2distill.node_pools import JOB_DEADLINE_VARIABLE, RAY_VARIABLES

from .job_log import LogFollower
from .job_state import (
    ENDED,
    EXIT_CODES,
    End,
    annotation_of,
    deployment_status,
    describe,
    end_of,
    last_attempt,
    object_identity,
    running_attempt,
    short_message,
)
from .kubectl import UnreachableError, as_selector, get_existing, get_object, kubectl, log_source
from .names import MADE_BY_KUBERAY_LABEL, PROJECT
from .nodes import INT32
from .render import to_yaml
from .spec import ClusterSpec
from .types import KubeManifest, Outcome

POLL_SECONDS = 5.0
OUTAGE_SECONDS = 300.0  # following stops with an error if the cluster does not answer for this time
_STOP_MARGIN_SECONDS = 120  # time between the end of a job that is stopped and KubeRay's deadline
_DIGEST_ANNOTATION = f"{PROJECT}/digest"  # digest of the submitted spec of the job
_SUBMISSION_LABEL = f"{PROJECT}/submission"  # random: tells a job from a later one of the same name

# What `render` makes, except the PodMonitor.
_RENDERED_KINDS = ("rayjob", "raycluster", "configmap", "serviceaccount", "networkpolicy", "poddisruptionbudget")


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
        if job and job["metadata"].get("deletionTimestamp"):
            _check_is_ours(spec, job)
            print(f"{spec.name} is being deleted; waiting for the end of its deletion", flush=True)
            _delete_ended(spec, job)
            continue
        if job and deployment_status(job) not in ENDED:
            _check_same_command(spec, job, ray_job)
            # A job that was applied by other means has no digest, and counts as unchanged.
            applied_digest = annotation_of(job, _DIGEST_ANNOTATION) or digest
            change = "" if applied_digest == digest else ", with a different image or spec"
            print(f"{spec.name} is already running{change}; following it", flush=True)
            break
        companions = to_yaml(manifests[:-1])
        for existing in [*([job] if job else []), *get_existing(companions)]:
            _check_is_ours(spec, existing)
        if job:
            status_text = deployment_status(job)
            is_same = job["spec"].get("entrypoint") == ray_job["spec"]["entrypoint"]
            what = (
                "it again to resume from its storage"
                if is_same
                else "another command, and deleting the log of that job"
            )
            print(f"{spec.name} has ended ({status_text}); submitting {what}", flush=True)
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
    summary = {**object_identity(spec, ray_job), "status": status_name(exit_code), "exit_code": exit_code}
    return Outcome(exit_code, summary)


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
    _delete_and_wait("rayjob", *which, "--namespace", spec.namespace, "--ignore-not-found")


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


def logs(spec: ClusterSpec) -> ExitCode:
    """Print the job's log so far."""
    if not get_object("rayjob", spec.name, spec.namespace):
        raise UserError(f"{spec.name}: no RayJob of this name in namespace {spec.namespace}, so there is no log")
    # Without a limit, since a long log takes long. That the server answers has just been seen.
    source = log_source(spec.name, spec.namespace)
    print(kubectl("logs", source, "--namespace", spec.namespace, time_limit="0"), end="")
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
    followed: str | None = None  # the uid of the job
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
            uid = job["metadata"].get("uid")
            if followed is not None and uid != followed:
                print(f"{spec.name} was deleted, and another job has its name; `cluster status` shows that one")
                return ExitCode.STOPPED
            followed = uid
            description = describe(job)
            if description != printed:
                print(f"{time.strftime('%H:%M:%S')} {spec.name}: {description}", flush=True)
                printed = description
            if deployment_status(job) in ENDED:
                log.finish(last_attempt(job))
                return _report_end(spec, job)
            log.update(running_attempt(job))
            time.sleep(POLL_SECONDS)
    finally:
        log.stop()


def _report_end(spec: ClusterSpec, job: dict[str, Any]) -> ExitCode:
    """Print how a job has ended."""
    end, status = end_of(spec, job), job["status"]
    if end is End.REJECTED:
        raise UserError(f"{spec.name}: KubeRay rejected it: {short_message(status.get('message', ''))}")
    causes = [str(status[field]) for field in ("reason", "message") if status.get(field)]
    resume = "run the same command to resume from its storage"
    lines = {
        End.SUCCEEDED: "succeeded",
        End.USER_ERROR: "has ended with a user error; see the line `error: …` near the end of its log",
        End.GATE_FAILED: "has ended, and its gate failed, as the end of its log says",
        End.FAILED: f"failed: {short_message(': '.join(causes))}",
        End.AT_DEADLINE: f"was stopped at its deadline (job.deadline_s: {spec.job.deadline_s}); {resume}",
        End.STOPPED: f"was stopped; {resume}",
    }
    print(f"{spec.name} {lines[end]}")
    return EXIT_CODES[end]
