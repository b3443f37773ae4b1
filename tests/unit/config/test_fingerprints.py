import math
from typing import Any

import pytest
from pydantic import ValidationError

from pos2distill.config import (
    LoraSection,
    MethodSection,
    TrainingSection,
    fingerprint,
)


def test_section_is_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        MethodSection().k = 5  # type: ignore[misc]


def test_fingerprint_is_pinned() -> None:
    """Changing this value orphans every artifact that users have."""
    # SHA-256 of: ["data", {"a": [2.5, null], "b": 1}, "ä"]
    assert fingerprint("data", {"b": 1, "a": [2.5, None]}, "ä") == "d6059818621a6f6c"


def test_fingerprint_of_equal_parts_is_equal() -> None:
    assert fingerprint(TrainingSection(), 1) == fingerprint(TrainingSection(learning_rate=3e-6), 1)
    assert fingerprint(TrainingSection()) == fingerprint(TrainingSection().model_dump(mode="json"))
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint("ab", "c") != fingerprint("a", "bc")


def test_fingerprint_of_training_without_adapters_is_pinned() -> None:
    """Of the settings that users' checkpoints were trained with."""
    assert fingerprint(TrainingSection()) == "c957856585ddc22f"
    assert fingerprint(TrainingSection(learning_rate=3e-6, lora=LoraSection())) == "cb492bce8a56d184"


@pytest.mark.parametrize("field", list(TrainingSection.model_fields))
def test_fingerprint_covers_every_training_setting(field: str) -> None:
    changed: dict[str, Any] = {
        "betas": (0.8, 0.95),
        "precision": "float32",
        "order": "fixed",
        "lora": LoraSection(),
    }
    value = getattr(TrainingSection(), field)
    other = changed.get(field) or (value + 1 if isinstance(value, int) else math.nextafter(value, 2))
    assert fingerprint(TrainingSection()) != fingerprint(TrainingSection(**{field: other}))
