"""One question of a run at one position, and what its prompt is built from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pos2distill.records import Example, Slots

QuestionValues = dict[str, Any]
"""What is shown of a question, by name."""


@dataclass(frozen=True, slots=True)
class PromptParts:
    """What a prompt is built from.

    Attributes:
        order: 0 is the data set's.
        slot_of_rank: where documents are reordered, the slot of the document of each rank.
    """

    example: Example
    documents: int
    slots: Slots
    order: int = 0
    slot_of_rank: Slots = ()


@dataclass(frozen=True, slots=True)
class InspectedQuestion:
    """A question at one position, before it is known whether it is shown.

    Attributes:
        prompt: its token ids where they are stored, or what it is built from.
        read_entropy: reads what `--entropy` shows; None where that is not asked for or not known. It is called for rows
            that are shown alone, since the hidden states of all samples may not fit the memory.
    """

    values: QuestionValues
    prompt: Sequence[int] | PromptParts
    read_entropy: Callable[[], QuestionValues] | None = None
