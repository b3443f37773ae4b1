"""Specs and manifests with arbitrary values anywhere: an answer in single lines, never a traceback."""

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.spec import PRESETS, load_cluster
from cluster.validate import check, load_manifests
from pipelines import command_line
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
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | WORDS
KEYS = st.sampled_from(["name", "env", "spec", "labels", "template", "containers", "kind", "min", "node", ""]) | TEXT
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)
MANIFESTS = load_manifests(RENDERED / "onprem.yaml") or []
SPEC = yaml.safe_load((PRESETS / "gke.yaml").read_text())


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
@given(st.data(), VALUES)
def test_load_cluster_never_fails_on_a_spec(tmp_path: Path, data: st.DataObject, value: Any) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(replace_somewhere(data, SPEC, value), allow_unicode=True))
    with contextlib.suppress(UserError):
        load_cluster(str(path))


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
