import pytest

from pos2distill.tasks.thoughts import begun_thought, count_thoughts, without_thought


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Paris\nRome", "Paris\nRome"),
        ("", ""),
        ("<think>\nRome?\n</think>\n\nParis", "\n\nParis"),
        ("Rome?</think>Paris", "Paris"),  # where the chat template or the server has left out the beginning
        ("<think>a</think>b</think>Paris", "Paris"),
        ("<think></think>", ""),
        (" \n<think>\nIt is Paris", ""),
        ("<think>a</think>\n<think>It is Paris", ""),
        ("I write <think> and go on", "I write <think> and go on"),
    ],
)
def test_without_thought_is_what_follows_the_last_end(text: str, answer: str) -> None:
    assert without_thought(text) == answer


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [
        ("<|assistant|><think>\n", "<think>"),
        ("<|assistant|><think>\n\n</think>\n\n", ""),
        ("<|assistant|>", ""),
    ],
)
def test_begun_thought_of_a_prompt(prompt: str, begun: str) -> None:
    assert begun_thought(prompt) == begun


def test_count_thoughts() -> None:
    texts = ["Paris", "<think>a</think>Paris", "a</think>Paris", "<think>a</think>", "<think>a", "\n<think>", ""]
    assert count_thoughts(texts) == {"thoughts": 5, "unfinished_thoughts": 2}
    assert count_thoughts(["Paris", ""]) == {}
