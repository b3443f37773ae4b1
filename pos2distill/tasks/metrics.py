"""Answers judged as the benchmarks judge them.

`sub_em` (retrieval): an answer stands in the first line. `em` (reasoning): what follows "The answer is:" equals one.
Both compare what SQuAD's normalisation leaves; F1 stands beside them.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Literal

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_FINAL_ANSWER = re.compile(r"the answer is[:：]?\s*(.*)", re.IGNORECASE)  # the published parse (arXiv:2508.15709)


def normalize(text: str) -> str:
    """Lower-case, drop punctuation, drop a/an/the, squeeze white space (SQuAD's normalisation)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def first_line(text: str) -> str:
    """The text before its first line break, without white space around it (Lost in the Middle)."""
    return text.split("\n", 1)[0].strip()


def parse_answer(text: str) -> str | None:
    """What follows the first "The answer is", to the end of its line (of the next with text, if nothing follows there).

    None where a chain of thought never says so.
    """
    found = _FINAL_ANSWER.search(text)
    return found[1].strip() if found else None


def score(metric: Literal["sub_em", "em"], text: str, answers: Sequence[str]) -> tuple[bool, float]:
    """Whether the text is right by `metric`, and F1 of the words that are judged: the first line, the parsed answer."""
    if metric == "sub_em":
        line = first_line(text)
        return sub_exact_match(line, answers), f1(line, answers)
    answer = parse_answer(text)
    if answer is None:
        return False, 0.0
    return exact_match(answer, answers), f1(answer, answers)


def sub_exact_match(text: str, answers: Sequence[str]) -> bool:
    """Whether any normalised answer is a sub-string of the normalised text.

    An answer of which normalisation leaves nothing ("*", of a published file) matches nothing rather than everything.
    """
    normal = normalize(text)
    return any(wanted in normal for answer in answers if (wanted := normalize(answer)))


def exact_match(text: str, answers: Sequence[str]) -> bool:
    """Whether the normalised text equals any normalised answer; one of which nothing is left equals nothing."""
    normal = normalize(text)
    return bool(normal) and any(normal == normalize(answer) for answer in answers)


def f1(text: str, answers: Sequence[str]) -> float:
    """The best F1 over the answers (SQuAD).

        F1 = 2 * shared / (words of the text + words of the answer)

    shared: normalised words that both have, each as often as both have it.
    """
    return max((_word_f1(normalize(text).split(), normalize(answer).split()) for answer in answers), default=0.0)


def _word_f1(words: list[str], wanted: list[str]) -> float:
    shared = sum((Counter(words) & Counter(wanted)).values())
    return 2 * shared / (len(words) + len(wanted)) if shared else 0.0
