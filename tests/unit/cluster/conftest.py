import pytest

from tests.support.crds import write_crds
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
