"""The records that stages exchange: typed, with one Arrow schema each.

Slots are 0-based; `Slots` are those of an example's gold documents, in hop order: one for one gold document, a pair for
two hops. Token ids are int32. `SCHEMA_VERSION` rises whenever a schema changes its meaning, or equal settings make
other prompts; an artifact of another version is rejected.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

SCHEMA_VERSION = 9

Slots = tuple[int, ...]
Tokens = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_METADATA = {"schema_version": str(SCHEMA_VERSION)}
_TOKENS = pa.list_(pa.int32())
_SLOTS = pa.list_(pa.int32())
_CHUNK_EXAMPLES = 256  # 4 MB if an example has 20 documents of 100 words


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a prompt.

    Attributes:
        hop: its index among the gold documents, from 0; None for a distractor.
    """

    title: str
    text: str
    hop: int | None = None

    @property
    def gold(self) -> bool:
        """Whether it holds the answer, or a step towards it."""
        return self.hop is not None


@dataclass(frozen=True, slots=True)
class Example:
    """A question, its answers (any of them is correct) and its documents: one gold document a hop, and distractors."""

    example_id: str
    question: str
    answers: tuple[str, ...]
    documents: tuple[Document, ...]

    @property
    def golds(self) -> tuple[Document, ...]:
        """The gold documents in hop order."""
        found = {document.hop: document for document in self.documents if document.hop is not None}
        return tuple(found[hop] for hop in sorted(found))

    @property
    def distractors(self) -> tuple[Document, ...]:
        """The other documents, in the data set's order."""
        return tuple(document for document in self.documents if not document.gold)


@dataclass(frozen=True, slots=True)
class TopKLogprobs:
    """The k most likely next tokens at each of S positions, and the logarithms (nats) of their probabilities.

    Attributes:
        ids_SK: (S, k) int32, most likely first.
        logprobs_SK: (S, k) float32, of the model itself, before temperature and top-p.
    """

    ids_SK: Tokens
    logprobs_SK: Logprobs

    def __getitem__(self, positions: slice) -> "TopKLogprobs":
        return TopKLogprobs(self.ids_SK[positions], self.logprobs_SK[positions])


EXAMPLE_SCHEMA = pa.schema(
    [
        ("example_id", pa.string()),
        ("question", pa.string()),
        ("answers", pa.list_(pa.string())),
        ("documents", pa.list_(pa.struct([("title", pa.string()), ("text", pa.string()), ("hop", pa.int8())]))),
    ],
    metadata=_METADATA,
)

_EXAMPLE = pa.struct(list(EXAMPLE_SCHEMA))

# One prompt to generate from: an example with its gold documents at slots of `documents`.
#   sample_id: id of the sample that is made, one of `sample_ids`; null for evaluation.
#   placement, group: which of the evaluated placements this is, and the group it belongs to ("" for none).
#   order: order of the distractors at this placement; 0 is the data set's, all others are random.
#   messages: used in place of prompt_ids, for a server that makes a prompt of them; else null.
#   example: the whole example for training; null for evaluation.
#   error: why there is no prompt, else null.
PROMPT_SCHEMA = pa.schema(
    [
        ("example_id", pa.string()),
        ("sample_id", pa.string()),
        ("answers", pa.list_(pa.string())),
        ("documents", pa.int32()),
        ("placement", pa.int32()),
        ("order", pa.int32()),
        ("group", pa.string()),
        ("slots", _SLOTS),
        ("prompt_ids", _TOKENS),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("seed", pa.int64()),
        ("example", _EXAMPLE),
        ("error", pa.string()),
    ],
    metadata=_METADATA,
)

# A generated response and its score.
#   sample_id: as in `PROMPT_SCHEMA`.
#   prompt_ids: the prompt that was answered, at `slots`; where the teacher gets another one (on-policy methods, a
#   random teacher slot), the teacher's.
#   sampled_ids, text: as generated; response_ids, truncated_text: what is kept of it, closed by the end-of-turn token.
#   The texts begin with the `<think>` that the chat template may have written, which is not among the ids.
#   prompt_tokens, answer_tokens: their numbers, null if the server does not report them.
#   correct: by the data set's metric; f1: token F1 of the part of the text that the metric compares.
#   outcome: "kept", or the reason why not ("wrong", "empty", "failed"; where a model on a server is evaluated also
#   "refused": the prompt, for its content; "unanswered": the server did not answer, and may later). error: what
#   failed or why it was refused, else null.
#   top_ids, top_logprobs: `TopKLogprobs` row by row, at the first S positions of response_ids: those before which the
#   engine had generated the very same tokens. Null if the answer is not kept or the teacher is another.
RESPONSE_SCHEMA = pa.schema(
    [
        ("example_id", pa.string()),
        ("sample_id", pa.string()),
        ("documents", pa.int32()),
        ("placement", pa.int32()),
        ("order", pa.int32()),
        ("group", pa.string()),
        ("slots", _SLOTS),
        ("prompt_ids", _TOKENS),
        ("seed", pa.int64()),
        ("example", _EXAMPLE),
        ("error", pa.string()),
        ("sampled_ids", _TOKENS),
        ("text", pa.string()),
        ("response_ids", _TOKENS),
        ("truncated_text", pa.string()),
        ("correct", pa.bool_()),
        ("f1", pa.float32()),
        ("outcome", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("answer_tokens", pa.int32()),
        ("top_ids", _TOKENS),
        ("top_logprobs", pa.list_(pa.float32())),
    ],
    metadata=_METADATA,
)

# A response for training, kept or not, with what the teacher stored with it: one record of the sample store.
#   slots: those of the answered prompt (the advantageous ones; on-policy those of one training row).
#   prompt_ids: the prompt that the teacher reads, see `RESPONSE_SCHEMA`.
#   hidden: (T, H) row-major bytes of dtype `hidden_dtype`, the states that enter lm_head at the positions that predict
#   response_ids; null if the response is not kept or `method.teacher` is not `cached`.
SAMPLE_SCHEMA = pa.schema(
    [
        *RESPONSE_SCHEMA,
        ("hidden", pa.large_binary()),
        ("hidden_dtype", pa.string()),
    ],
    metadata=_METADATA,
)

# A greedy answer at one placement: what evaluation keeps of `RESPONSE_SCHEMA`.
PREDICTION_SCHEMA = pa.schema(
    [
        RESPONSE_SCHEMA.field(name)
        for name in (
            "example_id",
            "documents",
            "placement",
            "order",
            "group",
            "slots",
            "sampled_ids",
            "text",
            "correct",
            "f1",
            "finish_reason",
            "prompt_tokens",
            "answer_tokens",
        )
    ],
    metadata=_METADATA,
)

QUESTIONS = b"questions"
"""In the metadata of a table of predictions: a digest of the questions and their answers, which may have equal ids."""

# A prompt of an evaluation that the server refused, for which its question is left out at every placement.
REFUSAL_SCHEMA = pa.schema(
    [RESPONSE_SCHEMA.field(name) for name in ("example_id", "documents", "placement", "order", "slots", "error")],
    metadata=_METADATA,
)

# What an analysis computed of one example: a response that all models read, and passes over it at S placements.
#   slots: the advantageous ones, where the base model answered. hidden, hidden_dtype, tokens: that model's states
#   there, as in `SAMPLE_SCHEMA`, and its most likely tokens.
#   placement_slots: slots of each placement. kl: nats, and agrees: whether the most likely tokens are equal, at T
#   tokens of each placement.
#   layers, attention: for each placement (N layers, 2 queries, D + 3 parts), row-major; empty if none.
PASSES_SCHEMA = pa.schema(
    [
        ("example_id", pa.string()),
        ("example", _EXAMPLE),
        ("slots", _SLOTS),
        ("response_ids", _TOKENS),
        ("hidden", pa.large_binary()),
        ("hidden_dtype", pa.string()),
        ("tokens", _TOKENS),
        ("placement_slots", pa.list_(_SLOTS)),
        ("kl", pa.list_(pa.list_(pa.float32()))),
        ("agrees", pa.list_(pa.list_(pa.bool_()))),
        ("layers", pa.int32()),
        ("attention", pa.list_(pa.list_(pa.float32()))),
    ],
    metadata=_METADATA,
)


def sample_ids(example_ids: Sequence[str], per_example: int) -> list[str]:
    """The ids that samples are stored under: those of the examples, or with several samples each `ID@0`, `ID@1`, …

    Those of one example are neighbors. So sample i is number `i % per_example` of example `i // per_example`.
    """
    if per_example == 1:
        return list(example_ids)
    return [f"{example_id}@{number}" for example_id in example_ids for number in range(per_example)]


def sample_id_array(example_ids: pa.Array, per_example: int) -> pa.Array:
    """`sample_ids` as an array: an index in it stands for the sample in stores and in training."""
    if per_example == 1:
        return example_ids
    return pa.array(sample_ids(example_ids.to_pylist(), per_example), pa.string())


def example_from_row(row: Mapping[str, Any]) -> Example:
    """The example in one row of an `EXAMPLE_SCHEMA` table, as returned by `Table.to_pylist`."""
    documents = tuple(Document(**document) for document in row["documents"])
    return Example(row["example_id"], row["question"], tuple(row["answers"]), documents)


def example_tables(examples: Sequence[Example]) -> Iterator[pa.Table]:
    """Examples as tables of `EXAMPLE_SCHEMA`, 256 in each: as dictionaries they take several times the memory.

    With examples that are read from a file when they are accessed, memory holds one table at a time.
    """
    for start in range(0, len(examples), _CHUNK_EXAMPLES):
        rows = [asdict(example) for example in examples[start : start + _CHUNK_EXAMPLES]]
        yield pa.Table.from_pylist(rows, schema=EXAMPLE_SCHEMA)
