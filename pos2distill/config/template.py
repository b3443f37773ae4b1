"""A custom prompt template."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator

from pos2distill.config.base import Section
from pos2distill.errors import did_you_mean

DOCUMENTS = "{documents}"
_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")
_CONCLUSION = "the answer is"
_CITATION = re.compile(r"\[\d+\]")


class TemplateSection(Section):
    """A custom prompt template instead of `data.prompt`: texts whose names in braces are filled in (docs/data.md)."""

    system: str = Field("", description="System message, which may contain {question} and {documents}. Default: none.")
    user: str = Field(description="User message. {question} and {documents} must be in it or in the system message.")
    document: str = Field("{text}", description="Text of each document, with {text}, {title} and {number} (from 1).")
    separator: str = Field("\n\n", description="Text between two documents.")
    without_documents: str = Field(
        "{question}",
        description="User message of prompts without documents (evaluation.reference_prompts), with {question}. A "
        "system message with {documents} is then left out.",
    )
    json_strings: bool = Field(False, description="Write title and text as JSON strings, in quotes.")

    _FIELDS: ClassVar[dict[str, tuple[str, ...]]] = {
        "system": ("documents", "question"),
        "user": ("documents", "question"),
        "document": ("text", "title", "number"),
        "separator": (),
        "without_documents": ("question",),
    }

    @model_validator(mode="before")
    @classmethod
    def _braces_are_in_quotes(cls, settings: Any) -> Any:
        """`document: {text}` is a mapping in YAML."""
        if not isinstance(settings, Mapping):
            return settings
        for name, value in settings.items():
            if name in cls._FIELDS and isinstance(value, Mapping):
                raise ValueError(f"{name}: expected a text, got a mapping; put it in quotes, such as '{{text}}'")
        return settings

    @model_validator(mode="after")
    def _texts_have_their_fields(self) -> "TemplateSection":
        for name, possible in self._FIELDS.items():
            for field in _FIELD.findall(getattr(self, name)):
                if field not in possible:
                    hint = did_you_mean(field, possible, likeness=0.6) or "; expected no field here"
                    raise ValueError(f"{name}: unknown field {{{field}}}{hint}")
        messages = self.system + self.user
        if not self.user.strip():
            raise ValueError("user: is empty; expected the user's message, with {question}")
        if "{question}" not in messages:
            raise ValueError("user: has no {question}, and neither has system")
        if messages.count(DOCUMENTS) != 1:
            found = "is in the messages more than once" if DOCUMENTS in messages else "is neither here nor in system"
            raise ValueError(f"user: {DOCUMENTS} {found}; expected it once, where the documents are shown")
        if "{text}" not in self.document:
            raise ValueError("document: has no {text}")
        if "{question}" not in self.without_documents:
            raise ValueError("without_documents: has no {question}")
        return self

    @property
    def asks_for_conclusion(self) -> bool:
        """Whether a message asks for "The answer is", which `data.metric` em looks for."""
        return _CONCLUSION in f"{self.system}\n{self.user}".lower()

    @property
    def asks_for_conclusion_without_documents(self) -> bool:
        """The same of a prompt without documents."""
        system = "" if DOCUMENTS in self.system else self.system
        return _CONCLUSION in f"{system}\n{self.without_documents}".lower()

    @property
    def names_documents(self) -> bool:
        """Whether a prompt shows by what an answer can name a document."""
        return "{title}" in self.document or "{number}" in self.document

    @property
    def asks_for_numbers(self) -> bool:
        """Whether documents are to be named by their numbers: a message shows how, as [1], or there are no titles."""
        return "{title}" not in self.document or _CITATION.search(f"{self.system}\n{self.user}") is not None
