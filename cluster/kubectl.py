"""kubectl, called as a program: it knows the user's clusters and ways to log in, so that nothing here needs to."""

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from pos2distill.errors import UserError

_NO_SERVER = "localhost:8080"  # what kubectl tries when nothing tells it of a cluster


class UnreachableError(UserError):
    """The cluster does not answer as it should; it may later."""


def kubectl(*arguments: str, text: str | None = None) -> str:
    """Run kubectl and return what it prints.

    Args:
        text: for its standard input.
    Raises:
        UserError: kubectl is not there, knows no cluster, or is refused; UnreachableError if that may pass.
    """
    try:
        done = subprocess.run(["kubectl", *arguments], input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError("kubectl: not found; install it (https://kubernetes.io/docs/tasks/tools/)") from None
    if done.returncode == 0:
        return done.stdout
    lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    if _NO_SERVER in done.stderr:
        raise UserError(
            "kubectl: knows no cluster; choose one with `kubectl config use-context NAME`, or set KUBECONFIG"
        )
    said = " ".join(lines[-1].split())
    # A log-in that has run out, an API server that starts anew, a network that is away: there is no list of all that.
    kind = UserError if "(NotFound)" in said or "(Forbidden)" in said else UnreachableError
    raise kind(f"kubectl {arguments[0]}: {said.removeprefix('error: ')}")


def get_object(kind: str, name: str, namespace: str) -> dict[str, Any] | None:
    """An object as it is now, or None if there is none of that name."""
    patient = ("--ignore-not-found", "--request-timeout=30s")
    found = kubectl("get", kind, name, "--namespace", namespace, *patient, "--output", "json")
    return json.loads(found) if found.strip() else None


def get_pods(namespace: str, labels: dict[str, str]) -> list[dict[str, Any]]:
    """The pods that carry these labels."""
    selector = ",".join(f"{key}={value}" for key, value in labels.items())
    found = kubectl("get", "pods", "--namespace", namespace, "--selector", selector, "--output", "json")
    items: list[dict[str, Any]] = json.loads(found)["items"]
    return items


def start_log(job: str, namespace: str, *, since_s: int | None = None) -> "subprocess.Popen[bytes]":
    """Follow the log of a Kubernetes Job onto the terminal, from the beginning or the last `since_s` seconds."""
    since: Sequence[str] = () if since_s is None else (f"--since={since_s}s",)
    command = ["kubectl", "logs", f"job/{job}", "--namespace", namespace, "--follow", *since]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)
