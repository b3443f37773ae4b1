"""A RayJob on a Kubernetes cluster: submitted and followed to its end, looked at, taken away. All through kubectl.

Results lie in the storage. A job that ended is submitted again by taking it away and applying it anew: its finished
stages and stored samples are found there.
"""

import contextlib
import hashlib
import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from cluster.kubectl import UnreachableError, get_object, get_pods, kubectl, start_log
from cluster.pods import instance_labels
from cluster.render import Manifest, render, to_yaml
from cluster.spec import ClusterSpec
from pos2distill.errors import UserError

STOPPED = 3  # exit code: somebody stopped or deleted the job

POLL_S = 5.0
OUTAGE_S = 300.0  # a cluster that does not answer for so long is given up
_DIGEST = "pos2distill/digest"  # annotation: of the spec that was applied
_LOG_END_S = 15.0  # what the log may still say after the end

# https://github.com/ray-project/kuberay/blob/v1.7.0/ray-operator/apis/ray/v1/rayjob_types.go
_ENDED = ("Complete", "Failed", "ValidationFailed")


def submit(spec: ClusterSpec, manifests: Sequence[Manifest]) -> int:
    """Apply a RayJob and follow it. One that runs already is only followed; one that ended is taken away first.

    Args:
        manifests: as `render` makes them, the RayJob last.
    Returns: 0 succeeded, 1 failed, STOPPED.
    Raises:
        UserError: kubectl or the cluster refuses, or another command runs under this name.
    """
    job, wanted = get_object("rayjob", spec.name, spec.namespace), manifests[-1]["spec"]["entrypoint"]
    digest = hashlib.sha256(json.dumps(manifests[-1]["spec"], sort_keys=True).encode()).hexdigest()[:16]
    if job and _stage(job) not in _ENDED:
        if job["spec"].get("entrypoint") != wanted:
            raise UserError(
                f"{spec.name}: runs another command ({job['spec'].get('entrypoint')}); wait for its end, delete it, or "
                f"choose another spec.name"
            )
        applied = job.get("metadata", {}).get("annotations", {}).get(_DIGEST, digest)
        changed = "" if applied == digest else ", with an image or a spec that has changed since"
        print(f"{spec.name} runs already{changed}; following it", flush=True)
    else:
        if job:
            print(f"{spec.name} ended as {_stage(job)}; submitting it again, to go on from its storage", flush=True)
            kubectl("delete", "rayjob", spec.name, "--namespace", spec.namespace, "--wait=true")
        metadata = {**manifests[-1]["metadata"], "annotations": {_DIGEST: digest}}
        marked = [*manifests[:-1], {**manifests[-1], "metadata": metadata}]
        print(kubectl("apply", "--filename", "-", text=to_yaml(marked)), end="", flush=True)
    try:
        return _follow(spec)
    except KeyboardInterrupt:
        print(
            f"\n{spec.name} goes on without being followed. The same command follows it again; "
            f"`run.py cluster delete` ends it",
            flush=True,
        )
        return 130


def status(spec: ClusterSpec) -> int:
    """Print how the job, or the cluster that stands alone, is, its pods, and what they wait for."""
    if job := get_object("rayjob", spec.name, spec.namespace):
        found, standing = job, _standing(job)
    elif cluster := get_object("raycluster", spec.name, spec.namespace):
        found, standing = cluster, f"cluster without a job, {cluster.get('status', {}).get('state') or 'new'}"
    else:
        raise UserError(f"{spec.name}: no RayJob or RayCluster of this name in namespace {spec.namespace}")
    print(f"{spec.name}: {standing}")
    for word in ("rayClusterName", "startTime", "endTime", "message"):
        if value := found.get("status", {}).get(word):
            print(f"  {word}: {' '.join(str(value).split())[:300]}")
    phases, waits = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for pod in get_pods(spec.namespace, instance_labels(spec)):
        group, state = pod["metadata"].get("labels", {}).get("ray.io/group", "submitter"), pod.get("status", {})
        phases[group, state.get("phase", "?")] += 1
        waits.update((group, why) for why in set(_waits_for(state)))
    for (group, phase), count in sorted(phases.items()):
        print(f"  pods of {group}: {count} {phase}")
    for (group, why), count in sorted(waits.items()):
        print(f"  {count} of {group}: {why}")
    return 0


def _waits_for(state: dict[str, Any]) -> Iterator[str]:
    """Why a pod has no machine, or its containers do not start, as Kubernetes says it."""
    containers = [*state.get("initContainerStatuses", ()), *state.get("containerStatuses", ())]
    reasons = [each.get("state", {}).get("waiting", {}) for each in containers]
    reasons += [each for each in state.get("conditions", ()) if each.get("reason") == "Unschedulable"]
    for each in reasons:
        if each.get("message"):  # those without are on their way
            yield " ".join(f"{each.get('reason')}: {each['message']}".split())[:300]


def logs(spec: ClusterSpec) -> int:
    """Print the job's log so far."""
    if not get_object("rayjob", spec.name, spec.namespace):
        raise UserError(f"{spec.name}: no RayJob of this name in namespace {spec.namespace}, so there is no log of one")
    print(kubectl("logs", f"job/{spec.name}", "--namespace", spec.namespace), end="")
    return 0


def delete(spec: ClusterSpec) -> int:
    """Take away the job, or the cluster that stands alone, and all that was made with it. Results stay."""
    made = [f"{manifest['kind'].lower()}/{manifest['metadata']['name']}" for manifest in render(spec)]
    # With a job goes its cluster; a cluster that stands alone has the spec's own name.
    told = kubectl("delete", f"rayjob/{spec.name}", *made, "--namespace", spec.namespace, "--ignore-not-found")
    print(told or f"{spec.name}: nothing was there\n", end="")
    return 0


def _follow(spec: ClusterSpec) -> int:
    """Print changes and the log until the job ends. Returns the exit code."""
    log, told, answered = _Log(spec), "", time.monotonic()
    try:
        while True:
            try:
                job = get_object("rayjob", spec.name, spec.namespace)
            except UserError as error:
                if not isinstance(error, UnreachableError) or time.monotonic() - answered > OUTAGE_S:
                    raise UserError(f"{error}; the job may go on, and the same command follows it again") from None
                time.sleep(POLL_S)
                continue
            answered = time.monotonic()
            if job is None:
                print(f"{spec.name} was deleted; the same command submits it again, to go on from its storage")
                return STOPPED
            if (standing := _standing(job)) != told:
                print(f"{time.strftime('%H:%M:%S')} {spec.name}: {standing}", flush=True)
                told = standing
            if _stage(job) in _ENDED:
                log.finish()
                return _end(spec, job)
            log.keep_up(job)
            time.sleep(POLL_S)
    finally:
        log.stop()


class _Log:
    """The log of a job's attempts, one after the other, each followed over any number of connections."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.process: subprocess.Popen[bytes] | None = None
        self.attempt = -1  # whose log is followed
        self.lost: float | None = None  # when its connection was
        self.wait_s = 0.0  # until it is asked for again

    def keep_up(self, job: dict[str, Any]) -> None:
        """See that the log of the attempt that runs now is followed."""
        if self.process and (code := self.process.poll()) is not None:
            # A log that ends well is mostly that of an attempt whose end is not known yet; but it may be cut off too.
            self.process, self.lost, self.wait_s = None, time.monotonic(), 0.0 if code else _LOG_END_S
        attempt = int(job.get("status", {}).get("failed") or 0)
        if self.process or _stage(job) != "Running":
            return
        since = None
        if attempt == self.attempt and self.lost is not None:
            if (silent_s := time.monotonic() - self.lost) < self.wait_s:
                return
            since = int(silent_s + 2 * POLL_S) + 1  # some lines twice are better than some that are missing
        self.attempt = attempt
        self.process = start_log(self.spec.name, self.spec.namespace, since_s=since)

    def finish(self) -> None:
        """Let it say what is left."""
        if self.process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_LOG_END_S)

    def stop(self) -> None:
        """End the program that follows."""
        if self.process:
            self.process.terminate()


def _end(spec: ClusterSpec, job: dict[str, Any]) -> int:
    """Say how a job ended. Returns the exit code."""
    state = job["status"]
    if state.get("jobStatus") == "STOPPED":
        print(f"{spec.name} was stopped; the same command submits it again, to go on from its storage")
        return STOPPED
    if _stage(job) == "Complete" and state.get("jobStatus") == "SUCCEEDED":
        print(f"{spec.name} succeeded")
        return 0
    if _stage(job) == "ValidationFailed":
        raise UserError(f"{spec.name}: KubeRay refuses it: {' '.join(str(state.get('message', '')).split())[:300]}")
    why = ": ".join(str(state[word]) for word in ("reason", "message") if state.get(word))
    print(f"{spec.name} failed: {' '.join(why.split())[:300]}")
    return 1


def _stage(job: dict[str, Any]) -> str:
    """How far KubeRay is with a job; a job that it has not seen yet is New."""
    return str(job.get("status", {}).get("jobDeploymentStatus") or "New")


def _standing(job: dict[str, Any]) -> str:
    state = job.get("status", {})
    parts = [_stage(job)]
    if state.get("jobStatus"):
        parts.append(f"job {state['jobStatus']}")
    if state.get("failed"):
        parts.append(f"{state['failed']} attempts failed")
    return ", ".join(parts)
