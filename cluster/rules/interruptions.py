"""What a study needs so that a running job outlives lost log streams, lost nodes and machines that are reclaimed."""

from collections.abc import Iterator
from typing import Any

from ..names import (
    LOST_NODE_DEFAULT_SECONDS,
    LOST_NODE_TAINTS,
    MARKET_LABEL,
    OTHER_SPOT_SELECTORS,
    SPOT_SELECTORS,
    SUBMITTER_MODULE,
)
from ..types import Violation
from .fields import Fields, Rule, cluster_of, job_of


def submitter_waits_for_the_end(manifest: Fields) -> Iterator[Violation]:
    """KubeRay's own submitter ends when the log's stream is closed, whereupon KubeRay deletes the running job."""
    job = job_of(manifest)
    if manifest.get("kind") != "RayJob":
        return
    if job.get("submissionMode", "K8sJobMode") != "K8sJobMode":
        yield job.violation("submissionMode", "has no submitter of its own that waits for the job; set K8sJobMode")
        return
    pod = job.mapping("submitterPodTemplate", "spec")
    container = (pod.mappings("containers") or [Fields(f"{pod.path}.containers[0]", None)])[0]
    command = container.items_of("command")
    if command[:-1] != ["python", "-m", SUBMITTER_MODULE]:
        message = f"KubeRay's own submitter may end before the job; set [python, -m, {SUBMITTER_MODULE}, ENTRYPOINT]"
        yield container.violation("command", message)
    elif command[-1] != job.text("entrypoint").replace("$", "$$"):
        message = "does not submit spec.entrypoint; make its last word equal to it, with $$ for $"
        yield container.violation("command", message)
    if pod.get("restartPolicy") != "Never":
        yield pod.violation("restartPolicy", "the pod of a Job must end; set Never, and retries in submitterConfig")


def head_is_not_on_spot_machines(manifest: Fields) -> Iterator[Violation]:
    """A new head runs the job again, and a submitter that is lost has few retries."""
    head = cluster_of(manifest).mapping("headGroupSpec")
    submitter = job_of(manifest).mapping("submitterPodTemplate", "spec")
    message = "must not be on machines that the cloud may reclaim; use on-demand machines"
    pod = head.mapping("template", "spec")
    if head.mapping("labels").get(MARKET_LABEL) == "spot" or selects_spot(pod):
        yield pod.violation("nodeSelector", f"the head {message}")
    if selects_spot(submitter):
        yield submitter.violation("nodeSelector", f"the submitter {message}")


def head_leaves_a_lost_node(manifest: Fields) -> Iterator[Violation]:
    """KubeRay gives up on a job if its head does not answer for 300 s, so that its pod must be deleted earlier."""
    cluster = cluster_of(manifest)
    if not cluster:
        return
    pod = cluster.mapping("headGroupSpec", "template", "spec")
    for taint in LOST_NODE_TAINTS:
        # The first toleration counts. Without a time, it lasts for ever; without a toleration, Kubernetes adds one with
        # its default time.
        matching = [each for each in pod.mappings("tolerations") if _tolerates(each, taint, "NoExecute")]
        seconds = matching[0].integer("tolerationSeconds") if matching else LOST_NODE_DEFAULT_SECONDS
        if seconds is None or seconds >= LOST_NODE_DEFAULT_SECONDS:
            message = f"the head stays on a lost node too long; tolerate {taint} with tolerationSeconds: 60"
            yield pod.violation("tolerations", message)


def _tolerates(toleration: Fields, taint: str, effect: str) -> bool:
    # A toleration without a key matches every taint, and one without an effect matches every effect.
    return toleration.get("key") in (None, "", taint) and toleration.get("effect") in (None, "", effect)


def selects_spot(pod: Fields) -> bool:
    """Whether the node selector, or the required node affinity, may choose spot machines of some cloud."""
    selector = pod.mapping("nodeSelector")
    affinity = pod.mapping("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    expressions = [
        each for term in affinity.mappings("nodeSelectorTerms") for each in term.mappings("matchExpressions")
    ]
    for labels in (*SPOT_SELECTORS.values(), *OTHER_SPOT_SELECTORS):
        for key, value in labels.items():
            of_key = [expression for expression in expressions if expression.get("key") == key]
            demanded = selector.get(key) == value or any(_values(expression) == [value] for expression in of_key)
            # What the selector chooses, the affinity can only narrow.
            allowed = key not in selector and any(_allows(expression, value) for expression in of_key)
            if demanded or allowed:
                return True
    return False


def _values(expression: Fields) -> list[Any]:
    return expression.items_of("values") if expression.get("operator") == "In" else []


def _allows(expression: Fields, value: str) -> bool:
    return expression.get("operator") == "Exists" or value in _values(expression)


POLICIES: tuple[Rule, ...] = (
    submitter_waits_for_the_end,
    head_is_not_on_spot_machines,
    head_leaves_a_lost_node,
)
