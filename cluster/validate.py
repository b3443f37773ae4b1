"""Check manifests before they are applied: against the schema of their kind, and against rules beyond the schema."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from pos2distill.errors import UserError

from .rules.manifest import check_manifest
from .schema import check_schema, load_schemas
from .types import KubeManifest, Violation


def check(manifests: Sequence[KubeManifest], crds: str | None = None) -> list[str]:
    """One line for each violation: manifest, path, what is wrong and how to fix it. Empty if all manifests are valid.

    Args:
        crds: file or folder with KubeRay's CRDs (see `load_schemas`); None: only the rules are checked.
    Raises:
        UserError: if that path contains no CRDs.
    """
    schemas = load_schemas(crds) if crds else {}
    lines: list[str] = []
    titles: set[str] = set()
    for manifest in manifests:
        title = _title(manifest)
        violations: list[Violation] = []
        if title in titles:
            violations.append(Violation("metadata.name", "is used twice; rename one of the manifests"))
        titles.add(title)
        schema = schemas.get(str(manifest.get("kind")))
        if schema:
            violations.extend(check_schema(manifest, schema))
        # A rule may repeat what the schema already reports about a field; one line per field is enough.
        reported = {violation.path for violation in violations}
        violations.extend(violation for violation in check_manifest(manifest) if violation.path not in reported)
        for violation in violations:
            lines.append(f"{title}: {violation.path}: {' '.join(violation.message.split())}")
    return lines


def _title(manifest: KubeManifest) -> str:
    metadata = manifest.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return f"{manifest.get('kind', 'manifest')}/{name or '(no name)'}"


def load_manifests(path: Path) -> list[KubeManifest] | None:
    """The manifests in a YAML file, or None if it contains something else, such as a cluster spec.

    Raises:
        UserError: if the file is not valid YAML, or only some of its documents are manifests.
    """
    try:
        # A trailing `---` leaves an empty document.
        documents = [document for document in yaml.safe_load_all(path.read_text()) if document is not None]
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not any(isinstance(document, dict) and "kind" in document for document in documents):
        return None
    for number, document in enumerate(documents, 1):
        if not isinstance(document, dict):
            raise UserError(
                f"{path}: document {number} is not a manifest; expected apiVersion, kind, metadata and spec"
            )
    return documents
