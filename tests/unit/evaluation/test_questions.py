import pyarrow as pa
import pytest

from pos2distill.config import TemplateSection
from pos2distill.evaluation.questions import (
    CORRECT,
    CUT,
    EvaluatedPrompts,
    EvaluatedTask,
    document_order,
    encode_questions,
)
from pos2distill.records import Example
from pos2distill.tasks.permutations import arrange
from pos2distill.tasks.prompts import MessageBuilder, joined_text
from tests.support.predictions import make_examples, predictions
from tests.support.tables import decode_questions, examples_to_table


def task(before: pa.Table, after: pa.Table, examples: list[Example], documents: int = 3) -> EvaluatedTask:
    prompts = EvaluatedPrompts(f"{documents} documents", documents, [before, after])
    return EvaluatedTask("sub_em", "plain", examples_to_table(examples), {"e1": "d.jsonl, line 2"}, [prompts])


def test_encode_questions_holds_answers_flags_and_sources() -> None:
    # Example 1 answers with the code of its second document, a distractor, where it is wrong.
    before = predictions(3, [[1, 1], [0, 1]], wrong="The code is {}001, I think.\nSure.")
    after = predictions(3, [[1, 1], [0, 0]])
    cut = pa.array(["stop", "stop", "stop", "length"])
    after = after.set_column(after.schema.get_field_index("finish_reason"), "finish_reason", cut)
    (found,) = decode_questions(encode_questions([task(before, after, make_examples(2, 3))]))["tasks"]
    second = found["questions"][1]
    assert (second["id"], second["location"], second["answers"]) == ("e1", "d.jsonl, line 2", ["1000"])
    assert second["documents"][0][0] == "Fox 1.0"
    (view,) = found["views"]
    assert [position["label"] for position in view["positions"]] == ["1", "2"]
    assert [position["orders"] for position in view["positions"]] == [{"1": [0, 1, 2]}, {"1": [1, 0, 2]}]
    assert view["answers"][0][0] == [["0", CORRECT, None], ["0", CORRECT, None]]
    assert view["answers"][1] == [
        [["The code is 1001, I think.\nSure.", 0, []], ["no", 0, []]],
        [["1000", CORRECT, None], ["no", CUT, []]],
    ]


def test_encode_questions_of_other_questions_than_those_answered_leaves_them_out() -> None:
    table = predictions(3, [[1, 0]])
    data = decode_questions(encode_questions([task(table, table, make_examples(5, 3))]))
    assert [question["id"] for question in data["tasks"][0]["questions"]] == ["e0"]


def test_encode_questions_shows_the_data_sets_order_of_several() -> None:
    """Two slots, each in two orders of the distractors."""
    first, second = predictions(3, [[1, 0]], slots=[[0], [2]]), predictions(3, [[0, 1]], slots=[[0], [2]])
    orders = pa.array([1, 1], pa.int32())
    second = second.set_column(second.column_names.index("order"), second.schema.field("order"), orders)
    prompts = EvaluatedPrompts("3 documents", 3, [pa.concat_tables([second, first])])
    two_orders = EvaluatedTask("sub_em", "plain", examples_to_table(make_examples(1, 3)), {}, [prompts])
    (view,) = decode_questions(encode_questions([two_orders]))["tasks"][0]["views"]
    assert [position["label"] for position in view["positions"]] == ["1", "3"]
    assert [[answer[1] for answer in models] for models in view["answers"][0]] == [[CORRECT], [0]]


def test_encode_questions_gives_the_same_bytes_again() -> None:
    table = predictions(3, [[1, 0]])
    one = task(table, table, make_examples(1, 3))
    assert encode_questions([one]) == encode_questions([one])


def test_encode_questions_shortens_documents_then_leaves_questions_out() -> None:
    table = predictions(3, [[1, 0]] * 40)
    large = task(table, table, make_examples(40, 3, words=400))
    whole = encode_questions([large])
    data = decode_questions(whole)
    assert (data["document_length"], data["left_out"]) == (None, 0)
    shortened = decode_questions(encode_questions([large], len(whole) // 2))
    assert (shortened["document_length"], shortened["left_out"]) == (1000, 0)
    lengths = {len(text) for question in shortened["tasks"][0]["questions"] for _, text in question["documents"]}
    assert lengths == {1001}  # with the mark of what is left out
    least = encode_questions([large], 2000)
    assert len(least) <= 2000
    data = decode_questions(least)
    shown = len(data["tasks"][0]["questions"])
    assert (data["document_length"], data["left_out"]) == (150, 40 - shown)
    assert len(data["tasks"][0]["views"][0]["answers"]) == shown > 0


@pytest.mark.parametrize(("slots", "ranks"), [((2,), ()), ((3, 1), ()), ((0,), (2, 0, 1, 3)), ((1, 3), (3, 2, 1, 0))])
def test_document_order_is_that_of_the_prompt(slots: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    (example,) = make_examples(1, 6, hops=len(slots))
    golds_first = (*example.golds, *example.distractors)
    shown = [golds_first[index] for index in document_order(4, slots, ranks)]
    assert shown == list(arrange(example, 4, slots, slot_of_rank=ranks))


@pytest.mark.parametrize(
    "template",
    [
        TemplateSection(system="Be brief.", user="{documents}\n\nQ: {question}", document="[{number}] {title} {text}"),
        TemplateSection(system="Use this: {documents} That is all.", user="{question}", separator=" | "),
    ],
)
def test_encode_questions_holds_the_parts_of_an_own_prompt(template: TemplateSection) -> None:
    """The page fills in what the template has, as `page.js.j2` does."""
    (example,) = make_examples(1, 3)
    table = predictions(3, [[1, 0]])

    def shown(chat: tuple[str, str] | None) -> str:
        prompts = EvaluatedPrompts("3 documents", 3, [table])
        one = EvaluatedTask("sub_em", template, examples_to_table([example]), {}, [prompts], chat)
        (found,) = decode_questions(encode_questions([one]))["tasks"]
        parts = found["template"]
        before, after = parts["chat"] or ["", ""]
        documents = []
        for number, document in enumerate(arrange(example, 3, (0,)), start=1):
            text = parts["document"].replace("{number}", str(number))
            documents.append(text.replace("{title}", document.title).replace("{text}", document.text))
        text = before + parts["before"] + parts["separator"].join(documents) + parts["after"] + after
        return str(text.replace("{question}", example.question))

    messages = MessageBuilder(template, max_length=None, reserve=1)(example, 3, (0,))
    assert shown(None) == joined_text(messages)
    # With a chat template, whose frame has the other message.
    holder = 0 if template.user == "{question}" else 1
    chat = ("<", "> {question}") if holder == 0 else ("Be brief. <", ">")
    content = messages[holder]["content"]
    assert shown(chat) == (f"<{content}> {example.question}" if holder == 0 else f"Be brief. <{content}>")
