"""Manifests with one change."""

import copy
from typing import Any

from cluster.types import KubeManifest


def changed(manifest: KubeManifest, path: str, value: Any) -> KubeManifest:
    """A copy with one value set, or removed where the value is `...`. In a path, ~ is a dot inside a name."""
    manifest = copy.deepcopy(manifest)
    parts = [part for part in path.replace("[", "|[").replace(".", "|").replace("~", ".").split("|") if part]
    inner: Any = manifest
    for part in parts[:-1]:
        inner = inner[int(part[1:-1])] if part.startswith("[") else inner.setdefault(part, {})
    last = parts[-1]
    key: Any = int(last[1:-1]) if last.startswith("[") else last
    if value is ...:
        del inner[key]
    elif isinstance(inner, list) and key == len(inner):
        inner.append(value)
    else:
        inner[key] = value
    return manifest
