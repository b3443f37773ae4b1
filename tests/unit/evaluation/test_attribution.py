import pytest

from pos2distill.config.data import Metric
from pos2distill.evaluation.attribution import Attribution, summarize_attribution
from pos2distill.records import Document

SHOWN = (
    Document("Dark Viper", "The code of Dark Viper is 87 57 .", 0),
    Document("Young Owl", "The code of Young Owl is 12 96 ."),
    Document("Old Owl", "Its code is 12, and 57 or 96 is that of others."),
    Document("Pale Fox", "It is 40."),
)
QUESTION = "what is the code of Dark Viper ?"


@pytest.mark.parametrize(
    ("text", "metric", "slots"),
    [
        ("The code of Dark Viper is 40 .", "sub_em", [3]),
        ("12 96\nand a second line with 40", "sub_em", [1, 2]),  # the first line alone, as the metric
        ("The code of Dark Viper is 87 .", "sub_em", [0]),
        ("Young Owl", "sub_em", [1]),  # a title
        ("The code of Dark Viper is 99 .", "sub_em", []),
        ("What is the code of Dark Viper?", "sub_em", []),  # nothing but the question
        ("", "sub_em", []),
        ("It may be 12 96. The answer is: 40", "em", [3]),
        ("It is:\nPale Fox, 40", "substring", [3]),
        ("40", "em", []),  # no conclusion
        ("1", "sub_em", []),  # not a whole word
    ],
)
def test_attribution_by_hand(text: str, metric: Metric, slots: list[int]) -> None:
    assert Attribution(QUESTION, metric, SHOWN)(text) == slots


def test_summarize_attribution_counts_every_wrong_answer_once() -> None:
    wrong = [((0,), [3]), ((0,), [1]), ((2,), [3]), ((0,), [0]), ((0,), [1, 2]), ((0,), [])]
    summary = summarize_attribution(wrong, documents=4)
    assert summary == {
        "wrong": 6,
        "one_document": 3,
        "gold_document": 1,
        "several_documents": 1,
        "no_document": 1,
        "by_slot": [0, 1, 0, 2],
        "median_distance_to_gold": 1,
    }
    assert summarize_attribution([], documents=2)["median_distance_to_gold"] is None
