import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import kubectl as kubectl_calls
from cluster import rayjob
from cluster.spec import ClusterSpec, load_cluster
from tests.support.crds import write_crds
from tests.support.fake_kubectl import FAKE, Reply
from tests.support.minimal_spec import MINIMAL_SPEC
from tests.support.paths import PUBLISHED_CRDS

needs_published_crds = pytest.mark.skipif(
    not PUBLISHED_CRDS.is_dir(),
    reason=f"no CRD schemas at {PUBLISHED_CRDS}; set POS2DISTILL_CRDS to a folder with them",
)


@pytest.fixture(scope="module", params=["stand-in", pytest.param("published", marks=needs_published_crds)])
def crds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A path with schemas of RayJob and RayCluster: the stand-in, and KubeRay's own where they are present."""
    if request.param == "published":
        return str(PUBLISHED_CRDS)
    return str(write_crds(tmp_path_factory.mktemp("crds") / "crds.yaml"))


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., ClusterSpec]:
    """`load("field=value", ...)` returns the minimal spec with these overrides."""

    def load(*overrides: str) -> ClusterSpec:
        path = tmp_path / "small.yaml"
        path.write_text(yaml.safe_dump(MINIMAL_SPEC))
        return load_cluster(str(path), overrides)

    return load


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Callable[[], list[Any]]]]:
    """`kubectl({"get rayjob": [reply, ...]})` puts it on the PATH and returns a function that lists its calls."""

    def script(answers: dict[str, list[Reply]]) -> Callable[[], list[Any]]:
        (tmp_path / "kubectl").write_text(FAKE)
        (tmp_path / "kubectl").chmod(0o755)
        (tmp_path / "script.json").write_text(json.dumps(answers))
        return calls

    def calls() -> list[Any]:
        """Without the question which context is current, which each command asks first."""
        made = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
        return [call for call in made if call[0][0] != "config"]

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(rayjob, "POLL_SECONDS", 0.05)
    kubectl_calls._context_options.cache_clear()
    yield script
    kubectl_calls._context_options.cache_clear()
