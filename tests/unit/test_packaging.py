"""`pipelines` and `cluster` are packages of their own in a checkout, and parts of `pos2distill` where installed."""

import ast
from pathlib import Path

import pytest

from tests.support.paths import PROJECT

MODULES = sorted(path for name in ("pipelines", "cluster") for path in (PROJECT / name).rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_pipelines_and_cluster_import_each_other_relatively(path: Path) -> None:
    """An absolute import of `pipelines` or `cluster` fails where they are installed as parts of `pos2distill`."""
    imported = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported.append(str(node.module))
    assert MODULES
    assert not [name for name in imported if name.split(".")[0] in ("pipelines", "cluster", "run")]
