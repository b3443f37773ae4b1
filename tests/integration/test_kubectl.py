"""The real kubectl, with `--dry-run=client`: rendered manifests and the commands of the documentation.

`apply` asks a server which kinds there are; the server here knows nothing else.
"""

import base64
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster.spec import load_cluster
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


def test_kubectl_accepts_the_manifests_of_the_documentation(server: str, tmp_path: Path) -> None:
    page = (PROJECT / "docs" / "cluster_setup.md").read_text()
    manifests = re.findall(r"^kubectl apply [^\n]*<<'END'\n(.*?)^END$", page, re.MULTILINE | re.DOTALL)
    assert [yaml.safe_load(text)["kind"] for text in manifests] == [
        "PersistentVolumeClaim",
        "Pod",
        "PersistentVolumeClaim",
    ]
    for text in manifests:
        done = apply(server, text, tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == created(text)


def test_kubectl_creates_the_objects_of_the_documentation(tmp_path: Path) -> None:
    """The lines `kubectl create …`, with the files that they read; in this mode kubectl asks no server."""
    token = tmp_path / ".cache" / "huggingface" / "token"
    token.parent.mkdir(parents=True)
    token.write_text("made-up")
    (tmp_path / "registry_password").write_text("made-up")
    page = (PROJECT / "docs" / "cluster_setup.md").read_text()
    lines = re.findall(r"^kubectl create .*$", page, re.MULTILINE)
    made = []
    for line in lines:
        done = subprocess.run(
            ["bash", "-c", f"{line} --dry-run=client --output yaml"],
            cwd=tmp_path,
            env={"HOME": str(tmp_path), "PATH": "/usr/local/bin:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), line
        made.append(yaml.safe_load(done.stdout))
    secrets = [each for each in made if each["kind"] == "Secret"]
    namespaces = {each["metadata"]["name"] for each in made if each["kind"] == "Namespace"}
    kinds = Counter(each["kind"] for each in made)
    assert kinds == {"Namespace": 4, "Secret": 3, "PriorityClass": 1}
    names = {each["metadata"]["name"] for each in made}
    for preset in ("gke", "eks", "onprem"):
        spec = load_cluster(preset)
        assert spec.namespace in namespaces
        assert names >= set(spec.pods.pull_secrets) | ({spec.pods.priority_class} - {None})
        for named in spec.pods.secrets:
            found = [each for each in secrets if each["metadata"]["name"] == named.secret]
            assert found
            for each in found:
                assert each["metadata"]["namespace"] == spec.namespace
                assert base64.b64decode(each["data"][named.key]).decode() == "made-up"
    assert load_cluster("kind").namespace in namespaces


def test_kubectl_refuses_a_misspelled_kind(server: str, tmp_path: Path) -> None:
    done = apply(server, RENDERED[0].read_text().replace("kind: RayJob", "kind: RayJbo"), tmp_path)
    assert done.returncode == 1
    assert 'no matches for kind "RayJbo"' in done.stderr
