"""What a study measures of its models beyond accuracy."""

from pydantic import Field

from pos2distill.config.base import Section


class AnalysisSection(Section):
    """Why answers differ by position, before and after training (docs/analysis.md). Without this section: nothing."""

    examples: int = Field(
        50,
        ge=1,
        description="Evaluation questions whose answers at the advantageous slot are compared, token by token, with "
        "those at every evaluated slot.",
    )
    attention: bool = Field(
        True,
        description="Also measure attention by document, in the same passes. Requires a tokenizer that returns the "
        "character offsets of its tokens.",
    )
