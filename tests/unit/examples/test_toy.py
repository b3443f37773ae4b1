import json
from pathlib import Path

import pytest
import torch

from examples.toy.batches import Kind, sequence_length, training_batch
from examples.toy.task import TWO_HOP_VOCABULARY, VOCABULARY, Example, make_two_hop_example

TOY = Path(__file__).parents[3] / "examples" / "toy"


@pytest.fixture
def rows() -> list[Example]:
    return [make_two_hop_example(seed=0, index=index, documents=40) for index in range(50)]


def words_after(text: str, beginning: str) -> str:
    assert text.startswith(beginning), text
    return text.removeprefix(beginning).removesuffix(" .")


def test_make_two_hop_example_chain_leads_to_the_answer(rows: list[Example]) -> None:
    for row in rows:
        subject = words_after(row["question"], "what is the code of the mentor of ").removesuffix(" ?")
        first, second = (document for document in row["documents"] if document["gold"])
        mentor = words_after(first["text"], f"The mentor of {subject} is ")
        assert [words_after(second["text"], f"The code of {mentor} is ")] == row["answers"]
        assert (first["title"], second["title"]) == (subject, mentor)


def test_make_two_hop_example_gold_documents_come_first(rows: list[Example]) -> None:
    for row in rows:
        assert [document["gold"] for document in row["documents"]] == [True, True] + [False] * 38
        assert [document.get("hop") for document in row["documents"]] == [1, 2] + [None] * 38


def test_make_two_hop_example_has_no_duplicates(rows: list[Example]) -> None:
    assert len({row["question"] for row in rows}) == len(rows)
    for row in rows:
        adjectives, animals = zip(*(document["title"].split() for document in row["documents"]), strict=True)
        assert len(set(adjectives)) == len(set(animals)) == 40
        assert sum(row["answers"][0] in document["text"] for document in row["documents"]) == 1


@pytest.mark.parametrize("shown", [10, 20, 30, 40])
def test_make_two_hop_example_blocks_contain_complete_chains(rows: list[Example], shown: int) -> None:
    for row in rows:
        texts = [document["text"] for document in row["documents"][:shown]]
        mentors = {words_after(text.split(" is ")[1], "") for text in texts if "mentor" in text}
        assert len(mentors) == shown // 2
        assert mentors == {text.split(" is ")[0].removeprefix("The code of ") for text in texts if "code" in text}


def test_make_two_hop_example_rejects_an_odd_number_of_documents() -> None:
    with pytest.raises(ValueError, match=r"must be even .* got 7"):
        make_two_hop_example(seed=0, index=0, documents=7)


def test_vocabulary_equals_the_shipped_tokenizers() -> None:
    for base, vocabulary in (("base", VOCABULARY), ("two_hop_base", TWO_HOP_VOCABULARY)):
        known = json.loads((TOY / base / "tokenizer.json").read_text())["model"]["vocab"]
        assert known == {word: index for index, word in enumerate(vocabulary)}


@pytest.mark.parametrize("kind", ["one hop", "mixed", "two hops"])
def test_training_batch_questions_are_about_its_documents(kind: Kind) -> None:
    ids_BT, weight_BT = training_batch(4, 8, 3, copy_weight=0.5, generator=torch.Generator().manual_seed(0), kind=kind)
    assert ids_BT.shape == weight_BT.shape == (4, sequence_length(8, 3, kind))
    for ids in ids_BT:
        context, *turns = " ".join(TWO_HOP_VOCABULARY[index] for index in ids).split(" Question: ")
        assert len(turns) == 3
        for turn in turns:
            question, answer = turn.split(" <|end|>")[0].split(" ? <|assistant|> ")
            sentences = [f"{part} ." for part in answer.split(" The answer is:")[0].removesuffix(" .").split(" . ")]
            assert all(sentence in context for sentence in sentences), answer
            assert question.split()[-2:] == sentences[0].split()[3:5]
            if kind == "two hops":
                assert sentences[0].split()[-3:-1] == sentences[1].split()[3:5]
                assert answer.split()[-2:] == sentences[1].split()[-3:-1]
