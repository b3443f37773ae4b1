"""The metrics of the benchmarks.

A thought before the answer (`thoughts`) is left out first; without its end, no answer is left.
`sub_em` (retrieval): an answer is contained in the first line. `em` (reasoning): the text after "The answer is:" equals
an answer. Both compare texts after SQuAD's normalization, which drops the punctuation of every script here. `substring`
(key-value retrieval): the whole text contains an answer, both in lower case. F1 is reported as well.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

from pos2distill.config import Study
from pos2distill.config.data import Metric
from pos2distill.tasks.thoughts import without_thought

_DESCRIPTIONS: dict[Metric, str] = {
    "sub_em": "sub-EM of the first line, SQuAD normalization",
    "substring": "an answer in the whole text, lower case",
    "em": "EM of the text after 'The answer is:', SQuAD normalization",
}

# Characters of an answer that is hardly ever in a longer word by chance.
_LONG_ANSWER = 4
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CONCLUSION = re.compile(r"the answer is\s*[:：]", re.IGNORECASE)
_LOOSE_CONCLUSION = re.compile(r"the answer is", re.IGNORECASE)


class _Punctuation(dict[int, int | None]):
    """For `str.translate`: drops punctuation. SQuAD's script drops ASCII's alone; here, that of all scripts."""

    def __missing__(self, code: int) -> int | None:
        kept = None if unicodedata.category(chr(code)).startswith("P") else code
        self[code] = kept
        return kept


_PUNCTUATION = _Punctuation(dict.fromkeys(map(ord, string.punctuation)))


def describe_metric(study: Study) -> str:
    """The metric of an evaluation in words, and how answers are decoded."""
    # Requests to a server can have another temperature than 0.
    is_greedy = study.model.engine != "openai" or study.model.extra_body.get("temperature", 0) == 0
    return _DESCRIPTIONS[study.data.metric] + (", greedy" if is_greedy else ", sampled")


def normalize(text: str) -> str:
    """Lower-case, drop punctuation, drop a/an/the, collapse white space (SQuAD's normalization).

    Before that, compose characters (NFC): a text from a PDF may write an umlaut as a letter and a combining mark.
    """
    composed = unicodedata.normalize("NFC", text)
    # Punctuation before articles, in the order of SQuAD's script: so `the.` counts as an article too.
    return " ".join(_ARTICLES.sub(" ", composed.lower().translate(_PUNCTUATION)).split())


def first_line(text: str) -> str:
    """The first line with text, without white space around it.

    Lost in the Middle's script takes the first line even if it is empty, as where a model begins with a line break.
    """
    return text.strip().split("\n", 1)[0].strip()


def find_conclusion(text: str) -> re.Match[str] | None:
    """Where a chain of thought states its answer: the first "The answer is:", or without a colon if there is none.

    The published parse (arXiv:2508.15709) takes the first one of both, and so what a chain may say in passing: "from
    [2] the answer is clear".
    """
    return _CONCLUSION.search(text) or _LOOSE_CONCLUSION.search(text)


def parse_answer(text: str) -> str | None:
    """The text after the conclusion, to the end of its line, or the next line with text if that is empty.

    None if a chain of thought has none.
    """
    found = find_conclusion(text)
    return first_line(text[found.end() :]) if found else None


def score(metric: Metric, text: str, answers: Sequence[str]) -> tuple[bool, float]:
    """Whether `metric` counts the text as correct, and F1 of the compared part: a line, all, or the parsed answer."""
    part = compared_text(metric, text)
    return _MATCHES[metric](part, answers), f1(part, answers)


def compared_text(metric: Metric, text: str) -> str:
    """The part of an answer that the metric compares: the first line, all, or what follows "The answer is" (or "")."""
    answer = without_thought(text)
    if metric == "sub_em":
        return first_line(answer)
    if metric == "substring":
        return answer
    return parse_answer(answer) or ""


def sub_exact_match(text: str, answers: Sequence[str]) -> bool:
    """Whether any normalized answer is a sub-string of the normalized text.

    An answer that is empty once normalized ("*", in a published file) matches nothing, not everything.
    """
    normal = normalize(text)
    for answer in answers:
        expected = normalize(answer)
        if expected and expected in normal:
            return True
    return False


def contains_words(text: str, answers: Sequence[str]) -> bool:
    """Whether any answer is in the text as whole words, once both are normalized; an empty one matches nothing.

    An answer beyond ASCII may be a part of a word: not all scripts separate words.
    """
    normal, lower = normalize(text), text.lower()
    expected = {normalize(answer) for answer in answers} - {""}
    return any(_is_found(normal, lower, answer, as_words=answer.isascii()) for answer in expected)


def mentions(text: str, answers: Sequence[str]) -> bool:
    """Whether a document's text contains any answer, once both are normalized.

    Short answers are looked for as whole words: "us" is in nearly every text. Yes and no are not looked for: they are
    judgments, and not found in a document.
    """
    normal, lower = normalize(text), text.lower()
    expected = {normalize(answer) for answer in answers} - {"", "yes", "no"}
    return any(
        _is_found(normal, lower, answer, as_words=answer.isascii() and len(answer) < _LONG_ANSWER)
        for answer in expected
    )


def _is_found(normal: str, lower: str, answer: str, *, as_words: bool) -> bool:
    """Whether a normalized answer is in a text, also within a word or only as whole words.

    Punctuation separates words in "US-based" and "Kim's", but not in "U.S.", of which the normalized text has the word,
    nor digits in "3.81" and "1,381".

    Args:
        normal, lower: the text, normalized and in lower case alone.
    """
    if not as_words:
        return answer in normal
    is_word = re.compile(rf"(?<!\w)(?<!\d[.,]){re.escape(answer)}(?!\w)(?![.,]\d)").search
    return bool(is_word(lower) or is_word(normal))


def contains(text: str, answers: Sequence[str]) -> bool:
    """Whether any answer is a sub-string of the text, both in lower case (Lost in the Middle's key-value retrieval).

    An empty answer matches nothing, not everything.
    """
    lower = text.lower()
    return any(answer and answer.lower() in lower for answer in answers)


def exact_match(text: str, answers: Sequence[str]) -> bool:
    """Whether the normalized text equals any normalized answer; an empty one equals nothing."""
    normal = normalize(text)
    return bool(normal) and any(normal == normalize(answer) for answer in answers)


def f1(text: str, answers: Sequence[str]) -> float:
    """The best F1 over the answers (SQuAD).

        F1 = 2 * shared / (words of the text + words of the answer)

    shared: normalized words that are in both, each as often as it is in both.
    """
    words = normalize(text).split()
    return max((word_f1(words, normalize(answer).split()) for answer in answers), default=0.0)


def word_f1(words: list[str], expected: list[str]) -> float:
    """F1 of two lists of normalized words; 0 if they share none."""
    shared = (Counter(words) & Counter(expected)).total()
    return 2 * shared / (len(words) + len(expected)) if shared else 0.0


_MATCHES = {"sub_em": sub_exact_match, "substring": contains, "em": exact_match}
