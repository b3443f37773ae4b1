import pytest

from pos2distill.evaluation.chains import Chain, judge_chain, summarize_chains
from pos2distill.records import Document

# As the two-hop toy writes them. In the prompt the gold documents are second (hop 2) and fourth (hop 1).
SHOWN = (
    Document("Proud Zebra", "The code of Proud Zebra is 66 53 ."),
    Document("Zesty Moth", "The code of Zesty Moth is 81 95 .", 1),
    Document("Zesty Moth Hill", "The mentor of Zesty Moth Hill is Proud Zebra ."),
    Document("Dark Viper", "The mentor of Dark Viper is Zesty Moth .", 0),
)
RIGHT = "The mentor of Dark Viper is Zesty Moth . The code of Zesty Moth is 81 95 . The answer is: 81 95"


@pytest.mark.parametrize(
    ("text", "chain"),
    [
        (RIGHT, Chain("none", True, None, 2)),
        (RIGHT.replace("is: 81 95", "is: 81 96"), Chain("answer", False, None, 2)),
        (RIGHT.replace("The answer is: 81 95", ""), Chain("reasoning", False, None, 2)),
        (RIGHT.replace("81 95", "81 99"), Chain("reasoning", False, None, 2)),
        # The mentor of another: a wrong document after the first hop.
        (
            "The mentor of Dark Viper is Proud Zebra . The code of Proud Zebra is 66 53 . The answer is: 66 53",
            Chain("retrieval", False, 0, 1),
        ),
        # Of two titles that begin alike, the longer one counts.
        ("The mentor of Zesty Moth Hill is Proud Zebra .", Chain("retrieval", False, 2, 0)),
        ("The answer is: 81 95", Chain("retrieval", True, None, 0)),
        ("The mentor of Dark Viper . The answer is: 5", Chain("retrieval", False, None, 1)),
        # Once both are named, further documents do no harm.
        (
            "dark viper, the zesty moth, 81 95, not Proud Zebra. The answer is: 81 95",
            Chain("none", True, None, 2),
        ),
    ],
)
def test_judge_chain_finds_the_first_failed_step_by_titles(text: str, chain: Chain) -> None:
    judged = judge_chain(text, correct=chain.correct, answers=("81 95",), shown=SHOWN, by="title")
    assert judged == chain


@pytest.mark.parametrize(
    ("text", "chain"),
    [
        ("His mentor is a moth [4]. It has 81 95 [2]. The answer is: 81 95", Chain("none", True, None, 2)),
        ("All of it [2, 4]: 81 95. The answer is: 81 95", Chain("none", True, None, 2)),
        ("His mentor is a zebra [4, 1]. The answer is: 66 53", Chain("retrieval", False, 0, 1)),
        ("His mentor is [9]. The answer is: 1", Chain("retrieval", False, None, 0)),
    ],
)
def test_judge_chain_finds_the_first_failed_step_by_numbers(text: str, chain: Chain) -> None:
    assert judge_chain(text, correct=chain.correct, answers=("81 95",), shown=SHOWN, by="number") == chain


@pytest.mark.parametrize(
    ("answer", "reasoning", "failed"),
    [
        ("yes", "Both are codes", "none"),  # a judgment, which the reasoning need not contain
        ("no", "They are known in the north", "none"),
        ("No", "", "none"),
        ("81", "The code is 81 95", "none"),
        ("81", "The code is 181", "reasoning"),  # not within another number
        ("81", "The code is 3.81", "reasoning"),
        ("381", "It has 1,381 people", "reasoning"),
        ("81", "The code is 81.", "none"),
        ("Kim", "It is Kim's code", "none"),
        ("曹雪芹", "作者是曹雪芹", "none"),  # words are not separated
        ("曹雪芹", "作者是鲁迅", "reasoning"),
    ],
)
def test_judge_chain_looks_for_facts_in_the_reasoning_as_whole_words(answer: str, reasoning: str, failed: str) -> None:
    text = f"His mentor is a moth [4]. {reasoning} [2]. The answer is: {answer}"
    chain = judge_chain(text, correct=True, answers=(answer,), shown=SHOWN, by="number")
    assert chain is not None
    assert chain.failed == failed


def test_judge_chain_reads_no_number_of_thousands_of_digits() -> None:
    """Python 3.11 refuses to convert one."""
    text = f"His mentor is a moth [{'4' * 5000}]. The answer is: 1"
    assert judge_chain(text, correct=False, answers=("1",), shown=SHOWN, by="number") == Chain(
        "retrieval", False, None, 0
    )


@pytest.mark.parametrize("title", ["Dark Viper", "", "The"])
def test_judge_chain_cannot_judge_equal_or_missing_titles(title: str) -> None:
    shown = (*SHOWN, Document(title, "Another."))
    assert judge_chain(RIGHT, correct=True, answers=("81 95",), shown=shown, by="title") is None


def test_summarize_chains_ratios_by_group() -> None:
    chains = [
        ("a", "connected", Chain("none", True, None, 2)),
        ("a", "reversed", Chain("retrieval", True, 3, 1)),
        ("b", "connected", Chain("answer", False, None, 2)),
        ("b", "reversed", Chain("retrieval", False, None, 0)),
    ]
    summary = summarize_chains(chains, documents=4, seed=0)
    assert {step: summary["overall"][step]["value"] for step in ("retrieval", "reasoning", "answer", "none")} == {
        "retrieval": 0.5,
        "reasoning": 0,
        "answer": 0.25,
        "none": 0.25,
    }
    assert summary["overall"]["correct_in_spite_of_a_failed_step"] == 0.25
    assert summary["by_group"]["reversed"]["retrieval"]["value"] == 1
    assert summary["by_group"]["connected"]["retrieval"]["value"] == 0
    assert summary["retrieval_failed_after_golds"] == {"0": 1, "1": 1}
    assert summary["first_wrong_document_by_slot"] == [0, 0, 0, 1]
    low, high = summary["overall"]["none"]["ci95"]
    assert low < 0.25 < high
