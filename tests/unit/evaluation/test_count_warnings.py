import pytest

from pos2distill.evaluation.count_warnings import (
    count_warnings,
    distractor_warning,
    refusal_warning,
    search_warning,
    shortage_warning,
    thought_warning,
    truncation_warning,
)


def test_refusal_warning_counts_questions() -> None:
    assert refusal_warning({"examples": 300, "prompts": 1500}) is None
    assert refusal_warning({"examples": 300, "refused": 2, "prompts": 1490}) == (
        "2 of 300 questions are left out at every position, since the server refused one of their prompts for its "
        "content; refused.parquet beside the answers has its reasons"
    )


@pytest.mark.parametrize(
    ("counts", "warning"),
    [
        (
            {"prompts": 20, "hit_max_tokens": 3},
            "3 of 20 answers were cut at evaluation.max_new_tokens; raise it if they ",
        ),
        (
            {"sampled": 10, "kept": 9, "hit_max_tokens": 2},
            "2 of 10 answers were cut at sampling.max_new_tokens; raise ",
        ),
        ({"prompts": 20, "hit_max_tokens": 2}, None),  # exactly a tenth
        ({"rows": 5}, None),
    ],
)
def test_truncation_warning_above_a_tenth_of_the_answers(counts: dict[str, int], warning: str | None) -> None:
    actual = truncation_warning(counts)
    if warning is None:
        assert actual is None
    else:
        assert actual is not None
        assert actual.startswith(warning)


def test_thought_warning_above_a_tenth_of_the_answers() -> None:
    off = ", or switch thinking off, in many models by model.chat_template_kwargs={enable_thinking: false}"
    assert thought_warning({"prompts": 20, "thoughts": 3, "unfinished_thoughts": 2}) == (
        "3 of 20 answers begin with a thought (<think>), of which 2 do not end, so that the answer is wrong; raise "
        f"evaluation.max_new_tokens{off}"
    )
    counts = {"sampled": 20, "kept": 20, "thoughts": 20}
    assert thought_warning(counts) == (
        "20 of 20 answers begin with a thought (<think>), which is not judged; leave room for it in "
        f"sampling.max_new_tokens{off}"
    )
    assert count_warnings(counts) == [thought_warning(counts)]
    assert thought_warning({"prompts": 20, "thoughts": 2, "unfinished_thoughts": 2}) is None
    assert thought_warning({"rows": 5}) is None


def test_shortage_warning_if_fewer_are_kept_than_wanted() -> None:
    counts = {"wanted": 300, "sampled": 600, "kept": 207}
    assert shortage_warning(counts) == (
        "207 of 300 wanted samples were kept after all 600 candidates had been sampled; raise data.train_candidates, "
        "give more data, lower data.train_examples, or try another slot or model"
    )
    assert shortage_warning(counts | {"kept": 300}) is None
    assert shortage_warning({"prompts": 20}) is None


def test_search_warning_if_most_candidates_answer_nothing() -> None:
    counts = {"candidates": 12, "without_right_answers": 7, "examples": 20, "prompts": 720}
    line = (
        "7 of 12 candidates answer nothing right, so that few could be compared; lower inference.search.largest, or "
        "increase inference.search.population"
    )
    assert search_warning(counts) == line
    assert count_warnings(counts) == [line]
    assert search_warning(counts | {"without_right_answers": 6}) is None
    assert search_warning({"prompts": 20}) is None


def test_distractor_warning_names_the_questions() -> None:
    assert distractor_warning({"eval": 20, "answer_in_distractor": 2}) is None
    assert distractor_warning({"eval": 20, "answer_in_distractor": 3}) == (
        "3 of 20 evaluated questions have an answer in a document that is not marked as gold, where a model finds it "
        "at every position of the gold one; leave such documents out of the data"
    )
    assert distractor_warning({"prompts": 20}) is None
