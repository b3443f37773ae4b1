"""What the objects of a job or cluster say: which ones they are, how far a job is, and how it has ended."""

import enum
from typing import Any

from pos2distill.errors import ExitCode, UserError, collapse_whitespace, warn_once
from pos2distill.node_pools import DEADLINE_PASSED, GATE_FAILED, NOT_RETRIED

from .kubectl import kubectl, log_source
from .names import STORAGE_ANNOTATION
from .spec import ClusterSpec
from .types import KubeManifest

# Values of jobDeploymentStatus, KubeRay 1.7.0:
# https://github.com/ray-project/kuberay/blob/v1.7.0/ray-operator/apis/ray/v1/rayjob_types.go
ENDED = ("Complete", "Failed", "ValidationFailed")
_DEADLINE_EXCEEDED = "DeadlineExceeded"  # reason of a job that has passed activeDeadlineSeconds; it is not retried
_MESSAGE_LENGTH = 300


class End(enum.Enum):
    """How a job has ended."""

    SUCCEEDED = "succeeded"
    REJECTED = "rejected"  # KubeRay found the RayJob invalid
    USER_ERROR = "user error"
    GATE_FAILED = "gate failed"
    FAILED = "failed"
    AT_DEADLINE = "at deadline"
    STOPPED = "stopped"


# Of `cluster submit`; `cluster status --json` prints them too.
EXIT_CODES = {
    End.SUCCEEDED: ExitCode.SUCCESS,
    End.REJECTED: ExitCode.USER_ERROR,
    End.USER_ERROR: ExitCode.USER_ERROR,
    End.GATE_FAILED: ExitCode.FAILED,
    End.FAILED: ExitCode.FAILED,
    End.AT_DEADLINE: ExitCode.STOPPED,
    End.STOPPED: ExitCode.STOPPED,
}


def object_identity(spec: ClusterSpec, manifest: KubeManifest) -> dict[str, Any]:
    """Which object an action is about, and where the results of its study are; None for a cluster without a job."""
    storage = annotation_of(manifest, STORAGE_ANNOTATION)
    return {"name": spec.name, "namespace": spec.namespace, "kind": manifest["kind"], "storage": storage}


def annotation_of(found: KubeManifest, name: str) -> str | None:
    """An annotation of this project; None on an object that was not made by `render`."""
    value = (found.get("metadata", {}).get("annotations") or {}).get(name)
    return None if value is None else str(value)


def deployment_status(job: dict[str, Any]) -> str:
    """KubeRay's status of a job, or New if KubeRay has not processed it yet."""
    return str(job.get("status", {}).get("jobDeploymentStatus") or "New")


def describe(job: dict[str, Any]) -> str:
    """How far a job is: KubeRay's status, that of the Ray job, and how many attempts have failed."""
    job_status = job.get("status", {})
    parts = [deployment_status(job)]
    if job_status.get("jobStatus"):
        parts.append(f"job {job_status['jobStatus']}")
    if job_status.get("failed"):
        parts.append(f"{job_status['failed']} attempts failed")
    return ", ".join(parts)


def running_attempt(job: dict[str, Any]) -> int | None:
    """The number of the attempt that runs, from 0; None if none does."""
    return int(job.get("status", {}).get("failed") or 0) if deployment_status(job) == "Running" else None


def last_attempt(job: dict[str, Any]) -> int | None:
    """The number of the last attempt of a job that has ended, from 0; None if none has run.

    KubeRay 1.7.0 counts a last attempt that fails as failed, but not one that passes a deadline: then this is too low,
    and never too high.
    """
    status = job.get("status", {})
    if not status.get("jobStatus"):
        return None
    failed = int(status.get("failed") or 0)
    return failed if deployment_status(job) == "Complete" else max(0, failed - 1)


def end_of(spec: ClusterSpec, job: dict[str, Any]) -> End:
    """How a job has ended. Where only its log says so, the end of it is read."""
    stage, status = deployment_status(job), job.get("status", {})
    if stage == "ValidationFailed":
        return End.REJECTED
    if status.get("reason") == _DEADLINE_EXCEEDED:
        return End.AT_DEADLINE
    if status.get("jobStatus") != "STOPPED":
        succeeded = stage == "Complete" and status.get("jobStatus") == "SUCCEEDED"
        return End.SUCCEEDED if succeeded else End.FAILED
    # A job stops itself, so that it is not tried again, after a user error and where its gate failed.
    tail = _log_tail(spec)
    for sentence, end in ((GATE_FAILED, End.GATE_FAILED), (NOT_RETRIED, End.USER_ERROR)):
        if sentence in tail:
            return end
    return End.AT_DEADLINE if DEADLINE_PASSED in tail else End.STOPPED


def _log_tail(spec: ClusterSpec) -> str:
    """The end of a job's log; empty if its Kubernetes Job is gone, or with a warning if it cannot be read.

    More lines than say how it ended: a job that stops at its deadline logs until it has saved its checkpoint.
    """
    try:
        source = log_source(spec.name, spec.namespace)
        return kubectl("logs", source, "--namespace", spec.namespace, "--tail=500")
    except UserError as error:
        if "(NotFound)" not in str(error):
            warn_once(f"{spec.name}: why it stopped is not known, since the end of its log cannot be read: {error}")
        return ""


def short_message(text: Any) -> str:
    """A message of Kubernetes or KubeRay on one line, with a limited length."""
    return collapse_whitespace(text, _MESSAGE_LENGTH)
