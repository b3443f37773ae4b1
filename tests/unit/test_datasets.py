import gzip
import json
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pos2distill.config import DataSection
from pos2distill.errors import UserError
from pos2distill.records import Document
from pos2distill.tasks.datasets import Split, dataset_name, draw_distractors, load_split, read_examples
from pos2distill.tasks.judge import normalize, sub_exact_match
from pos2distill.tasks.readers import file_digest, read_jsonl

Rows = list[dict[str, Any]]
Write = Callable[[Rows], str]

NQ = {
    "question": "who wrote the song Photograph",
    "answers": ["Ringo Starr"],
    "ctxs": [
        {"id": "7", "title": "Photograph", "text": "A song by Ringo Starr.", "isgold": True, "score": 1.5},
        {"id": "8", "title": "Camera", "text": "It takes pictures.", "isgold": False, "score": 1.2},
    ],
}
KV = {"key": "k-2", "value": "v-2", "ordered_kv_records": [["k-1", "v-1"], ["k-2", "v-2"], ["k-3", "v-3"]]}
GENERIC = {
    "question": "Which code has the fox?",
    "answers": ["42", "forty-two"],
    "documents": [
        {"title": "Owl", "text": "The owl has 17.", "gold": False},
        {"text": "The fox has 42.", "gold": True},
    ],
}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(rows: Rows) -> str:
        path = tmp_path / f"{uuid.uuid4().hex}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def section(path: str, **fields: Any) -> DataSection:
    given = {"format": "jsonl", "documents": 2, "train_examples": 1, "evaluation_examples": 1, **fields}
    return DataSection(path=path, **given)


def read(path: str, **fields: Any) -> list[Any]:
    data = section(path, **fields)
    return list(read_examples(data, data.documents))


def question_row(index: int, question: str | None = None) -> dict[str, Any]:
    return {
        "id": f"row-{index}",
        "question": question or f"Which code has animal {index}?",
        "answers": [f"code{index}"],
        "documents": [
            {"title": f"t{index}", "text": f"It is code{index}.", "gold": True},
            {"title": "other", "text": "Nothing here.", "gold": False},
        ],
    }


def oracle_row(index: int) -> dict[str, Any]:
    gold = {"title": f"t{index}", "text": f"It is code{index:03d}.", "isgold": True}
    return {"question": f"Which code has animal {index}?", "answers": [f"code{index:03d}"], "ctxs": [gold]}


# --- formats


def test_lost_in_the_middle_rows(write: Write) -> None:
    (example,) = read(write([NQ]), format="nq")
    assert (example.question, example.answers) == ("who wrote the song Photograph", ("Ringo Starr",))
    assert example.documents == (
        Document("Photograph", "A song by Ringo Starr.", True),
        Document("Camera", "It takes pictures.", False),
    )


def test_key_value_rows(write: Write) -> None:
    (example,) = read(write([KV]), format="kv")
    assert (example.question, example.answers) == ("k-2", ("v-2",))
    assert example.documents == (
        Document("k-1", "v-1", False),
        Document("k-2", "v-2", True),
        Document("k-3", "v-3", False),
    )


def test_generic_rows_need_neither_id_nor_title(write: Write) -> None:
    bare, named = read(write([GENERIC, {**GENERIC, "id": "fox-1"}]))
    assert bare.documents == (Document("Owl", "The owl has 17.", False), Document("", "The fox has 42.", True))
    assert bare.answers == ("42", "forty-two")
    assert named.example_id == "fox-1"
    # Without an id the normalised question stands in, so the same question is the same example.
    (same,) = read(write([{**GENERIC, "question": "which code has THE fox"}]))
    assert bare.example_id == same.example_id


def test_oracle_rows_get_distractors_from_their_own_side(write: Write) -> None:
    path = write([oracle_row(index) for index in range(40)])
    counts = load_split(section(path, format="nq_oracle"), documents=2, seed=0).counts
    every = {f"{side}_examples": counts[side] + counts[f"{side}_unused"] for side in ("train", "evaluation")}
    split = load_split(section(path, format="nq_oracle", **every), documents=5, seed=0)
    for side in (split.train, split.evaluation):
        own = {example.gold.text for example in side}
        for example in side:
            texts = {document.text for document in example.documents}
            assert len(texts) == 5
            assert texts <= own
            assert sum(sub_exact_match(text, example.answers) for text in texts) == 1


def test_distractors_that_hold_an_answer_are_passed_over(write: Write) -> None:
    (example,) = read(write([oracle_row(1)]), format="nq_oracle", documents=2)
    pool = [
        Document("a", "It is CODE001!", True),
        Document("b", "fine", True),
        example.gold,
        Document("c", "good", True),
    ]
    drawn = draw_distractors(example, pool, 2, 0, "file")
    assert {document.title for document in drawn.distractors} == {"b", "c"}
    assert drawn.gold == example.gold
    with pytest.raises(UserError, match=r"file: only 2 of 3 distractors can be drawn for 'Which code has animal 1\?'"):
        draw_distractors(example, pool, 3, 0, "file")


@pytest.mark.parametrize("place", ["plain", "gzip", "memory", "memory gzip"])
def test_files_are_read_from_anywhere_plain_or_gzip(tmp_path: Path, place: str) -> None:
    root = f"memory://{uuid.uuid4().hex}" if "memory" in place else str(tmp_path)
    url = f"{root}/data.jsonl" + (".gz" if "gzip" in place else "")
    # Blank lines are no rows; a byte order mark is no error.
    text = "\ufeff" + json.dumps(GENERIC) + "\n\n" + json.dumps({**GENERIC, "question": "Größe?"}, ensure_ascii=False)
    with fsspec.open(url, "wb", compression="infer") as file:
        file.write(text.encode())
    assert [example.question for example in read(url)] == [GENERIC["question"], "Größe?"]


def test_results_name_random_distractors() -> None:
    assert dataset_name(section("x", format="nq_oracle")) == "nq-oracle-random-distractors"
    assert dataset_name(section("x", format="nq")) == "nq"


def test_the_digest_is_of_the_bytes_as_stored(tmp_path: Path) -> None:
    path = tmp_path / "abc.jsonl.gz"
    path.write_bytes(b"abc")
    assert file_digest(str(path)) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


# --- files that cannot be used


@pytest.mark.parametrize("use", [read, file_digest])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dta.jsonl", r"dta.jsonl: no such file \(data.path\); did you mean 'data.jsonl'\?$"),
        ("elsewhere/data.jsonl", r"data.jsonl: no such file \(data.path\)$"),
        ("", r": cannot be read \(Is a directory\)$"),
        ("data.jsonl/inside.jsonl", r"inside.jsonl: "),
        ("nosuch://bucket/data.jsonl", r"^nosuch://bucket/data.jsonl: cannot be opened \(Protocol not known: nosuch"),
    ],
)
def test_a_file_that_cannot_be_opened(tmp_path: Path, use: Callable[[str], Any], name: str, message: str) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps(GENERIC))
    with pytest.raises(UserError, match=message):
        use(name if "://" in name else f"{tmp_path}/{name}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b'{"a": 1}\n' * 4000)[:60], r"broken gzip after line \d+ \(.*\); fetch the file again$"),
        (
            json.dumps(GENERIC).encode(),
            r"is no gzip file, whatever its name says \(Not a gzipped file .*\); rename or fetch it again$",
        ),
    ],
)
def test_broken_gzip(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_jsonl(str(path)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b'{"question": "wh',
            r"line 2: not valid JSON \(Unterminated string .* at column 14\); is the line cut off\?$",
        ),
        (b'{"question": "\xff"}', r"line 2: not UTF-8 \(invalid start byte at byte 14\)$"),
        (b"[1, 2]", "line 2: expected a JSON object, got list$"),
        (b"null", "line 2: expected a JSON object, got NoneType$"),
    ],
)
def test_a_line_that_is_no_object(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(json.dumps(GENERIC).encode() + b"\n" + line)
    with pytest.raises(UserError, match=message):
        read(str(path))


def test_an_empty_file(write: Write) -> None:
    with pytest.raises(UserError, match=r"holds no examples$"):
        read(write([]))


# --- rows that cannot be used


def without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


GOLD, OTHER = GENERIC["documents"][1], GENERIC["documents"][0]  # type: ignore[index]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            without(GENERIC, "answers"),
            "line 1: field 'answers' is missing; there is question, documents (is data.format right?)",
        ),
        ({**without(GENERIC, "answers"), "answer": ["x"]}, "field 'answers' is missing; is 'answer' meant to be it?"),
        ({**GENERIC, "answers": "42"}, "line 1, answers: expected a list, got '42'"),
        ({**GENERIC, "answers": ["42", 42]}, "line 1, answers[1]: expected text, got 42"),
        ({**GENERIC, "answers": []}, "line 1, answers: empty; expected at least one answer"),
        ({**GENERIC, "answers": ["42", " "]}, "line 1, answers: one is blank; expected text"),
        ({**GENERIC, "answers": ["*", "The!"]}, "line 1, answers: ['*', 'The!'] are all empty once normalised"),
        ({**GENERIC, "question": 5}, "line 1, question: expected text, got 5"),
        ({**GENERIC, "question": "  "}, "line 1, question: empty"),
        ({**GENERIC, "id": 7}, "line 1, id: expected text, got 7"),
        ({**GENERIC, "documents": {}}, "line 1, documents: expected a list, got {}"),
        ({**GENERIC, "documents": [GOLD, "text"]}, "line 1, documents[1]: expected an object, got 'text'"),
        (
            {**GENERIC, "documents": [{**GOLD, "gold": 1}, OTHER]},
            "line 1, documents[0], gold: expected true or false, got 1",
        ),
        ({**GENERIC, "documents": [GOLD, without(OTHER, "text")]}, "line 1, documents[1]: field 'text' is missing"),
        ({**GENERIC, "documents": [OTHER, OTHER]}, "line 1: no gold document; expected exactly one"),
        ({**GENERIC, "documents": [GOLD, GOLD]}, "line 1: 2 gold documents; expected exactly one"),
        (
            {**GENERIC, "answers": ["43"]},
            "line 1: the gold document holds none of the answers ['43']; mend the row or set data.answer_in_gold=false",
        ),
        ({**GENERIC, "documents": [GOLD]}, "line 1: 1 documents, but prompts of 2 slots are asked for"),
    ],
)
def test_a_bad_generic_row(write: Write, row: dict[str, Any], message: str) -> None:
    path = write([row])
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}, ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("row", "form", "message"),
    [
        (without(NQ, "ctxs"), "nq", "line 1: field 'ctxs' is missing"),
        ({**NQ, "ctxs": [7]}, "nq", "line 1, ctxs[0]: expected an object, got 7"),
        ({**NQ, "ctxs": [{"title": "a", "text": "b"}]}, "nq", "line 1, ctxs[0]: field 'isgold' is missing"),
        ({**KV, "value": 1}, "kv", "line 1, value: expected text, got 1"),
        ({**KV, "ordered_kv_records": [["k"]]}, "kv", "ordered_kv_records[0]: expected [key, value], got ['k']"),
        ({**KV, "key": "k-9"}, "kv", "line 1: no gold document; expected exactly one"),
    ],
)
def test_a_bad_row_of_other_formats(write: Write, row: dict[str, Any], form: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read(write([row]), format=form)
    assert message in str(caught.value)


def test_a_gold_document_without_the_answer_can_be_allowed(write: Write) -> None:
    (example,) = read(write([{**GENERIC, "answers": ["43"]}]), answer_in_gold=False)
    assert example.answers == ("43",)


def test_half_a_surrogate_pair_is_told(write: Write) -> None:
    """JSON can say "\\ud83d", which is no character and can be encoded by nothing that follows."""
    with pytest.raises(UserError, match="line 1"):
        read(write([{**GENERIC, "question": "Which \ud83d?"}]))


def test_one_id_for_two_questions(write: Write) -> None:
    path = write([{**question_row(1), "id": "same"}, {**question_row(2), "id": "same"}])
    with pytest.raises(UserError, match=r"id 'same' stands for two questions; ids must be unique$"):
        load_split(section(path), documents=2, seed=0)


def test_too_few_examples(write: Write) -> None:
    path = write([question_row(index) for index in range(20)])
    with pytest.raises(UserError) as caught:
        load_split(section(path, train_examples=50), documents=2, seed=0)
    assert "train examples, but data.train_examples asks for 50; lower it or move data.evaluation_share (0.5)" in str(
        caught.value
    )


# --- the split


def ids(split: Split) -> tuple[list[str], list[str]]:
    return [example.example_id for example in split.train], [example.example_id for example in split.evaluation]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.randoms(use_true_random=False), seed=st.integers(0, 5), repeats=st.integers(0, 6))
def test_counts_add_up_and_the_sides_share_no_question(
    write: Write, order: random.Random, seed: int, repeats: int
) -> None:
    rows = [question_row(index) for index in range(30)]
    # The same questions again under other ids, in other dress; and the same rows again.
    rows += [question_row(100 + index, f"the WHICH code, has: animal {index}") for index in range(repeats)]
    rows += rows[:repeats]
    order.shuffle(rows)
    split = load_split(section(write(rows), train_examples=5, evaluation_examples=5), documents=2, seed=seed)
    parts = ("duplicate", "train_unused", "evaluation_unused", "train", "evaluation")
    assert split.counts["rows"] == len(rows) == sum(split.counts.get(part, 0) for part in parts)
    assert split.counts["duplicate"] == 2 * repeats
    train, evaluation = ({normalize(each.question) for each in side} for side in (split.train, split.evaluation))
    assert not train & evaluation


def test_the_sides_share_no_question_across_files_and_seeds(write: Write) -> None:
    one = write([question_row(index) for index in range(40)])
    two = write([question_row(500 + index, f"WHICH code has the animal {index}??") for index in range(60)])
    sides = [
        load_split(section(path, train_examples=12, evaluation_examples=12), documents=2, seed=seed)
        for path, seed in ((one, 0), (two, 1), (two, 2))
    ]
    trained = {normalize(example.question) for split in sides for example in split.train}
    asked = {normalize(example.question) for split in sides for example in split.evaluation}
    assert not trained & asked


@pytest.mark.parametrize("form", ["jsonl", "nq_oracle"])
def test_the_choice_does_not_depend_on_file_order(write: Write, form: str) -> None:
    make = question_row if form == "jsonl" else oracle_row
    rows = [make(index) for index in range(40)]
    data = {"format": form, "train_examples": 6, "evaluation_examples": 6}
    forward, backward = (load_split(section(write(r), **data), documents=2, seed=3) for r in (rows, rows[::-1]))
    assert ids(forward) == ids(backward)
    assert (forward.train, forward.evaluation) == (backward.train, backward.evaluation)


def test_the_seed_chooses_within_a_side(write: Write) -> None:
    path = write([question_row(index) for index in range(60)])
    first, second = (load_split(section(path, train_examples=8), documents=2, seed=seed) for seed in (0, 1))
    assert set(ids(first)[0]) != set(ids(second)[0])


def test_more_training_examples_leave_the_evaluation_as_it_was(write: Write) -> None:
    path = write([question_row(index) for index in range(60)])
    few, many = (
        load_split(section(path, train_examples=n, evaluation_examples=9), documents=2, seed=0) for n in (3, 12)
    )
    assert few.evaluation == many.evaluation
    assert few.train == many.train[:3]
