import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOY = Path(__file__).parents[3] / "examples" / "toy"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The toy's `task` module. Its folder is not a package."""
    monkeypatch.syspath_prepend(TOY)
    return importlib.import_module("task")


@pytest.fixture
def rows(toy: ModuleType) -> list[dict[str, Any]]:
    return [toy.make_two_hop_example(seed=0, index=index, documents=40) for index in range(50)]


def words_after(text: str, beginning: str) -> str:
    assert text.startswith(beginning), text
    return text.removeprefix(beginning).removesuffix(" .")


def test_make_two_hop_example_chain_leads_to_the_answer(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        subject = words_after(row["question"], "what is the code of the mentor of ").removesuffix(" ?")
        first, second = (document for document in row["documents"] if document["gold"])
        mentor = words_after(first["text"], f"The mentor of {subject} is ")
        assert [words_after(second["text"], f"The code of {mentor} is ")] == row["answers"]
        assert (first["title"], second["title"]) == (subject, mentor)


def test_make_two_hop_example_gold_documents_come_first(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert [document["gold"] for document in row["documents"]] == [True, True] + [False] * 38
        assert [document.get("hop") for document in row["documents"]] == [1, 2] + [None] * 38


def test_make_two_hop_example_has_no_duplicates(rows: list[dict[str, Any]]) -> None:
    assert len({row["question"] for row in rows}) == len(rows)
    for row in rows:
        adjectives, animals = zip(*(document["title"].split() for document in row["documents"]), strict=True)
        assert len(set(adjectives)) == len(set(animals)) == 40
        assert sum(row["answers"][0] in document["text"] for document in row["documents"]) == 1


@pytest.mark.parametrize("shown", [10, 20, 30, 40])
def test_make_two_hop_example_blocks_contain_complete_chains(rows: list[dict[str, Any]], shown: int) -> None:
    for row in rows:
        texts = [document["text"] for document in row["documents"][:shown]]
        mentors = {words_after(text.split(" is ")[1], "") for text in texts if "mentor" in text}
        assert len(mentors) == shown // 2
        assert mentors == {text.split(" is ")[0].removeprefix("The code of ") for text in texts if "code" in text}


def test_make_two_hop_example_refuses_an_odd_number_of_documents(toy: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"must be even .* got 7"):
        toy.make_two_hop_example(seed=0, index=0, documents=7)


def test_vocabulary_equals_the_shipped_tokenizers(toy: ModuleType) -> None:
    for base, vocabulary in (("base", toy.VOCABULARY), ("two_hop_base", toy.TWO_HOP_VOCABULARY)):
        known = json.loads((TOY / base / "tokenizer.json").read_text())["model"]["vocab"]
        assert known == {word: index for index, word in enumerate(vocabulary)}


@pytest.mark.parametrize("kind", ["one hop", "mixed", "two hops"])
def test_training_batch_questions_are_about_its_documents(toy: ModuleType, kind: str) -> None:
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
