import pytest

from pos2distill.evaluation.count_warnings import count_warnings, distractor_warning


def test_count_warnings_of_refused_questions() -> None:
    assert count_warnings({"examples": 300, "prompts": 1500}) == []
    assert count_warnings({"examples": 300, "refused": 2, "prompts": 1490}) == [
        "2 of 300 questions are left out at every position, since the server refused one of their prompts for its "
        "content; refused.parquet beside the answers has its reasons"
    ]


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
def test_count_warnings_of_truncation_above_a_tenth_of_the_answers(counts: dict[str, int], warning: str | None) -> None:
    actual = count_warnings(counts)
    if warning is None:
        assert actual == []
    else:
        assert len(actual) == 1
        assert actual[0].startswith(warning)


def test_count_warnings_of_thoughts_above_a_tenth_of_the_answers() -> None:
    off = ", or switch thinking off, in many models by model.chat_template_kwargs={enable_thinking: false}"
    assert count_warnings({"prompts": 20, "thoughts": 3, "unfinished_thoughts": 2}) == [
        "3 of 20 answers begin with a thought (<think>), of which 2 do not end, so that the answer is wrong; raise "
        f"evaluation.max_new_tokens{off}"
    ]
    counts = {"sampled": 20, "kept": 20, "thoughts": 20}
    assert count_warnings(counts) == [
        "20 of 20 answers begin with a thought (<think>), which is not judged; leave room for it in "
        f"sampling.max_new_tokens{off}"
    ]
    assert count_warnings({"prompts": 20, "thoughts": 2, "unfinished_thoughts": 2}) == []
    assert count_warnings({"rows": 5}) == []


def test_count_warnings_of_a_shortage_if_fewer_are_kept_than_wanted() -> None:
    counts = {"wanted": 300, "sampled": 600, "kept": 207}
    assert count_warnings(counts) == [
        "207 of 300 wanted samples were kept after all 600 candidates had been sampled; raise data.train_candidates, "
        "give more data, lower data.train_examples, or try another slot or model"
    ]
    assert count_warnings(counts | {"kept": 300}) == []
    assert count_warnings({"prompts": 20}) == []


def test_count_warnings_of_a_search_if_most_candidates_answer_nothing() -> None:
    counts = {"candidates": 12, "without_correct_answers": 7, "examples": 20, "prompts": 720}
    line = (
        "7 of 12 candidates give no correct answer, so that few could be compared; lower inference.search.largest, or "
        "increase inference.search.population"
    )
    assert count_warnings(counts) == [line]
    assert count_warnings(counts | {"without_correct_answers": 6}) == []
    assert count_warnings({"prompts": 20}) == []


def test_distractor_warning_names_the_questions() -> None:
    assert distractor_warning({"eval": 20, "answer_in_distractor": 2}) is None
    assert distractor_warning({"eval": 20, "answer_in_distractor": 3}) == (
        "3 of 20 evaluated questions have an answer in a document that is not marked as gold, where a model finds it "
        "at every position of the gold one; leave such documents out of the data"
    )
    assert distractor_warning({"prompts": 20}) is None
    assert count_warnings({"eval": 20, "answer_in_distractor": 3}) == [
        distractor_warning({"eval": 20, "answer_in_distractor": 3})
    ]
