"""Check manifests against the schemas of KubeRay's custom resource definitions (CRDs). Unknown fields are rejected."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, ValidationError

from pos2distill.config.yaml_reader import read_documents
from pos2distill.errors import UserError, collapse_whitespace, did_you_mean

from .rules.fields import RAY_API
from .types import KubeManifest, Violation

KINDS = ("RayJob", "RayCluster")
_TYPE_NAMES = {
    "object": "a mapping",
    "array": "a list",
    "string": "a string (in quotes)",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
}


def load_schemas(path: str) -> dict[tuple[str, str], Draft202012Validator]:
    """Validators by API version and kind.

    Args:
        path: a file, or a folder of files. A file is a CRD (from `kubectl get crd rayjobs.ray.io -o json`, or the YAML
            of KubeRay's chart), or the plain schema of one version, if its file name starts with the kind.
    Raises:
        UserError: if there is no schema of a KubeRay kind.
    """
    root = Path(path)
    if not root.exists():
        raise UserError(f"{path}: no such file or folder; set --crds to the CRDs of KubeRay")
    files = [root]
    if root.is_dir():
        files = sorted(file for file in root.iterdir() if file.suffix in (".json", ".yaml"))
    validators: dict[tuple[str, str], Draft202012Validator] = {}
    for file in files:
        for kind, schema in _read_schemas(file):
            validators[RAY_API, kind] = Draft202012Validator(_strict(schema))
    if not validators:
        raise UserError(f"{path}: no schema of {' or '.join(KINDS)}; set --crds to the CRDs of KubeRay")
    return validators


def check_schema(manifest: KubeManifest, validator: Draft202012Validator) -> Iterator[Violation]:
    """All violations of a manifest against the schema of its kind, sorted by path."""
    # The API server drops fields without a value (`env:`) and then names the required ones.
    given = {name: _without_nulls(value) for name, value in manifest.items()}
    # Paths contain names and list indices, which cannot be compared with each other.
    errors = sorted(validator.iter_errors(given), key=lambda error: [str(part) for part in error.absolute_path])
    for error in errors:
        yield from _to_violations(error)


def _without_nulls(value: Any) -> Any:
    """A copy without the fields that have no value. Elements of a list stay, since each of them counts."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: _without_nulls(item) for name, item in value.items() if item is not None}


def _read_schemas(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kind and OpenAPI schema of every CRD in a file."""
    try:
        documents = [json.loads(file.read_text(encoding="utf-8"))] if file.suffix == ".json" else read_documents(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as a CRD: {collapse_whitespace(error)}") from None
    for document in documents:
        # `kubectl get crd A B -o json` prints a list.
        items = document.get("items") if isinstance(document, dict) else None
        for item in items if isinstance(items, list) else [document]:
            yield from _schemas_in(item, file)


def _schemas_in(document: Any, file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(document, dict):
        return
    if document.get("kind") == "CustomResourceDefinition":
        try:
            kind = document["spec"]["names"]["kind"]
            versions = [version for version in document["spec"]["versions"] if version["name"] == "v1"]
            schemas = [version["schema"]["openAPIV3Schema"] for version in versions]
        except (KeyError, TypeError):
            raise UserError(f"{file}: cannot be read as a CRD: its kind or schema is missing") from None
        for schema in schemas:
            if kind in KINDS:
                yield kind, schema
    elif "properties" in document:  # a plain schema
        for kind in KINDS:
            if file.name.lower().startswith(kind.lower()):
                yield kind, document


def _strict(schema: Any) -> Any:
    """A copy of a schema that rejects unknown fields and does not require those with a default.

    The API server drops unknown fields without a message, and fills in defaults.
    """
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {name: _strict(value) for name, value in schema.items()}
    strict = {name: _strict(value) for name, value in schema.items() if name != "properties"}
    strict["properties"] = {name: _strict(value) for name, value in properties.items()}
    # With this extension of Kubernetes, a CRD allows unknown fields.
    if not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    if "required" in strict:
        strict["required"] = [name for name in strict["required"] if "default" not in properties.get(name, {})]
    return strict


def _to_violations(error: ValidationError) -> Iterator[Violation]:
    """Messages for one schema error. They never contain the value, which may be a secret in the wrong field."""
    path = _join_path(error.absolute_path)
    expected = error.validator_value
    if error.validator == "additionalProperties" and expected is False:
        known = error.schema["properties"]
        for name in error.instance:
            if name not in known:
                yield Violation(_field_path(path, name), f"unknown field{did_you_mean(name, known)}")
    elif error.validator == "required":
        for name in expected:
            if name not in error.instance:
                yield Violation(_field_path(path, name), "missing; add it")
    elif error.validator == "type":
        yield Violation(path, f"expected {_TYPE_NAMES[expected]}, got {_type_name(error.instance)}")
    elif error.validator == "enum":
        yield Violation(path, f"expected one of: {', '.join(map(str, expected))}; set one of them")
    elif error.validator == "anyOf":
        # In the CRDs of KubeRay 1.7, all alternatives are those of the type IntOrString.
        yield Violation(path, "expected an integer or a string; set one of them")
    elif error.validator == "pattern" and error.schema.get("x-kubernetes-int-or-string"):
        yield Violation(path, "is not a valid quantity; expected for example 4, 500m or 16Gi")
    else:
        yield Violation(path, f"must satisfy {error.validator}: {expected}; change it")


def _type_name(value: Any) -> str:
    if value is None:
        return "nothing"
    # bool comes before the numbers, because it is a subclass of int.
    names: tuple[tuple[type, str], ...] = (
        (dict, "a mapping"),
        (list, "a list"),
        (str, "a string"),
        (bool, "true or false"),
    )
    for kind, name in names:
        if isinstance(value, kind):
            return name
    return "a number"


def _join_path(parts: Sequence[str | int]) -> str:
    path = ""
    for part in parts:
        path = f"{path}[{part}]" if isinstance(part, int) else _field_path(path, part)
    return path


def _field_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
