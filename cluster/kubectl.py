"""Calls of the program kubectl, which knows the user's clusters and how to log in to them."""

import functools
import json
import re
import subprocess
import sys
from typing import Any

from pos2distill.errors import UserError, collapse_whitespace

# The address that kubectl tries if no cluster is configured.
_NO_SERVER = "localhost:8080"
_TIME_LIMIT = "30s"  # limit of one request; without one, kubectl waits forever for a server that does not answer
# How much longer the program may take: for several requests, and for what logs in to the cluster before them.
_EXTRA_SECONDS = 120


class UnreachableError(UserError):
    """A request failed, in a way that is not certain to be permanent: a network failure, an expired login, others."""


def kubectl(*arguments: str, text: str | None = None, time_limit: str = _TIME_LIMIT) -> str:
    """Run kubectl and return its output.

    Args:
        text: sent to its standard input.
        time_limit: the time limit of each request, including its whole answer; 0 sets none.
    Raises:
        UserError: kubectl is not installed, has no cluster configured, or the cluster rejects the request;
            UnreachableError if the failure may pass.
    """
    result = _run(*arguments, text=text, time_limit=time_limit)
    if result.returncode == 0:
        return result.stdout
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    # The lines before the last one are warnings and retries.
    last_line = lines[-1] if lines else f"exit code {result.returncode}"
    message = collapse_whitespace(last_line)
    if arguments[0] == "delete" and "timed out" in message:
        raise UserError(
            f"kubectl delete: {message.removeprefix('error: ')}; something keeps the object, often a finalizer of an "
            f"operator that does not run: look at its metadata.finalizers"
        )
    # Only these two are certain to be permanent. There is no list of the failures that may pass.
    is_permanent = "(NotFound)" in message or "(Forbidden)" in message
    error_type = UserError if is_permanent else UnreachableError
    raise error_type(f"kubectl {arguments[0]}: {message.removeprefix('error: ')}")


def dry_run(manifests: str) -> list[str]:
    """Let the cluster check manifests as if they were applied: its schemas, CEL rules, quotas and webhooks.

    KubeRay's operator is not part of this, since it reads an object only after it was applied.

    Returns: one line for each rejection; empty if the cluster accepts all.
    Raises:
        UserError: kubectl is not installed, or no cluster answers.
    """
    result = _run("apply", "--dry-run=server", "--validate=strict", "--filename", "-", text=manifests)
    if result.returncode == 0:
        return []
    lines = [collapse_whitespace(line) for line in result.stderr.splitlines()]
    rejections = [line for line in lines if line and not line.startswith("Warning:")]
    # Nothing was checked if the request itself failed.
    for line in rejections:
        if line.startswith("Unable to connect") or "was refused" in line or "failed to download openapi" in line:
            raise UnreachableError(f"kubectl apply: {line.removeprefix('error: ')}")
    return rejections or [f"kubectl apply: exit code {result.returncode}"]


def _run(*arguments: str, text: str | None, time_limit: str = _TIME_LIMIT) -> "subprocess.CompletedProcess[str]":
    words = ["kubectl", *_context_options(), *arguments, f"--request-timeout={time_limit}"]
    result = _call(words, text, time_limit)
    if result.returncode != 0 and _NO_SERVER in result.stderr:
        raise UserError(
            "kubectl: no cluster is configured; choose one with `kubectl config use-context NAME`, or set KUBECONFIG"
        )
    return result


def _call(words: list[str], text: str | None, time_limit: str) -> "subprocess.CompletedProcess[str]":
    """Run the program to its end. It gets no terminal, at which a plugin for the login would wait for an answer."""
    limit_s = int(re.sub(r"\D", "", time_limit))
    try:
        return subprocess.run(
            words,
            input=text or "",
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=limit_s + _EXTRA_SECONDS if limit_s else None,
        )
    except FileNotFoundError:
        raise UserError("kubectl: not found; install it (https://kubernetes.io/docs/tasks/tools/)") from None
    except subprocess.TimeoutExpired:
        raise UnreachableError(
            f"kubectl: no end after {limit_s + _EXTRA_SECONDS} s; does its login wait for an answer?"
        ) from None


@functools.cache
def _context_options() -> tuple[str, ...]:
    """The context that is current when the command begins: another shell may choose another one while it runs."""
    found = _call(["kubectl", "config", "current-context"], None, _TIME_LIMIT)
    # Without one, as inside a cluster, kubectl finds its way by itself.
    name = found.stdout.strip()
    return ("--context", name) if found.returncode == 0 and name else ()


def get_object(kind: str, name: str, namespace: str) -> dict[str, Any] | None:
    """The current state of an object, or None if it does not exist."""
    output = kubectl("get", kind, name, "--namespace", namespace, "--ignore-not-found", "--output", "json")
    if not output.strip():
        return None
    found: dict[str, Any] = json.loads(output)
    return found


def get_existing(manifests: str) -> list[dict[str, Any]]:
    """The current state of those objects in a text of manifests that exist."""
    output = kubectl("get", "--filename", "-", "--ignore-not-found", "--output", "json", text=manifests)
    if not output.strip():
        return []
    found: dict[str, Any] = json.loads(output)
    items: list[dict[str, Any]] = found.get("items", [found])  # a list, unless there is one manifest
    return items


def as_selector(labels: dict[str, str]) -> str:
    """What kubectl's option `--selector` takes for objects that carry all of these labels."""
    return ",".join(f"{key}={value}" for key, value in labels.items())


def get_pods(namespace: str, labels: dict[str, str]) -> list[dict[str, Any]]:
    """The pods that carry all of these labels."""
    selector = as_selector(labels)
    output = kubectl("get", "pods", "--namespace", namespace, "--selector", selector, "--output", "json")
    pods: list[dict[str, Any]] = json.loads(output)["items"]
    return pods


def log_source(job: str, namespace: str) -> str:
    """What `kubectl logs` takes for the newest pod of a Kubernetes Job: of several that have ended it takes any.

    A pod that has not started has no log yet. The Job itself while its pods are not known.
    """
    try:
        pods = get_pods(namespace, {"job-name": job})
    except UserError:
        pods = []
    started = [pod["metadata"] for pod in pods if pod.get("status", {}).get("phase") != "Pending"]
    if not started:
        return f"job/{job}"
    newest = max(started, key=lambda metadata: str(metadata.get("creationTimestamp")))
    return f"pod/{newest['name']}"


def start_log(job: str, namespace: str, *, since_s: int | None = None) -> "subprocess.Popen[bytes]":
    """Start a process that prints the log of a Kubernetes Job: from its beginning, or from `since_s` seconds ago."""
    source = log_source(job, namespace)
    command = ["kubectl", *_context_options(), "logs", source, "--namespace", namespace, "--follow"]
    if since_s is not None:
        command.append(f"--since={since_s}s")
    # `sys.stdout` may have been redirected. Errors of the connection are not part of the job's log; the caller opens a
    # lost one again.
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stdout, stderr=subprocess.DEVNULL)
