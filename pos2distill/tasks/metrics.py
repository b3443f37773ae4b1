"""The metrics of the benchmarks.

`sub_em` (retrieval): an answer is contained in the first line. `em` (reasoning): the text after "The answer is:" equals
an answer. Both compare texts after SQuAD's normalisation. F1 is reported as well.
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
    """Lower-case, drop punctuation, drop a/an/the, collapse white space (SQuAD's normalisation)."""
    # Punctuation before articles, in the order of SQuAD's script: so `the.` counts as an article too.
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def first_line(text: str) -> str:
    """The text before its first line break, without white space around it (Lost in the Middle)."""
    return text.split("\n", 1)[0].strip()


def parse_answer(text: str) -> str | None:
    """The text after the first "The answer is", to the end of its line, or the next line with text if that is empty.

    None if a chain of thought never says so.
    """
    found = _FINAL_ANSWER.search(text)
    return found[1].strip() if found else None


def score(metric: Literal["sub_em", "em"], text: str, answers: Sequence[str]) -> tuple[bool, float]:
    """Whether the text is right by `metric`, and F1 of the compared part: the first line, or the parsed answer."""
    if metric == "sub_em":
        line = first_line(text)
        return sub_exact_match(line, answers), f1(line, answers)
    answer = parse_answer(text)
    if answer is None:
        return False, 0.0
    return exact_match(answer, answers), f1(answer, answers)


def sub_exact_match(text: str, answers: Sequence[str]) -> bool:
    """Whether any normalised answer is a sub-string of the normalised text.

    An answer that is empty once normalised ("*", in a published file) matches nothing, not everything.
    """
    normal = normalize(text)
    for answer in answers:
        expected = normalize(answer)
        if expected and expected in normal:
            return True
    return False


def exact_match(text: str, answers: Sequence[str]) -> bool:
    """Whether the normalised text equals any normalised answer; an empty one equals nothing."""
    normal = normalize(text)
    return bool(normal) and any(normal == normalize(answer) for answer in answers)


def f1(text: str, answers: Sequence[str]) -> float:
    """The best F1 over the answers (SQuAD).

        F1 = 2 * shared / (words of the text + words of the answer)

    shared: normalised words that are in both, each as often as it is in both.
    """
    words = normalize(text).split()
    return max((_word_f1(words, normalize(answer).split()) for answer in answers), default=0.0)


def _word_f1(words: list[str], expected: list[str]) -> float:
    shared = (Counter(words) & Counter(expected)).total()
    return 2 * shared / (len(words) + len(expected)) if shared else 0.0
