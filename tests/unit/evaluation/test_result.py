import pytest

from pos2distill.config import EndpointSection
from pos2distill.evaluation.result import Picture, to_evaluation
from pos2distill.records import REFUSAL_SCHEMA
from tests.support.predictions import predictions
from tests.support.reports import STUDY


@pytest.mark.parametrize(
    ("counts", "cost"),
    [
        ({"prompt_tokens": 480, "answer_tokens": 12}, (2 * 480 + 5 * 12) / 1e6),
        ({"prompt_tokens": 480}, None),
        ({"answer_tokens": 12}, None),
        ({}, None),
    ],
)
def test_to_evaluation_has_a_cost_only_with_both_counts(counts: dict[str, int], cost: float | None) -> None:
    study = STUDY.model_copy(update={"data": STUDY.data.model_copy(update={"documents": 3})})
    prices = EndpointSection(price_input=2, price_output=5)
    table = predictions(3, [[True, False, True]] * 2)
    refused = REFUSAL_SCHEMA.empty_table()
    assert to_evaluation(study, "models/tiny", table, refused, counts, prices, "0123456789abcdef").cost == cost


def test_picture_is_printed_without_its_bytes() -> None:
    assert repr(Picture(b"PNG" * 1000)) == "Picture()"


def test_evaluation_is_printed_in_a_line() -> None:
    study = STUDY.model_copy(update={"data": STUDY.data.model_copy(update={"documents": 3})})
    table = predictions(3, [[True, False, True]] * 2)
    refused = REFUSAL_SCHEMA.empty_table()
    shown = str(to_evaluation(study, "models/tiny", table, refused, {}, EndpointSection(), "0123456789abcdef"))
    assert shown.startswith("<Evaluation of models/tiny on d: mean 0.667. Accuracy at position 2 of 3 is 100 points")
    assert "\n" not in shown
