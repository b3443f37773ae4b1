"""The text of prompts."""

from collections.abc import Sequence
from typing import Any

from pos2distill.config import Study
from pos2distill.tasks.prompts import MessageBuilder, PromptBuilder, joined_text

from .question import PromptParts


class PromptText:
    """The text of prompts, special tokens included, from stored token ids or built again.

    For a model behind a server, the text of the messages: only the server has its chat template.
    """

    def __init__(self, study: Study) -> None:
        self.builder: MessageBuilder | PromptBuilder
        if study.model.uses_chat_api:
            self.builder = MessageBuilder(study.data.wording, max_length=None, reserve=0)
            return
        # Imported where needed: transformers takes seconds to import.
        from pos2distill.models.load import load_prompt_builder

        self.builder = load_prompt_builder(study, reserve=0)

    def __call__(self, prompt: Sequence[int] | PromptParts) -> str:
        """The text of one prompt, from its token ids or what it is built from."""
        built: Any = self._build(prompt) if isinstance(prompt, PromptParts) else prompt
        if isinstance(self.builder, MessageBuilder):
            return joined_text(built)
        return str(self.builder.tokenizer.decode(built))

    def _build(self, parts: PromptParts) -> Any:
        """Token ids, or messages for a server."""
        return self.builder(
            parts.example,
            parts.documents,
            parts.slots,
            slot_of_rank=parts.slot_of_rank,
            order=parts.order,
        )
