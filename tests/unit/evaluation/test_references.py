"""Accuracy without documents and with the gold documents alone."""

import pyarrow as pa
import pytest

from pos2distill.evaluation.references import compare_references, summarize_references
from tests.support.predictions import predictions
from tests.support.reports import STUDY, with_evaluation

ASKED = with_evaluation(STUDY, reference_prompts=True)


def table(closed_book: list[int], gold_alone: list[int]) -> pa.Table:
    """Answers of the questions `e0`, ... to both kinds of prompts and at the three positions of a longer prompt."""
    alone = predictions(1, [[right] for right in gold_alone])
    without = predictions(0, [[right] for right in closed_book], slots=[()])
    by_position = predictions(3, [[1, 1, 1]] * len(closed_book))
    return pa.concat_tables([by_position, alone, without])


def test_references_are_no_answers_of_other_prompts() -> None:
    summary = summarize_references(table([0, 0, 0, 1], [1, 1, 0, 1]), ASKED)
    assert summary is not None
    assert (summary["closed_book"]["accuracy"], summary["gold_alone"]["accuracy"]) == (0.25, 0.75)
    # 3 of 4: Wilson's lower end, and Poisson's for one that is wrong.
    assert summary["gold_alone"]["ci95"] == pytest.approx((0.3006, 0.9872), abs=1e-4)
    assert summary["gold_alone"]["cut"] == 0.0


def test_references_of_several_hops_have_as_many_documents_as_an_example_has_hops() -> None:
    study = ASKED.model_copy(update={"data": STUDY.data.model_copy(update={"hops": (2, 3)})})
    # One question of two hops, which is right, and two of three hops.
    alone = [predictions(2, [[1]], slots=[(0, 1)]), predictions(3, [[0], [0], [0]], slots=[(0, 1, 2)])[1:]]
    summary = summarize_references(pa.concat_tables([predictions(0, [[0]] * 3, slots=[()]), *alone]), study)
    assert summary is not None
    assert summary["gold_alone"]["accuracy"] == pytest.approx(1 / 3)


def test_references_of_two_models_are_paired_by_question() -> None:
    before = table([0, 0], [1, 0])
    # In another order: answers arrive as they come.
    after = table([0, 0], [1, 1])[::-1]
    compared = compare_references(before, after, ASKED)
    assert compared is not None
    alone = compared["gold_alone"]
    assert (alone["base"]["accuracy"], alone["distilled"]["accuracy"]) == (0.5, 1.0)
    assert alone["paired"]["mean_difference"] == 0.5
    # Both questions of the other kind differ by 0: as wide as what 0 of 2 leave open.
    low, high = compared["closed_book"]["paired"]["ci95"]
    assert low == -high < 0


def test_there_are_no_references_unless_they_are_asked_for() -> None:
    answers = table([0], [1])
    assert summarize_references(answers, STUDY) is None
    assert compare_references(answers, answers, STUDY) is None
