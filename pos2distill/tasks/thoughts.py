"""The thought that some models write before their answer, between `<think>` and `</think>`.

Most such models keep these marks out of the special tokens (Qwen3, DeepSeek-R1), so that they are a part of the text.
Mistral's models have special tokens instead, which are decoded as these marks. What is judged follows the last
`</think>`.
"""

from collections import Counter
from collections.abc import Iterable

_BEGIN, _END = "<think>", "</think>"
# Tokens that stand for the marks where they are special ones, which are left out of decoded texts.
SPECIAL_MARKS = {"[THINK]": _BEGIN, "[/THINK]": _END, _BEGIN: _BEGIN, _END: _END}


def answer_start(text: str) -> int:
    """Where the answer in a text begins: after its thought, at 0 without one, at the end if a thought does not end."""
    end = text.rfind(_END)
    start = 0 if end < 0 else end + len(_END)
    return len(text) if text[start:].lstrip().startswith(_BEGIN) else start


def without_thought(text: str) -> str:
    """The answer in a text; empty if its thought does not end."""
    return text[answer_start(text) :]


def begun_thought(prompt: str) -> str:
    """`<think>` if a prompt ends with it, so that a response begins within a thought; else nothing."""
    return _BEGIN if prompt.rstrip().endswith(_BEGIN) else ""


def count_thoughts(texts: Iterable[str]) -> Counter[str]:
    """How many texts have a thought (`thoughts`), and how many of these do not end it (`unfinished_thoughts`).

    Numbers of 0 are left out.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        if _END in text or text.lstrip().startswith(_BEGIN):
            counts["thoughts"] += 1
            if answer_start(text) == len(text) and not text.endswith(_END):
                counts["unfinished_thoughts"] += 1
    return counts
