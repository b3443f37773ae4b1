"""What do two other checkers report about the rendered presets and the pods in them? Writes `other_tools.json`.

kubernetes-validate has the schemas of Kubernetes; checkov has rules on security and operation. Neither knows KubeRay's
kinds, so each pod template of a RayJob or RayCluster is given to them as a Pod.

Example (a minute on two cores; neither package is in a lock file):
  uv pip install --target /tmp/schemas kubernetes-validate==1.37.0
  uv venv /tmp/checkov && uv pip install --python /tmp/checkov/bin/python checkov==3.3.30
  python -m benchmarks.validator.other_tools --schemas /tmp/schemas --checkov /tmp/checkov/bin/checkov
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.circumstances import circumstances
from cluster.types import KubeManifest
from scripts.render_presets import RENDERED

REPORT = Path(__file__).parent / "other_tools.json"
_RAY_KINDS = ("RayJob", "RayCluster")


def objects_and_pods(manifests: list[KubeManifest]) -> Iterator[KubeManifest]:
    """The objects of Kubernetes' own kinds, and a Pod for every template in the others."""
    for manifest in manifests:
        if manifest["kind"] not in _RAY_KINDS:
            yield manifest
            continue
        namespace = manifest["metadata"]["namespace"]
        spec = manifest["spec"]
        cluster = spec.get("rayClusterSpec", spec)
        templates = {"head": cluster["headGroupSpec"]["template"]}
        for group in cluster["workerGroupSpecs"]:
            templates[group["groupName"]] = group["template"]
        if "submitterPodTemplate" in spec:
            templates["submitter"] = spec["submitterPodTemplate"]
        for name, template in templates.items():
            metadata = {**template.get("metadata", {}), "name": name, "namespace": namespace}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def check_schemas(folder: Path, packages: Path) -> dict[str, Any]:
    """How many objects fit Kubernetes' schemas without unknown fields, and what is wrong with the others."""
    program = packages / "bin" / "kubernetes-validate"
    done = subprocess.run(
        [sys.executable, str(program), "--strict", *map(str, sorted(folder.glob("*.yaml")))],
        env={**os.environ, "PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.replace(f"{folder}/", "") for line in (done.stdout + done.stderr).splitlines()]
    passed = sum(" passed for resource " in line for line in lines)
    return {"passed": passed, "other lines": [line for line in lines if " passed for resource " not in line]}


def check_rules(folder: Path, program: Path) -> dict[str, Any]:
    """How many checks passed, and those that failed with the number of objects."""
    words = [str(program), "--framework", "kubernetes", "--directory", str(folder), "--output", "json"]
    done = subprocess.run([*words, "--compact", "--skip-download"], capture_output=True, text=True, check=False)
    result = json.loads(done.stdout)
    failed: dict[str, Any] = {}
    for check in result["results"]["failed_checks"]:
        entry = failed.setdefault(check["check_id"], {"name": check["check_name"], "objects": 0})
        entry["objects"] += 1
    summary = result["summary"]
    counts = {name: summary[name] for name in ("passed", "failed", "parsing_errors", "checkov_version")}
    return {**counts, "failed checks": dict(sorted(failed.items()))}


def main() -> None:
    """Check all presets, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=Path, required=True, help="folder in which kubernetes-validate is installed")
    parser.add_argument("--checkov", type=Path, required=True, help="the program")
    arguments = parser.parse_args()
    count = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in sorted(RENDERED.glob("*.yaml")):
            documents = list(objects_and_pods(list(yaml.safe_load_all(path.read_text()))))
            count += len(documents)
            (folder / path.name).write_text(yaml.safe_dump_all(documents))
        schemas = check_schemas(folder, arguments.schemas)
        rules = check_rules(folder, arguments.checkov)
    report = {**circumstances("pyyaml"), "objects": count, "kubernetes-validate": schemas, "checkov": rules}
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
