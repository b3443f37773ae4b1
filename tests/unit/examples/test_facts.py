import hashlib
import json
import re
from pathlib import Path

import pytest

from examples.smollm2.facts import FACTS_PER_ENTRY, MAX_RECORDS, Record, choose_facts, main, make_record, subject_names
from examples.smollm2.phrases import KINDS
from pos2distill.records import Example
from pos2distill.tasks.formats import holds_answer, parse_record
from pos2distill.tasks.readers import read_records

DIGEST = "ee216c9d20b03b2e638119e397500423bc51c2d8c595e45704a73ed1793499fc"


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [make_record(seed=0, index=index, documents=20) for index in range(200)]


@pytest.fixture(scope="module")
def examples(records: list[Record]) -> list[Example]:
    parsed = [parse_record("jsonl", dict(record), record["id"]) for record in records]
    return [example for example in parsed if isinstance(example, Example)]


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["facts", *arguments])
    return main()


def test_make_record_is_pinned(records: list[Record]) -> None:
    text = json.dumps(records[:50], sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest() == DIGEST


def test_make_record_depends_on_its_index_and_seed_alone(records: list[Record]) -> None:
    assert make_record(seed=0, index=7, documents=20) == records[7]
    assert make_record(seed=1, index=7, documents=20)["question"] != records[7]["question"]
    assert make_record(seed=0, index=7, documents=5)["documents"] == records[7]["documents"][:5]


def test_make_record_has_the_answer_in_the_gold_document_only(records: list[Record], examples: list[Example]) -> None:
    assert len(examples) == len(records)
    for example in examples:
        assert len(example.golds) == 1
        assert holds_answer(example.golds[0], example.answers)
        assert len(example.distractors) == 19
        for distractor in example.distractors:
            assert not holds_answer(distractor, example.answers), (example.example_id, distractor)


def test_make_record_never_repeats_a_question_or_an_entry(records: list[Record]) -> None:
    assert len({record["id"] for record in records}) == len(records)
    assert len({record["question"] for record in records}) == len(records)
    texts = [document["text"] for record in records for document in record["documents"]]
    assert len(set(texts)) == len(texts)
    for record in records:
        assert len({document["title"] for document in record["documents"]}) == 20


def test_make_record_states_the_asked_fact_once_in_the_gold_document(examples: list[Example]) -> None:
    for example in examples:
        assert example.golds[0].text.count(example.answers[0]) == 1


def test_make_record_writes_varied_and_correct_english(records: list[Record]) -> None:
    """Names and values removed, questions and entries have many wordings."""
    shapes = set()
    for record in records:
        question = record["question"].replace(record["documents"][0]["title"], "NAME")
        shapes.add(question)
        for document in record["documents"]:
            assert not re.search(r"\b[Aa] [aeiou]", document["text"]), document["text"]
            assert not re.search(r"[{}]", document["text"]), document["text"]
            assert re.fullmatch(r"[A-Z].*\.", document["text"])
    assert len(shapes) >= 60
    openings = {
        record["documents"][0]["text"].split(".")[0].replace(record["documents"][0]["title"], "NAME")
        for record in records
    }
    assert len(openings) >= 60


def test_make_record_asks_for_no_year(records: list[Record]) -> None:
    """Entries state years, but the model that this is for often fails on questions about them."""
    assert not [record["id"] for record in records if re.fullmatch(r"1\d{3}", record["answers"][0])]
    assert not [record["id"] for record in records if re.search(r"\b(When|year)\b", record["question"])]


def test_make_record_takes_the_kinds_in_turn(records: list[Record]) -> None:
    """A fourth of the questions is about each kind, and half of the distractors are of the question's kind."""
    names = {kind.name: set(subject_names(kind.name, 0)) for kind in KINDS}
    for index, record in enumerate(records):
        kind = KINDS[index % len(KINDS)]
        for document in (record["documents"][0], *record["documents"][1::2]):
            assert document["title"] in names[kind.name]


def test_choose_facts_never_takes_two_of_one_type() -> None:
    from random import Random

    for kind in KINDS:
        for fact in kind.facts:
            chosen = choose_facts(kind, Random(0), including=fact)
            assert fact in chosen
            assert len({each.value_type for each in chosen}) == len(chosen) == FACTS_PER_ENTRY


def test_subject_names_suffice_for_the_most_records() -> None:
    for kind in KINDS:
        names = subject_names(kind.name, 0)
        assert len(set(names)) == len(names) >= MAX_RECORDS // len(KINDS)


def test_main_writes_the_same_bytes_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / name for name in ("one.jsonl.gz", "two.jsonl.gz")]
    for path in paths:
        assert run_main(monkeypatch, str(path), "--records", "5", "--documents", "3", "--seed", "4") == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    rows = [row for _, row in read_records(str(paths[0]))]
    assert rows == [make_record(4, index, 3) for index in range(5)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--records", "2001"], "--records must be 1 to 2000, got 2001"),
        (["--documents", "41"], "--documents must be 1 to 40, got 41"),
    ],
)
def test_main_rejects_impossible_numbers(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        run_main(monkeypatch, str(tmp_path / "facts.jsonl.gz"), *arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_main_rejects_what_it_cannot_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.jsonl.gz").mkdir()
    for path, message in {
        tmp_path / "file" / "facts.jsonl.gz": f"{tmp_path / 'file'}: File exists",
        tmp_path
        / "folder.jsonl.gz": f"{tmp_path / 'folder.jsonl.gz'}: is a folder; expected the name of a file to write",
    }.items():
        assert run_main(monkeypatch, str(path)) == 2
        assert capsys.readouterr().err == f"error: {message}\n"
    assert {each.name for each in tmp_path.iterdir()} == {"file", "folder.jsonl.gz"}
