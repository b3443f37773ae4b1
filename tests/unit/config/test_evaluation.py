import re
from collections.abc import Callable

import pytest

from pos2distill.config import (
    Recipe,
    Study,
)
from pos2distill.errors import UserError


def test_retriever_ranks_are_those_of_one_document(load: Callable[..., Recipe]) -> None:
    with pytest.raises(UserError, match=r"retriever_ranks: only for one gold document"):
        load("data.hops=[2]", "data.format=musique", "evaluation.retriever_ranks=[1]")


@pytest.mark.parametrize(
    ("settings", "documents", "golds", "available"),
    [
        (["data.documents=2", "method.k=1"], 2, 1, 1),
        (["data.documents=4", "method.k=1"], 4, 1, 6),
        (["evaluation.other_documents=[3]"], 3, 1, 2),
        (["data.documents=6", "data.hops=[2,4]", "data.format=musique"], 6, 4, 2),
    ],
)
def test_distractor_orders_exist(
    load: Callable[..., Recipe], settings: list[str], documents: int, golds: int, available: int
) -> None:
    """Otherwise some would be equal, and the fraction of questions that an order breaks too low."""
    load(*settings, f"evaluation.distractor_orders={available}")
    message = (
        f"evaluation.distractor_orders: {available + 1} orders, but {documents} documents, {golds} of them gold, "
        f"have {available}; lower it"
    )
    with pytest.raises(UserError, match=re.escape(message) + "$"):
        load(*settings, f"evaluation.distractor_orders={available + 1}")


def test_evaluation_default_slots_depend_on_hops(load: Callable[..., Recipe]) -> None:
    one, two = load().study, load("data.format=musique", "data.hops=[2]").study
    assert (one.evaluation.slots, one.evaluation.other_slots) == ("all", 10)
    assert (two.evaluation.slots, two.evaluation.other_slots) == ("pairs", "pairs")
    null = load("data.format=musique", "data.hops=[2]", "evaluation.slots=null").study
    assert null.evaluation == two.evaluation


def test_evaluation_rejects_fewer_slots_than_hops(load: Callable[..., Recipe]) -> None:
    with pytest.raises(UserError, match=r"evaluation.slots: 1 slots cannot hold 2 gold documents"):
        load("data.format=musique", "data.hops=[2]", "evaluation.slots=1")
    with pytest.raises(UserError, match=r"evaluation.other_documents: 4 leaves no distractor"):
        load("data.format=musique", "data.hops=[4]", "evaluation.other_documents=[4]")


def test_evaluation_default_slots_are_at_most_those_available(load: Callable[..., Recipe]) -> None:
    study = load("data.documents=8", "method.advantageous_slot=auto", "evaluation.other_documents=[6]").study
    assert (study.method.auto_slots, study.evaluation.other_slots) == (8, 6)
    assert Study.model_validate(study.model_dump()) == study  # what a dry run shows is a recipe
