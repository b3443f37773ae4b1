import json
from collections.abc import Callable
from typing import Any

import pytest

from cluster.status import count_pods
from pipelines.cli import command_line
from tests.support.fake_kubectl import DONE, IDENTITY, NO_PODS, RUNNING, Reply, job


def test_status_prints_why_pods_wait(
    kubectl: Callable[..., Callable[[], list[Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    refused = {"state": {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "wandb" not found'}}}
    coming = {"state": {"waiting": {"reason": "PodInitializing"}}}
    lost = {"type": "PodScheduled", "reason": "Unschedulable", "message": 'persistentvolumeclaim "runs"\nnot found'}
    states = [
        ("head", {"phase": "Pending", "containerStatuses": [refused, refused]}),
        ("sampling", {"phase": "Pending", "initContainerStatuses": [refused], "containerStatuses": [coming]}),
        ("sampling", {"phase": "Pending", "containerStatuses": [refused]}),
        ("training", {"phase": "Pending", "conditions": [lost]}),
        ("training", {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}),
    ]
    pods = [{"metadata": {"labels": {"ray.io/group": group}}, "status": state} for group, state in states]
    kubectl({"get rayjob": [RUNNING], "get pods": [{"out": json.dumps({"items": pods})}]})
    assert command_line.main(["cluster", "status", "gke"]) == 0
    assert capfd.readouterr().out.splitlines()[-3:] == [
        '  1 of head: CreateContainerConfigError: secret "wandb" not found',
        '  2 of sampling: CreateContainerConfigError: secret "wandb" not found',
        '  1 of training: Unschedulable: persistentvolumeclaim "runs" not found',
    ]


def test_status_of_a_cluster_without_a_job(
    kubectl: Callable[..., Callable[[], list[Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    ready = {"out": json.dumps({"status": {"state": "ready"}})}
    kubectl({"get raycluster": [ready], "get pods": [{"out": json.dumps({"items": []})}]})
    assert command_line.main(["cluster", "status", "gke"]) == 0
    assert capfd.readouterr().out == "nq-mistral: cluster without a job, ready\n"


@pytest.mark.parametrize(
    ("found", "status", "exit_code"),
    [
        (job(), "pending", None),
        (job("Initializing"), "pending", None),
        (RUNNING, "running", None),
        (DONE, "succeeded", 0),
        (job("Failed", jobStatus="FAILED", message="Job\nfailed"), "failed", 1),
        (job("ValidationFailed"), "failed", 2),
        (job("Complete", jobStatus="STOPPED"), "stopped", 3),
    ],
)
def test_status_prints_json_alone(
    kubectl: Callable[..., Callable[[], list[Any]]],
    capfd: pytest.CaptureFixture[str],
    found: Reply,
    status: str,
    exit_code: int | None,
) -> None:
    waits = {"containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull", "message": "denied"}}}]}
    states = [{"phase": "Running"}, {"phase": "Pending", **waits}, {"phase": "Pending", **waits}]
    metadata = {"name": "pod", "labels": {"ray.io/group": "sampling"}}
    pods = [{"metadata": metadata, "status": state} for state in states]
    kubectl({"get rayjob": [found], "get pods": [{"out": json.dumps({"items": pods})}]})
    assert command_line.main(["cluster", "status", "gke", "--json"]) == 0
    printed = capfd.readouterr()
    result = json.loads(printed.out)
    state = json.loads(found["out"])["status"]
    assert {name: result[name] for name in IDENTITY} == IDENTITY
    assert (result["status"], result["exit_code"]) == (status, exit_code)
    assert result["rayClusterName"] == state.get("rayClusterName")
    assert result["message"] == ("Job failed" if "message" in state else None)
    assert result["pods"] == {
        "sampling": {"phases": {"Running": 1, "Pending": 2}, "waiting": {"ErrImagePull: denied": 2}}
    }
    assert "pods of sampling: 2 Pending" in printed.err


@pytest.mark.parametrize("annotations", [None, {}, {"owner": "ann"}])
def test_status_of_a_job_that_was_applied_by_other_means(
    kubectl: Callable[..., Callable[[], list[Any]]],
    capfd: pytest.CaptureFixture[str],
    annotations: dict[str, str] | None,
) -> None:
    found = json.loads(RUNNING["out"])
    found["metadata"]["annotations"] = annotations
    kubectl({"get rayjob": [{"out": json.dumps(found)}], "get pods": [{"out": NO_PODS}]})
    assert command_line.main(["cluster", "status", "gke", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["storage"] is None


def test_status_prints_json_of_a_cluster_without_a_job(
    kubectl: Callable[..., Callable[[], list[Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    kubectl({"get raycluster": [{"out": json.dumps({"status": {"state": "ready"}})}], "get pods": [{"out": NO_PODS}]})
    assert command_line.main(["cluster", "status", "gke", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert (result["kind"], result["storage"], result["status"]) == ("RayCluster", None, "ready")


def test_count_pods_counts_a_pod_without_a_group_as_the_submitter() -> None:
    waits = {"state": {"waiting": {"reason": "ErrImagePull", "message": "denied"}}}
    pods: list[dict[str, Any]] = [
        {"metadata": {"labels": {"ray.io/group": "training"}}, "status": {"phase": "Running"}},
        {"metadata": {}, "status": {"phase": "Pending", "containerStatuses": [waits, waits]}},
        {"metadata": {}},
    ]
    counts = count_pods(pods)
    assert list(counts) == ["submitter", "training"]
    assert counts["submitter"] == {"phases": {"Pending": 1, "?": 1}, "waiting": {"ErrImagePull: denied": 1}}
    assert counts["training"] == {"phases": {"Running": 1}, "waiting": {}}
