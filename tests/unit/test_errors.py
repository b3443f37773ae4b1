import pytest

from pos2distill.errors import (
    MESSAGE_LENGTH,
    ExitCode,
    TransientError,
    collapse_whitespace,
    did_you_mean,
    one_line,
    reworded,
    status_name,
)


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


def test_reworded_replaces_the_message_alone() -> None:
    error = TransientError("no answer")
    with pytest.raises(TransientError) as raised, reworded(lambda message: f"data.path: {message}"):
        raise error from OSError("timeout")
    assert raised.value is error
    assert str(error) == "data.path: no answer"
    assert isinstance(error.__cause__, OSError)


def test_collapse_whitespace_gives_one_line() -> None:
    assert collapse_whitespace(ValueError("a\n\t b ")) == "a b"
    assert collapse_whitespace("a  b c", 3) == "a b"


def test_one_line_is_short_and_printable() -> None:
    assert one_line("a\nb\u2028c \x1b[31m") == "a b c ?[31m"
    assert one_line("x" * 100_000) == "x" * MESSAGE_LENGTH + "…"


@pytest.mark.parametrize(
    ("exit_code", "status"),
    [
        (ExitCode.SUCCESS, "succeeded"),
        (ExitCode.FAILED, "failed"),
        (ExitCode.USER_ERROR, "failed"),
        (ExitCode.STOPPED, "stopped"),
        (ExitCode.INTERRUPTED, "running"),
        (137, "failed"),
    ],
)
def test_status_name_of_every_exit_code(exit_code: int, status: str) -> None:
    assert status_name(exit_code) == status
