"""The base class of all sections, and fingerprints."""

import hashlib
import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A part of a recipe. It is immutable and refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def fingerprint(*parts: Any) -> str:
    """16 hex digits of SHA-256 over the parts as canonical JSON. Equal parts have equal fingerprints on any machine."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, default=lambda part: part.model_dump(mode="json"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
