"""What the stages hand to each other: typed records, and one Arrow schema each.

Slots are 0-based. Token ids are int32. `SCHEMA_VERSION` rises whenever a schema changes its meaning, and an artifact
of another version is refused, never guessed at.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

SCHEMA_VERSION = 1

_METADATA = {"schema_version": str(SCHEMA_VERSION)}
_TOKENS = pa.list_(pa.int32())


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a prompt; gold if it holds the answer."""

    title: str
    text: str
    gold: bool


@dataclass(frozen=True, slots=True)
class Example:
    """A question, its answers (any of them is right) and its documents: one gold, the others distractors."""

    example_id: str
    question: str
    answers: tuple[str, ...]
    documents: tuple[Document, ...]

    @property
    def gold(self) -> Document:
        """The document that holds the answer."""
        return next(document for document in self.documents if document.gold)

    @property
    def distractors(self) -> tuple[Document, ...]:
        """The other documents, in the data set's order."""
        return tuple(document for document in self.documents if not document.gold)


EXAMPLE_SCHEMA = pa.schema(
    [
        ("example_id", pa.string()),
        ("question", pa.string()),
        ("answers", pa.list_(pa.string())),
        ("documents", pa.list_(pa.struct([("title", pa.string()), ("text", pa.string()), ("gold", pa.bool_())]))),
    ],
    metadata=_METADATA,
)

# One prompt to generate from: an example with its gold document at one slot of `documents`.
PROMPT_SCHEMA = pa.schema(
    [
        ("example_id", pa.string()),
        ("answers", pa.list_(pa.string())),
        ("documents", pa.int32()),
        ("slot", pa.int32()),
        ("prompt_ids", _TOKENS),
        ("seed", pa.int64()),
    ],
    metadata=_METADATA,
)

# A generated answer, judged.
#   sampled_ids, text: as generated; response_ids, cut_text: cut to the first line, closed by the end-of-turn token.
#   outcome: "kept", or the reason why not ("wrong", "empty").
ANSWER_SCHEMA = pa.schema(
    [
        ("example_id", pa.string()),
        ("documents", pa.int32()),
        ("slot", pa.int32()),
        ("prompt_ids", _TOKENS),
        ("seed", pa.int64()),
        ("sampled_ids", _TOKENS),
        ("text", pa.string()),
        ("response_ids", _TOKENS),
        ("cut_text", pa.string()),
        ("correct", pa.bool_()),
        ("outcome", pa.string()),
        ("finish_reason", pa.string()),
    ],
    metadata=_METADATA,
)

# An advantaged answer, kept or not, with the teacher's view of it.
#   hidden: (T, H) row-major bytes of dtype `hidden_dtype`, the states that enter lm_head at the positions that
#   predict response_ids; null where the answer is not kept or the teacher is resident.
SAMPLE_SCHEMA = pa.schema(
    [
        *ANSWER_SCHEMA,
        ("hidden", pa.large_binary()),
        ("hidden_dtype", pa.string()),
        ("teacher_seconds", pa.float32()),
    ],
    metadata=_METADATA,
)

# A greedy answer at one slot: what evaluation keeps of `ANSWER_SCHEMA`.
PREDICTION_SCHEMA = pa.schema(
    [
        ANSWER_SCHEMA.field(name)
        for name in ("example_id", "documents", "slot", "sampled_ids", "text", "correct", "finish_reason")
    ],
    metadata=_METADATA,
)


def example_from_row(row: Mapping[str, Any]) -> Example:
    """The example in one row of an `EXAMPLE_SCHEMA` table, as `Table.to_pylist` gives it."""
    documents = tuple(Document(**document) for document in row["documents"])
    return Example(row["example_id"], row["question"], tuple(row["answers"]), documents)


def examples_to_table(examples: Iterable[Example]) -> pa.Table:
    """Examples as a table of `EXAMPLE_SCHEMA`."""
    return pa.Table.from_pylist([asdict(example) for example in examples], schema=EXAMPLE_SCHEMA)
