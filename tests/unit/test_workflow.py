"""The workflow runs what anyone runs: targets of the Makefile."""

import yaml

from tests.support.paths import PROJECT


def test_workflow_checks_each_change_and_runs_every_test_at_night() -> None:
    # BaseLoader, since YAML 1.1 reads the key `on` as true.
    workflow = yaml.load((PROJECT / ".github/workflows/ci.yml").read_text(), Loader=yaml.BaseLoader)
    assert workflow["on"].keys() == {"push", "pull_request", "schedule", "workflow_dispatch"}
    (job,) = workflow["jobs"].values()
    commands = {step["run"]: step["if"] for step in job["steps"] if step.get("run", "").startswith("make ")}
    assert commands.keys() == {"make check test", "make check test-all"}
    assert "pull_request" in commands["make check test"]
    assert "schedule" in commands["make check test-all"]
