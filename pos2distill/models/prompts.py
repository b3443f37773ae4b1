"""The prompts of a study, in the tokens of its model."""

from pos2distill.config import Study
from pos2distill.models.load import context_length, load_tokenizer
from pos2distill.tasks.prompts import PromptBuilder


def load_prompt_builder(study: Study, *, reserve: int) -> PromptBuilder:
    """The builder of a study's prompts, with the tokenizer and the context of its model.

    Args:
        reserve: tokens of the context that are kept free for the response.
    """
    tokenizer = load_tokenizer(study.model)
    return PromptBuilder.of_study(study, tokenizer, max_length=context_length(study.model), reserve=reserve)
