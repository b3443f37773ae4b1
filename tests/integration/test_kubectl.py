"""The real kubectl on rendered manifests, against a server that knows their kinds only: `apply --dry-run=client`."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.discovery_server import discovery_server
from tests.support.paths import PROJECT

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")

RENDERED = sorted((PROJECT / "cluster" / "presets" / "rendered").glob("*.yaml"))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with discovery_server() as url:
        yield url


def apply(server: str, text: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    # Without validation, which kubectl leaves to the server since 1.27; another home, so that no cluster is found.
    options = ["--dry-run=client", "--validate=false", "--cache-dir", str(folder), "--filename", "-"]
    return subprocess.run(
        ["kubectl", "--server", server, "apply", *options],
        input=text,
        env={"HOME": str(folder), "PATH": "/usr/local/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def created(text: str) -> list[str]:
    """What kubectl says of manifests that it accepts."""
    lines = []
    for manifest in yaml.safe_load_all(text):
        group = manifest["apiVersion"].rpartition("/")[0]
        kind = manifest["kind"].lower() + (f".{group}" if group else "")
        lines.append(f"{kind}/{manifest['metadata']['name']} created (dry run)")
    return lines


@pytest.mark.parametrize("path", RENDERED, ids=lambda path: path.stem)
def test_kubectl_accepts_every_rendered_preset(path: Path, server: str, tmp_path: Path) -> None:
    text = path.read_text()
    done = apply(server, text, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == created(text)


def test_kubectl_accepts_the_claim_of_the_documentation(server: str, tmp_path: Path) -> None:
    page = (PROJECT / "docs" / "cluster.md").read_text()
    claims = re.findall(r"^kubectl apply .*<<'END'\n(.*?)^END$", page, re.MULTILINE | re.DOTALL)
    assert len(claims) == 1
    done = apply(server, claims[0], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == created(claims[0])


def test_kubectl_refuses_a_misspelt_kind(server: str, tmp_path: Path) -> None:
    done = apply(server, RENDERED[0].read_text().replace("kind: RayJob", "kind: RayJbo"), tmp_path)
    assert done.returncode == 1
    assert 'no matches for kind "RayJbo"' in done.stderr
