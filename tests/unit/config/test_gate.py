from pos2distill.config.gate import NO_GATE, Gate


def test_gate_options_words_are_those_of_the_command_line() -> None:
    gate = Gate(gap_above=5.0, mean_below=0.5, drop_above=2.0, baseline="s3://b/x=1")
    assert gate.words() == [
        "--fail-if-gap-above=5",
        "--fail-if-mean-below=0.5",
        "--fail-if-drop-above=2",
        "--baseline=s3://b/x=1",
    ]
    assert Gate(mean_below=0.0).words() == ["--fail-if-mean-below=0"]
    assert NO_GATE.words() == []


def test_gate_options_given_has_no_option_without_a_value() -> None:
    assert Gate(drop_above=2.0, baseline="/runs/x").given() == {
        "--fail-if-drop-above": "2",
        "--baseline": "/runs/x",
    }
