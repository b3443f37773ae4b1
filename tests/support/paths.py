"""Folders that tests read, and a name for those that they write."""

import os
from pathlib import Path

PROJECT = Path(__file__).parents[2]

# The pages about clusters.
CLUSTER_PAGES = [PROJECT / "docs" / f"{name}.md" for name in ("cluster", "cluster_setup", "cluster_spec")]

# Of a folder. Taken for a pattern, it matches other names and not itself.
ODD_NAME = "a[1]*b"

# Stand-ins for published files, written for these tests: the same formats, other content.
DATA = PROJECT / "tests" / "data"

# The published files themselves and the schemas of KubeRay, on machines that have them.
BENCHMARK_DATA = Path(os.environ.get("POS2DISTILL_BENCHMARK_DATA") or PROJECT.parent / "shared" / "data")
PUBLISHED_CRDS = Path(os.environ.get("POS2DISTILL_CRDS") or PROJECT.parent / "shared" / "crds")
