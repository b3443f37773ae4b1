import pytest

from pos2distill.evaluation.formatting import code_span, format_estimate, format_gap, format_interval, format_lower


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.25, 3, "0.250"),
        (0.0, 3, "0.000"),
        (1e-6, 3, "above 0"),
        (0.0004, 3, "above 0"),
        (0.0006, 3, "0.001"),
        (-0.0004, 3, "0.000"),
        (-0.0006, 3, "-0.001"),
        (0.04, 1, "above 0"),
        (0.06, 1, "0.1"),
    ],
)
def test_format_lower_says_where_an_end_above_0_rounds_to_0(value: float, digits: int, text: str) -> None:
    assert format_lower(value, digits) == text


def test_format_interval_estimate_and_gap() -> None:
    assert format_interval((0.25, 0.45)) == "[0.250, 0.450]"
    assert format_interval((0.0, 0.45)) == "[0.000, 0.450]"
    assert format_interval((1e-6, 0.45)) == "[above 0, 0.450]"
    assert format_estimate(0.35, (0.25, 0.45)) == "0.350 [0.250, 0.450]"
    assert format_gap(0.35, (0.25, 0.45), 0.33) == "0.350 [0.250, 0.450], corrected 0.330"
    assert format_gap(0.35, (1e-6, 0.45), -0.01) == "0.350 [above 0, 0.450], corrected -0.010"


def test_format_gap_has_no_sign_at_values_that_round_to_0() -> None:
    assert format_gap(-0.0, (-0.0004, -0.0001), -0.0004) == "0.000 [0.000, 0.000], corrected 0.000"


@pytest.mark.parametrize(
    ("text", "span"),
    [("a *b* <c>", "`a *b* <c>`"), ("`a`", "`` `a` ``"), ("a `` b", "``` a `` b ```")],
)
def test_code_span_ends_where_the_text_does(text: str, span: str) -> None:
    assert code_span(text) == span
