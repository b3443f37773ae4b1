"""Manifests checked before a cluster sees them: against the schema of their kind, and against rules it cannot say."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from cluster.rules import check_manifest
from cluster.schema import check_schema, load_schemas
from pos2distill.errors import UserError


def check(manifests: Sequence[dict[str, Any]], crds: str | None = None) -> list[str]:
    """One line for each fault: manifest, place, what is wrong and how to mend it. Empty if all is well.

    Args:
        crds: file or folder with KubeRay's CRDs (see `load_schemas`); None: the rules alone.
    Raises:
        UserError: if there are no CRDs there.
    """
    schemas = load_schemas(crds) if crds else {}
    lines, seen = [], set[str]()
    for manifest in manifests:
        metadata = manifest.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        title = f"{manifest.get('kind', 'manifest')}/{name or '(no name)'}"
        faults = []
        if title in seen:
            faults.append(("metadata.name", "is there twice; rename one of them"))
        seen.add(title)
        if validator := schemas.get(str(manifest.get("kind"))):
            faults += check_schema(manifest, validator)
        # A rule may say again, and better, what the schema says; once is enough.
        told = {place for place, _ in faults}
        faults += [fault for fault in check_manifest(manifest) if fault[0] not in told]
        lines += [f"{title}: {place}: {' '.join(text.split())}" for place, text in faults]
    return lines


def load_manifests(path: Path) -> list[dict[str, Any]] | None:
    """The manifests in a YAML file; None if it holds something else, such as a cluster spec.

    Raises:
        UserError: if it is no YAML.
    """
    try:
        documents = [document for document in yaml.safe_load_all(path.read_text()) if document is not None]
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not any(isinstance(document, dict) and "kind" in document for document in documents):
        return None
    for index, document in enumerate(documents):
        if not isinstance(document, dict):
            raise UserError(f"{path}: document {index + 1} is no manifest; expected apiVersion, kind, metadata, spec")
    return documents
