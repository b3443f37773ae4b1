"""Manifests against the schemas of KubeRay's custom resource definitions, with misspelt fields refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator, ValidationError

from pos2distill.errors import UserError, did_you_mean

Fault = tuple[str, str]

KINDS = ("RayJob", "RayCluster")
_NAMES = {
    "object": "a section with fields",
    "array": "a list",
    "string": "a text (in quotes)",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
}


def load_schemas(path: str) -> dict[str, Draft202012Validator]:
    """Validators by kind.

    Args:
        path: a file, or a folder of files: a CRD (`kubectl get crd rayjobs.ray.io -o json`, or the YAML of KubeRay's
            chart), or the plain schema of one version in a file whose name starts with its kind.
    Raises:
        UserError: if nothing of KubeRay is there.
    """
    root = Path(path)
    if not root.exists():
        raise UserError(f"{path}: no such file or folder; give the CRDs of KubeRay (--crds)")
    files = [root] if root.is_file() else sorted(each for each in root.iterdir() if each.suffix in (".json", ".yaml"))
    found = {kind: schema for file in files for kind, schema in _schemas_in(file)}
    if not found:
        raise UserError(f"{path}: no schema of {' or '.join(KINDS)}; give the CRDs of KubeRay (--crds)")
    return {kind: Draft202012Validator(_strict(schema)) for kind, schema in found.items()}


def check_schema(manifest: dict[str, Any], validator: Draft202012Validator) -> Iterator[Fault]:
    """All faults of a manifest against its kind's schema, in the order of the file."""
    for error in sorted(validator.iter_errors(manifest), key=lambda each: [str(part) for part in each.absolute_path]):
        yield from _in_plain_words(error)


def _schemas_in(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = file.read_text()
        documents = [json.loads(text)] if file.suffix == ".json" else list(yaml.safe_load_all(text))
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as a CRD: {' '.join(str(error).split())}") from None
    for document in documents:
        if not isinstance(document, dict):
            continue
        if document.get("kind") == "CustomResourceDefinition":
            kind = document["spec"]["names"]["kind"]
            served = [each for each in document["spec"]["versions"] if each["name"] == "v1"]
            if kind in KINDS and served:
                yield kind, served[0]["schema"]["openAPIV3Schema"]
        elif "properties" in document:
            yield from ((kind, document) for kind in KINDS if file.name.lower().startswith(kind.lower()))


def _strict(schema: Any) -> Any:
    """The schema without room for unknown fields; fields that the API server fills in are not asked for."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {name: _strict(each) for name, each in schema.items()}
    made = {name: _strict(each) for name, each in schema.items() if name != "properties"}
    made["properties"] = {name: _strict(each) for name, each in properties.items()}
    if not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if "required" in made:
        made["required"] = [name for name in made["required"] if "default" not in properties.get(name, {})]
    return made


def _in_plain_words(error: ValidationError) -> Iterator[Fault]:
    """Never with the value itself: it may be a secret at a wrong place."""
    place = _place(error.absolute_path)
    if error.validator == "additionalProperties" and error.validator_value is False:
        known = error.schema["properties"]
        for name in error.instance:
            if name not in known:
                yield _join(place, name), f"unknown field{did_you_mean(name, known)}"
    elif error.validator == "required":
        for name in error.validator_value:
            if name not in error.instance:
                yield _join(place, name), "missing; add it"
    elif error.validator == "type":
        came = {dict: "a section", list: "a list", str: "a text", bool: "true or false", type(None): "nothing"}
        yield place, f"expected {_NAMES[error.validator_value]}, got {came.get(type(error.instance), 'a number')}"
    elif error.validator == "enum":
        yield place, f"expected one of: {', '.join(map(str, error.validator_value))}; set one of them"
    elif error.validator == "anyOf":
        yield place, "expected a whole number or a text; mend it"
    elif error.validator == "pattern":
        yield place, "is no quantity; expected for example 4, 500m or 16Gi"
    else:
        yield place, f"does not keep to {error.validator}: {error.validator_value}; mend it"


def _place(path: Any) -> str:
    place = ""
    for part in path:
        place = f"{place}[{part}]" if isinstance(part, int) else _join(place, part)
    return place


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
