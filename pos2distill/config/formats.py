"""The data formats, in one table (docs/data.md describes them).

A new format is one entry of `_ALL`, and a parser in `tasks/formats.py` unless an existing one reads it.
"""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal

_ENDINGS = re.compile(r"(?<=.)(\.(jsonl?|ndjson|parquet|gz|bz2|xz|zip))+$")  # endings of files of records


@dataclass(frozen=True, slots=True)
class Format:
    """What distinguishes one data format from the others.

    Attributes:
        name: the value of `data.format`.
        parser: its key in `PARSERS` of `tasks/formats.py`, which reads a record.
        required: fields of every record.
        hops: how many gold documents its records can have.
        skips_unusable: a record that follows its format but cannot be used is skipped and counted, not rejected. For
            published files, which the user cannot correct.
        keeps_gold_only: the record's own distractors are dropped, and all are drawn from other examples.
    """

    name: str
    parser: str
    required: tuple[str, ...]
    hops: Literal["one", "several", "any"]
    skips_unusable: bool = False
    keeps_gold_only: bool = False


_LOST_IN_THE_MIDDLE = ("question", "answers", "ctxs")
_MULTI_HOP = ("question", "answer", "supporting_facts", "context")

_ALL = (
    Format("nq", "lost_in_the_middle", _LOST_IN_THE_MIDDLE, hops="one"),
    # These files have the gold document alone, so all distractors are drawn from other examples.
    Format("nq_oracle", "lost_in_the_middle", _LOST_IN_THE_MIDDLE, hops="one", keeps_gold_only=True),
    Format("kv", "key_value", ("key", "value", "ordered_kv_records"), hops="one"),
    # Some records have no positive context that contains an answer.
    Format(
        "dpr",
        "dpr",
        ("question", "answers", "positive_ctxs", "hard_negative_ctxs", "negative_ctxs"),
        hops="one",
        skips_unusable=True,
    ),
    # Its files also have unanswerable questions, and steps without a paragraph.
    Format(
        "musique",
        "musique",
        ("id", "question", "answer", "answer_aliases", "answerable", "paragraphs", "question_decomposition"),
        hops="several",
        skips_unusable=True,
    ),
    # In both, a supporting fact may name a title that the context lacks or has twice.
    Format("hotpotqa", "hotpotqa", _MULTI_HOP, hops="several", skips_unusable=True),
    Format("2wiki", "2wiki", (*_MULTI_HOP, "evidences"), hops="several", skips_unusable=True),
    # The user's own data: a record that cannot be used is rejected, since the user can correct it.
    Format("jsonl", "generic", ("question", "answers", "documents"), hops="any"),
)

FORMATS: dict[str, Format] = {each.name: each for each in _ALL}
"""Every format by its name."""

# The values of the setting `data.format`, in the order of the table. mypy accepts a Literal of written values only.
if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal[tuple(FORMATS)]


def data_name(path: str) -> str:
    """The name of a data file; of a pattern what follows from its first `*`, and the folder before if it is needed."""
    parts = PurePosixPath(path).parts
    patterns = [index for index, part in enumerate(parts) if "*" in part]
    if not patterns:
        return PurePosixPath(path).name
    first = patterns[0]
    if parts[first].startswith("*"):
        first = max(0, first - 1)
    return str(PurePosixPath(*parts[first:]))


def stem(name: str) -> str:
    """A name in lower case, without the endings of files of records."""
    return _ENDINGS.sub("", name.lower())
