import pytest

from pos2distill.errors import did_you_mean


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
