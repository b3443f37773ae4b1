"""The least that a recipe can say."""

from typing import Any

MINIMAL_RECIPE: dict[str, Any] = {
    "name": "small",
    "description": "the least a recipe can say",
    "model": {"path": "some/model"},
    "data": {"format": "nq", "path": "data.jsonl"},
}
