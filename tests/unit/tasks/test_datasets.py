import json
import random
import tracemalloc
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pos2distill.config import DataSection
from pos2distill.errors import UserError
from pos2distill.records import Document, Example
from pos2distill.tasks.datasets import Split, dataset_name, draw_distractors, load_split, read_examples
from pos2distill.tasks.formats import REASONS
from pos2distill.tasks.metrics import normalize, sub_exact_match
from pos2distill.tasks.spill import ExampleFile, StoredExamples
from tests.support.tiny import write_examples

Records = list[dict[str, Any]]
Write = Callable[[Records], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(records: Records) -> str:
        path = tmp_path / f"{uuid.uuid4().hex}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(path)

    return write


def section(path: str, **fields: Any) -> DataSection:
    given = {"format": "jsonl", "documents": 2, "train_examples": 1, "eval_examples": 1, **fields}
    return DataSection(path=path, **given)


def question_record(index: int, question: str | None = None) -> dict[str, Any]:
    return {
        "id": f"row-{index}",
        "question": question or f"Which code has animal {index}?",
        "answers": [f"code{index}"],
        "documents": [
            {"title": f"t{index}", "text": f"It is code{index}.", "gold": True},
            {"title": "other", "text": "Nothing here.", "gold": False},
        ],
    }


def oracle_record(index: int) -> dict[str, Any]:
    gold = {"title": f"t{index}", "text": f"It is code{index:03d}.", "isgold": True}
    return {"question": f"Which code has animal {index}?", "answers": [f"code{index:03d}"], "ctxs": [gold]}


def hotpot_record(index: int, question: str | None = None, hops: int = 2) -> dict[str, Any]:
    """A paragraph a hop and one distractor; every third answer is a yes."""
    titles = [f"t{index}-{hop}" for hop in range(hops)]
    return {
        "_id": f"hotpot-{index}",
        "question": question or f"Which code has animal {index}?",
        "answer": "yes" if index % 3 == 0 else f"code{index:03d}",
        "supporting_facts": [[title, 0] for title in titles],
        "context": [["eye", ["Nothing, yes."]]] + [[title, [f"It is code{index:03d}.", title]] for title in titles],
    }


def test_read_examples_rejects_an_empty_file(write: Write) -> None:
    data = section(write([]))
    with pytest.raises(UserError, match=r"holds no examples; expected a record for each question \(docs/data.md\)$"):
        list(read_examples(data, 2))


@pytest.mark.parametrize("questions", [("Which one?", "Which other one?"), ("What is C?", "What is C++?")])
def test_load_split_rejects_one_id_for_two_questions(write: Write, questions: tuple[str, str]) -> None:
    path = write([{**question_record(index, question), "id": "same"} for index, question in enumerate(questions)])
    with pytest.raises(UserError, match=r", line \d: id 'same' is that of another question too; ids must be unique$"):
        load_split(section(path), documents=2, seed=0)


def test_load_split_rejects_too_few_examples(write: Write) -> None:
    path = write([question_record(index) for index in range(20)])
    with pytest.raises(UserError) as caught:
        load_split(section(path, train_examples=50), documents=2, seed=0)
    assert str(caught.value).endswith(
        "train examples, but data.train_examples asks for 50; lower it or change data.eval_fraction (0.5)"
    )


# --- records that are skipped


def hotpot(path: str, **fields: Any) -> DataSection:
    return section(path, **{"format": "hotpotqa", "hops": (2,), "documents": 3, **fields})


def test_load_split_counts_skipped_records_by_reason(write: Write) -> None:
    records = [hotpot_record(index) for index in range(40)]
    records += [hotpot_record(100 + index, hops=3) for index in range(7)]
    records += [{**hotpot_record(200 + index), "answer": "The The"} for index in range(3)]
    short = hotpot_record(300)
    records += [{**short, "context": short["context"][1:]}]
    records += [{**hotpot_record(400 + index), "question": "Which code has animal 7"} for index in range(2)]
    split = load_split(hotpot(write(records), train_examples=4, eval_examples=4), documents=3, seed=0)
    assert split.counts["records"] == 53 == sum(count for name, count in split.counts.items() if name != "records")
    assert {name: split.counts[name] for name in (*REASONS, "duplicate") if name in split.counts} == {
        "no_answer": 3,
        "other_hops": 7,
        "too_few_documents": 1,
        "duplicate": 2,
    }
    assert all(len(example.golds) == 2 for example in [*split.train, *split.evaluation])


def test_load_split_rejects_a_file_without_usable_records(write: Write) -> None:
    path = write([hotpot_record(index, hops=3) for index in range(2)] + [hotpot_record(9)])
    with pytest.raises(UserError) as caught:
        load_split(hotpot(path, documents=20), documents=20, seed=0)
    assert str(caught.value) == (
        f"{path}: none of 3 records can be used: 2 other_hops (a number of gold documents that is not in data.hops); "
        "1 too_few_documents (shorter than the longest prompt; lower data.documents or set data.distractors=random)"
    )


def test_load_split_names_skipped_records_if_examples_are_too_few(write: Write) -> None:
    path = write(
        [hotpot_record(index) for index in range(20)] + [hotpot_record(50 + index, hops=3) for index in range(5)]
    )
    with pytest.raises(UserError, match=r"eval_fraction \(0\.5\); records skipped: 5 other_hops$"):
        load_split(hotpot(path, train_examples=50), documents=3, seed=0)


# --- drawn distractors


def test_dataset_name_shows_random_distractors() -> None:
    assert dataset_name(section("x", format="nq_oracle")) == "nq-oracle-random-distractors"
    assert dataset_name(section("x", format="nq_oracle", distractors="random")) == "nq-oracle-random-distractors"
    assert dataset_name(section("x", format="nq")) == "nq"
    assert dataset_name(section("s3://bucket/mine.jsonl.gz", format="jsonl")) == "mine.jsonl.gz"
    assert dataset_name(section("s3://bucket/mine/part-*.jsonl", format="jsonl")) == "part-*.jsonl"
    assert dataset_name(section("s3://bucket/mine/*.jsonl", format="jsonl")) == "mine/*.jsonl"
    assert dataset_name(section("*.jsonl", format="jsonl")) == "*.jsonl"
    assert dataset_name(section("/*.jsonl", format="jsonl")) == "/*.jsonl"
    assert dataset_name(section("/data/*.jsonl", format="jsonl")) == "data/*.jsonl"
    assert dataset_name(section("data/mine/*/part.jsonl", format="jsonl")) == "mine/*/part.jsonl"
    assert dataset_name(section("mine/*/*.jsonl", format="jsonl")) == "mine/*/*.jsonl"
    assert dataset_name(hotpot("x")) == "hotpotqa"
    assert dataset_name(hotpot("x", distractors="random")) == "hotpotqa-random-distractors"


def everything(data: DataSection) -> DataSection:
    """The settings that use every example of the file."""
    counts = load_split(data, documents=data.documents, seed=0).counts
    limits = {f"{side}_examples": counts[side] + counts.get(f"{side}_unused", 0) for side in ("train", "eval")}
    return data.model_copy(update=limits | {"train_candidates": limits["train_examples"]})


def test_load_split_draws_distractors_of_oracle_records_from_their_own_side(write: Write) -> None:
    data = everything(section(write([oracle_record(index) for index in range(40)]), format="nq_oracle"))
    split = load_split(data, documents=5, seed=0)
    for side in (split.train, split.evaluation):
        own = {document.text for example in side for document in example.golds}
        for example in side:
            texts = {document.text for document in example.documents}
            assert len(texts) == 5
            assert texts <= own
            assert sum(sub_exact_match(text, example.answers) for text in texts) == 1


def test_load_split_fills_up_records_of_several_hops_from_their_own_side(write: Write) -> None:
    data = everything(hotpot(write([hotpot_record(index) for index in range(40)]), distractors="random"))
    plain = load_split(data, documents=3, seed=0)
    filled = load_split(data, documents=9, seed=0)
    for before, after in ((plain.train, filled.train), (plain.evaluation, filled.evaluation)):
        own = {(document.title, document.text) for example in before for document in example.golds}
        for short, example in zip(before, after, strict=True):
            assert example.documents[:3] == short.documents  # its own come first
            assert example.golds == short.golds
            drawn = [(document.title, document.text) for document in example.documents[3:]]
            assert len(drawn) == 6
            assert set(drawn) <= own
            assert len({(document.title, document.text) for document in example.documents}) == 9
            if example.answers != ("yes",):
                assert not any(sub_exact_match(text, example.answers) for _, text in drawn)


def test_load_split_adds_to_the_same_draw_for_a_longer_prompt(write: Write) -> None:
    data = hotpot(write([hotpot_record(index) for index in range(30)]), distractors="random")
    short, long = (load_split(data, documents=n, seed=4).train[0] for n in (6, 9))
    assert short.documents == long.documents[:6]


def test_load_split_draws_by_seed_and_example_alone(write: Write) -> None:
    records = [hotpot_record(index) for index in range(30)]
    few, many, other = (
        {example.example_id: example for example in load_split(data, documents=8, seed=seed).train}
        for data, seed in (
            (hotpot(write(records), distractors="random", train_examples=3), 0),
            (hotpot(write(records[::-1]), distractors="random", train_examples=9), 0),
            (hotpot(write(records), distractors="random", train_examples=9), 1),
        )
    )
    assert few == {name: many[name] for name in few}
    assert any(many[name] != other[name] for name in many.keys() & other.keys())


def gold_and(*others: Document) -> Example:
    return Example("e", "Which?", ("code001",), (Document("gold", "It is code001.", 0), *others))


def test_draw_distractors_skips_documents_with_an_answer_and_repetitions() -> None:
    own = Document("own", "mine")
    pool = [
        Document("a", "It is CODE001!"),
        Document("Code001", "the title says it"),
        Document("b", "fine", 1),
        Document("gold", "It is code001."),
        Document("own", "mine"),
        Document("c", "good", 0),
        Document("c", "good", 1),
    ]
    drawn = draw_distractors(gold_and(own), pool, 2, 0, "file")
    assert drawn.documents[:2] == gold_and(own).documents
    assert set(drawn.documents[2:]) == {Document("b", "fine"), Document("c", "good")}
    message = (
        r"^file: only 2 of 3 distractors can be drawn for 'Which\?' from the gold documents on its side of the split "
        r"\(data\.eval_fraction; it has 7, 2 of them with an answer to this question\); add records, or lower the "
        r"documents of a prompt to 4 \("
    )
    with pytest.raises(UserError, match=message):
        draw_distractors(gold_and(own), pool, 3, 0, "file")


def test_draw_distractors_of_no_count_changes_nothing() -> None:
    assert draw_distractors(gold_and(), [Document("b", "fine")], 0, 0, "file") == gold_and()
    assert draw_distractors(gold_and(), [], -3, 0, "file") == gold_and()


@pytest.mark.parametrize("hops", [1, 2])
def test_draw_distractors_does_not_look_for_yes_and_no(hops: int) -> None:
    golds = (Document("a", "x", 0), Document("b", "y", 1))[:hops]
    pool = [Document("c", "Nothing is known of it, yes.")]
    for answer in ("No", "yes"):
        assert len(draw_distractors(Example("e", "Both?", (answer,), golds), pool, 1, 0, "file").documents) == hops + 1
    with pytest.raises(UserError, match="only 0 of 1"):
        draw_distractors(Example("e", "Both?", ("no", "nothing"), golds), pool, 1, 0, "file")


# --- the split


def ids(split: Split) -> tuple[list[str], list[str]]:
    return [example.example_id for example in split.train], [example.example_id for example in split.evaluation]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.randoms(use_true_random=False), seed=st.integers(0, 5), repeats=st.integers(0, 6))
def test_load_split_counts_add_up_and_no_question_is_on_both_sides(
    write: Write, order: random.Random, seed: int, repeats: int
) -> None:
    records = [question_record(index) for index in range(30)]
    # The same questions again under other ids, in other dress; and the same records again.
    records += [question_record(100 + index, f"WHICH code  has animal {index} ??") for index in range(repeats)]
    records += records[:repeats]
    order.shuffle(records)
    split = load_split(section(write(records), train_examples=5, eval_examples=5), documents=2, seed=seed)
    parts = ("duplicate", "train_unused", "eval_unused", "train", "eval")
    assert split.counts["records"] == len(records) == sum(split.counts.get(part, 0) for part in parts)
    assert split.counts["duplicate"] == 2 * repeats
    train, evaluation = ({normalize(each.question) for each in side} for side in (split.train, split.evaluation))
    assert not train & evaluation


@pytest.mark.parametrize(("documents", "found"), [(2, 0), (3, 1)])
def test_load_split_counts_evaluated_questions_with_an_answer_in_a_distractor(
    write: Write, documents: int, found: int
) -> None:
    """Of the documents that a prompt holds; one is as the answer of another record's."""
    records = [question_record(index) for index in range(4)]
    for record in records:
        record["documents"] = [*record["documents"], {"title": "", "text": "More.", "gold": False}]
    records[2]["documents"][-1]["text"] = f"Also {records[2]['answers'][0]}."
    data = section(write(records), train_examples=0, eval_examples=4, eval_fraction=1)
    split = load_split(data, documents=documents, seed=0)
    assert (split.counts["eval"], split.counts["answer_in_distractor"]) == (4, found)


@pytest.mark.parametrize(
    ("answer", "text", "found"),
    [
        ("art", "A party.", 0),
        ("2", "In 1928.", 0),
        ("US", "Music.", 0),
        ("no", "There is no doubt.", 0),
        ("Yes", "yes", 0),
        ("2", "It has 2 of them.", 1),
        ("the US", "In the U.S. today", 1),
    ],
)
def test_load_split_looks_for_answers_in_distractors_as_words(write: Write, answer: str, text: str, found: int) -> None:
    record = question_record(0)
    record["answers"] = [answer]
    record["documents"][0]["text"] = f"It is {answer}."
    record["documents"][1]["text"] = text
    data = section(write([record]), train_examples=0, eval_examples=1, eval_fraction=1)
    assert load_split(data, documents=2, seed=0).counts["answer_in_distractor"] == found


def test_load_split_keeps_questions_that_only_normalized_text_does_not_tell_apart(write: Write) -> None:
    names = ["C", "C++", "C#", "the C"]
    records = [question_record(index, f"What is {name}?") for index, name in enumerate(names)]
    split = load_split(section(write(records), train_examples=0, eval_examples=4, eval_fraction=1), documents=2, seed=0)
    assert split.counts["duplicate"] == 0
    assert {example.question for example in split.evaluation} == {f"What is {name}?" for name in names}
    without_ids = [{name: value for name, value in record.items() if name != "id"} for record in records]
    data = section(write(without_ids), train_examples=0, eval_examples=1, eval_fraction=1)
    assert load_split(data, documents=2, seed=0).counts["duplicate"] == 3


def test_load_split_keeps_sides_apart_across_files_and_seeds(write: Write) -> None:
    one = write([question_record(index) for index in range(40)])
    two = write([question_record(500 + index, f"WHICH code has the animal {index}??") for index in range(60)])
    sides = [
        load_split(section(path, train_examples=12, eval_examples=12), documents=2, seed=seed)
        for path, seed in ((one, 0), (two, 1), (two, 2))
    ]
    trained = {normalize(example.question) for split in sides for example in split.train}
    asked = {normalize(example.question) for split in sides for example in split.evaluation}
    assert not trained & asked


def test_load_split_keeps_sides_apart_across_formats(write: Write) -> None:
    """The same questions in two formats, in other dress, under other ids, with other seeds and sizes."""
    one = write([question_record(index) for index in range(60)])
    two = write([hotpot_record(index, f"the WHICH code, has animal: {index}") for index in range(60)][::-1])
    three = write([oracle_record(index) for index in range(60)])
    every = [
        load_split(everything(data), documents=2, seed=seed)
        for data, seed in (
            (section(one), 0),
            (hotpot(two, distractors="random"), 1),
            (section(three, format="nq_oracle"), 2),
        )
    ]
    for split in every:
        assert len(split.train) + len(split.evaluation) == 60
    trained = {normalize(example.question) for split in every for example in split.train}
    asked = {normalize(example.question) for split in every for example in split.evaluation}
    assert not trained & asked
    assert len(trained) + len(asked) == 60


@pytest.mark.parametrize("form", ["jsonl", "nq_oracle"])
def test_load_split_does_not_depend_on_file_order(write: Write, form: str) -> None:
    make = question_record if form == "jsonl" else oracle_record
    records = [make(index) for index in range(40)]
    data = {"format": form, "train_examples": 6, "eval_examples": 6}
    forward, backward = (load_split(section(write(r), **data), documents=2, seed=3) for r in (records, records[::-1]))
    assert ids(forward) == ids(backward)
    assert list(forward.train) == list(backward.train)
    assert list(forward.evaluation) == list(backward.evaluation)


def test_load_split_chooses_by_seed_within_a_side(write: Write) -> None:
    path = write([question_record(index) for index in range(60)])
    first, second = (load_split(section(path, train_examples=8), documents=2, seed=seed) for seed in (0, 1))
    assert set(ids(first)[0]) != set(ids(second)[0])


def test_load_split_chooses_each_side_by_its_own_seed(write: Write) -> None:
    path = write([question_record(index) for index in range(60)])
    settings = section(path, train_examples=8, eval_examples=8, distractors="random")
    split = {
        (seed, eval_seed): load_split(settings, documents=5, seed=seed, eval_seed=eval_seed)
        for seed in (0, 1)
        for eval_seed in (0, 1)
    }
    assert list(split[0, 0].evaluation) == list(split[1, 0].evaluation) != list(split[0, 1].evaluation)
    assert list(split[0, 0].train) == list(split[0, 1].train) != list(split[1, 0].train)


def test_load_split_evaluation_does_not_depend_on_train_examples(write: Write) -> None:
    path = write([question_record(index) for index in range(60)])
    few, many = (load_split(section(path, train_examples=n, eval_examples=9), documents=2, seed=0) for n in (1, 3))
    assert list(few.evaluation) == list(many.evaluation)
    # Candidates of one example are the first of those of three.
    assert (len(few.train), len(many.train)) == (4, 12)
    assert list(few.train) == many.train[:4]


def test_load_split_takes_all_candidates_that_there_are(write: Write) -> None:
    path = write([question_record(index) for index in range(20)])
    split = load_split(section(path, train_examples=5, train_candidates=1000), documents=2, seed=0)
    assert len(split.train) == split.counts["train"] == 20 - split.counts["eval"] - split.counts["eval_unused"]


def test_load_split_memory_does_not_grow_with_the_examples(tmp_path: Path) -> None:
    """16 MB of documents, all of which are chosen and become tables."""
    path = tmp_path / "data.jsonl"
    with path.open("w") as file:
        for index in range(800):
            record = question_record(index)
            record["documents"][1]["text"] = "x " * 10_000
            file.write(json.dumps(record) + "\n")
    tracemalloc.start()
    try:
        split = load_split(everything(section(str(path))), documents=2, seed=0)
        kept = tracemalloc.get_traced_memory()[1]
        for start in range(0, len(split.train), 10):
            assert len(split.train[start : start + 10]) > 0
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(split.train) + len(split.evaluation) == 800
    assert kept < 4 << 20
    assert peak < 4 << 20


def test_stored_examples_are_a_sequence() -> None:
    file = ExampleFile()
    examples = [gold_and(Document("own", str(index))) for index in range(5)]
    offsets = [file.append(example) for example in examples]
    stored = StoredExamples(file, offsets[::-1])
    assert list(stored) == examples[::-1]
    assert (stored[0], stored[-1], stored[1:3]) == (examples[4], examples[0], [examples[3], examples[2]])
    offsets.append(file.append(examples[0]))  # after a read
    assert StoredExamples(file, offsets)[5] == examples[0]
    with pytest.raises(IndexError):
        stored[5]


def test_load_split_says_where_the_chosen_examples_are(tmp_path: Path) -> None:
    path = write_examples(tmp_path / "data.jsonl", 30, 3)
    split = load_split(section(str(path), train_examples=4, eval_examples=3), documents=3, seed=0)
    chosen = [*split.train, *split.evaluation]
    assert split.locations.keys() == {example.example_id for example in chosen}
    lines = path.read_text().splitlines()
    for example_id, location in split.locations.items():
        file, line = location.split(", line ")
        assert file == "data.jsonl"
        assert json.loads(lines[int(line) - 1])["id"] == example_id
