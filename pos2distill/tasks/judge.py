"""Answers judged as the benchmarks judge them: SQuAD normalisation, sub-string exact match on the first line."""

import re
import string
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Lower-case, drop punctuation, drop a/an/the, squeeze white space (SQuAD's normalisation)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def first_line(text: str) -> str:
    """The text before its first line break, without white space around it (Lost in the Middle)."""
    return text.split("\n", 1)[0].strip()


def sub_exact_match(text: str, answers: Sequence[str]) -> bool:
    """Whether any normalised answer is a sub-string of the normalised text.

    An answer of which normalisation leaves nothing ("*", of a published file) matches nothing rather than everything.
    """
    normal = normalize(text)
    return any(wanted in normal for answer in answers if (wanted := normalize(answer)))
