from typing import Any, Literal

import pytest

from pos2distill.config import ModelSection
from pos2distill.tasks.metrics import (
    compared_text,
    describe_metric,
    exact_match,
    f1,
    first_line,
    normalize,
    parse_answer,
    score,
    sub_exact_match,
)
from tests.support.reports import STUDY


@pytest.mark.parametrize(
    ("settings", "decoding"),
    [
        ({"engine": "hf"}, "greedy"),
        ({"engine": "hf", "extra_body": {"temperature": 1}}, "greedy"),  # which is not sent
        ({"engine": "openai", "extra_body": {"temperature": 1}}, "sampled"),
        ({"engine": "openai", "extra_body": {"temperature": None}}, "sampled"),
        ({"engine": "openai", "extra_body": {"temperature": 0}}, "greedy"),
        ({"engine": "openai"}, "greedy"),
    ],
)
def test_describe_metric_says_how_answers_are_decoded(settings: dict[str, Any], decoding: str) -> None:
    study = STUDY.model_copy(update={"model": ModelSection.model_validate({"path": "m", **settings})})
    assert describe_metric(study) == f"sub-EM of the first line, SQuAD normalization, {decoding}"


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Quick, brown\tFOX!", "quick brown fox"),
        ("a theatre an antenna", "theatre antenna"),  # articles go, words that hold them stay
        ("U.S.A.", "usa"),
        ("Élan à la Carte", "élan à la carte"),
        ("ΣΊΣΥΦΟΣ, Straße", "σίσυφος straße"),
        ("Mu\u0308ller, Ele\u0301a", "müller eléa"),  # as of a PDF: letters and combining marks
        ("the -- a", ""),
        ("\u201cParis\u201d.", "paris"),
        ("«Париж»", "париж"),
        ("北京。", "北京"),
        ("1939\u20131945, O\u2019Brien", "19391945 obrien"),  # as with a hyphen and an apostrophe
        ("5 € + ½", "5 € ½"),  # of symbols only those of ASCII, as in SQuAD's script
    ],
)
def test_normalize(text: str, normal: str) -> None:
    assert normalize(text) == normal


def test_first_line() -> None:
    assert first_line("  Paris \nLondon\nRome") == "Paris"
    assert first_line("\n \nParis\nRome") == "Paris"
    assert first_line(" \n") == ""
    assert first_line("Paris") == "Paris"


@pytest.mark.parametrize(
    ("text", "answers", "right"),
    [
        ("It was the Beatles, I think.", ["Beatles"], True),
        ("it was beatles", ["The Beatles!"], True),
        ("Marie Curie", ["Pierre Curie", "Curie"], True),
        ("Marie", ["Marie Curie"], False),
        ("", ["x"], False),
        ("1,914", ["1914"], True),
        ("anything", ["*"], False),
        ("anything", ["*", "thing"], True),
    ],
)
def test_sub_exact_match(text: str, answers: list[str], right: bool) -> None:
    assert sub_exact_match(text, answers) is right


@pytest.mark.parametrize(
    ("text", "answers", "right"),
    [
        ("Sure!\nThe value is 8F2E-a1.", ["8f2e-A1"], True),
        ("8f2e a1", ["8f2e-a1"], False),  # nothing is normalized
        ("anything", [""], False),
    ],
)
def test_substring_judges_the_whole_text_in_lower_case(text: str, answers: list[str], right: bool) -> None:
    assert score("substring", text, answers)[0] is right


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is: Paris", "Paris"),
        ("the ANSWER is Paris.", "Paris."),
        ("The answer is：巴黎", "巴黎"),  # a full-width colon
        ("List: a, b.\nSo the answer is: G. Stanley Hall. \nI am sure.", "G. Stanley Hall."),
        ("It follows that the answer is:\n\n  Paris  \nRome", "Paris"),  # said on the next line with text
        ("The answer is: Paris. No, the answer is: Rome.", "Paris. No, the answer is: Rome."),
        ("The answer is: Paris\nThe answer is: Rome", "Paris"),  # the first counts
        ("From [2] the answer is clear: Lyon.\nThe answer is : Paris", "Paris"),  # said in passing, without a colon
        ("The answer is: Paris\r\nDone", "Paris"),
        ("The answer is:", ""),
        ("The answer is \n ", ""),
        ("The answer: Paris", None),
        ("The answers are: Paris", None),
        ("", None),
    ],
)
def test_parse_answer(text: str, answer: str | None) -> None:
    assert parse_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answers", "right"),
    [
        ("The Beatles.", ["beatles"], True),
        ("Beatles, the", ["The Beatles"], True),
        ("the Beatles of Liverpool", ["The Beatles"], False),
        ("G. Stanley Hall", ["Granville Hall", "Stanley Hall", "G Stanley Hall"], True),  # an alias
        ("ÉLAN", ["élan"], True),
        ("elan", ["élan"], False),
        ("1,914", ["1914"], True),
        ("", ["x"], False),
        ("", [""], False),
        ("The", ["*"], False),  # nothing equals nothing, which is not an answer
        ("Paris", [], False),
    ],
)
def test_exact_match(text: str, answers: list[str], right: bool) -> None:
    assert exact_match(text, answers) is right


@pytest.mark.parametrize(
    ("text", "answers", "value"),
    [
        ("The Beatles!", ["beatles"], 1.0),
        ("stanley hall", ["G. Stanley Hall"], 2 * 2 / (2 + 3)),
        ("it is in Paris, France", ["Paris"], 2 * 1 / (5 + 1)),
        ("it is in Paris, France", ["Paris", "Paris in France", "Rome"], 2 * 3 / (5 + 3)),  # the best of them
        ("new new york", ["New York"], 2 * 2 / (3 + 2)),  # a word counts as often as both have it
        ("new york", ["new new york"], 2 * 2 / (2 + 3)),
        ("größe der stadt", ["Größe"], 2 * 1 / (3 + 1)),
        ("Rome", ["Paris"], 0.0),
        ("", ["Paris"], 0.0),
        ("the", ["a"], 0.0),
        ("Paris", [""], 0.0),
        ("Paris", [], 0.0),
    ],
)
def test_f1(text: str, answers: list[str], value: float) -> None:
    assert f1(text, answers) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("metric", "text", "scored"),
    [
        ("sub_em", "It is Paris.\nNo idea.", (True, 0.5)),  # it is paris: 2 * 1 / (3 + 1)
        ("sub_em", "No idea.\nIt is Paris.", (False, 0.0)),
        ("sub_em", "", (False, 0.0)),
        ("em", "Paris is a city.\nThe answer is: Paris.", (True, 1.0)),
        ("em", "The answer is: Paris, France", (False, 2 / 3)),
        ("em", "Paris", (False, 0.0)),  # does not say that it is the answer
        ("em", "The answer is:", (False, 0.0)),
        ("em", "", (False, 0.0)),
    ],
)
def test_score(metric: Literal["sub_em", "em"], text: str, scored: tuple[bool, float]) -> None:
    correct, value = score(metric, text, ["London town", "Paris"])
    assert correct == scored[0]
    assert value == pytest.approx(scored[1], abs=1e-12)


@pytest.mark.parametrize("metric", ["sub_em", "substring", "em"])
def test_score_leaves_out_the_thought(metric: Literal["sub_em", "substring", "em"]) -> None:
    right, wrong = "The answer is: Paris", "The answer is: Rome"
    assert score(metric, f"<think>\n{wrong}\n</think>\n\n{right}\n{wrong}", ["Paris"])[0]
    assert score(metric, f"<think>\n{right}\n</think>\n\n{wrong}", ["Paris"])[0] is False
    assert score(metric, f"<think>\n{right}", ["Paris"]) == (False, 0.0)
    assert compared_text("em", f"<think>{wrong}</think>{right}") == "Paris"
