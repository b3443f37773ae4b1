import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOY = Path(__file__).parents[3] / "examples" / "toy"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The toy's `task` module; its folder is no package."""
    monkeypatch.syspath_prepend(TOY)
    return importlib.import_module("task")


@pytest.fixture
def rows(toy: ModuleType) -> list[dict[str, Any]]:
    return [toy.make_two_hop_example(seed=0, index=index, documents=40) for index in range(50)]


def words_after(text: str, beginning: str) -> str:
    assert text.startswith(beginning), text
    return text.removeprefix(beginning).removesuffix(" .")


def test_the_chain_leads_from_question_to_answer(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        subject = words_after(row["question"], "what is the code of the mentor of ").removesuffix(" ?")
        first, second = (document for document in row["documents"] if document["gold"])
        mentor = words_after(first["text"], f"The mentor of {subject} is ")
        assert [words_after(second["text"], f"The code of {mentor} is ")] == row["answers"]
        assert (first["title"], second["title"]) == (subject, mentor)


def test_gold_documents_come_first_and_alone_carry_their_hop(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert [document["gold"] for document in row["documents"]] == [True, True] + [False] * 38
        assert [document.get("hop") for document in row["documents"]] == [1, 2] + [None] * 38


def test_no_document_or_question_occurs_twice(rows: list[dict[str, Any]]) -> None:
    assert len({row["question"] for row in rows}) == len(rows)
    for row in rows:
        adjectives, animals = zip(*(document["title"].split() for document in row["documents"]), strict=True)
        assert len(set(adjectives)) == len(set(animals)) == 40
        assert sum(row["answers"][0] in document["text"] for document in row["documents"]) == 1


@pytest.mark.parametrize("shown", [10, 20, 30, 40])
def test_a_prompt_of_whole_blocks_holds_complete_chains(rows: list[dict[str, Any]], shown: int) -> None:
    for row in rows:
        texts = [document["text"] for document in row["documents"][:shown]]
        mentors = {words_after(text.split(" is ")[1], "") for text in texts if "mentor" in text}
        assert len(mentors) == shown // 2
        assert mentors == {text.split(" is ")[0].removeprefix("The code of ") for text in texts if "code" in text}


def test_gold_documents_go_to_their_slots(toy: ModuleType, rows: list[dict[str, Any]]) -> None:
    first, second, *others = rows[0]["documents"]
    for slots in ((38, 39), (0, 1), (1, 0), (5, 30), (39, 0)):
        shown = toy.gold_at(rows[0]["documents"], *slots)
        assert (shown[slots[0]], shown[slots[1]]) == (first, second)
        assert [document for document in shown if not document["gold"]] == others


def test_the_right_response_says_both_sentences_and_the_answer(toy: ModuleType, rows: list[dict[str, Any]]) -> None:
    first, second, *_ = rows[0]["documents"]
    wanted = f"{first['text']} {second['text']} The answer is: {rows[0]['answers'][0]}"
    assert toy.response(rows[0]) == wanted


def test_chains_need_an_even_number_of_documents(toy: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"must be even .* got 7"):
        toy.make_two_hop_example(seed=0, index=0, documents=7)


def test_the_bases_know_the_words_that_the_task_writes(toy: ModuleType) -> None:
    for base, vocabulary in (("base", toy.VOCABULARY), ("two_hop_base", toy.TWO_HOP_VOCABULARY)):
        known = json.loads((TOY / base / "tokenizer.json").read_text())["model"]["vocab"]
        assert known == {word: place for place, word in enumerate(vocabulary)}


@pytest.mark.parametrize("kind", ["one hop", "mixed", "two hops"])
def test_a_training_sequence_asks_about_its_own_documents(toy: ModuleType, kind: str) -> None:
    import torch

    batches = importlib.import_module("batches")

    ids_BT, weight_BT = batches.training_batch(
        4, 8, 3, copy_weight=0.5, generator=torch.Generator().manual_seed(0), kind=kind
    )
    assert ids_BT.shape == weight_BT.shape == (4, batches.sequence_length(8, 3, kind))
    for ids in ids_BT:
        context, *turns = " ".join(toy.TWO_HOP_VOCABULARY[index] for index in ids).split(" Question: ")
        assert len(turns) == 3
        for turn in turns:
            question, answer = turn.split(" <|end|>")[0].split(" ? <|assistant|> ")
            sentences = [f"{part} ." for part in answer.split(" The answer is:")[0].removesuffix(" .").split(" . ")]
            assert all(sentence in context for sentence in sentences), answer
            assert question.split()[-2:] == sentences[0].split()[3:5]
            if kind == "two hops":
                assert sentences[0].split()[-3:-1] == sentences[1].split()[3:5]
                assert answer.split()[-2:] == sentences[1].split()[-3:-1]
