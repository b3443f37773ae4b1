"""Specs and manifests with arbitrary values anywhere: an answer in single lines, never a traceback."""

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.job_command import load_job
from cluster.render import render
from cluster.spec import PRESETS, ClusterSpec, load_cluster
from cluster.spec_warnings import spec_warnings
from cluster.validate import check, load_manifests
from pipelines.cli import command_line
from pos2distill.config.validation import dotted_names
from pos2distill.errors import UserError
from scripts.render_presets import RENDERED

# The same examples on every run, so that a failure can be repeated.
BOUNDED = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
WORDS = st.sampled_from(
    ["", "0", "-1", "1e9", "16Gi", "a b", "RayJob", "token", "é", "x" * 5000, "../..", "${A}", "a: b", "<<", "1.2.3"]
)
# Amounts of up to 6000 digits, with and without a unit, and numbers beyond the range of floats.
AMOUNTS = st.builds(
    lambda digits, fraction, unit: f"{'9' * digits}{fraction}{unit}",
    st.sampled_from([1, 3, 7, 8, 20, 400, 6000]),
    st.sampled_from(["", ".5", f".{'5' * 400}"]),
    st.sampled_from(["", "m", "Mi", "Gi", "Ti", "E", "e3", "e999"]),
)
NUMBERS = st.sampled_from([2**31, 2**63, 10**100, 10**400, -(10**400), 5e-324, 1e308])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | NUMBERS | AMOUNTS | TEXT | WORDS
KEYS = st.sampled_from(["name", "env", "spec", "labels", "template", "containers", "kind", "min", "node", ""]) | TEXT
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)
MANIFESTS = [manifest for name in ("onprem", "eks") for manifest in load_manifests(RENDERED / f"{name}.yaml") or []]
SPEC = yaml.safe_load((PRESETS / "gke.yaml").read_text())
PLAIN_JOB = load_job("nq_mistral_7b", ["data.path=gs://b/x"])
JOB = load_job("nq_mistral_7b", ["data.path=gs://b/x", "runtime.trainers.workers=8"])


def replace_somewhere(data: st.DataObject, root: Any, value: Any) -> Any:
    """A copy with another value at a path that hypothesis chooses."""
    root = copy.deepcopy(root)
    inner, path = root, 0
    while True:
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        key = data.draw(st.sampled_from(keys))
        path += 1
        is_deep = isinstance(inner[key], dict | list) and inner[key]
        if not is_deep or (path > 1 and data.draw(st.booleans())):
            inner[key] = value
            return root
        inner = inner[key]


@BOUNDED
@given(st.data(), VALUES)
def test_check_never_fails_on_a_manifest(data: st.DataObject, value: Any) -> None:
    manifest = replace_somewhere(data, data.draw(st.sampled_from(MANIFESTS)), value)
    for finding in check([manifest]):
        line = finding.line("x.yaml")
        assert "\n" not in line
        assert len(line) < 1000


@BOUNDED
@given(st.data(), VALUES | AMOUNTS | NUMBERS)
def test_render_never_fails_on_a_spec(tmp_path: Path, data: st.DataObject, value: Any) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(replace_somewhere(data, SPEC, value), allow_unicode=True))
    for job in (None, JOB):
        with contextlib.suppress(UserError):
            spec = load_cluster(str(path))
            check(render(spec, job))
            spec_warnings(spec, job)


# Values at each field of the spec, since a random path rarely meets the field that a value breaks.
@pytest.mark.parametrize("field", list(dotted_names(ClusterSpec)))
def test_render_never_fails_on_a_field_of_a_spec(field: str) -> None:
    for value in ("9" * 400, f"{'9' * 400}Gi", "9" * 6000, "1e308", "5e-324", "-1"):
        with contextlib.suppress(UserError):
            check(render(load_cluster("gke", [f"{field}={value}"]), PLAIN_JOB))


SNIPPETS = (
    *("kind: RayJob", "apiVersion: ray.io/v1", "metadata: {name: a}", "spec:", "  rayClusterSpec: &a", "  - *a", "---"),
    *("on: 1", "1: b", "? [a]", "<<: *a", "a: &a {b: *a}", "!!int x", "{", "[", "'", "\t", "# x", "a: b: c", "- a"),
)


@BOUNDED
@given(st.lists(st.sampled_from(SNIPPETS), max_size=8))
def test_run_cluster_validate_never_fails_on_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str]
) -> None:
    path = tmp_path / "any.yaml"
    path.write_text("\n".join(lines))
    assert command_line.main(["cluster", "validate", str(path)]) in (0, 2)
    for line in capsys.readouterr().err.splitlines():
        assert line.startswith((f"error: {path}: ", f"policy: {path}: ", f"warning: {path}: "))
