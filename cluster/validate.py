"""Check manifests before they are applied: against the schema of their kind, and against rules beyond the schema."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pos2distill.config.yaml_reader import read_documents
from pos2distill.errors import UserError, one_line
from pos2distill.secrets import mask_secrets

from .names import INSTANCE_LABEL
from .rules.fields import Fields, is_own
from .rules.manifest import check_rules
from .rules.shapes import IDENTITY, SHAPES
from .schema import check_schema, load_schemas
from .types import KubeManifest, Level, Violation

CHECKED_KINDS = tuple(SHAPES)  # pairs of API version and kind
# Characters of a report's line. Names in a file can be of any length.
_TITLE_LENGTH = 100
_PATH_LENGTH = 250
_MESSAGE_LENGTH = 500


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a report.

    Attributes:
        document: 1 for the first one of the file.
        title: kind and name of the manifest.
        path: the field's path. All three are None if the finding is not about a single manifest.
    """

    level: Level
    document: int | None
    title: str | None
    path: str | None
    message: str

    @property
    def is_refused(self) -> bool:
        """Whether the manifest must not be applied."""
        return self.level is not Level.WARNING

    def line(self, source: str) -> str:
        """The finding in a file, or in what a spec was rendered to."""
        where = f"{source}: "
        if self.document is not None:
            where += f"document {self.document}, {self.title}: {self.path}: "
        return one_line(mask_secrets(f"{self.level}: {where}{self.message}"))

    def summary(self) -> dict[str, Any]:
        """The finding as `--json` prints it."""
        texts = {"object": self.title, "field": self.path, "message": self.message}
        masked = {name: text and one_line(mask_secrets(text)) for name, text in texts.items()}
        return {"level": self.level, "document": self.document, **masked}


def check(manifests: Sequence[KubeManifest], crds: str | None = None) -> list[Finding]:
    """What is wrong with manifests and how to fix it, in the order of the manifests.

    Args:
        manifests: mappings with string keys only, as `load_manifests` and `render` return them.
        crds: file or folder with KubeRay's CRDs (see `load_schemas`); None: the types of few fields are checked.
    Raises:
        UserError: if that path contains no CRDs.
    """
    published = load_schemas(crds) if crds else {}
    findings: list[Finding] = []
    identities = set()
    namespaces: dict[str, object] = {}  # namespace of a cluster's objects, by the cluster's label
    for number, manifest in enumerate(manifests, 1):
        title = _title(manifest)
        identity = _identity(manifest, number)
        if identity in identities:
            message = "is used twice, so that only the last of the manifests stays; rename one"
            findings.append(Finding(Level.WARNING, number, title, "metadata.name", message))
        identities.add(identity)
        namespace = _namespace_of_own(manifest, namespaces)
        if namespace is not None:
            message = f"is not {namespace}, that of the other objects of this cluster; set it"
            findings.append(Finding(Level.POLICY, number, title, "metadata.namespace", message))
        for level, violation in _check_one(manifest, published):
            path, message = violation.path[:_PATH_LENGTH], violation.message[:_MESSAGE_LENGTH]
            findings.append(Finding(level, number, title, path, message))
    return findings


def _check_one(manifest: KubeManifest, published: dict[tuple[str, str], Any]) -> Iterator[tuple[Level, Violation]]:
    reported = set()
    kind = str(manifest.get("apiVersion")), str(manifest.get("kind"))
    # The CRD comes before our own schema, since it knows all fields. Ours stays: KubeRay's CRD has no list of the
    # values of some fields, such as submissionMode, which the operator rejects later.
    for validator in (IDENTITY, published.get(kind), SHAPES.get(kind)):
        if validator is None:
            continue
        for violation in check_schema(manifest, validator):
            if violation.path not in reported:
                yield Level.ERROR, violation
            reported.add(violation.path)
    for level, violation in check_rules(manifest):
        # A rule may repeat what the schema or a rule before it reports about a field; one line per field is enough.
        if violation.path not in reported:
            yield level, violation
        reported.add(violation.path)


def _namespace_of_own(manifest: KubeManifest, namespaces: dict[str, object]) -> str | None:
    """The namespace of the earlier objects of the same cluster, if this object has a different one."""
    metadata = Fields("", manifest).mapping("metadata")
    instance = metadata.mapping("labels").get(INSTANCE_LABEL)
    if not is_own(Fields("", manifest)) or not isinstance(instance, str):
        return None
    first = namespaces.setdefault(instance, metadata.get("namespace"))
    return None if first == metadata.get("namespace") else one_line(str(first))[:_TITLE_LENGTH]


def _title(manifest: KubeManifest) -> str:
    metadata = manifest.get("metadata")
    name = None
    if isinstance(metadata, dict):
        name = metadata.get("name") or metadata.get("generateName")
    return f"{manifest.get('kind') or 'manifest'}/{name or '(no name)'}"[:_TITLE_LENGTH]


def _identity(manifest: KubeManifest, number: int) -> tuple[str, ...]:
    """What distinguishes an object from others. A generated name is never the same."""
    metadata = manifest.get("metadata")
    if not isinstance(metadata, dict) or not metadata.get("name"):
        return (str(number),)
    group = str(manifest.get("apiVersion")).rpartition("/")[0]
    return group, str(manifest.get("kind")), str(metadata.get("namespace")), str(metadata["name"])


def load_manifests(path: Path) -> list[KubeManifest] | None:
    """The manifests in a YAML file, or None if it contains something else, such as a cluster spec.

    Raises:
        UserError: if the file is not valid YAML, or only some of its documents are manifests.
    """
    documents = []
    for document in read_documents(path):
        if isinstance(document, dict) and document.get("kind") == "List" and isinstance(document.get("items"), list):
            if not document["items"]:
                raise UserError(f"{path}: is a List without items, as kubectl prints where nothing is found")
            documents += document["items"]  # `kubectl get -o yaml` prints several objects as a List
        elif document is not None:  # a trailing `---` leaves an empty document
            documents.append(document)
    if not any(isinstance(document, dict) and "kind" in document for document in documents):
        return None
    for number, document in enumerate(documents, 1):
        if not isinstance(document, dict):
            raise UserError(
                f"{path}: document {number} is not a manifest; expected apiVersion, kind, metadata and spec"
            )
    return documents
