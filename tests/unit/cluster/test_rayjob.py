"""Jobs on Kubernetes, with a scripted kubectl that records its calls and plays the cluster and its failures."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import job_log, rayjob
from cluster import kubectl as kubectl_calls
from cluster.job_command import load_job
from cluster.render import render
from cluster.spec import load_cluster
from pipelines.cli import command_line
from pos2distill.config.read import RECIPES
from pos2distill.errors import UserError
from pos2distill.node_pools import DEADLINE_PASSED, GATE_FAILED, NOT_RETRIED, RAY_VARIABLES
from scripts.render_presets import PRESETS, RENDERED
from tests.support.fake_kubectl import (
    DONE,
    ENTRYPOINT,
    IDENTITY,
    LABELS,
    NO_PODS,
    NONE,
    RUNNING,
    STORAGE,
    Reply,
    job,
)
from tests.support.paths import PROJECT

WORDS = ["gke", "nq_mistral_7b", "data.path=gs://bucket/nq.jsonl.gz", "runtime.trainers.workers=8"]
SECRET = "hunter2"  # in the position of a password


def verbs(calls: list[Any]) -> list[str]:
    return [words[0] for words, _ in calls if words[0] in ("apply", "create", "delete", "logs")]


def test_submit_applies_a_new_job_and_follows_it(
    kubectl: Callable[..., Callable[[], list[Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    states = [NONE, job(), job("Initializing"), *[RUNNING] * 5, DONE]
    calls = kubectl(
        {"get rayjob": states, "create": [{"out": "rayjob created\n"}], "logs": [{"out": "examples 1 s\n"}]}
    )
    assert command_line.main(["cluster", "submit", *WORDS]) == 0
    output = capfd.readouterr().out
    for line in (
        "rayjob created",
        "nq-mistral: New",
        "nq-mistral: Initializing",
        "Running, job RUNNING",
        "examples 1 s",
    ):
        assert line in output
    assert output.splitlines()[-1] == "nq-mistral succeeded"
    assert output.count("Running, job RUNNING") == 1
    applied, created = (
        [each["kind"] for each in yaml.safe_load_all(text)]
        for words, text in calls()
        if words[0] in ("apply", "create")
    )
    assert "NetworkPolicy" in applied
    assert created == ["RayJob"]
    first_get, first_log = (next(words for words, _ in calls() if words[0] == verb) for verb in ("get", "logs"))
    assert first_get[1:5] == ["rayjob", "nq-mistral", "--namespace", "pos2distill"]
    assert first_log == ["logs", "job/nq-mistral", "--namespace", "pos2distill", "--follow"]


def test_submit_only_follows_a_running_job(
    kubectl: Callable[..., Callable[[], list[Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    calls = kubectl({"get rayjob": [RUNNING, RUNNING, DONE]})
    assert command_line.main(["cluster", "submit", *WORDS]) == 0
    assert capfd.readouterr().out.startswith("nq-mistral is already running; following it\n")
    assert {"apply", "create", "delete"}.isdisjoint(verbs(calls()))


def test_submit_reports_a_running_job_with_another_spec(
    kubectl: Callable[..., Callable[[], list[Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    calls = kubectl({"get rayjob": [NONE, DONE]})
    assert command_line.main(["cluster", "submit", *WORDS]) == 0
    created = next(text for words, text in calls() if words[0] == "create")
    metadata = yaml.safe_load(created)["metadata"]
    running = {"out": json.dumps({**json.loads(RUNNING["out"]), "metadata": metadata})}
    capfd.readouterr()
    for settings, message in (
        ([], "is already running; following it"),
        (["spec.image=repo/p:0.2.0"], "is already running, with a different image or spec; following it"),
    ):
        kubectl({"get rayjob": [running, DONE]})
        assert command_line.main(["cluster", "submit", *WORDS, *settings]) == 0
        assert capfd.readouterr().out.startswith(f"nq-mistral {message}\n")


@pytest.mark.parametrize(
    "ended", [DONE, job("Failed", jobStatus="FAILED"), job("Complete", jobStatus="STOPPED"), job("ValidationFailed")]
)
def test_submit_replaces_a_job_that_has_ended(
    kubectl: Callable[..., Callable[[], list[Any]]], capfd: pytest.CaptureFixture[str], ended: Reply
) -> None:
    calls = kubectl({"get rayjob": [ended, job(), DONE]})
    assert command_line.main(["cluster", "submit", *WORDS]) == 0
    assert "submitting it again to resume from its storage" in capfd.readouterr().out
    assert verbs(calls()) == ["delete", "apply", "create", "logs"]
    deleted = next(words for words, _ in calls() if words[0] == "delete")
    assert deleted[:3] == ["delete", "rayjob", "nq-mistral"]
    assert deleted[-3:] == ["--wait=true", "--timeout=180s", "--request-timeout=200s"]


def with_metadata(reply: Reply, **metadata: Any) -> Reply:
    found = json.loads(reply["out"])
    return {"out": json.dumps(found | {"metadata": found["metadata"] | metadata})}


def test_submit_says_that_another_command_deletes_the_log(
    kubectl: Callable[..., Callable[[], list[Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    kubectl({"get rayjob": [job("Failed", entrypoint="other", jobStatus="FAILED"), job(), DONE]})
    assert command_line.main(["cluster", "submit", *WORDS]) == 0
    assert (
        "nq-mistral has ended (Failed); submitting another command, and deleting the log of that job"
        in capfd.readouterr().out
    )


def test_submit_waits_for_a_job_that_is_being_deleted(
    kubectl: Callable[..., Callable[[], list[Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    """Followed, it would end at once."""
    leaving = with_metadata(RUNNING, deletionTimestamp="2026-05-04T10:00:00Z")
    calls = kubectl({"get rayjob": [leaving, NONE, job(), DONE]})
    assert command_line.main(["cluster", "submit", *WORDS]) == 0
    output = capfd.readouterr().out
    assert output.startswith("nq-mistral is being deleted; waiting for the end of its deletion\n")
    assert "already running" not in output
    assert verbs(calls())[:3] == ["delete", "apply", "create"]


def test_submit_follows_no_later_job_of_the_same_name(
    kubectl: Callable[..., Callable[[], list[Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    """Its exit code would be taken for that of the first one."""
    first, later = with_metadata(RUNNING, uid="1"), with_metadata(DONE, uid="2")
    kubectl({"get rayjob": [first, first, later]})
    assert command_line.main(["cluster", "submit", *WORDS]) == 3
    line = "nq-mistral was deleted, and another job has its name; `cluster status` shows that one"
    assert capfd.readouterr().out.splitlines()[-1] == line


def test_every_call_names_the_context_that_was_current_at_first(
    kubectl: Callable[..., Callable[[], list[Any]]],
) -> None:
    """Another shell may choose another one while a job is followed."""
    contexts = [{"out": "production\n"}, {"out": "staging\n"}]
    calls = kubectl({"config": contexts, "--context": [{"out": '{"items": []}'}]})
    assert command_line.main(["cluster", "status", "gke"]) == 0
    assert {tuple(words[:2]) for words, _ in calls()} == {("--context", "production")}


def test_the_log_is_that_of_the_newest_pod_of_the_submitter(
    kubectl: Callable[..., Callable[[], list[Any]]],
) -> None:
    """Of several pods that have ended, kubectl takes the oldest, which does not say how the job ended."""
    stopped = job("Complete", jobStatus="STOPPED")
    pods = [
        {"metadata": {"name": f"nq-mistral-{name}", "creationTimestamp": time}, "status": {"phase": phase}}
        for name, time, phase in (
            ("new", "2026-05-04T10:02:00Z", "Succeeded"),
            ("lost", "2026-05-04T10:01:00Z", "Failed"),
            ("next", "2026-05-04T10:03:00Z", "Pending"),
        )
    ]
    calls = kubectl(
        {
            "get rayjob": [RUNNING, stopped],
            "get pods": [{"out": json.dumps({"items": pods})}],
            "logs": [{"out": f"{GATE_FAILED}\n"}],
        }
    )
    assert command_line.main(["cluster", "submit", *WORDS]) == 1
    assert {words[1] for words, _ in calls() if words[0] == "logs"} == {"pod/nq-mistral-new"}
    listed = next(words for words, _ in calls() if words[:2] == ["get", "pods"])
    assert listed[4:6] == ["--selector", "job-name=nq-mistral"]


def test_kubectl_that_never_ends_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A plugin for the login may ask for a password, which nobody sees."""
    (tmp_path / "kubectl").write_text("#!/bin/sh\ncat > input\nexec sleep 60\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(kubectl_calls, "_EXTRA_SECONDS", -29)
    kubectl_calls._context_options.cache_clear()  # not cached where it fails
    assert command_line.main(["cluster", "status", "gke"]) == 2
    assert capfd.readouterr().err == "error: kubectl: no end after 1 s; does its login wait for an answer?\n"
    assert (tmp_path / "input").read_text() == ""


@pytest.mark.parametrize(
    ("labels", "missing"),
    [
        (None, "part-of=pos2distill"),
        ({}, "part-of=pos2distill"),
        ({**LABELS, "app.kubernetes.io/instance": "other"}, "instance=nq-mistral"),
    ],
)
def test_submit_keeps_objects_of_another_owner(
    kubectl: Callable[..., Callable[[], list[Any]]],
    capfd: pytest.CaptureFixture[str],
    labels: dict[str, str] | None,
    missing: str,
) -> None:
    metadata = {"name": "nq-mistral", "labels": labels}
    ended = {**json.loads(DONE["out"]), "metadata": metadata}
    account = {"kind": "ServiceAccount", "metadata": metadata}
    policy = {"kind": "NetworkPolicy", "metadata": {"name": "nq-mistral", "labels": LABELS}}
    for answers, kind in (
        ({"get rayjob": [{"out": json.dumps(ended)}]}, "RayJob"),
        ({"get --filename": [{"out": json.dumps({"kind": "List", "items": [policy, account]})}]}, "ServiceAccount"),
        ({"get --filename": [{"out": json.dumps(account)}]}, "ServiceAccount"),
    ):
        calls = kubectl(answers)
        assert command_line.main(["cluster", "submit", *WORDS]) == 2
        assert capfd.readouterr().err == (
            f"error: {kind}/nq-mistral: exists in namespace pos2distill without the label app.kubernetes.io/{missing}, "
            f"so it may have another owner; set another spec.name, or delete it with kubectl\n"
        )
        assert verbs(calls()) == []


def test_submit_replaces_its_own_objects(kubectl: Callable[..., Callable[[], list[Any]]]) -> None:
    policy = {"kind": "NetworkPolicy", "metadata": {"name": "nq-mistral", "labels": LABELS}}
    existing = {"out": json.dumps({"kind": "List", "items": [policy]})}
    calls = kubectl({"get rayjob": [NONE, DONE], "get --filename": [existing]})
    assert command_line.main(["cluster", "submit", *WORDS]) == 0
    (asked,) = (text for words, text in calls() if words[:2] == ["get", "--filename"])
    assert asked == next(text for words, text in calls() if words[0] == "apply")


def test_delete_asks_for_pod_monitors_only_if_the_spec_has_one(
    kubectl: Callable[..., Callable[[], list[Any]]],
) -> None:
    """A cluster without a Prometheus operator does not know the kind."""
    calls = kubectl({"delete": [{"out": "rayjob deleted\n"}]})
    monitored = ["spec.network.metrics_namespace=monitoring", "spec.network.pod_monitor={release: prometheus}"]
    assert command_line.main(["cluster", "delete", "gke"]) == 0
    assert command_line.main(["cluster", "delete", "gke", *monitored]) == 0
    assert [words[1].endswith(",podmonitor") for words, _ in calls()] == [False, True]


def test_delete_selects_every_kind_that_is_rendered(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text((RECIPES / "nq_mistral_7b.yaml").read_text())
    spec = load_cluster("gke", ["network.metrics_namespace=monitoring", "network.pod_monitor={release: prometheus}"])
    kinds = {"raycluster"}
    for manifest in render(spec, load_job(str(mine), WORDS[2:])):
        kinds.add(manifest["kind"].lower())
        assert LABELS.items() <= manifest["metadata"]["labels"].items()
    assert kinds == {*rayjob._RENDERED_KINDS, "podmonitor"}


EXISTS = {
    "rc": 1,
    "err": 'Error from server (AlreadyExists): error when creating "STDIN": rayjobs.ray.io "nq-mistral" already '
    "exists\n",
}


def test_submit_of_two_at_once_creates_one_job(
    kubectl: Callable[..., Callable[[], list[Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    """Another command creates the job between the question whether there is one, and the answer."""
    calls = kubectl({"get rayjob": [NONE, RUNNING, DONE], "create": [EXISTS]})
    assert command_line.main(["cluster", "submit", *WORDS]) == 0
    assert "nq-mistral is already running; following it\n" in capfd.readouterr().out
    assert verbs(calls()) == ["apply", "create", "logs"]


def test_submit_deletes_the_job_that_has_ended_and_no_later_one(
    kubectl: Callable[..., Callable[[], list[Any]]],
) -> None:
    """The label is another one for every job."""
    submissions = []
    for _ in range(2):
        calls = kubectl({"get rayjob": [NONE, DONE]})
        assert command_line.main(["cluster", "submit", *WORDS]) == 0
        metadata = yaml.safe_load([text for words, text in calls() if words[0] == "create"][-1])["metadata"]
        submissions.append(metadata["labels"]["pos2distill/submission"])
    assert submissions[0] != submissions[1]
    ended = {"out": json.dumps({**json.loads(DONE["out"]), "metadata": metadata})}
    calls = kubectl({"get rayjob": [ended, DONE]})
    assert command_line.main(["cluster", "submit", *WORDS]) == 0
    deleted = [words for words, _ in calls() if words[0] == "delete"]
    assert [words[:3] for words in deleted] == [
        ["delete", "rayjob", f"--selector=pos2distill/submission={submissions[1]}"]
    ]


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        (
            job("Failed", jobStatus="FAILED", reason="AppFailed", message="Job entrypoint command failed\nwith exit 1"),
            1,
            "nq-mistral failed: AppFailed: Job entrypoint command failed with exit 1",
        ),
        (
            job("Failed", jobStatus="RUNNING", reason="DeadlineExceeded"),
            3,
            "nq-mistral was stopped at its deadline (job.deadline_s: 604800); run the same command to resume",
        ),
        (job("Complete", jobStatus="STOPPED"), 3, "nq-mistral was stopped; run the same command to resume"),
        (NONE, 3, "nq-mistral was deleted; run the same command to resume"),
    ],
)
def test_submit_exit_code_of_every_end(
    kubectl: Callable[..., Callable[[], list[Any]]],
    capfd: pytest.CaptureFixture[str],
    end: Reply,
    code: int,
    message: str,
) -> None:
    kubectl({"get rayjob": [NONE, RUNNING, end]})
    assert command_line.main(["cluster", "submit", *WORDS]) == code
    assert message in capfd.readouterr().out.splitlines()[-1]


def test_submit_reports_a_job_that_stopped_itself_as_a_user_error(
    kubectl: Callable[..., Callable[[], list[Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    log = f"error: data.path: gs://bucket/nq.jsonl.gz: not found\n{NOT_RETRIED}\n"
    kubectl({"get rayjob": [NONE, RUNNING, job("Complete", jobStatus="STOPPED")], "logs": [{"out": log}]})
    assert command_line.main(["cluster", "submit", *WORDS]) == 2
    assert capfd.readouterr().out.splitlines()[-1].startswith("nq-mistral has ended with a user error")


def test_submit_runs_another_command_with_its_gate(
    kubectl: Callable[..., Callable[[], list[Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    calls = kubectl({"get rayjob": [NONE, DONE]})
    gate = ["--fail-if-gap-above", "5", "--fail-if-drop-above=2", "--baseline", "gs://bucket/base"]
    assert command_line.main(["cluster", "submit", "gke", "evaluate", *WORDS[1:], *gate, "--json"]) == 0
    created = yaml.safe_load(next(text for words, text in calls() if words[0] == "create"))
    flags = "--fail-if-gap-above=5 --fail-if-drop-above=2 --baseline=gs://bucket/base"
    assert created["spec"]["entrypoint"] == f"{ENTRYPOINT.replace(' study ', ' evaluate ')} {flags}"
    assert json.loads(capfd.readouterr().out)["storage"] == STORAGE


def test_submit_and_status_report_a_gate_that_failed(
    kubectl: Callable[..., Callable[[], list[Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    """Such a job has stopped itself too, since KubeRay would try it again on a new cluster."""
    stopped, log = job("Complete", jobStatus="STOPPED"), {"out": f"gate: the GAP is 9\n{GATE_FAILED}\n"}
    kubectl({"get rayjob": [NONE, RUNNING, stopped], "logs": [log], "get pods": [{"out": NO_PODS}]})
    words = ["gke", "evaluate", *WORDS[1:], "--fail-if-gap-above=5"]
    assert command_line.main(["cluster", "submit", *words]) == 1
    assert capfd.readouterr().out.splitlines()[-1] == (
        "nq-mistral has ended, and its gate failed, as the end of its log says"
    )
    assert command_line.main(["cluster", "status", "gke", "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert (shown["status"], shown["exit_code"]) == ("failed", 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["submit", "gke", "evalute", *WORDS[1:]], "cluster submit: evalute: no such command; did you mean 'evaluate'"),
        (["render", "gke", "quickstart", "spec=3"], "spec=3: expected spec.section.field=value"),
        (["status", "gke", "spec={}"], "spec={}: expected spec.section.field=value"),
        (["render", "gke", "evalute", "quickstart"], "cluster render: evalute: no such command; did you mean 'evalu"),
        (
            ["render", "gke", "evaluate"],
            "cluster render: expected [COMMAND] RECIPE [section.field=value ...]; the recipe is missing",
        ),
        (
            ["validate", "gke", "evaluate", "spec.sampling.max=3"],
            "cluster validate: expected [COMMAND] RECIPE [section.field=value ...]; the recipe is missing",
        ),
        (
            ["submit", *WORDS, "--fail-if-gap-above=5"],
            "--fail-if-gap-above: is an option of evaluate, not of study",
        ),
        (["render", "gke", "--fail-if-mean-below=5"], "--fail-if-mean-below: is an option of evaluate, not of study"),
        (
            ["status", "gke", "--fail-if-gap-above=5"],
            "--fail-if-gap-above: is an option of cluster render, validate, submit, not of status",
        ),
        (
            ["render", "gke", "evaluate", *WORDS[1:], "--fail-if-drop-above=5"],
            "--fail-if-drop-above and --baseline: expected both or none",
        ),
        (
            ["render", "gke", "evaluate", *WORDS[1:], "--fail-if-drop-above=5", "--baseline=runs/base"],
            "nq_mistral_7b: --baseline: runs/base does not exist in the pods; set a URL",
        ),
        (
            ["render", "gke", "evaluate", *WORDS[1:], "--fail-if-drop-above=5", f"--baseline=s3://k:{SECRET}@b/x"],
            "command line: an option contains what looks like a secret; use pods.secrets instead",
        ),
    ],
)
def test_run_cluster_rejects_a_wrong_command_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["cluster", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {message}")
    assert printed.err.count("\n") == 1
    assert SECRET not in printed.err


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        (["runtime.trainers.workers=2"], "error: nq_mistral_7b: runtime.trainers.workers: 2 workers need"),
        (["runtime.trainers.workers=400"], "error: nq_mistral_7b: runtime.trainers.workers: 400, but only 8 fit"),
        ([], "warning: gke: runtime.trainers.workers: 4 workers need about"),
        (
            ["runtime.trainers.workers=8", "spec.training.grace_s=60"],
            "warning: gke: training.grace_s: 60 leaves 45 s to write a checkpoint",
        ),
    ],
)
def test_run_cluster_checks_trainers_only_of_a_command_that_trains(
    settings: list[str], refused: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS[1:3], *settings]
    for command in ("study", "distill"):
        command_line.main(["cluster", "render", "gke", command, *words])
        assert capsys.readouterr().err.startswith(refused)
    assert command_line.main(["cluster", "render", "gke", "evaluate", *words]) == 0
    assert capsys.readouterr().err == ""


def test_submit_takes_a_recipe_of_the_user_to_the_cluster(
    kubectl: Callable[..., Callable[[], list[Any]]],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(RECIPES.parents[1])
    mine = tmp_path / "mine.yaml"
    mine.write_text((RECIPES / "quickstart.yaml").read_text())
    calls = kubectl({"get rayjob": [NONE, DONE]})
    assert command_line.main(["cluster", "submit", "kind", str(mine)]) == 0
    applied = list(yaml.safe_load_all(next(text for words, text in calls() if words[0] == "apply")))
    created = yaml.safe_load(next(text for words, text in calls() if words[0] == "create"))
    (recipe_map,) = (each for each in applied if each["kind"] == "ConfigMap")
    ((name, text),) = recipe_map["data"].items()
    assert text == mine.read_text()
    entrypoint = created["spec"]["entrypoint"]
    assert f" study /etc/pos2distill/{name} " in entrypoint
    # While this job runs, a changed recipe is another command.
    mine.write_text(f"{text}# changed\n")
    kubectl({"get rayjob": [job("Running", entrypoint)]})
    assert command_line.main(["cluster", "submit", "kind", str(mine)]) == 2
    assert f"error: try: runs another command ({entrypoint})" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("settings", "stop_wait_s"),
    [
        ([], int(RAY_VARIABLES["RAY_JOB_STOP_WAIT_TIME_S"])),
        (["spec.pods.env.RAY_JOB_STOP_WAIT_TIME_S='3600'"], 3600),
        (["spec.pods.env.RAY_JOB_STOP_WAIT_TIME_S='soon'"], 0),
    ],
)
def test_submit_sets_one_deadline_for_all_attempts(
    kubectl: Callable[..., Callable[[], list[Any]]],
    monkeypatch: pytest.MonkeyPatch,
    settings: list[str],
    stop_wait_s: int,
) -> None:
    """KubeRay's own is later: otherwise, it would end the job as failed while that saves a checkpoint."""
    monkeypatch.setattr("cluster.rayjob.time.time", lambda: 1_000_000.0)
    calls = kubectl({"get rayjob": [NONE, DONE]})
    assert command_line.main(["cluster", "submit", *WORDS, "spec.job.deadline_s=5000", *settings]) == 0
    created = yaml.safe_load(next(text for words, text in calls() if words[0] == "create"))
    (container,) = created["spec"]["submitterPodTemplate"]["spec"]["containers"]
    assert {"name": "POS2DISTILL_JOB_DEADLINE", "value": "1005000"} in container["env"]
    assert created["spec"]["activeDeadlineSeconds"] == 5000 + stop_wait_s + 120


def test_submit_sets_a_deadline_that_kubernetes_accepts(kubectl: Callable[..., Callable[[], list[Any]]]) -> None:
    calls = kubectl({"get rayjob": [NONE, DONE]})
    assert command_line.main(["cluster", "submit", *WORDS, f"spec.job.deadline_s={2**31 - 1}"]) == 0
    created = yaml.safe_load(next(text for words, text in calls() if words[0] == "create"))
    assert created["spec"]["activeDeadlineSeconds"] == 2**31 - 1


def test_submit_sets_no_deadline_of_its_own_in_a_queue(kubectl: Callable[..., Callable[[], list[Any]]]) -> None:
    """A job may wait in the queue for longer than it may run."""
    calls = kubectl({"get rayjob": [NONE, DONE]})
    queued = ["spec.job.queue=research", "spec.job.elastic=true", "spec.job.deadline_s=5000"]
    assert command_line.main(["cluster", "submit", *WORDS, *queued]) == 0
    created = next(text for words, text in calls() if words[0] == "create")
    assert yaml.safe_load(created)["spec"]["activeDeadlineSeconds"] == 5000
    assert "POS2DISTILL_JOB_DEADLINE" not in created


def test_submit_names_the_deadline_that_has_passed(
    kubectl: Callable[..., Callable[[], list[Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    stopped = job("Complete", jobStatus="STOPPED")
    kubectl({"get rayjob": [NONE, RUNNING, stopped], "logs": [{"out": f"job-1: {DEADLINE_PASSED}\n"}]})
    assert command_line.main(["cluster", "submit", *WORDS, "spec.job.deadline_s=5000"]) == 3
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith("nq-mistral was stopped at its deadline (job.deadline_s: 5000); run the same command")


def test_delete_takes_a_spec_whose_disks_would_be_too_small_without_its_recipe(
    kubectl: Callable[..., Callable[[], list[Any]]],
) -> None:
    """With the model and the data on a volume, the same spec can be submitted."""
    spec = ["onprem", "spec.model_billions=28"]
    with pytest.raises(UserError, match=r"training\.node\.disk"):
        render(load_cluster("onprem", ["model_billions=28"]))
    calls = kubectl({"delete": [{"out": "rayjob deleted\n"}]})
    assert command_line.main(["cluster", "delete", *spec]) == 0
    assert [words[0] for words, _ in calls()] == ["delete"]


def test_submit_prints_the_logs_of_retries(
    kubectl: Callable[..., Callable[[], list[Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    again = job("Running", jobStatus="RUNNING", failed=1)
    calls = kubectl(
        {
            "get rayjob": [NONE, *[RUNNING] * 8, job("Retrying"), *[again] * 8, DONE],
            "logs": [{"out": "first try\n", "rc": 1}, {"out": "first continues\n"}, {"out": "second try\n"}],
        }
    )
    assert command_line.main(["cluster", "submit", *WORDS]) == 0
    output = capfd.readouterr().out
    for line in ("Retrying", "1 attempts failed", "first try", "first continues", "second try"):
        assert output.count(line) == 1
    followed = [words for words, _ in calls() if words[0] == "logs"]
    # From the beginning; from the loss of the connection; the next attempt from its beginning.
    assert ["--since=" in words[-1] for words in followed] == [False, True, False]


@pytest.mark.parametrize(
    ("end", "logs"),
    [
        (job("Complete", jobStatus="SUCCEEDED", failed=1), 2),  # the second attempt
        (job("Failed", jobStatus="FAILED", failed=2), 2),
        (job("Failed", jobStatus="FAILED", failed=1), 1),  # the first attempt, which has been followed
    ],
)
def test_submit_prints_the_log_of_an_attempt_that_no_poll_saw(
    kubectl: Callable[..., Callable[[], list[Any]]], capfd: pytest.CaptureFixture[str], end: Reply, logs: int
) -> None:
    replies = {
        "get rayjob": [NONE, *[RUNNING] * 8, end],
        "logs": [{"out": "first try\n"}, {"out": "second try\n"}],
    }
    calls = kubectl(replies)
    command_line.main(["cluster", "submit", *WORDS])
    assert [words[0] for words, _ in calls()].count("logs") == logs
    assert ("second try" in capfd.readouterr().out) == (logs == 2)


def test_submit_reads_the_end_of_a_log_that_is_not_utf_8(
    kubectl: Callable[..., Callable[[], list[Any]]], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A job may print any bytes."""
    kubectl({"get rayjob": [job("Complete", jobStatus="STOPPED")], "get pods": [{"out": NO_PODS}]})
    plain = (tmp_path / "kubectl").read_text()
    first = (
        f"import sys\nif sys.argv[1] == 'logs':\n    sys.stdout.buffer.write(b'\\xff {NOT_RETRIED}')\n    sys.exit(0)\n"
    )
    (tmp_path / "kubectl").write_text(plain.replace("import fcntl", f"{first}import fcntl", 1))
    assert command_line.main(["cluster", "status", "gke", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["exit_code"] == 2


SILENT = {"rc": 1, "err": "Unable to connect to the server: dial tcp 10.0.0.1:443: i/o timeout\n"}


def test_submit_reopens_a_log_that_ends_while_the_job_runs(
    kubectl: Callable[..., Callable[[], list[Any]]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_log, "_END_SECONDS", 0.2)
    calls = kubectl({"get rayjob": [NONE, *[RUNNING] * 20, DONE], "logs": [{"out": "so far\n"}, {"out": "and on\n"}]})
    assert command_line.main(["cluster", "submit", *WORDS]) == 0
    assert "and on" in capfd.readouterr().out
    followed = [words for words, _ in calls() if words[0] == "logs"]
    assert ["--since=" in words[-1] for words in followed[:2]] == [False, True]


EXPIRED = {"rc": 1, "err": "error: You must be logged in to the server (Unauthorized)\n"}


def test_submit_waits_during_an_outage(kubectl: Callable[..., Callable[[], list[Any]]]) -> None:
    kubectl({"get rayjob": [NONE, RUNNING, SILENT, EXPIRED, RUNNING, DONE]})
    assert command_line.main(["cluster", "submit", *WORDS]) == 0


def test_submit_prints_the_end_of_a_log_whose_connection_an_outage_broke(
    kubectl: Callable[..., Callable[[], list[Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    """The job ends meanwhile; the last lines say why."""
    replies = [NONE, RUNNING, *[SILENT] * 10, DONE]
    calls = kubectl({"get rayjob": replies, "logs": [{"out": "so far\n", "rc": 1}, {"out": "the end\n"}]})
    assert command_line.main(["cluster", "submit", *WORDS]) == 0
    output = capfd.readouterr().out
    assert output.index("so far") < output.index("the end") < output.index("nq-mistral succeeded")
    followed = [words for words, _ in calls() if words[0] == "logs"]
    assert ["--since=" in words[-1] for words in followed] == [False, True]


def test_submit_ends_after_a_long_outage(
    kubectl: Callable[..., Callable[[], list[Any]]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rayjob, "OUTAGE_SECONDS", 0.2)
    kubectl({"get rayjob": [NONE, RUNNING, SILENT]})
    assert command_line.main(["cluster", "submit", *WORDS]) == 2
    assert "i/o timeout; the job may still run; run the same command to follow it" in capfd.readouterr().err


def test_submit_ends_at_once_if_the_cluster_rejects(
    kubectl: Callable[..., Callable[[], list[Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    refused = 'Error from server (Forbidden): rayjobs.ray.io "nq-mistral" is forbidden\n'
    kubectl({"get rayjob": [NONE, RUNNING, {"rc": 1, "err": refused}]})
    assert command_line.main(["cluster", "submit", *WORDS]) == 2
    assert "is forbidden; the job may still run; run the same command to follow it" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("action", "answers", "message"),
    [
        (
            "submit",
            {
                "get rayjob": [
                    {"rc": 1, "err": "The connection to the server localhost:8080 was refused - did you ...\n"}
                ]
            },
            "kubectl: no cluster is configured; choose one with `kubectl config use-context NAME`, or set KUBECONFIG",
        ),
        (
            "submit",
            {"apply": [{"rc": 1, "err": 'Error from server (NotFound): namespaces "pos2distill" not found\n'}]},
            'kubectl apply: Error from server (NotFound): namespaces "pos2distill" not found',
        ),
        (
            "submit",
            {"get rayjob": [{"rc": 1, "err": 'error: the server doesn\'t have a resource type "rayjob"\n'}]},
            'kubectl get: the server doesn\'t have a resource type "rayjob"',
        ),
        ("submit", {"get rayjob": [SILENT]}, "kubectl get: Unable to connect to the server: dial tcp"),
        (
            "submit",
            {"get rayjob": [job("Running", entrypoint="python run.py study other")]},
            "nq-mistral: runs another command (python run.py study other); wait until it ends, delete it, or set",
        ),
        (
            "submit",
            {"get rayjob": [NONE, job("ValidationFailed", message="name too\nlong")]},
            "nq-mistral: KubeRay rejected it: name too long",
        ),
        ("status", {}, "nq-mistral: no RayJob or RayCluster of this name in namespace pos2distill"),
        (
            "delete",
            {"delete": [{"rc": 1, "err": "error: timed out waiting for the condition on rayjobs/nq-mistral\n"}]},
            "kubectl delete: timed out waiting for the condition on rayjobs/nq-mistral; something keeps the object",
        ),
        ("logs", {}, "nq-mistral: no RayJob of this name in namespace pos2distill"),
        ("delete", {"delete": [{"rc": 1, "err": "\n"}]}, "kubectl delete: exit code 1"),
    ],
)
def test_run_cluster_user_error_is_one_line(
    kubectl: Callable[..., Callable[[], list[Any]]],
    capfd: pytest.CaptureFixture[str],
    action: str,
    answers: dict[str, list[Reply]],
    message: str,
) -> None:
    kubectl(answers)
    words = WORDS if action == "submit" else WORDS[:1]
    assert command_line.main(["cluster", action, *words]) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


def test_kubectl_not_installed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command_line.main(["cluster", "status", "gke"]) == 2
    assert capsys.readouterr().err.startswith("error: kubectl: not found; install it (https://kubernetes.io/")


def test_submit_requires_a_recipe_and_valid_manifests(
    kubectl: Callable[..., Callable[[], list[Any]]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kubectl({})
    assert command_line.main(["cluster", "submit", "gke"]) == 2
    assert "submit: expected a recipe; for a cluster without a job" in capsys.readouterr().err
    assert command_line.main(["cluster", "submit", *WORDS, "spec.training.node.gpus=16"]) == 2
    assert "16 GPUs, but a2-highgpu-8g has 8" in capsys.readouterr().err
    assert not (tmp_path / "calls.jsonl").exists()


@pytest.mark.parametrize("action", ["status", "logs", "delete"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["name=my-own-run", "nonsense"],
            "takes only a spec and its settings; to change the spec, write spec.name=my",
        ),
        (["spec.name=my-own-run", "nonsense"], "takes only a spec and its settings\n"),
        (["nq_mistral_7b"], "takes only a spec and its settings\n"),
    ],
)
def test_status_logs_and_delete_reject_words_that_they_would_ignore(
    kubectl: Callable[..., Callable[[], list[Any]]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    action: str,
    words: list[str],
    message: str,
) -> None:
    """The name of what is deleted is the spec's; a misspelled one would delete the job of another name."""
    kubectl({})
    wrong = next(word for word in words if not word.startswith("spec."))
    assert command_line.main(["cluster", action, "gke", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {wrong}: cluster {action} {message}")
    assert not (tmp_path / "calls.jsonl").exists()


def test_status_logs_and_delete_print_what_kubectl_reports(
    kubectl: Callable[..., Callable[[], list[Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    pods = [
        {"metadata": {"name": "pod", "labels": {"ray.io/group": group}}, "status": {"phase": phase}}
        for group, phase in (("sampling", "Running"), ("sampling", "Running"), ("training", "Pending"))
    ]
    calls = kubectl(
        {
            "get rayjob": [RUNNING],
            "get pods": [{"out": json.dumps({"items": pods})}],
            "logs": [{"out": "so far\n"}],
            "delete": [{"out": "rayjob deleted\n"}, {"out": "No resources found\n"}],
        }
    )
    assert command_line.main(["cluster", "status", "gke"]) == 0
    output = capfd.readouterr().out
    assert output.splitlines() == [
        "nq-mistral: Running, job RUNNING",
        "  rayClusterName: nq-mistral-x",
        "  pods of sampling: 2 Running",
        "  pods of training: 1 Pending",
    ]
    assert command_line.main(["cluster", "logs", "gke"]) == 0
    assert command_line.main(["cluster", "delete", "gke"]) == 0
    assert command_line.main(["cluster", "delete", "gke"]) == 0
    assert capfd.readouterr().out == "so far\nrayjob deleted\nnq-mistral: not found\n"
    deleted = next(words for words, _ in calls() if words[0] == "delete")
    assert deleted[1:5] == [
        "rayjob,raycluster,configmap,serviceaccount,networkpolicy,poddisruptionbudget",
        "--selector=app.kubernetes.io/part-of=pos2distill,app.kubernetes.io/instance=nq-mistral,"
        "!ray.io/originated-from-crd",
        "--namespace",
        "pos2distill",
    ]
    assert {"--ignore-not-found", "--wait=true", "--timeout=180s", "--request-timeout=200s"} <= set(deleted)
    (read,) = (words for words, _ in calls() if words[0] == "logs")
    assert read == ["logs", "pod/pod", "--namespace", "pos2distill", "--request-timeout=0"]


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_submit_interrupted_leaves_the_job_running(
    kubectl: Callable[..., Callable[[], list[Any]]], number: signal.Signals, exit_code: int
) -> None:
    """And ends the process that follows the log, which otherwise would keep the output open."""
    calls = kubectl({"get rayjob": [NONE, RUNNING]})
    process = subprocess.Popen(
        [sys.executable, "run.py", "cluster", "submit", *WORDS], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    for line in process.stdout:
        if "Running" in line:
            break
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == exit_code
    assert "detached; nq-mistral continues. Run the same command to follow it again; `run.py cluster delete`" in output
    assert "stops it, and may lose the steps since its last checkpoint (to save one first: docs/cluster.md" in output
    assert "delete" not in verbs(calls())


@pytest.mark.parametrize(
    ("end", "status", "exit_code"),
    [
        (DONE, "succeeded", 0),
        (job("Failed", jobStatus="FAILED"), "failed", 1),
        (job("Complete", jobStatus="STOPPED"), "stopped", 3),
        (NONE, "stopped", 3),
    ],
)
def test_submit_prints_json_alone(
    kubectl: Callable[..., Callable[[], list[Any]]],
    capfd: pytest.CaptureFixture[str],
    end: Reply,
    status: str,
    exit_code: int,
) -> None:
    """The log is printed by another process."""
    answers = {"get rayjob": [NONE, *[RUNNING] * 8, end], "logs": [{"out": "examples 1 s\n"}]}
    kubectl(answers)
    assert command_line.main(["cluster", "submit", *WORDS, "--json"]) == exit_code
    printed = capfd.readouterr()
    assert json.loads(printed.out) == {**IDENTITY, "status": status, "exit_code": exit_code}
    assert "examples 1 s" in printed.err
    assert "Running, job RUNNING" in printed.err
    kubectl(answers)
    assert command_line.main(["cluster", "submit", *WORDS, "--quiet"]) == exit_code
    assert capfd.readouterr() == ("", "")


def test_submit_warns_where_the_end_of_the_log_cannot_be_read(
    kubectl: Callable[..., Callable[[], list[Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    """Without it, a user error looks like a job that somebody stopped."""
    forbidden = {
        "rc": 1,
        "err": 'Error from server (Forbidden): pods "x" is forbidden: cannot get resource "pods/log"\n',
    }
    kubectl({"get rayjob": [NONE, RUNNING, job("Complete", jobStatus="STOPPED")], "logs": [forbidden]})
    assert command_line.main(["cluster", "submit", *WORDS]) == 3
    warning = (
        "warning: nq-mistral: why it stopped is not known, since the end of its log cannot be read: kubectl logs: "
    )
    assert warning in capfd.readouterr().err


def test_submit_prints_json_of_a_detached_job(
    kubectl: Callable[..., Callable[[], list[Any]]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(spec: object) -> None:
        raise KeyboardInterrupt

    kubectl({"get rayjob": [RUNNING]})
    monkeypatch.setattr(rayjob, "_follow", interrupt)
    assert command_line.main(["cluster", "submit", *WORDS, "--json"]) == 130
    assert json.loads(capfd.readouterr().out) == {**IDENTITY, "status": "running", "exit_code": 130}


@pytest.mark.parametrize(
    ("action", "option", "message"),
    [
        ("render", "--json", "--json: is an option of cluster submit, status, validate, not of render"),
        ("logs", "--json", "--json: is an option of cluster submit, status, validate, not of logs"),
        ("delete", "--json", "--json: is an option of cluster submit, status, validate, not of delete"),
        ("render", "--quiet", "--quiet: is an option of cluster submit, validate, delete, not of render"),
        ("status", "--quiet", "--quiet: is an option of cluster submit, validate, delete, not of status"),
        ("logs", "--quiet", "--quiet: is an option of cluster submit, validate, delete, not of logs"),
        ("submit", "--out=manifests", "--out: is an option of cluster render, not of submit"),
        ("validate", "--out=", "--out: is an option of cluster render, not of validate"),
        ("delete", "--out=manifests", "--out: is an option of cluster render, not of delete"),
        ("status", "--crds=crds", "--crds: is an option of cluster render, validate, submit, not of status"),
        ("logs", "--server", "--server: is an option of cluster render, validate, submit, not of logs"),
        ("delete", "--server", "--server: is an option of cluster render, validate, submit, not of delete"),
    ],
)
def test_run_cluster_rejects_an_option_that_means_nothing(
    action: str, option: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["cluster", action, "gke", option]) == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl here")
@pytest.mark.parametrize("name", PRESETS)
def test_render_is_read_by_the_real_kubectl(name: str, tmp_path: Path) -> None:
    """Without a server, kubectl can parse manifests, but not check their kinds."""
    path = RENDERED / f"{name}.yaml"
    done = subprocess.run(
        ["kubectl", "annotate", "--local", "--filename", str(path), "a=b", "--output", "json"],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    decoder, text, read = json.JSONDecoder(), done.stdout.strip(), []
    while text:
        document, end = decoder.raw_decode(text)
        read.append(document)
        text = text[end:].strip()
    for document in read:
        del document["metadata"]["annotations"]["a"]
        if not document["metadata"]["annotations"]:
            del document["metadata"]["annotations"]
    assert read == list(yaml.safe_load_all(path.read_text()))
