"""The tiers of tests: `make test` leaves out tests marked slow and nothing else, `make test-all` leaves out nothing."""

import shlex
import subprocess

import pytest

from tests.support.paths import PROJECT


def pytest_command(target: str) -> list[str]:
    """The words of the command with which `make` runs pytest."""
    printed = subprocess.run(
        ["make", "--dry-run", target], cwd=PROJECT, capture_output=True, text=True, check=True, timeout=30
    ).stdout
    (line,) = (line for line in printed.splitlines() if " -m pytest" in line)
    return shlex.split(line)


def test_make_test_all_collects_every_test(pytestconfig: pytest.Config) -> None:
    assert pytest_command("test-all") == [".venv/bin/python", "-m", "pytest", "-n", "2", "--dist", "loadgroup"]
    assert pytestconfig.getini("testpaths") == ["tests"]
    options = " ".join(pytestconfig.getini("addopts"))
    assert not {"-k", "-m", "--ignore", "--ignore-glob", "--deselect"} & set(options.replace("=", " ").split())
    assert "make check test-all" in (PROJECT / ".ci" / "run").read_text().splitlines()


def test_make_test_deselects_slow_tests_only() -> None:
    assert pytest_command("test") == [*pytest_command("test-all"), "-m", "not slow"]


@pytest.mark.xdist_group("compute")
def test_xdist_keeps_groups_together(request: pytest.FixtureRequest) -> None:
    """With `--dist loadgroup` the group is a part of the test's id; without it, groups would run in parallel."""
    if not hasattr(request.config, "workerinput"):
        pytest.skip("this run is one process")
    assert request.node.nodeid.endswith("@compute")
