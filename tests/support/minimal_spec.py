"""A cluster spec with the required fields alone."""

from typing import Any

MINIMAL_SPEC: dict[str, Any] = {
    "name": "small",
    "image": "registry.example.org/pos2distill:0.1.0",
    "platform": "gke",
    "storage": {"url": "gs://bucket/runs"},
    "head": {"cpus": 2, "memory": "16Gi"},
    "sampling": {"max": 2, "node": {"cpus": 8, "memory": "32Gi", "gpus": 1}},
    "training": {"max": 1, "node": {"cpus": 8, "memory": "64Gi", "gpus": 4}},
}
