"""What a study measures of its models beyond accuracy."""

from pydantic import Field

from pos2distill.config.base import Section


class AnalysisSection(Section):
    """Why answers differ by position, before and after training (docs/analysis.md). Without this section: nothing."""

    examples: int = Field(
        50,
        ge=1,
        description="evaluation questions whose answer at the advantageous slot is compared, token by token, with "
        "every evaluated slot",
    )
    attention: bool = Field(
        True,
        description="attention by document too, from the same passes; for tokenizers that say where their tokens are "
        "in the text",
    )
