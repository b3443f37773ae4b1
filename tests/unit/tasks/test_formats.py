"""Records of every format: what becomes of good ones, and what is said of bad ones."""

import copy
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from pos2distill.config import DataSection
from pos2distill.config.formats import FORMATS, FormatName
from pos2distill.errors import UserError
from pos2distill.records import Document, Example
from pos2distill.tasks.datasets import read_examples
from pos2distill.tasks.formats import PARSERS, REASONS, Reason, holds_answer
from pos2distill.tasks.metrics import sub_exact_match

Record = dict[str, Any]
Read = Callable[..., Any]

NQ: Record = {
    "question": "who wrote the song Photograph",
    "answers": ["Ringo Starr"],
    "ctxs": [
        {"id": "7", "title": "Photograph", "text": "A song by Ringo Starr.", "isgold": True, "score": 1.5},
        {"id": "8", "title": "Camera", "text": "It takes pictures.", "isgold": False, "score": 1.2},
    ],
}
KV: Record = {"key": "k-2", "value": "v-2", "ordered_kv_records": [["k-1", "v-1"], ["k-2", "v-2"], ["k-3", "v-3"]]}
OWL: Record = {"title": "Owl", "text": "The owl has 17.", "gold": False}
FOX: Record = {"text": "The fox has 42.", "gold": True}
GENERIC: Record = {"question": "Which code has the fox?", "answers": ["42", "forty-two"], "documents": [OWL, FOX]}
DEN: Record = {"title": "Den", "text": "The fox lives in the den.", "gold": True}
TWO_HOPS: Record = {
    "question": "Which code has who lives in the den?",
    "answers": ["42"],
    "documents": [{**FOX, "hop": 2}, OWL, {**DEN, "hop": 1}],
}
DPR: Record = {
    "dataset": "webq",
    "question": "who is the capital of france",
    "answers": ["Paris"],
    "positive_ctxs": [
        {"title": "Lyon", "text": "A city by the Rhône.", "score": 9.5},
        {"title": "France", "text": "Its capital is PARIS.", "score": 9.1},
        {"title": "Paris", "text": "Paris is on the Seine.", "score": 8.8},
    ],
    "hard_negative_ctxs": [
        {"title": "Texas", "text": "There is a Paris in it."},
        {"title": "Rome", "text": "The capital of Italy."},
        {"title": "Paris (film)", "text": "A film."},
    ],
    "negative_ctxs": [
        {"title": "Owl", "text": "A bird."},
        {"title": "Rome", "text": "The capital of Italy."},
        {"title": "Rome", "text": "It has seven hills."},
    ],
}
MUSIQUE: Record = {
    "id": "2hop__1_2",
    "question": "Who was the first president of the publisher of the journal?",
    "answer": "G. Stanley Hall",
    "answer_aliases": ["Stanley Hall", "G. Stanley Hall"],
    "answerable": True,
    "paragraphs": [
        {"idx": 0, "title": "APA", "paragraph_text": "G. Stanley Hall was its first.", "is_supporting": True},
        {"idx": 1, "title": "Owl", "paragraph_text": "A bird.", "is_supporting": False},
        {"idx": 2, "title": "Journal", "paragraph_text": "Published by the APA.", "is_supporting": True},
    ],
    "question_decomposition": [
        {"id": 1, "question": "Journal >> publisher", "answer": "APA", "paragraph_support_idx": 2},
        {"id": 2, "question": "first president of #1", "answer": "G. Stanley Hall", "paragraph_support_idx": 0},
    ],
}
HOTPOTQA: Record = {
    "_id": "5a7a",
    "question": "Are the Alû and the Lilu both demons?",
    "answer": "yes",
    "type": "comparison",
    "supporting_facts": [["Lilu", 0], ["Alû", 3], ["Lilu", 1]],
    "context": [
        ["Owl", ["A bird."]],
        ["Alû", ["Alû is a demon.", " It has no mouth. ", " "]],
        ["Lilu", ["Lilu is a spirit.", "It is male."]],
    ],
}
WIKI: Record = {
    "_id": "8813",
    "question": "Which film has the director who was born first?",
    "answer": "Film A",
    "type": "bridge_comparison",
    "supporting_facts": [["Film A", 0], ["Film B", 0], ["Anna", 1], ["Bert", 0]],
    "evidences": [["Film A", "director", "Anna"], ["Film B", "director", "Bert"]],
    "context": [
        ["Bert", ["Born in 1950."]],
        ["Film B", ["By Bert."]],
        ["Anna", ["A director.", "Born in 1940."]],
        ["Film A", ["By Anna."]],
    ],
}
HOPS = {"musique": (2,), "hotpotqa": (2,), "2wiki": (2, 4)}


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """`read(format, record, …)`: what the one record of a file becomes, with prompts of two documents asked for."""

    def read(form: str, record: Record, documents: int = 2, **fields: Any) -> Any:
        path = tmp_path / f"{uuid.uuid4().hex}.jsonl"
        path.write_text(json.dumps(record))
        given = {"format": form, "hops": HOPS.get(form, (1,)), "documents": 5, **fields}
        (found,) = read_examples(DataSection(path=str(path), **given), documents)
        return found

    return read


def changed(record: Record, path: str, value: Any) -> Record:
    """A copy of the record with the value at `field.0.field` replaced."""
    record = copy.deepcopy(record)
    inner: Any = record
    *steps, last = (int(step) if step.isdigit() else step for step in path.split("."))
    for step in steps:
        inner = inner[step]
    inner[last] = value
    return record


def without(record: Record, path: str) -> Record:
    record = copy.deepcopy(record)
    inner: Any = record
    *steps, last = (int(step) if step.isdigit() else step for step in path.split("."))
    for step in steps:
        inner = inner[step]
    del inner[last]
    return record


# --- good records


def test_parse_lost_in_the_middle(read: Read) -> None:
    example = read("nq", NQ)
    assert (example.question, example.answers) == ("who wrote the song Photograph", ("Ringo Starr",))
    assert example.documents == (
        Document("Photograph", "A song by Ringo Starr.", 0),
        Document("Camera", "It takes pictures."),
    )


def test_parse_nq_oracle_keeps_the_gold_document_alone(read: Read) -> None:
    assert read("nq_oracle", NQ).documents == (Document("Photograph", "A song by Ringo Starr.", 0),)


def test_parse_key_value(read: Read) -> None:
    example = read("kv", KV)
    assert (example.question, example.answers) == ("k-2", ("v-2",))
    assert example.documents == (Document("k-1", "v-1"), Document("k-2", "v-2", 0), Document("k-3", "v-3"))


def test_parse_generic_needs_neither_id_nor_title(read: Read) -> None:
    bare, named = read("jsonl", GENERIC), read("jsonl", {**GENERIC, "id": "fox-1"})
    assert bare.documents == (Document("Owl", "The owl has 17."), Document("", "The fox has 42.", 0))
    assert bare.answers == ("42", "forty-two")
    assert named.example_id == "fox-1"
    # Without an id, the id is derived from the normalized question, so the same question is the same example.
    assert bare.example_id == read("jsonl", {**GENERIC, "question": "which code has THE fox"}).example_id


def test_parse_generic_ignores_further_fields(read: Read) -> None:
    """Also one that is like an optional field, if that is there too."""
    further: Record = {"titles": ["Owl"], "source": "zoo", "idea": 5}
    record = {**GENERIC, **further, "documents": [{**OWL, **further}, FOX]}
    assert read("jsonl", record) == read("jsonl", GENERIC)


def test_parse_generic_takes_hops_from_the_record(read: Read) -> None:
    example = read("jsonl", TWO_HOPS, hops=(2,))
    assert example.documents == (
        Document("", "The fox has 42.", 1),
        Document("Owl", "The owl has 17."),
        Document("Den", "The fox lives in the den.", 0),
    )
    assert [document.title for document in example.golds] == ["Den", ""]


def test_parse_generic_numbers_hops_in_file_order(read: Read) -> None:
    records = [
        {**TWO_HOPS, "documents": documents} for documents in ([FOX, OWL, DEN], [{**FOX, "hop": None}, OWL, DEN])
    ]
    for record in records:
        assert [document.hop for document in read("jsonl", record, hops=(2,)).documents] == [0, None, 1]


def test_parse_generic_orders_documents_by_score(read: Read) -> None:
    """From the highest to the lowest, equal ones in their order; the hops stay those of the documents."""
    ranked = [
        ({**FOX, "title": "Fox", "hop": 2}, -1),
        (OWL, 0.5),
        ({**DEN, "hop": 1}, 7),
        ({**OWL, "title": "Kite"}, 0.5),
    ]
    scored = [{**document, "score": score} for document, score in ranked]
    example = read("jsonl", {**TWO_HOPS, "documents": scored}, hops=(2,))
    found = [(document.title, document.hop) for document in example.documents]
    assert found == [("Den", 0), ("Owl", None), ("Kite", None), ("Fox", 1)]


def test_parse_generic_accepts_several_numbers_of_hops(read: Read) -> None:
    assert [len(read("jsonl", record, hops=hops).golds) for record, hops in ((GENERIC, (1,)), (TWO_HOPS, (2, 3)))] == [
        1,
        2,
    ]


def test_parse_dpr(read: Read) -> None:
    example = read("dpr", DPR)
    assert example.answers == ("Paris",)
    # The first positive that holds an answer; then hard negatives, then negatives, each once and without the answer.
    assert example.documents == (
        Document("France", "Its capital is PARIS.", 0),
        Document("Rome", "The capital of Italy."),
        Document("Owl", "A bird."),
        Document("Rome", "It has seven hills."),
    )


def test_parse_musique(read: Read) -> None:
    example = read("musique", MUSIQUE)
    assert (example.example_id, example.answers) == (
        "2hop__1_2",
        ("G. Stanley Hall", "Stanley Hall", "G. Stanley Hall"),
    )
    assert example.documents == (
        Document("APA", "G. Stanley Hall was its first.", 1),
        Document("Owl", "A bird."),
        Document("Journal", "Published by the APA.", 0),
    )
    assert [document.title for document in example.golds] == ["Journal", "APA"]


def test_parse_musique_finds_paragraphs_by_idx(read: Read) -> None:
    record = {**MUSIQUE, "paragraphs": MUSIQUE["paragraphs"][::-1]}
    assert read("musique", record).golds == read("musique", MUSIQUE).golds


def test_parse_hotpotqa(read: Read) -> None:
    example = read("hotpotqa", HOTPOTQA)
    assert (example.example_id, example.answers) == ("5a7a", ("yes",))
    assert example.documents == (
        Document("Owl", "A bird."),
        Document("Alû", "Alû is a demon. It has no mouth.", 1),
        Document("Lilu", "Lilu is a spirit. It is male.", 0),  # mentioned first
    )


@pytest.mark.parametrize(("form", "record"), [("hotpotqa", HOTPOTQA), ("2wiki", WIKI)])
def test_parse_hotpotqa_accepts_the_layout_of_the_hub(read: Read, form: str, record: Record) -> None:
    facts, context = zip(*record["supporting_facts"], strict=True), zip(*record["context"], strict=True)
    hub = {
        **record,
        "supporting_facts": dict(zip(("title", "sent_id"), map(list, facts), strict=True)),
        "context": dict(zip(("title", "sentences"), map(list, context), strict=True)),
    }
    assert read(form, hub) == read(form, record)


def test_parse_hotpotqa_accepts_either_name_of_the_id(read: Read) -> None:
    assert read("hotpotqa", {**without(HOTPOTQA, "_id"), "id": "x"}).example_id == "x"


def test_read_examples_accepts_an_empty_paragraph_of_a_published_file(read: Read) -> None:
    """A user cannot correct a published file."""
    record = changed(HOTPOTQA, "context.2.1", [" "])
    assert read("hotpotqa", record).documents[2].text == ""


def test_parse_2wiki(read: Read) -> None:
    example = read("2wiki", WIKI)
    assert [document.title for document in example.golds] == ["Film A", "Film B", "Anna", "Bert"]
    assert [document.hop for document in example.documents] == [3, 1, 2, 0]


def test_parse_record_drops_empty_answers_of_published_records(read: Read) -> None:
    assert read("musique", changed(MUSIQUE, "answer_aliases", ["The", "", "Hall"])).answers == (
        "G. Stanley Hall",
        "Hall",
    )
    assert read("dpr", changed(DPR, "answers", ["*", " ", "Rhône"])).answers == ("Rhône",)


def test_read_examples_allows_a_gold_document_without_the_answer_if_set(read: Read) -> None:
    assert read("jsonl", {**GENERIC, "answers": ["43"]}, answer_in_gold=False).answers == ("43",)


def test_read_examples_allows_derived_answers_of_several_hops(read: Read) -> None:
    assert read("jsonl", {**TWO_HOPS, "answers": ["no"]}, hops=(2,)).answers == ("no",)


# --- records that are passed over


@pytest.mark.parametrize(
    ("form", "record", "reason"),
    [
        ("dpr", changed(DPR, "answers", ["The"]), "no_answer"),
        ("musique", changed(changed(MUSIQUE, "answer", "A"), "answer_aliases", []), "no_answer"),
        ("hotpotqa", changed(HOTPOTQA, "answer", "The The"), "no_answer"),
        ("2wiki", changed(WIKI, "answer", ""), "no_answer"),
        ("dpr", changed(DPR, "positive_ctxs", []), "no_gold"),
        ("dpr", changed(DPR, "positive_ctxs", DPR["positive_ctxs"][:1]), "no_gold"),
        ("musique", changed(MUSIQUE, "answerable", False), "unanswerable"),
        (
            "musique",
            changed(MUSIQUE, "question_decomposition.1.paragraph_support_idx", None),
            "hop_without_paragraph",
        ),
        ("musique", changed(MUSIQUE, "question_decomposition.1.paragraph_support_idx", 2), "shared_paragraph"),
        ("musique", changed(MUSIQUE, "paragraphs.1.is_supporting", True), "unclear_support"),
        ("musique", changed(MUSIQUE, "paragraphs.0.is_supporting", False), "unclear_support"),
        ("hotpotqa", changed(HOTPOTQA, "supporting_facts.1.0", "Gallu"), "missing_title"),
        ("hotpotqa", changed(HOTPOTQA, "context.0.0", "Lilu"), "ambiguous_title"),
        ("hotpotqa", changed(HOTPOTQA, "supporting_facts", [["Lilu", 0]]), "other_hops"),
        ("hotpotqa", changed(HOTPOTQA, "supporting_facts", []), "other_hops"),
        ("2wiki", changed(WIKI, "supporting_facts", WIKI["supporting_facts"][:3]), "other_hops"),
    ],
)
def test_parse_record_skips_unusable_published_records_with_a_reason(
    read: Read, form: str, record: Record, reason: Reason
) -> None:
    assert read(form, record) == reason


@pytest.mark.parametrize(
    ("form", "record"), [("dpr", DPR), ("musique", MUSIQUE), ("hotpotqa", HOTPOTQA), ("2wiki", WIKI)]
)
def test_read_examples_skips_published_records_with_too_few_documents(read: Read, form: str, record: Record) -> None:
    assert isinstance(read(form, record, documents=3), Example)
    assert read(form, record, documents=5) == "too_few_documents"
    assert isinstance(read(form, record, documents=5, distractors="random"), Example)


def test_read_examples_rejects_distractors_that_are_all_the_same(read: Read) -> None:
    """Among those that a prompt shows, unless further ones are drawn."""
    message = r"line 1: all 2 distractors are the same; expected different ones$"
    for form, record in [
        ("jsonl", {**GENERIC, "documents": [OWL, FOX, OWL]}),
        ("kv", {**KV, "ordered_kv_records": [["k-1", "v-1"], ["k-2", "v-2"], ["k-1", "v-1"]]}),
    ]:
        with pytest.raises(UserError, match=message):
            read(form, record, documents=3)
        assert isinstance(read(form, record, documents=2), Example)
        assert isinstance(read(form, record, documents=3, distractors="random"), Example)


def test_parse_hotpotqa_accepts_two_distractors_of_one_title(read: Read) -> None:
    record = {**HOTPOTQA, "context": [*HOTPOTQA["context"], ["Owl", ["Another bird."]]]}
    assert [document.title for document in read("hotpotqa", record).distractors] == ["Owl", "Owl"]


@pytest.mark.parametrize(
    ("form", "record"),
    [
        ("nq", NQ),
        ("kv", KV),
        ("jsonl", GENERIC),
        ("dpr", DPR),
        ("musique", MUSIQUE),
        ("hotpotqa", HOTPOTQA),
        ("2wiki", WIKI),
    ],
)
def test_parse_record_names_the_one_missing_field(read: Read, form: str, record: Record) -> None:
    for name in FORMATS[form].required:
        with pytest.raises(UserError, match=f"line 1: field '{name}' is missing"):
            read(form, without(record, name))


def test_reasons_and_formats_are_all_in_the_docs() -> None:
    assert set(REASONS) == set(get_args(Reason))
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    assert list(FORMATS) == list(get_args(FormatName))
    assert {spec.parser for spec in FORMATS.values()} == set(PARSERS)
    for name in (*REASONS, *FORMATS):
        assert f"| `{name}` | " in page


# --- records that are rejected


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            without(GENERIC, "answers"),
            "line 1: field 'answers' is missing; found fields: question, documents (if one of them holds it, rename "
            "it to 'answers', or set another data.format)",
        ),
        (
            {**without(GENERIC, "answers"), "answer": ["x"]},
            "field 'answers' is missing, but there is 'answer'; rename it",
        ),
        ({**GENERIC, "answers": "42"}, "line 1, answers: expected a list, got '42'; put it in a list"),
        (
            {**GENERIC, "answers": "['42']"},
            """line 1, answers: expected a list, got "['42']"; it is a list that became text; write a JSON list""",
        ),
        (
            {**GENERIC, "answers": "[42]"},
            "line 1, answers: expected a list, got '[42]'; it is a list that became text; write a JSON list",
        ),
        (
            {**GENERIC, "answers": " [ '0'] "},
            """line 1, answers: expected a list, got " [ '0'] "; it is a list that became text; write a JSON list""",
        ),
        ({**GENERIC, "answers": "[42"}, "line 1, answers: expected a list, got '[42'; put it in a list"),
        ({**GENERIC, "answers": None}, "line 1, answers: expected a list, got null"),
        ({**GENERIC, "answers": ["42", 42]}, "line 1, answers[1]: expected text, got 42"),
        ({**GENERIC, "answers": []}, "line 1, answers: empty; expected at least one answer"),
        ({**GENERIC, "answers": ["42", " "]}, "line 1, answers: one is blank; expected text"),
        (
            {**GENERIC, "answers": ["*", "The!"]},
            "line 1, answers: ['*', 'The!'] are all empty once normalized; expected words",
        ),
        ({**GENERIC, "question": 5}, "line 1, question: expected text, got 5"),
        ({**GENERIC, "question": "  "}, "line 1, question: empty"),
        ({**GENERIC, "id": 7}, "line 1, id: expected text, got 7"),
        ({**GENERIC, "id": None}, "line 1, id: expected text, got null"),
        (
            {**GENERIC, "documents": [FOX, {"content": "The owl has 17.", "gold": False}]},
            "line 1, documents[1]: field 'text' is missing; found fields: content, gold (if one of them holds it, "
            "rename it to 'text', or set another data.format)",
        ),
        (
            {**GENERIC, "documents": [FOX, without(OWL, "gold")]},
            "line 1, documents[1]: field 'gold' is missing; found fields: title, text (every document needs gold: true "
            "or false)",
        ),
        (
            {**GENERIC, "documents": [FOX, FOX | {"gold": False}, OWL]},
            "line 1: a distractor is the same as a gold document ('The fox has 42.'); remove it",
        ),
        (
            {**GENERIC, "documents": [FOX, {**OWL, "text": " "}]},
            "line 1: the texts of all distractors are empty; expected text",
        ),
        (
            {**GENERIC, "documents": [{**FOX, "Hop": 1}]},
            "line 1, documents[0]: unknown field 'Hop'; did you mean 'hop'? If not, rename it",
        ),
        (
            {**GENERIC, "documents": [OWL, {**FOX, "titel": "Fox"}]},
            "documents[1]: unknown field 'titel'; did you mean 'title'?",
        ),
        ({**GENERIC, "ID": "fox-1"}, "line 1: unknown field 'ID'; did you mean 'id'?"),
        ({**GENERIC, "documents": {}}, "line 1, documents: expected a list, got {}"),
        ({**GENERIC, "documents": [FOX, "text"]}, "line 1, documents[1]: expected an object, got 'text'"),
        (
            {**GENERIC, "documents": [{**FOX, "gold": 1}, OWL]},
            "line 1, documents[0], gold: expected true or false, got 1",
        ),
        ({**GENERIC, "documents": [FOX, without(OWL, "text")]}, "line 1, documents[1]: field 'text' is missing"),
        ({**GENERIC, "documents": [OWL, OWL]}, "line 1: no gold document; expected exactly one"),
        (
            {**GENERIC, "documents": [FOX, FOX]},
            "line 1: 2 gold documents; expected exactly one (data.hops); if that is right, set data.hops=[2]",
        ),
        ({**GENERIC, "documents": [{**FOX, "text": " "}]}, "line 1: the text of a gold document is empty"),
        (
            {**GENERIC, "answers": ["43"]},
            "line 1: the gold document contains none of the answers ['43']; correct the record or set "
            "data.answer_in_gold=false",
        ),
        (
            {**GENERIC, "documents": [FOX]},
            "line 1: documents: found 1, but prompts of 2 slots are asked for (data.documents, or --documents with "
            "--model; evaluation.other_documents); set data.distractors=random, or ask for fewer",
        ),
        (
            {**GENERIC, "documents": [{**FOX, "hop": "1"}, OWL]},
            "line 1, documents[0], hop: expected a whole number, got '1'",
        ),
        (
            {**GENERIC, "documents": [{**FOX, "hop": True}, OWL]},
            "line 1, documents[0], hop: expected a whole number, got True",
        ),
        (
            {**GENERIC, "documents": [FOX, {**OWL, "hop": 2}]},
            "line 1, documents[1], hop: 2, but the document is not gold; leave hop out or set gold to true",
        ),
        (
            {**GENERIC, "documents": [{**FOX, "hop": 0}, OWL]},
            "line 1, documents: the gold ones have the hops [0]; expected each of [1] once, or none",
        ),
        (
            {**GENERIC, "documents": [{**FOX, "hop": 1}, DEN]},
            "line 1, documents: the gold ones have the hops [1, None]; expected each of [1, 2] once, or none",
        ),
        (
            {**GENERIC, "documents": [{**FOX, "hop": 2}, {**DEN, "hop": 2}]},
            "line 1, documents: the gold ones have the hops [2, 2]; expected each of [1, 2] once, or none",
        ),
        (
            {**GENERIC, "documents": [{**FOX, "score": "high"}, OWL]},
            "line 1, documents[0], score: expected a number, the higher the better, got 'high'",
        ),
        (
            {**GENERIC, "documents": [{**FOX, "score": True}, OWL]},
            "line 1, documents[0], score: expected a number, the higher the better, got True",
        ),
        (
            {**GENERIC, "documents": [{**FOX, "score": 10**400}, OWL]},
            "line 1, documents[0], score: expected a number, the higher the better, got 1000",
        ),
        (
            {**GENERIC, "documents": [FOX, {**OWL, "score": 0.5}]},
            "line 1, documents: 1 of 2 have a score; expected one on each, or on none",
        ),
        (
            {**GENERIC, "documents": [FOX, {**OWL, "scores": 0.5}]},
            "line 1, documents[1]: unknown field 'scores'; did you mean 'score'? If not, rename it",
        ),
    ],
)
def test_parse_generic_rejects_a_bad_record(read: Read, tmp_path: Path, record: Record, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read("jsonl", record)
    assert str(caught.value).startswith(f"{tmp_path}/")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("hops", "message"),
    [((2,), "1 gold document; expected 2 (data.hops)"), ((3, 2), "1 gold document; expected 2 or 3 (data.hops)")],
)
def test_read_examples_rejects_other_hops_in_a_users_own_file(read: Read, hops: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read("jsonl", GENERIC, hops=hops)
    assert str(caught.value).endswith(f"line 1: {message}; if that is right, set data.hops=[1]")


@pytest.mark.parametrize(
    ("form", "record", "message"),
    [
        ("nq", without(NQ, "ctxs"), "line 1: field 'ctxs' is missing"),
        ("nq", {**NQ, "ctxs": [7]}, "line 1, ctxs[0]: expected an object, got 7"),
        ("nq", {**NQ, "ctxs": [{"title": "a", "text": "b"}]}, "line 1, ctxs[0]: field 'isgold' is missing"),
        ("nq", changed(NQ, "ctxs.1.isgold", True), "line 1: 2 gold documents; expected exactly one"),
        ("kv", {**KV, "value": 1}, "line 1, value: expected text, got 1"),
        ("kv", {**KV, "ordered_kv_records": [["k"]]}, "ordered_kv_records[0]: expected [key, value], got ['k']"),
        ("kv", {**KV, "key": "k-9"}, "line 1, key: 'k-9' is the key of no pair in ordered_kv_records"),
        ("kv", {**KV, "ordered_kv_records": [["k-2", "v-2"]]}, "line 1: documents: found 1, but prompts of 2"),
        ("dpr", {**DPR, "question": " "}, "line 1, question: empty"),
        (
            "dpr",
            without(DPR, "negative_ctxs"),
            "line 1: field 'negative_ctxs' is missing; found fields: dataset, question, answers, positive_ctxs",
        ),
        (
            "dpr",
            {**without(DPR, "positive_ctxs"), "positive_ctx": []},
            "line 1: field 'positive_ctxs' is missing, but there is 'positive_ctx'; rename it",
        ),
        (
            "dpr",
            NQ,
            "line 1: fields positive_ctxs, hard_negative_ctxs, negative_ctxs are missing; "
            "found fields: question, answers, ctxs (those of data.format=nq or nq_oracle)",
        ),
        (
            "jsonl",
            {"data": [GENERIC]},
            "line 1: fields question, answers, documents are missing; found fields: data "
            "(if the records are in 'data', write that list alone)",
        ),
        ("nq", {}, "line 1: fields question, answers, ctxs are missing; found fields: none (is data.format right?)"),
        (
            "musique",
            HOTPOTQA,
            "line 1: fields id, answer_aliases, answerable, paragraphs, question_decomposition are missing; "
            "found fields: _id, question, answer, type, supporting_facts, context (those of data.format=hotpotqa)",
        ),
        ("dpr", changed(DPR, "answers", "Paris"), "line 1, answers: expected a list, got 'Paris'"),
        ("dpr", changed(DPR, "positive_ctxs.0", []), "line 1, positive_ctxs[0]: expected an object, got []"),
        ("dpr", without(DPR, "negative_ctxs.1.text"), "line 1, negative_ctxs[1]: field 'text' is missing"),
        (
            "dpr",
            changed(DPR, "hard_negative_ctxs.0.title", None),
            "hard_negative_ctxs[0], title: expected text, got null",
        ),
        ("musique", without(MUSIQUE, "id"), "line 1: field 'id' is missing"),
        ("musique", without(MUSIQUE, "answerable"), "line 1: field 'answerable' is missing"),
        ("musique", changed(MUSIQUE, "answer", None), "line 1, answer: expected text, got null"),
        ("musique", changed(MUSIQUE, "answer_aliases", [1]), "line 1, answer_aliases[0]: expected text, got 1"),
        ("musique", changed(MUSIQUE, "paragraphs.0.idx", "0"), "paragraphs[0], idx: expected a whole number, got '0'"),
        (
            "musique",
            changed(MUSIQUE, "paragraphs.1.idx", 0),
            "line 1, paragraphs[1], idx: 0 for the second time; expected a number for each paragraph",
        ),
        (
            "musique",
            changed(MUSIQUE, "question_decomposition.0.paragraph_support_idx", 20),
            "line 1, question_decomposition[0], paragraph_support_idx: 20 is the idx of no paragraph",
        ),
        (
            "musique",
            without(MUSIQUE, "question_decomposition.0.paragraph_support_idx"),
            "line 1, question_decomposition[0]: field 'paragraph_support_idx' is missing",
        ),
        ("hotpotqa", without(HOTPOTQA, "_id"), "line 1: field '_id' is missing"),
        ("hotpotqa", without(HOTPOTQA, "answer"), "line 1: field 'answer' is missing"),
        (
            "hotpotqa",
            changed(HOTPOTQA, "supporting_facts.0", "Lilu"),
            "line 1, supporting_facts[0]: expected [title, sentence], got 'Lilu'",
        ),
        (
            "hotpotqa",
            changed(HOTPOTQA, "supporting_facts.0.1", "0"),
            "line 1, supporting_facts[0][1]: expected a whole number, got '0'",
        ),
        (
            "hotpotqa",
            changed(HOTPOTQA, "context.1", ["Alû"]),
            "line 1, context[1]: expected [title, sentences], got ['Alû']",
        ),
        ("hotpotqa", changed(HOTPOTQA, "context.1.1", "text"), "line 1, context[1][1]: expected a list, got 'text'"),
        ("hotpotqa", changed(HOTPOTQA, "context.1.1.0", 3), "line 1, context[1][1][0]: expected text, got 3"),
        (
            "hotpotqa",
            changed(HOTPOTQA, "context", {"title": ["Alû", "Lilu"], "sentences": [["A demon."]]}),
            "line 1, context: title has 2 elements and sentences 1; expected equally many",
        ),
        (
            "hotpotqa",
            changed(HOTPOTQA, "supporting_facts", {"title": ["Alû"], "sent_id": "0"}),
            "line 1, supporting_facts, sent_id: expected a list, got '0'",
        ),
        (
            "hotpotqa",
            changed(HOTPOTQA, "context", {"title": ["Alû"], "sentences": ["text"]}),
            "line 1, context[0][1]: expected a list, got 'text'",
        ),
        ("hotpotqa", changed(HOTPOTQA, "context", {"title": []}), "line 1, context: expected a list, got {'title': []"),
        (
            "2wiki",
            HOTPOTQA,
            "line 1: field 'evidences' is missing; found fields: _id, question, answer, type, supporting",
        ),
        ("2wiki", changed(WIKI, "evidences", {}), "line 1, evidences: expected a list, got {}"),
    ],
)
def test_parse_record_rejects_bad_records(read: Read, form: str, record: Record, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read(form, record)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "text", "found"),
    [
        ("US", "Music, because of houses.", False),
        ("US", "In the U.S. today.", True),
        ("the US", "A US-based firm.", True),
        ("US", "The US's wife", True),
        ("4", "In 1994.", False),
        ("4", "Of 3/4 of them.", True),
        ("art", "A party.", False),
        ("Obama", "Obama's wife", True),
        ("1960s", "In the 1960s–70s", True),
        ("東京", "東京は首都です", True),
        ("No", "There is no doubt.", False),
        ("*", "A * of *.", False),
    ],
)
def test_holds_answer_looks_for_short_answers_as_words(answer: str, text: str, found: bool) -> None:
    assert holds_answer(Document("", text), [answer]) == holds_answer(Document(text, ""), ["zzz", answer]) == found


def test_parse_dpr_drops_distractors_that_contain_an_answer(read: Read) -> None:
    for document in read("dpr", DPR).distractors:
        assert not sub_exact_match(f"{document.title} {document.text}", DPR["answers"])
    texts = ["Music, because of houses.", "In the U.S. today.", "No more."]
    contexts = [{"title": "", "text": text} for text in texts]
    gold = [{"title": "", "text": "It is in the US."}]
    example = read("dpr", DPR | {"answers": ["US"], "positive_ctxs": gold, "hard_negative_ctxs": contexts})
    assert [document.text for document in example.distractors if document.text in texts] == [texts[0], texts[2]]
