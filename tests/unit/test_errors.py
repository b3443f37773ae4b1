import pytest

from pos2distill.errors import MESSAGE_LENGTH, did_you_mean, one_line


@pytest.mark.parametrize(
    ("name", "options", "hint"),
    [
        ("lerning_rate", ["learning_rate", "epochs"], "; did you mean 'learning_rate'?"),
        ("zzz", ["beta", "alpha"], "; expected one of: alpha, beta"),
        ("zzz", [], ""),
    ],
)
def test_did_you_mean(name: str, options: list[str], hint: str) -> None:
    assert did_you_mean(name, options) == hint


def test_one_line_is_short_and_printable() -> None:
    assert one_line("a\nb\u2028c \x1b[31m") == "a b c ?[31m"
    assert one_line("x" * 100_000) == "x" * MESSAGE_LENGTH + "…"
