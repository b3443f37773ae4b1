from dataclasses import replace

import pyarrow as pa
import pytest

from pos2distill.records import (
    EXAMPLE_SCHEMA,
    PREDICTION_SCHEMA,
    REFUSAL_SCHEMA,
    SAMPLE_SCHEMA,
    SCHEMA_VERSION,
    Document,
    Example,
    example_from_row,
    sample_id_array,
    sample_ids,
)
from tests.support.tables import examples_to_table

EXAMPLE = Example(
    "e1",
    "Wer?",
    ("Käthe", "K."),
    (Document("a", "x"), Document("b", "Käthe", 1), Document("", "y"), Document("c", "z", 0)),
)


def test_examples_to_table_round_trips() -> None:
    table = examples_to_table([EXAMPLE])
    assert table.schema.equals(EXAMPLE_SCHEMA, check_metadata=True)
    assert [example_from_row(row) for row in table.to_pylist()] == [EXAMPLE]


def test_examples_to_table_keeps_the_order() -> None:
    examples = [replace(EXAMPLE, example_id=str(number)) for number in range(2500)]
    assert [example_from_row(row) for row in examples_to_table(examples).to_pylist()] == examples
    assert examples_to_table([]).schema.equals(EXAMPLE_SCHEMA)


def test_example_golds_and_distractors_partition_documents() -> None:
    assert EXAMPLE.golds == (EXAMPLE.documents[3], EXAMPLE.documents[1])  # in hop order
    assert [document.gold for document in EXAMPLE.documents] == [False, True, False, True]
    assert EXAMPLE.distractors == (EXAMPLE.documents[0], EXAMPLE.documents[2])


SCHEMAS = (EXAMPLE_SCHEMA, SAMPLE_SCHEMA, PREDICTION_SCHEMA, REFUSAL_SCHEMA)


def test_schemas_have_a_version() -> None:
    versions = {schema.metadata[b"schema_version"] for schema in SCHEMAS}
    assert versions == {str(SCHEMA_VERSION).encode()}


def test_sample_ids_name_several_samples_of_an_example() -> None:
    assert sample_ids(["a", "b"], 1) == ["a", "b"]
    assert sample_ids(["a", "b@1"], 2) == ["a@0", "a@1", "b@1@0", "b@1@1"]


@pytest.mark.parametrize("per_example", [1, 2])
def test_sample_id_array_has_the_sample_ids(per_example: int) -> None:
    ids = sample_id_array(pa.array(["a", "b"]), per_example)
    assert ids.type == pa.string()
    assert ids.to_pylist() == sample_ids(["a", "b"], per_example)
    assert len(sample_id_array(pa.array([], pa.string()), per_example)) == 0
